"""The mistakes that a user makes, one for each public call and more: each raises while it is
traced, with a message that names the call, says what was passed and what to do."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx_pde as mpx


pytestmark = pytest.mark.usefixtures("unchecked_annotations")

KEY = jax.random.key(0)
W, X = jnp.ones(3), jnp.ones((4, 3))
POINT, POINTS = jnp.array([0.3, 0.2]), jnp.ones((4, 2))
SGD, ADAM = optax.sgd(0.1), optax.adam(0.1)
DS = mpx.DerivativeScaling
SCALING = mpx.DynamicLossScaling(4.0)
LM = mpx.LevenbergMarquardt


def net(p):
    return jnp.sin(p[0]) * jnp.exp(p[1])


def total(w, *rest, **kwargs):
    return jnp.sum(w)


def mlp(**options):
    return mpx.nn.CoordinateMLP(2, 1, 8, 1, **{"key": KEY, **options})


def fno(**options):
    return mpx.nn.FNO(1, 1, 4, 1, 2, **{"key": KEY, **options})


def conv(modes=2, **options):
    return mpx.nn.SpectralConv(1, 1, modes, **{"key": KEY, **options})


def update(state, optimizer=ADAM, model=W, grads=W, **options):
    return mpx.optimizer_update(model, optimizer, state, grads, True, **options)


def half_update(key):
    w = W.astype("bfloat16")
    return update(SGD.init(w), SGD, w, w, master="stochastic", key=key)


def partials(terms, coords="xy", outputs="u", **options):
    return mpx.partials(net, terms, coords=coords, outputs=outputs, **options)


def fitted(state=None, residual=lambda w, x: w * x, batch=W):
    optimizer = LM(residual)
    return optimizer.update(W, optimizer.init(W) if state is None else state, batch)


def accumulated(func, scaling, *args, n=2, **kwargs):
    return mpx.filter_accumulated_value_and_grad(func, scaling, n, *args, **kwargs)


def accumulate(*args, n=2, in_axes=0, **kwargs):
    return accumulated(total, SCALING, n=n, in_axes=in_axes)(W, *args, **kwargs)


def grad(loss, scaling=SCALING, **options):
    return mpx.filter_grad(loss, scaling, **options)(W)


def dynamic(loss_scaling=2.0, **options):
    return mpx.DynamicLossScaling(loss_scaling, **options)


TREE = {"w": W, "b": jnp.ones(2), "n": jnp.arange(2), "f": jnp.tanh}
FLOATS = eqx.filter(TREE, eqx.is_inexact_array)


def update_tree(grads, optimizer=SGD):
    return mpx.optimizer_update(TREE, optimizer, SGD.init(FLOATS), grads, jnp.array(True))


CONVOLUTION = conv()
FIELD = jnp.ones((1, 8))


TYPE_ERRORS = {
    # Losses.
    "a complex number": (
        lambda: grad(lambda w: jnp.sum(jax.lax.complex(*[w.astype(jnp.float32)] * 2))),
        ("real floating-point", "complex64"),
    ),
    "a tuple": (
        lambda: grad(lambda w: (jnp.sum(w), w)),
        ("scalar loss", "tuple", "pass `has_aux=True`"),
    ),
    "a vector with aux": (
        lambda: grad(lambda w: (w, None), has_aux=True),
        ("`filter_grad`", "real floating-point scalar"),
    ),
    "scaled without aux": (
        lambda: mpx.scaled(jnp.sum, SCALING, has_aux=True)(W),
        ("`scaled`", "returns `(loss, aux)`", "leave `has_aux` out"),
    ),
    # Gradients.
    "a number as scaling": (
        lambda: grad(total, 2.0**15),
        ("`filter_grad`", "`scaling`", "DynamicLossScaling()", "32768.0"),
    ),
    "a class as scaling": (
        lambda: mpx.scaled(total, mpx.DynamicLossScaling),
        ("`scaled` needs a loss scaling as `scaling`",),
    ),
    "a dtype as policy": (
        lambda: grad(total, policy=jnp.float16),
        ("`filter_grad`", "`policy`", "jmp.Policy", "float16"),
    ),
    "the model by name": (
        lambda: mpx.filter_grad(total, SCALING)(w=W),
        ("`filter_grad`", "first positional", "model first"),
    ),
    "no arrays": (
        lambda: mpx.filter_grad(lambda w: jnp.float32(1), SCALING)({"a": 2.0, "n": jnp.arange(2)}),
        ("`filter_grad`", "has none", "Pass the model first"),
    ),
    "a dtype as has_aux": (
        lambda: mpx.filter_grad(total, SCALING, "bfloat16"),
        ("`filter_grad`", "bool as `has_aux`", "'bfloat16'"),
    ),
    "a dtype as use_mixed_precision": (
        lambda: mpx.filter_grad(total, SCALING, use_mixed_precision="float16"),
        ("`use_mixed_precision`", "`policy`", "'float16'"),
    ),
    "an axis by number": (
        lambda: mpx.filter_grad(total, SCALING, axis_name=3)(W),
        ("`filter_grad`", "name of a mesh axis", "3"),
    ),
    # Casts.
    "a number as function": (
        lambda: mpx.force_full_precision(3),
        ("`force_full_precision`", "a function", "3"),
    ),
    "no layer": (lambda: mpx.FullPrecision(None), ("`FullPrecision`", "callable layer", "None")),
    # Optimizers.
    "the maker of an optimizer": (
        lambda: update_tree(FLOATS, optimizer=optax.adam),
        ("optax.adam(1e-3)", "`optimizer`", "function adam"),
    ),
    "a number as key": (lambda: half_update(0), ("`optimizer_update`", "key of `jax.random`", "0")),
    "where the scale is, by name": (
        lambda: mpx.contrib.scale_by_loss_scaling(ADAM, SCALING, scale_in_params="scale"),
        ("`contrib.scale_by_loss_scaling`", "function from the parameters", "'scale'"),
    ),
    # Derivatives.
    "no coordinates": (lambda: partials(["u"], coords=""), ("the coordinates", "''")),
    "no operators": (
        lambda: mpx.linear_operator(net, {}, coords="xy", outputs="u"),
        ("`linear_operator`", "{}"),
    ),
    "a sum over no coordinates": (
        lambda: mpx.laplacian(net, coords="xy", outputs="u", over=""),
        ("`laplacian`", "`over`"),
    ),
    **{
        f"{name} in nothing, {told}": (
            lambda name=name, argnums=argnums, point=point: getattr(mpx.derivatives, name)(
                lambda p: jnp.sum(p**2), argnums=argnums
            )(point),
            (f"`{name}`", told),
        )
        for name in ("grad", "jacfwd", "hessian")
        for argnums, point, told in (((), W, "`argnums`"), (0, W[:0], "shape (0,)"))
    },
    "primals that are no tuple": (
        lambda: mpx.scaled_jvp(net, POINT, POINT, 2.0),
        ("`scaled_jvp`", "`primals` as a tuple", "`(x,)`"),
    ),
    "tangents of integers": (
        lambda: mpx.scaled_jvp(net, (jnp.arange(2),), (POINT,), 2.0),
        ("`scaled_jvp`", "int32", "float32"),
    ),
    "a scaling by its class": (
        lambda: DS("xt"),
        ("`DerivativeScaling` is made by", "per_direction"),
    ),
    # Networks.
    "no key": (lambda: mlp(key=None), ("`CoordinateMLP`", "jax.random.key(0)")),
    "a seed as key": (lambda: fno(key=0), ("`FNO`", "jax.random.key(0)")),
    "a form of one argument": (
        lambda: mpx.nn.Ansatz(net, lambda u: u),
        ("`Ansatz`", "`form`", "(u)"),
    ),
    "a number as network": (lambda: mpx.nn.Ansatz(1.0, total), ("`Ansatz`", "`network`")),
    "an embedding by name": (
        lambda: fno(grid_embedding="grid"),
        ("`FNO`", "bool as `grid_embedding`", "'grid'"),
    ),
    # Ladders, reports, counters, files.
    "a name to say": (
        lambda: mpx.PrecisionLadder(say="print"),
        ("`PrecisionLadder`", "`say`", "'print'"),
    ),
    "nothing to tie a check to": (
        lambda: mpx.error_if_stuck(None, SCALING, max_consecutive_skips=2),
        ("`error_if_stuck`", "`tree` with an array", "None"),
    ),
    "a scaling as its options": (
        lambda: mpx.check_scaling_options(SCALING, SCALING),
        ("`check_scaling_options`", "`saved`"),
    ),
    # Levenberg–Marquardt.
    "no solver": (lambda: LM(total, solver=3), ("`solver`", "lineax", "3")),
    "the model as state": (
        lambda: fitted(state={"w": W}),
        ("`LevenbergMarquardt.update`", "`state`", "init(model)"),
    ),
    "residuals in a tuple": (
        lambda: fitted(residual=lambda w, x: (w, x)),
        ("`LevenbergMarquardt.update`", "returned tuple", "Stack several"),
    ),
}

VALUE_ERRORS = {
    # Gradients.
    "an unknown policy": (
        lambda: grad(total, policy="compute=float17"),
        ("policy 'compute=float17'", '"params=float32,compute=bfloat16,output=float32"'),
    ),
    "an axis that is not there": (
        lambda: mpx.filter_grad(total, SCALING, axis_name="devices")(W),
        ("`filter_grad`", "`axis_name='devices'`", "leave it out"),
    ),
    "a mean over no axis": (
        lambda: mpx.all_reduce_mean(W, "devices"),
        ("`all_reduce_mean`", "`axis_name='devices'`", "`jax.shard_map`"),
    ),
    "a batch by keyword": (
        lambda: accumulate(x=POINTS),
        ("`filter_accumulated_value_and_grad`", "no array to split", "by position"),
    ),
    "no micro-batch": (lambda: accumulate(X, n=0), ("`micro_batches`", "0")),
    "a batch that does not divide": (
        lambda: accumulate({"x": X}, n=3),
        ("[0]['x']", "3 micro-batches", "4 entries along axis 0", "multiple", "`in_axes`"),
    ),
    "an axis beyond": (lambda: accumulate(X, in_axes=2), ("axis 2", "(4, 3)")),
    "axes that do not fit": (
        lambda: accumulate(X, X, in_axes=(0, 0, None)),
        ("`in_axes`", "prefix of the 2 positional", "(0, 0, None)"),
    ),
    # Scalers.
    **{
        f"a period {wrong}": (
            lambda wrong=wrong: dynamic(period=wrong),
            ("`DynamicLossScaling`", "integer", "`period`"),
        )
        for wrong in [2.5, 0.5, 2**31]
    },
    **{
        f"a factor {wrong}": (
            lambda wrong=wrong: dynamic(factor=wrong),
            ("`DynamicLossScaling`", "power of two above 1", "`factor`"),
        )
        for wrong in [1, 0.5, 3, 1.5]
    },
    "a scale below its minimum": (
        lambda: dynamic(0.25, min_loss_scaling=1),
        ("between `min_loss_scaling`", "0.25"),
    ),
    # Casts.
    "None as dtype": (
        lambda: mpx.cast_tree(W, None),
        ("`cast_tree` needs a floating-point dtype",),
    ),
    # Trees.
    "other structures": (
        lambda: mpx.select_tree(True, {"a": W}, {"b": W}),
        ("`select_tree`", "same structure", "at ['b'] it has nothing"),
    ),
    "other shapes": (
        lambda: mpx.select_tree(True, W, X),
        ("`select_tree`", "the root", "same shape", "float32[3]", "float32[4,3]"),
    ),
    # Optimizers.
    "a missing gradient": (
        lambda: update_tree({**FLOATS, "b": None}),
        ("`optimizer_update`", "`grads`", "`model`", "same structure", "['b']"),
    ),
    "a gradient too many": (
        lambda: update_tree({**FLOATS, "n": jnp.ones(2)}),
        ("same structure", "['n']"),
    ),
    "the same paths in other classes": (
        lambda: mpx.optimizer_update((W,), SGD, SGD.init((W,)), [W], True),
        ("same structure", "list has other nodes or static fields than tuple"),
    ),
    "a gradient of another shape": (
        lambda: update_tree({**FLOATS, "b": jnp.ones((2, 1))}),
        ("['b']", "(2, 1)", "(2,)", "gradients of this model"),
    ),
    "the state of another optimizer": (
        lambda: update(SGD.init(W)),
        ("`optimizer_update`", "`optimizer_state`", "[0].count", "optimizer.init("),
    ),
    "the state of another shape": (
        lambda: update(ADAM.init(jnp.ones(2))),
        ("[0].mu it has float32[2]", "should be float32[3]"),
    ),
    # Derivatives.
    "no terms": (lambda: partials(iter(())), ("`partials`", "at least one term")),
    "an operator of nothing": (
        lambda: mpx.linear_operator(net, {"a": {}}, coords="xy", outputs="u"),
        ("`linear_operator`", "{} for 'a'"),
    ),
    "separated coordinates": (
        lambda: DS.per_direction("x, t"),
        ("`DerivativeScaling.per_direction`", "nothing in between", "'x, t'"),
    ),
    "one long output": (
        lambda: partials(["temp_x"], outputs="temp"),
        ("t, e, m, p", "write `outputs=['temp']`"),
    ),
    "an operator that names its output": (
        lambda: mpx.linear_operator(net, {"a": {"u_xx": 1.0}}, coords="xy", outputs="u"),
        ("`linear_operator`", "'xx', not 'u_xx'"),
    ),
    "tangents of another shape": (
        lambda: mpx.scaled_jvp(net, (POINT,), (W,), 2.0),
        ("`scaled_jvp`", "[0]", "(3,)", "(2,)"),
    ),
    "counts of another scaling": (
        lambda: DS.per_direction("xt").adjust(DS.per_order(1).counts),
        ("`DerivativeScaling.adjust`", "(15, 66)"),
    ),
    "exponents for other scalers": (
        lambda: DS.per_direction("xt").with_exponents([1, 2, 3]),
        ("`DerivativeScaling.with_exponents`", "x, t", "[1, 2, 3]"),
    ),
    # Networks.
    **{
        f"Fourier features {wrong}": (
            lambda wrong=wrong: mlp(fourier_features=wrong),
            ("`CoordinateMLP`", "(64, 1.0)"),
        )
        for wrong in [(0, 1.0), (8, "a"), (1.0, 64), 16]
    },
    **{
        f"periods {wrong}": (
            lambda wrong=wrong: mlp(periodic=wrong),
            ("`CoordinateMLP`", "{0: 2.0}"),
        )
        for wrong in [2.0, {0: float("inf")}, {"x": 1.0}]
    },
    **{
        f"modes {wrong}": (lambda wrong=wrong: conv(wrong), ("`SpectralConv`", "modes"))
        for wrong in [None, (4.0,)]
    },
    **{
        f"an output shape {wrong}": (
            lambda wrong=wrong: CONVOLUTION(FIELD, output_shape=wrong),
            ("`SpectralConv`", "`output_shape`", repr(wrong)),
        )
        for wrong in ["a", -8, (8, 8)]
    },
    "the maker of a stabilizer": (
        lambda: conv(stabilizer=mpx.nn.soft_clip)(FIELD),
        ("`soft_clip`", "stabilizer=soft_clip(4.0)"),
    ),
    **{
        f"a ratio {wrong}": (lambda wrong=wrong: fno(mlp_ratio=wrong), ("`FNO`", "`mlp_ratio`"))
        for wrong in [-1, "a", float("inf")]
    },
    "a padding in points": (lambda: fno(domain_padding=8), ("`FNO`", "fraction", "8/64")),
    # Ladders, reports, counters, files.
    "a tolerance that is no number": (
        lambda: mpx.PrecisionLadder(tolerance=float("nan")),
        ("`PrecisionLadder`", "`tolerance`", "nan"),
    ),
    "a report of what float32 loses": (
        lambda: mpx.range_report(jnp.sin)(W).first_overflow("float32"),
        ("`RangeReport`", "'float16'", "'float32'"),
    ),
    **{
        f"a counter {wrong}": (
            lambda wrong=wrong: mpx.DynamicLossScaling(counter=wrong),
            ("`DynamicLossScaling`", "`counter`", repr(wrong)),
        )
        for wrong in [-1, 1.5, "a", 2**31]
    },
    # Levenberg–Marquardt.
    "a damping by name": (lambda: LM(total, damping="a"), ("`damping`", "'a'")),
    "no examples": (
        lambda: fitted(batch=jnp.ones(0)),
        ("`LevenbergMarquardt.update`", "at least one example"),
    ),
    "complex parameters": (
        lambda: LM(total).init(W.astype(complex)),
        ("`LevenbergMarquardt.init`", "complex"),
    ),
}


@pytest.mark.parametrize("case", [*TYPE_ERRORS, *VALUE_ERRORS])
def test_mistakes_are_named(case):
    error = TypeError if case in TYPE_ERRORS else ValueError
    call, says = (TYPE_ERRORS | VALUE_ERRORS)[case]
    with pytest.raises(error) as caught:
        call()
    # Not a subclass, which JAX would have raised somewhere below.
    assert type(caught.value) is error
    for part in says:
        assert part in str(caught.value), str(caught.value)


TRANSFORMATIONS = {
    "filter_grad": mpx.filter_grad,
    "filter_value_and_grad": mpx.filter_value_and_grad,
    "calculate_scaled_grad": mpx.calculate_scaled_grad,
    "filter_accumulated_value_and_grad": accumulated,
}


@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "full"])
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_each_transformation_names_itself(name, mixed):
    make = lambda *args, **kwargs: TRANSFORMATIONS[name](*args, use_mixed_precision=mixed, **kwargs)
    with pytest.raises(TypeError, match=rf"`{name}` .*real floating-point scalar.*\(3,\).*mean"):
        jax.jit(make(lambda w: w, SCALING))(W)
    with pytest.raises(
        TypeError,
        match=rf"`{name}` .*returns `\(loss, aux\)`, but it returned an array of dtype \w+ and "
        r"shape \(\)\. .* leave `has_aux`",
    ):
        make(jnp.sum, SCALING, has_aux=True)(W)
    with pytest.raises(TypeError, match=rf"`{name}` .*first positional.*model first"):
        make(total, SCALING)()
    with pytest.raises(TypeError, match=rf"`{name}` .*loss function first.*3"):
        make(3, SCALING)
    if mixed:
        with pytest.raises(
            TypeError, match=rf"`{name}` .*`scaling`.*NoOpLossScaling\(\).*got None"
        ):
            make(total, None)


@pytest.mark.parametrize("name", TRANSFORMATIONS)
@pytest.mark.parametrize(
    ("keep_full", "error", "says"),
    [
        ((False, True, True), ValueError, "prefix of its 2 positional"),
        ([False, True], ValueError, r"such as \(False, True\)"),
        (None, ValueError, "one bool for all"),
        ((False, {"x": True}), ValueError, "prefix"),
        ("points", TypeError, "takes bools"),
        (1, TypeError, "takes bools"),
        ((False, jnp.bool_), TypeError, "takes bools"),
    ],
    ids=str,
)
def test_keep_full(name, keep_full, error, says):
    call = TRANSFORMATIONS[name](total, SCALING, keep_full=keep_full)
    with pytest.raises(
        error, match=rf"(?s)`{name}`.*`keep_full`.*{says}|`{name}`.*{says}.*`keep_full`"
    ):
        call(W, X)


def test_an_error_in_the_loss_is_not_taken_for_a_bad_keep_full():
    def loss(w):
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine"):
        grad(loss)


def test_numbers_that_are_no_scales():
    wrongs = [
        0,
        0.0,
        -1.0,
        np.nan,
        np.inf,
        -np.inf,
        1e39,
        10**400,
        1e-39,
        None,
        "2",
        1j,
        KEY,
        [1.0],
    ]
    wrongs += [jnp.zeros(()), jnp.ones(2), np.ones(1), jnp.float16(np.inf), np.complex64(1)]
    names = ["loss_scaling", "min_loss_scaling", "factor", "period", "max_loss_scaling"]
    for wrong in wrongs:
        for name in names[: None if wrong is not None else -1]:  # None is the default of the last
            with pytest.raises(
                ValueError, match=rf"`DynamicLossScaling` needs .* `{name}`, but got"
            ):
                mpx.DynamicLossScaling(**{name: wrong})
        with pytest.raises(ValueError, match=r"`StaticLossScaling` needs .* `loss_scaling`, but"):
            mpx.StaticLossScaling(wrong)


def test_traced_fields():
    for name in ("min_loss_scaling", "max_loss_scaling", "factor", "period"):
        with pytest.raises(
            ValueError, match=rf"`DynamicLossScaling` .*`{name}`.* outside of `jit`"
        ):
            jax.jit(lambda x, name=name: mpx.DynamicLossScaling(**{name: x}))(2.0)
    for wrong in (W, 1j, True, jnp.array(KEY)):
        for call in (mpx.DynamicLossScaling, mpx.StaticLossScaling):
            with pytest.raises(ValueError, match=rf"`{call.__name__}` needs .* `loss_scaling`"):
                jax.jit(call)(wrong)


@pytest.mark.parametrize("wrong", [None, 1, 1.0, "yes", np.ones(()), np.array([True]), W], ids=repr)
def test_flags(wrong):
    for name, call in {
        "DynamicLossScaling.adjust": SCALING.adjust,
        "StaticLossScaling.adjust": mpx.StaticLossScaling(2.0).adjust,
        "NoOpLossScaling.adjust": mpx.NoOpLossScaling().adjust,
        "optimizer_update": lambda f: mpx.optimizer_update(W, SGD, SGD.init(W), W, f),
        "select_tree": lambda f: mpx.select_tree(f, W, W),
    }.items():
        for run in (call, eqx.filter_jit(call)):
            with pytest.raises(TypeError, match=rf"`{name}`.*") as caught:
                run(wrong)
            argument = "`pred`" if name == "select_tree" else "`grads_finite`"
            assert all(p in str(caught.value) for p in (argument, "scalar bool", "all_finite"))


def test_dtypes():
    for wrong in ("float17", "int32", jnp.complex64, bool, "key<fry>", object(), KEY.dtype, W):
        for name, call in {
            "cast_tree": lambda d: mpx.cast_tree(W, d),
            "cast_function": lambda d: mpx.cast_function(jnp.sin, d),
            "cast_function`|`cast_function": lambda d: mpx.cast_function(jnp.sin, "float16", d),
            "force_full_precision": lambda d: mpx.force_full_precision(jnp.sin, d),
        }.items():
            with pytest.raises(ValueError, match=rf"(`{name}`).*floating-point dtype such as jnp"):
                call(wrong)
    with pytest.raises(TypeError, match=r"explain_nonfinite\(mpx_pde.filter_grad\(loss, scaling\)"):
        mpx.explain_nonfinite(jnp.sin, SCALING)  # as `precision_floor` takes it


def test_an_error_of_the_optimizer_itself_stays_what_it_is():
    def fails(updates, state, params=None):
        raise KeyError("mine")

    optimizer = optax.GradientTransformation(SGD.init, fails)
    with pytest.raises(KeyError, match="mine"):
        update(SGD.init(W), optimizer)


@pytest.mark.parametrize(
    "layer", [mpx.nn.CoordinateMLP(2, 2, 4, 1, key=KEY), mpx.nn.Ansatz(net, lambda p, u: u * p)]
)
def test_networks_stand_in_a_sequence(layer):
    """Which passes a key to each of its layers, as do other networks of Equinox."""
    both = eqx.nn.Sequential([layer, eqx.nn.Linear(2, 1, key=KEY)])
    np.testing.assert_array_equal(both(POINT), both[1](layer(POINT)))


def test_a_derivative_scaling_that_nothing_takes_is_told():
    scaling = mpx.Scaling(derivatives=DS.per_direction("xy", order=1))

    def gradient(hand_on, dtype="float16"):
        def loss(w, point, *, derivatives):
            u = lambda p: w[0] * jnp.sum(p.astype(w.dtype) ** 2)
            options = {"scaling": derivatives} if hand_on else {}
            return mpx.partials(u, ["u_x"], coords="xy", outputs="u", **options)(point)["u_x"]

        with mpx.half_precision(dtype):
            run = mpx.filter_grad(loss, scaling, keep_full=(False, True))
            return jax.make_jaxpr(lambda w, x: run(w, x)[2])(W, POINT)

    with pytest.warns(mpx.PrecisionWarning, match=r"`filter_grad`.*no derivative.*scaling=deriv"):
        gradient(False)
    gradient(True)  # warnings are errors
    gradient(False, "bfloat16")  # where nothing needs to be scaled

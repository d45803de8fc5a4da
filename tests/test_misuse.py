"""More of the mistakes that a user makes, one for each public call and more: each raises while it
is traced, and says what came and what to do.

`test_errors.py` has those of the transformations.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx_pde as mpx


pytestmark = pytest.mark.usefixtures("unchecked_annotations")

KEY = jax.random.key(0)
W = jnp.ones(3)
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


def calibrate(points=POINTS, terms=("u_x",), fun=net):
    return DS.per_direction("xy").calibrate(fun, points, terms, coords="xy", outputs="u")


def fitted(state=None, residual=lambda w, x: w * x, batch=W):
    optimizer = LM(residual)
    return optimizer.update(W, optimizer.init(W) if state is None else state, batch)


def accumulate(*args, **kwargs):
    return mpx.filter_accumulated_value_and_grad(total, SCALING, 2)(W, *args, **kwargs)


CONVOLUTION = conv()
FIELD = jnp.ones((1, 8))
LOOKAHEAD = optax.lookahead(SGD, 2, 0.5)
PARAMS = optax.LookaheadParams(W, W)


CASES = {
    # Gradients.
    "no arrays": (
        lambda: mpx.filter_grad(lambda w: jnp.float32(1), SCALING)({"a": 2.0, "n": jnp.arange(2)}),
        TypeError,
        ("`filter_grad`", "has none", "Pass the model first"),
    ),
    "no arrays in float32": (
        lambda: mpx.filter_value_and_grad(total, None, False, False)("model"),
        TypeError,
        ("`filter_value_and_grad`", "'model' has none"),
    ),
    "no arrays in a floor": (
        lambda: mpx.precision_floor(lambda w: jnp.float32(1), SCALING)({}),
        TypeError,
        ("`precision_floor`", "{} has none"),
    ),
    "a dtype as has_aux": (
        lambda: mpx.filter_grad(total, SCALING, "bfloat16"),
        TypeError,
        ("`filter_grad`", "bool as `has_aux`", "'bfloat16'"),
    ),
    "a dtype as use_mixed_precision": (
        lambda: mpx.filter_grad(total, SCALING, use_mixed_precision="float16"),
        TypeError,
        ("`use_mixed_precision`", "`policy`", "'float16'"),
    ),
    "None as use_mixed_precision": (
        lambda: mpx.line_search_value(total, SCALING, use_mixed_precision=None),
        TypeError,
        ("`line_search_value`", "`use_mixed_precision`", "None"),
    ),
    "an axis that is not there": (
        lambda: mpx.filter_grad(total, SCALING, axis_name="devices")(W),
        ValueError,
        ("`filter_grad`", "`axis_name='devices'`", "leave it out"),
    ),
    "an axis by number": (
        lambda: mpx.filter_grad(total, SCALING, axis_name=3)(W),
        TypeError,
        ("`filter_grad`", "name of a mesh axis", "3"),
    ),
    "a mean over no axis": (
        lambda: mpx.all_reduce_mean(W, "devices"),
        ValueError,
        ("`all_reduce_mean`", "`axis_name='devices'`", "`jax.shard_map`"),
    ),
    "a mean with swapped arguments": (
        lambda: mpx.all_reduce_mean("devices", W),
        TypeError,
        ("`all_reduce_mean`", "name of a mesh axis"),
    ),
    "a batch by keyword": (
        lambda: accumulate(x=POINTS),
        ValueError,
        ("`filter_accumulated_value_and_grad`", "no array to split", "by position"),
    ),
    # Optimizers.
    "the state of another optimizer": (
        lambda: update(SGD.init(W)),
        ValueError,
        ("`optimizer_update`", "`optimizer_state`", "[0].count", "optimizer.init("),
    ),
    "the state of another model": (
        lambda: update(ADAM.init({"w": W})),
        ValueError,
        ("`optimizer_update`", "[0].mu it has nothing"),
    ),
    "the state of another shape": (
        lambda: update(ADAM.init(jnp.ones(2))),
        ValueError,
        ("[0].mu it has float32[2]", "should be float32[3]"),
    ),
    "no state": (lambda: update(None), ValueError, ("`optimizer_update`", "`optimizer_state`")),
    "gradients of something else for lookahead": (
        lambda: update(LOOKAHEAD.init(PARAMS), LOOKAHEAD, PARAMS, [W]),
        ValueError,
        ("`optimizer_update`", "same structure", "the root, [0]"),
    ),
    "a number as key": (
        lambda: half_update(0),
        TypeError,
        ("`optimizer_update`", "key of `jax.random`", "0"),
    ),
    "where the scale is, by name": (
        lambda: mpx.contrib.scale_by_loss_scaling(ADAM, SCALING, scale_in_params="scale"),
        TypeError,
        ("`contrib.scale_by_loss_scaling`", "function from the parameters", "'scale'"),
    ),
    # Derivatives.
    "separated coordinates": (
        lambda: DS.per_direction("x, t"),
        ValueError,
        ("`DerivativeScaling.per_direction`", "nothing in between", "'x, t'"),
    ),
    "separated outputs": (
        lambda: partials(["u"], outputs="u v"),
        ValueError,
        ("`partials`", "the outputs", "Leave out"),
    ),
    "one long output": (
        lambda: partials(["temp_x"], outputs="temp"),
        ValueError,
        ("t, e, m, p", "write `outputs=['temp']`"),
    ),
    "an operator that names its output": (
        lambda: mpx.linear_operator(net, {"a": {"u_xx": 1.0}}, coords="xy", outputs="u"),
        ValueError,
        ("`linear_operator`", "'xx', not 'u_xx'"),
    ),
    "primals that are no tuple": (
        lambda: mpx.scaled_jvp(net, POINT, POINT, 2.0),
        TypeError,
        ("`scaled_jvp`", "`primals` as a tuple", "`(x,)`"),
    ),
    "tangents of another shape": (
        lambda: mpx.scaled_jvp(net, (POINT,), (W,), 2.0),
        ValueError,
        ("`scaled_jvp`", "[0]", "(3,)", "(2,)"),
    ),
    "tangents of integers": (
        lambda: mpx.scaled_jvp(net, (jnp.arange(2),), (POINT,), 2.0),
        TypeError,
        ("`scaled_jvp`", "int32", "float32"),
    ),
    "a scaling by its class": (
        lambda: DS("xt"),
        TypeError,
        ("`DerivativeScaling` is made by", "per_direction"),
    ),
    "counts of another scaling": (
        lambda: DS.per_direction("xt").adjust(DS.per_order(1).counts),
        ValueError,
        ("`DerivativeScaling.adjust`", "(15, 66)"),
    ),
    "no counts": (
        lambda: DS.per_order(1).finite(None),
        ValueError,
        ("`DerivativeScaling.finite`", "None"),
    ),
    "exponents for other scalers": (
        lambda: DS.per_direction("xt").with_exponents([1, 2, 3]),
        ValueError,
        ("`DerivativeScaling.with_exponents`", "x, t", "[1, 2, 3]"),
    ),
    "scales as exponents": (
        lambda: DS.per_direction("xt").with_exponents(0.5),
        ValueError,
        ("`DerivativeScaling.with_exponents`", "log2", "0.5"),
    ),
    "points with too many coordinates": (
        lambda: calibrate(jnp.ones((4, 3))),
        ValueError,
        ("`DerivativeScaling.calibrate`", "[points, 2]", "(4, 3)"),
    ),
    "no points": (lambda: calibrate(jnp.ones((0, 2))), ValueError, ("calibrate`", "(0, 2)")),
    "no derivatives": (
        lambda: calibrate(terms=["u"]),
        ValueError,
        ("`DerivativeScaling.calibrate`", "none in the terms", "'u'"),
    ),
    "points that are not finite": (
        lambda: calibrate(POINTS * jnp.nan),
        ValueError,
        ("`DerivativeScaling.calibrate`", "not finite in float32"),
    ),
    "calibration inside of jit": (
        lambda: jax.jit(lambda x: calibrate(x).exponents)(POINTS),
        TypeError,
        ("`DerivativeScaling.calibrate`", "inside of `jax.jit`"),
    ),
    # Networks.
    "no key": (lambda: mlp(key=None), TypeError, ("`CoordinateMLP`", "jax.random.key(0)")),
    "a seed as key": (lambda: fno(key=0), TypeError, ("`FNO`", "jax.random.key(0)")),
    "several keys": (
        lambda: conv(key=jax.random.split(KEY)),
        TypeError,
        ("`SpectralConv`", "one key"),
    ),
    **{
        f"Fourier features {wrong}": (
            lambda wrong=wrong: mlp(fourier_features=wrong),
            ValueError,
            ("`CoordinateMLP`", "(64, 1.0)"),
        )
        for wrong in [(0, 1.0), (8.0, 1), (8, "a"), (1.0, 64), (8, float("nan")), (8, -1.0), 16]
    },
    **{
        f"periods {wrong}": (
            lambda wrong=wrong: mlp(periodic=wrong),
            ValueError,
            ("`CoordinateMLP`", "{0: 2.0}"),
        )
        for wrong in [[2.0, None], 2.0, (0, 2.0), {0: "a"}, {0: float("inf")}, {"x": 1.0}]
    },
    "a form of one argument": (
        lambda: mpx.nn.Ansatz(net, lambda u: u),
        TypeError,
        ("`Ansatz`", "`form`", "(u)"),
    ),
    "a form before its network": (
        lambda: mpx.nn.Ansatz(lambda p, u: u, mlp()),
        TypeError,
        ("`Ansatz`", "The network comes first"),
    ),
    **{
        f"modes {wrong}": (lambda wrong=wrong: conv(wrong), ValueError, ("`SpectralConv`", "modes"))
        for wrong in [4.0, None, "44", (4.0,)]
    },
    **{
        f"an output shape {wrong}": (
            lambda wrong=wrong: CONVOLUTION(FIELD, output_shape=wrong),
            ValueError,
            ("`SpectralConv`", "`output_shape`", repr(wrong)),
        )
        for wrong in [8.5, "a", -8, (8, 8)]
    },
    "the maker of a stabilizer": (
        lambda: conv(stabilizer=mpx.nn.soft_clip)(FIELD),
        ValueError,
        ("`soft_clip`", "stabilizer=soft_clip(4.0)"),
    ),
    **{
        f"a ratio {wrong}": (
            lambda wrong=wrong: fno(mlp_ratio=wrong),
            ValueError,
            ("`FNO`", "`mlp_ratio`"),
        )
        for wrong in [0, -1, "a", float("nan"), float("inf")]
    },
    "a padding in points": (
        lambda: fno(domain_padding=8),
        ValueError,
        ("`FNO`", "fraction", "8/64"),
    ),
    "an embedding by name": (
        lambda: fno(grid_embedding="grid"),
        TypeError,
        ("`FNO`", "bool as `grid_embedding`", "'grid'"),
    ),
    # Ladders, reports, counters, files.
    "a tolerance that is no number": (
        lambda: mpx.PrecisionLadder(tolerance=float("nan")),
        ValueError,
        ("`PrecisionLadder`", "`tolerance`", "nan"),
    ),
    "a name to say": (
        lambda: mpx.PrecisionLadder(say="print"),
        TypeError,
        ("`PrecisionLadder`", "`say`", "'print'"),
    ),
    "a report of what float32 loses": (
        lambda: mpx.range_report(jnp.sin)(W).first_overflow("float32"),
        ValueError,
        ("`RangeReport`", "'float16'", "'float32'"),
    ),
    **{
        f"a counter {wrong}": (
            lambda wrong=wrong: mpx.DynamicLossScaling(counter=wrong),
            ValueError,
            ("`DynamicLossScaling`", "`counter`", repr(wrong)),
        )
        for wrong in [-1, 1.5, "a", 2**31]
    },
    "nothing to tie a check to": (
        lambda: mpx.error_if_stuck(None, SCALING, max_consecutive_skips=2),
        TypeError,
        ("`error_if_stuck`", "`tree` with an array", "None"),
    ),
    "a state as path": (
        lambda: mpx.save_checkpoint({"w": W}, "run"),
        TypeError,
        ("`save_checkpoint`", "path of a file first"),
    ),
    "a state as path to restore": (
        lambda: mpx.restore_checkpoint({"w": W}, "run"),
        TypeError,
        ("`restore_checkpoint`", "path of a file first"),
    ),
    "a checkpoint inside of jit": (
        lambda: jax.jit(lambda w: mpx.save_checkpoint("run", {"w": w}))(W),
        TypeError,
        ("`save_checkpoint`", "['w']", "inside of `jax.jit`"),
    ),
    "a scaling as its options": (
        lambda: mpx.check_scaling_options(SCALING, SCALING),
        TypeError,
        ("`check_scaling_options`", "`saved`"),
    ),
    # Levenberg–Marquardt.
    "a damping by name": (lambda: LM(total, damping="a"), ValueError, ("`damping`", "'a'")),
    "an acceleration by name": (
        lambda: LM(total, acceleration=None),
        ValueError,
        ("`LevenbergMarquardt`", "`acceleration`", "None"),
    ),
    "no solver": (lambda: LM(total, solver=3), TypeError, ("`solver`", "lineax", "3")),
    "the model as state": (
        lambda: fitted(state={"w": W}),
        TypeError,
        ("`LevenbergMarquardt.update`", "`state`", "init(model)"),
    ),
    "no examples": (
        lambda: fitted(batch=jnp.ones(0)),
        ValueError,
        ("`LevenbergMarquardt.update`", "at least one example"),
    ),
    "residuals in a tuple": (
        lambda: fitted(residual=lambda w, x: (w, x)),
        TypeError,
        ("`LevenbergMarquardt.update`", "returned tuple", "Stack several"),
    ),
    "residuals of integers": (
        lambda: fitted(residual=lambda w, x: jnp.arange(2)),
        TypeError,
        ("`LevenbergMarquardt.update`", "dtype int32"),
    ),
    "complex parameters": (
        lambda: LM(total).init(W.astype(complex)),
        ValueError,
        ("`LevenbergMarquardt.init`", "complex"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_mistakes_are_named(case):
    call, error, says = CASES[case]
    with pytest.raises(error) as caught:
        call()
    # Not a subclass, which JAX would have raised somewhere below.
    assert type(caught.value) is error
    for part in says:
        assert part in str(caught.value), str(caught.value)


def test_a_checkpoint_inside_of_jit_writes_nothing(tmp_path):
    with pytest.raises(TypeError):
        jax.jit(lambda w: mpx.save_checkpoint(tmp_path / "run", w))(W)
    assert not list(tmp_path.iterdir())


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


@pytest.mark.parametrize("layer", [CONVOLUTION, fno()])
def test_operators_stand_in_a_sequence(layer):
    np.testing.assert_array_equal(eqx.nn.Sequential([layer])(FIELD), layer(FIELD))


def test_a_network_takes_lists_and_numpy_numbers():
    network = mlp(periodic={np.int64(0): jnp.array(2.0)}, fourier_features=(np.int64(4), 1))
    assert network([0.3, 0.2]) == network(POINT)
    hash(jax.tree.structure(network))


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

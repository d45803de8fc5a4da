"""Tests mistakes that several public calls share, with the same values for each of them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx_pde as mpx


pytestmark = pytest.mark.usefixtures("unchecked_annotations")

KEY = jax.random.key(0)
W, X, POINT = jnp.ones(3), jnp.ones((4, 3)), jnp.array([0.3, 0.2])
SGD, SCALING = optax.sgd(0.1), mpx.DynamicLossScaling(4.0)


def total(w, *rest, **kwargs):
    return jnp.sum(w)


def accumulated(func, scaling, *args, **kwargs):
    return mpx.filter_accumulated_value_and_grad(func, scaling, 2, *args, **kwargs)


MAKE = mpx.filter_grad, mpx.filter_value_and_grad, mpx.calculate_scaled_grad
TRANSFORMATIONS = {transform.__name__: transform for transform in MAKE}
TRANSFORMATIONS |= {"filter_accumulated_value_and_grad": accumulated}


@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "full"])
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_each_transformation_names_itself(name, mixed):
    make = lambda *args, **kwargs: TRANSFORMATIONS[name](*args, use_mixed_precision=mixed, **kwargs)
    with pytest.raises(TypeError, match=rf"`{name}` .*real floating-point scalar.*\(3,\).*mean"):
        jax.jit(make(lambda w: w, SCALING))(W)
    returned = r"an array of dtype \w+ and shape \(\)\. .* leave `has_aux`"
    match = rf"`{name}` .*returns `\(loss, aux\)`, but it returned {returned}"
    with pytest.raises(TypeError, match=match):
        make(jnp.sum, SCALING, has_aux=True)(W)
    with pytest.raises(TypeError, match=rf"`{name}` .*first positional.*model first"):
        make(total, SCALING)()
    with pytest.raises(TypeError, match=rf"`{name}` .*loss function first.*3"):
        make(3, SCALING)
    if mixed:
        match = rf"`{name}` .*`scaling`.*NoOpLossScaling\(\).*got None"
        with pytest.raises(TypeError, match=match):
            make(total, None)


@pytest.mark.parametrize("options", [{}, {"forward": "float32"}], ids=["half", "forward"])
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
def test_keep_full(name, keep_full, error, says, options):
    call = TRANSFORMATIONS[name](total, SCALING, keep_full=keep_full, **options)
    match = rf"(?s)`{name}`.*`keep_full`.*{says}|`{name}`.*{says}.*`keep_full`"
    with pytest.raises(error, match=match):
        call(W, X)


def test_numbers_that_are_no_scales():
    wrongs = [0, 0.0, -1.0, np.nan, np.inf, -np.inf, 1e39, 10**400, 1e-39, None, "2", 1j, KEY, True]
    wrongs += [jnp.zeros(()), jnp.ones(2), np.ones(1), jnp.float16(np.inf), np.complex64(1), [1.0]]
    names = ["loss_scaling", "min_loss_scaling", "factor", "period", "max_loss_scaling"]
    for wrong in wrongs:
        for name in names[: None if wrong is not None else -1]:  # None is the default of the last
            match = rf"`DynamicLossScaling` needs .* `{name}`, but got"
            with pytest.raises(ValueError, match=match):
                mpx.DynamicLossScaling(**{name: wrong})
        with pytest.raises(ValueError, match=r"`StaticLossScaling` needs .* `loss_scaling`, but"):
            mpx.StaticLossScaling(wrong)


def test_traced_fields():
    for name in ("min_loss_scaling", "max_loss_scaling", "factor", "period"):
        match = rf"`DynamicLossScaling` .*`{name}`.* outside of `jit`"
        with pytest.raises(ValueError, match=match):
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


def test_an_error_of_the_optimizer_itself_stays_what_it_is():
    def fails(updates, state, params=None):
        raise KeyError("mine")

    optimizer = optax.GradientTransformation(SGD.init, fails)
    with pytest.raises(KeyError, match="mine"):
        mpx.optimizer_update(W, optimizer, SGD.init(W), W, True)


@pytest.mark.parametrize(
    "layer",
    [mpx.nn.CoordinateMLP(2, 2, 4, 1, key=KEY), mpx.nn.Ansatz(jnp.prod, lambda p, u: u * p)],
)
def test_networks_stand_in_a_sequence(layer):
    """`Sequential` and other networks of Equinox pass a key to each of their layers."""
    both = eqx.nn.Sequential([layer, eqx.nn.Linear(2, 1, key=KEY)])
    np.testing.assert_array_equal(both(POINT), both[1](layer(POINT)))


def test_a_derivative_scaling_that_nothing_takes_is_told():
    scaling = mpx.Scaling(derivatives=mpx.DerivativeScaling.per_direction("xy", order=1))

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
    gradient(False, "bfloat16")  # nothing needs to be scaled

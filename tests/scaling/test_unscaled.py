"""Tests the warning of float16 derivatives with a loss scale alone, which spares intended ones."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import assert_tells, policy

import mpx_pde as mpx


pytestmark = pytest.mark.slow

KEY = jax.random.key(0)
MODEL = eqx.nn.MLP(2, "scalar", 8, 2, activation=jnp.tanh, key=KEY)
POINTS = jax.random.uniform(KEY, (4, 2))
NAMES = {"coords": "xy", "outputs": "u"}
CAST = {"keep_full": (False, True)}
PLAIN = mpx.DynamicLossScaling()


THIRD = {"xxx": 1.0, "x": 1.0}
# A way to take derivatives, and of which order they are.
TAKEN = {
    "partials": (lambda fun: mpx.partials(fun, ["u", "u_xx"], **NAMES), 2),
    "laplacian": (lambda fun: mpx.laplacian(fun, **NAMES), 2),
    "linear_operator": (lambda fun: mpx.linear_operator(fun, {"a": THIRD}, **NAMES), 3),
    "hessian": (mpx.derivatives.hessian, 2),
}


def loss_of(taken):
    def loss(model, points):
        out = jax.vmap(taken(model))(points)
        return sum(jnp.mean(x.astype(jnp.float32) ** 2) for x in jax.tree.leaves(out))

    return loss


def told(gradient, *args):
    """Returns the warnings of derivatives without a scale that tracing issues."""
    with warnings.catch_warnings(record=True) as caught, jax.numpy_dtype_promotion("standard"):
        warnings.simplefilter("always")
        eqx.filter_eval_shape(gradient, *args)
    return [str(w.message) for w in caught if "got a loss scaling alone" in str(w.message)]


@pytest.mark.parametrize("name", TAKEN)
def test_every_way_to_take_derivatives_is_told(name):
    taken, order = TAKEN[name]
    [text] = told(mpx.filter_grad(loss_of(taken), PLAIN, **CAST), MODEL, POINTS)
    assert text.startswith("`filter_grad` got a loss scaling alone, but the loss takes derivatives")
    mend = "mpx_pde.Scaling(loss=..., derivatives=mpx_pde.DerivativeScaling.per_direction("
    order = f"derivatives of order {order} by `{name}` in float16"
    assert_tells(text, order, mend, "forward='float32'")


def test_every_transformation_tells_it_once_a_trace():
    loss = loss_of(TAKEN["partials"][0])
    for gradient in (
        mpx.filter_value_and_grad(loss, mpx.NoOpLossScaling(), **CAST),
        mpx.filter_grad(loss, mpx.StaticLossScaling(2.0), **CAST),
        mpx.calculate_scaled_grad(loss, PLAIN, **CAST),
        mpx.filter_grad(loss, PLAIN, autocast=True),
    ):
        assert len(told(gradient, MODEL, POINTS)) == 1
    compiled = eqx.filter_jit(mpx.filter_grad(loss, PLAIN, **CAST))
    assert len(told(compiled, MODEL, POINTS)) == 1
    assert told(compiled, MODEL, POINTS) == []


def scaled(model, points, *, derivatives):
    fun = mpx.partials(model, ["u", "u_xx"], **NAMES, scaling=derivatives)
    return jnp.mean(jax.vmap(fun)(points)["u_xx"] ** 2)


FIRST = loss_of(lambda fun: mpx.partials(fun, ["u", "u_x", "u_y"], **NAMES))
SECOND = loss_of(TAKEN["partials"][0])
KEPT = mpx.FullPrecision(MODEL)
MEANT = {
    "scaled": (scaled, mpx.Scaling(PLAIN, mpx.DerivativeScaling.per_direction("xy")), CAST, MODEL),
    "first order": (FIRST, PLAIN, CAST, MODEL),
    "bfloat16": (SECOND, PLAIN, {**CAST, "policy": policy("bfloat16")}, MODEL),
    "forward": (SECOND, PLAIN, {"forward": "float32"}, MODEL),
    "network in full": (SECOND, PLAIN, {"keep_full": True}, MODEL),
    "FullPrecision": (SECOND, PLAIN, {}, {"net": KEPT, "half": jnp.ones(2)}),
    "not mixed": (SECOND, PLAIN, {"use_mixed_precision": False}, MODEL),
}


@pytest.mark.parametrize("name", MEANT)
def test_what_is_in_range_or_scaled_is_not_told(name):
    loss, scaling, options, model = MEANT[name]
    if isinstance(model, dict):
        loss = lambda model, points: SECOND(model["net"], points)
    assert told(mpx.filter_grad(loss, scaling, **options), model, POINTS) == []

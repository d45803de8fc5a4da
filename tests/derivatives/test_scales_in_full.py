"""Tests derivative scales under a full forward pass: of drawn directions, and of values alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative

import mpx_pde as mpx


COORDS = "txyz"
KEYS = jax.random.split(jax.random.key(0), 3)
LAYERS = [
    jax.random.normal(key, shape) / 3
    for key, shape in zip(KEYS, [(4, 16), (16,), (16,)], strict=True)
]
POINTS = jax.random.normal(jax.random.key(1), (8, 4))
OPERATORS = {
    "laplacian": "laplacian",
    "first": dict.fromkeys(COORDS, 1.0),
    "second": {"xx": 1.0, "yy": 2.0, "zz": 0.5},
    "biharmonic": "biharmonic",
}


def network(params, p):
    return jnp.sum(jnp.tanh(p @ params[0] + params[1]) @ params[2])


def drawn(operator, samples):
    def loss(params, points, *, derivatives=None):
        terms = mpx.linear_operator(
            lambda p: network(params, p), {"d": OPERATORS[operator]}, coords=COORDS, outputs="u",
            samples=samples, key=jax.random.key(2), scaling=derivatives,
        )  # fmt: skip
        return jnp.mean(jax.vmap(lambda p: terms(p)["d_u"])(points) ** 2)

    return loss


@pytest.mark.filterwarnings("ignore:.*is done in half")  # a small network gains nothing
@pytest.mark.parametrize("samples", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "operator",
    ["laplacian", *(pytest.param(x, marks=pytest.mark.slow) for x in [*OPERATORS][1:])],
)
def test_a_scale_of_drawn_directions_changes_no_value(operator, samples):
    loss = drawn(operator, samples)
    want = jax.value_and_grad(loss)(LAYERS, POINTS)
    order = {"first": 1, "biharmonic": 4}.get(operator, 2)
    scales = mpx.DerivativeScaling.per_order(order, init_scale=2.0**8)
    scaling = mpx.Scaling(mpx.DynamicLossScaling(2.0**6), scales)
    run = mpx.filter_value_and_grad(loss, scaling, forward="float32")
    value, _, finite, got = jax.jit(lambda *args: run(*args))(LAYERS, POINTS)
    assert finite
    np.testing.assert_allclose(value, want[0], rtol=1e-5)  # sums in another order
    assert relative(got, want[1]) < 2e-3  # float16 rounds to 5e-4, twice


@pytest.mark.slow
def test_a_scaling_of_terms_without_derivatives():
    """Values alone have no streams, and no scales."""

    def loss(params, points, *, derivatives=None):
        terms = mpx.partials(
            lambda p: network(params, p), ["u"], coords=COORDS, outputs="u", scaling=derivatives
        )
        return jnp.mean(jax.vmap(lambda p: terms(p)["u"])(points) ** 2)

    want = jax.grad(loss)(LAYERS, POINTS)
    scaling = mpx.Scaling(derivatives=mpx.DerivativeScaling.per_order(1, init_scale=2.0**8))
    *_, got = mpx.filter_grad(loss, scaling, forward="float32")(LAYERS, POINTS)
    assert relative(got, want) < 2e-3


def normed(params, p):
    h = jnp.tanh(p @ params[0] + params[1])
    return jnp.sum((h - jnp.mean(h)) / jnp.sqrt(jnp.var(h) + 1e-5) * params[2])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is done in half")  # a small network gains nothing
def test_operators_with_scales_on_a_norm():
    """The rule for the derivative of a variance takes the factors of the operator, too."""

    def loss(params, points, *, derivatives=None):
        operators = {"d": {"xx": points[0, 0], "yy": 2.0}}
        terms = mpx.linear_operator(
            lambda p: normed(params, p), operators, coords=COORDS, outputs="u", scaling=derivatives
        )
        return jnp.mean(jax.vmap(lambda p: terms(p)["d_u"])(points) ** 2)

    want = jax.jit(jax.grad(loss))(LAYERS, POINTS)
    scaling = mpx.Scaling(
        mpx.DynamicLossScaling(2.0**6), mpx.DerivativeScaling.per_order(2, init_scale=4.0)
    )
    run = mpx.filter_grad(loss, scaling, forward="float32")
    _, finite, got = jax.jit(lambda *args: run(*args))(LAYERS, POINTS)
    assert finite
    assert relative(got, want) < 2e-3

"""Tests the loss for a line search."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import over_devices, relative, tree_equal_bits
from jax.sharding import PartitionSpec as P

import mpx_pde as mpx


POINTS = jnp.linspace(-1.0, 1.0, 24)[:, None]


def loss(model, x):
    return jnp.mean((jax.vmap(model)(x)[:, 0] - jnp.sin(3 * x[:, 0])) ** 2)


OPTIONS = {"policy": "params=float32,compute=float16,output=float32", "forward": "float32"}


@pytest.mark.slow
def test_value_and_slope_are_of_one_scaled_evaluation():
    model = mpx.nn.CoordinateMLP(1, 1, 8, 1, key=jax.random.key(0))
    scaling = mpx.DynamicLossScaling(2.0**10)
    tiny = lambda model, x: 1e-7 * loss(model, x)  # unscaled, its gradients are zero in float16
    value, _, finite, grads = mpx.filter_value_and_grad(tiny, scaling, **OPTIONS)(model, POINTS)
    search = mpx.line_search_value(tiny, scaling, **OPTIONS)
    assert finite
    assert tree_equal_bits(eqx.filter_value_and_grad(search)(model, POINTS), (value, grads))
    assert mpx.global_norm(grads) > 0
    # Optax's backtracking search does the same, with a Python number as the cotangent.
    params, static = eqx.partition(model, eqx.is_inexact_array)
    fun = lambda params: search(eqx.combine(params, static), POINTS)
    (slope,) = jax.linear_transpose(jax.linearize(fun, params)[1], params)(1.0)
    assert tree_equal_bits(slope, eqx.filter(grads, eqx.is_inexact_array))
    backtracking = optax.scale_by_backtracking_linesearch(9, store_grad=True)
    optimizer = optax.lbfgs(linesearch=backtracking)
    searched = {"value": value, "grad": grads, "value_fn": fun}
    state = optimizer.init(params)
    new, _ = mpx.optimizer_update(model, optimizer, state, grads, finite, **searched)
    assert tiny(new, POINTS) < value


@pytest.mark.parametrize(
    "where",
    [
        "in the loss",
        pytest.param("of what is returned", marks=pytest.mark.slow),
        pytest.param("of a closure", marks=pytest.mark.slow),
    ],
)
def test_a_mean_over_devices_is_that_of_one(where):
    model = mpx.nn.CoordinateMLP(1, 1, 8, 1, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    mean = lambda x: jax.lax.pmean(x, "data")
    find = lambda loss: mpx.line_search_value(loss, mpx.DynamicLossScaling(2.0**8), **OPTIONS)

    def fun(params, x):
        model = eqx.combine(params, static)
        if where == "in the loss":
            return find(lambda *args: mean(loss(*args)))(model, x)
        if where == "of a closure":
            return mean(find(lambda model: loss(model, x))(model))
        return mean(find(loss)(model, x))

    run = jax.jit(over_devices(jax.value_and_grad(fun), 2, (P(), P("data")), P()))
    value, grads = run(params, POINTS)
    want, slope = eqx.filter_value_and_grad(loss)(model, POINTS)
    assert relative(value, want) < 1e-6
    assert relative(grads, eqx.filter(slope, eqx.is_inexact_array)) < 2.0**-9

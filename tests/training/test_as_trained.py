"""Tests the values that training rounds and keeps, and the model that a training has seen."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import policy, tree_equal_bits

import mpx_pde as mpx
from mpx_pde import nn


KEY = jax.random.key(0)
POINTS = jax.random.uniform(jax.random.key(1), (16, 2))


class Inverse(eqx.Module):
    network: nn.CoordinateMLP
    viscosity: mpx.FullPrecision
    plain: jax.Array


class Features(eqx.Module):
    """Random Fourier features of a network that does not use this library."""

    matrix: jax.Array

    def __call__(self, x):
        return jnp.sin(jax.lax.stop_gradient(self.matrix) @ x)


def inverse():
    network = nn.CoordinateMLP(2, "scalar", 8, 2, fourier_features=(4, 1.0), key=KEY)
    return Inverse(network, mpx.FullPrecision(jnp.array(0.1)), jnp.array(0.1))


def same(x, y):
    return np.array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.slow
def test_it_is_the_model_that_the_loss_has_seen():
    model = inverse()

    def loss(model, points):
        weights = [model.network.hidden[0].weight, model.plain, model.viscosity.value]
        return jnp.sum(points) * 0, [x.astype(jnp.float32) for x in weights]

    for half in ("float16", "bfloat16"):
        given = {"policy": policy(half)}
        step = mpx.filter_value_and_grad(loss, mpx.NoOpLossScaling(), True, **given)
        (_, seen), *_ = step(model, POINTS)
        trained = mpx.as_trained(model, **given)
        weights = [trained.network.hidden[0].weight, trained.plain, trained.viscosity.value]
        assert tree_equal_bits(seen, weights)
        zeros = lambda tree: jax.tree.map(jnp.zeros_like, eqx.filter(tree, eqx.is_array))
        assert tree_equal_bits(zeros(trained), zeros(model))
        assert not same(weights[0], model.network.hidden[0].weight)


def test_what_a_step_keeps_is_kept():
    model = inverse()
    trained = mpx.as_trained(model)
    # A step keeps frozen features, the first layer and the coefficient.
    assert same(trained.network.embedding.frequencies, model.network.embedding.frequencies)
    assert same(trained.network.first.weight, model.network.first.weight)
    assert trained.viscosity.value == jnp.float32(0.1)
    assert trained.plain == jnp.float32(0.1).astype("float16").astype("float32")
    assert tree_equal_bits(mpx.as_trained(model, keep_full=True), model)
    assert tree_equal_bits(mpx.as_trained(model, keep_full=(True, False)), model)
    assert tree_equal_bits(mpx.as_trained(model, forward="float32"), model)
    keep = eqx.tree_at(lambda m: m.plain, jax.tree.map(lambda _: False, model), True)
    assert mpx.as_trained(model, keep_full=(keep, True)).plain == jnp.float32(0.1)


HOW = {"cast": {}, "forward": {"forward": "float32"}, "autocast": {"autocast": True}}


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
def test_frozen_features_are_never_rounded(how):
    """Tests features of a `CoordinateMLP` and others in `FullPrecision`. 2049 is no float16."""
    features = mpx.FullPrecision(Features(jnp.array([[2049.0, 0.0]])))
    options = {"keep_full": (False, True), **HOW[how]}

    def loss(model, x):
        features, weight = model
        return jnp.sum(features(x).astype(jnp.float32)) + 0 * jnp.sum(weight).astype(jnp.float32)

    x = jnp.array([2.0**-6, 0.0])
    step = mpx.filter_value_and_grad(loss, mpx.NoOpLossScaling(), **options)
    value, _, _, (grad, _) = step((features, jnp.ones(2)), x)
    np.testing.assert_allclose(value, np.sin(2049.0 * 2.0**-6), rtol=2.0**-20)
    assert same(grad.matrix, np.zeros((1, 2)))

    network = nn.CoordinateMLP(1, "scalar", 8, 2, fourier_features=(4, 300.0), key=KEY)
    inside = lambda model, x: jnp.sum(model.embedding(x))
    step = mpx.filter_value_and_grad(inside, mpx.NoOpLossScaling(), **options)
    x = jnp.array([0.3])
    np.testing.assert_allclose(step(network, x)[0], inside(network, x), rtol=2.0**-12)


def test_an_array_in_full_precision():
    kept = mpx.FullPrecision(jnp.array(0.1))
    assert kept.value == jnp.float32(0.1)
    assert mpx.cast_to_float16(kept).value.dtype == jnp.float32
    layer = mpx.FullPrecision(eqx.nn.Linear(1, 1, key=KEY))
    assert not hasattr(layer, "value")

"""Tests that a batch of any size gives the same results as its samples.

XLA's CPU backend computes some fusions of a small sum and a large field wrongly, above a certain
number of elements. The layers must avoid these fusions.
"""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TOLERANCES, normal

import mpx_pde as mpx


def field(channels):
    # The fault begins at 16 samples of 16 channels on 48² points, and this is larger.
    x = jax.random.normal(jax.random.key(1), (16, channels, 56, 56), jnp.float32)
    return x + jnp.arange(channels, dtype=jnp.float32).reshape(1, -1, 1, 1)


def check(layer, x):
    layer = mpx.cast_tree(layer, "float16")
    batch = jax.jit(jax.vmap(lambda x: layer(x)))(x)
    one = jax.jit(lambda x: layer(x))
    for i in (0, -1):
        sample = one(x[i]).astype(jnp.float32)
        error = jnp.max(jnp.abs(batch[i].astype(jnp.float32) - sample))
        assert error <= TOLERANCES["float16"] * jnp.max(jnp.abs(sample)), (i, error)


@pytest.mark.slow
@pytest.mark.parametrize("factorization", [None, "cp"])
def test_a_spectral_convolution_of_a_large_batch(factorization):
    key = jax.random.key(0)
    check(mpx.nn.SpectralConv(16, 16, (4, 4), key=key, factorization=factorization), field(16))


@pytest.mark.slow
def test_an_operator_of_a_large_batch():
    check(mpx.nn.FNO(2, 1, 16, 1, (4, 4), key=jax.random.key(0)), field(2))


@pytest.mark.slow
@pytest.mark.parametrize("members", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_an_ensemble_in_a_batch_is_that_of_each_member_and_sample(members):
    """A constant per channel, mapped over members alone, once mistook the sample axis for the
    member axis. The result was wrong with equal counts, and an error otherwise."""
    keys = jax.random.split(jax.random.key(0), members)
    models = eqx.filter_vmap(lambda key: mpx.nn.FNO(2, 1, 8, 1, (4, 4), key=key))(keys)
    shifted = lambda x: x + jnp.arange(1.0, members + 1).reshape(-1, *(1,) * (x.ndim - 1))
    models = eqx.tree_at(lambda m: m.lifting.last.bias, models, replace_fn=shifted)
    fields = normal(1, (2, 2, 8, 8))
    one = eqx.filter_jit(lambda model, x: model(x))
    ensemble = eqx.filter_vmap(one, in_axes=(eqx.if_array(0), None))
    got = jax.vmap(lambda x: ensemble(models, x))(fields)
    for i, j in itertools.product(range(members), range(len(fields))):
        model = jax.tree.map(lambda x, i=i: x[i] if eqx.is_array(x) else x, models)
        np.testing.assert_allclose(got[j, i], one(model, fields[j]), rtol=1e-4, atol=1e-5)

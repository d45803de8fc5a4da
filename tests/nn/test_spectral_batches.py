"""A batch gives what its samples give, whatever its size.

XLA's CPU backend computes some fusions of a small sum and a large field wrongly, from a certain
number of elements on: the layers must not run into them.
"""

import jax
import jax.numpy as jnp
import pytest
from helpers import TOLERANCES

import mpx_pde as mpx


def field(channels):
    # Larger than where the fault begins: 16 samples of 16 channels on 48² points.
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

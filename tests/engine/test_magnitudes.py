"""Tests by how much numbers are found to enlarge the values of a program."""

import jax
import jax.numpy as jnp
import pytest
from helpers import normal

from mpx_pde.engine._magnitudes import magnitudes
from mpx_pde.program._flat import flatten


X = normal(0, (8, 8), 1.0)
INDICES = jnp.arange(8) * 2**20

PROGRAMS = {
    "a product of matrices": (lambda x: (1e6 * x) @ (1e6 * x), 40),
    "a branch": (lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: 1e9 * x, jnp.sin, x), 30),
    "a power": (lambda x: (1e3 * x) ** 3, 30),
    "a root": (lambda x: jnp.sqrt(1e6 * x), 10),
    "numbers that leave again": (lambda x: (1e6 * x + 1) / 1e6, 0),
    "a bounded function": (lambda x: jnp.tanh(1e6 * x), 0),
    "a mean": (lambda x: 1e6 * jnp.mean(jnp.tile(x, (64, 64))), 20),
    "a norm": (lambda x: 1e6 * x * jax.lax.rsqrt(jnp.mean((1e6 * x) ** 2)), 0),
    "ordinary numbers": (lambda x: 100 * (x @ (200 * x)), 0),
    "integers": (lambda x: x[INDICES % 8 * 1_000_000] @ x, 0),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_enlarge_values(name):
    fun, want = PROGRAMS[name]
    flat = flatten(jax.make_jaxpr(fun)(X), forward_mode=False)
    found = dict.fromkeys((*flat.inputs, *flat.constants), 0.0)
    for step in flat.steps:
        found.update(zip(step.outputs, magnitudes(step, found.__getitem__), strict=True))
    (result,) = flat.outputs
    assert found[result] == pytest.approx(want, abs=1)  # 10^3 is a little less than 2^10

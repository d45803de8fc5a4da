"""Tests programs as one list of equations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpx_pde.program._deviations import with_deviations_once
from mpx_pde.program._flat import evaluated, flatten
from mpx_pde.program._jaxpr import own_bind


def names_of(fun, *args):
    """Returns the names of the equations that are left of a function, whose results must stay."""
    closed = jax.make_jaxpr(fun)(*args)
    flat = with_deviations_once(flatten(closed, forward_mode=True))
    got = evaluated(flat, args, lambda step, operands: own_bind(step.eqn, operands))
    np.testing.assert_array_equal(got, jax.tree.leaves(fun(*args)))
    return [step.name for step in flat.steps]


def test_what_is_computed_twice_is_computed_once():
    names = names_of(lambda x: jnp.sin(x + 1) * jnp.sum(jnp.sin(1 + x)), jnp.arange(4.0))
    assert names.count("sin") == 2
    names = names_of(lambda x: jnp.sin(x + 1) * jnp.sum(jnp.sin(x + 1)), jnp.arange(4.0))
    assert names.count("sin") == names.count("add") == 1


@pytest.mark.parametrize("keepdims", [False, True])
def test_deviations_from_a_mean_are_computed_once(keepdims):
    """A norm has some, and so has the variance in it."""

    def norm(x):
        return (x - jnp.mean(x, keepdims=keepdims)) * jax.lax.rsqrt(jnp.var(x) + 1e-5)

    assert names_of(norm, jnp.arange(4.0)).count("square") == 1
    # One more is that of the count of degrees of freedom.
    assert names_of(norm, jnp.arange(4.0)).count("sub") == 2


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: jnp.sin(x + 0.0) / jnp.sin(x + -0.0),  # numbers of other bits
        lambda x: jnp.sin(x[:2]) + jnp.sin(x[2:]),
        lambda x: jnp.sin(x) + jnp.sin(x.astype(jnp.float16)).astype(jnp.float32),
        lambda x: jnp.sin(x) + jax.named_call(jnp.sin, name="mpx_pde.region")(x),
    ],
)
def test_what_differs_stays(fun):
    assert names_of(fun, jnp.arange(4.0)).count("sin") == 2


def test_a_network_that_is_called_twice_is_evaluated_once():
    w = jnp.ones((4, 4))
    layer = lambda x: jnp.tanh(x @ w)
    names = names_of(lambda x: layer(layer(x)) + jnp.sin(layer(layer(x))), jnp.arange(4.0))
    assert (names.count("dot_general"), names.count("tanh")) == (2, 2)

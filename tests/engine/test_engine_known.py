"""What the derivative engine knows of coordinates."""

import jax
import jax.numpy as jnp
import pytest
from helpers import equations

import mpx_pde as mpx


@pytest.mark.parametrize("coords", [1, 3, 5])
@pytest.mark.parametrize("turned", [False, True])
def test_few_coordinates_meet_the_rows_of_a_weight(coords, turned):
    """No product then. The random programs compare such layers with float64."""
    names, weight = "txyzw"[:coords], jnp.ones((coords, 8))
    net = lambda p: jnp.sum(jnp.tanh(weight.T @ p if turned else p @ weight))
    terms = mpx.partials(net, ["u", f"u_{names[0]}{names[-1]}"], coords=names, outputs="u")
    jaxpr = jax.make_jaxpr(jax.vmap(terms))(jnp.ones((6, coords)))
    assert ("beside" in [e.primitive.name for e in equations(jaxpr)]) == (coords <= 4)

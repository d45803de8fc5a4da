"""Tests the engine's knowledge of coordinates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import equations

import mpx_pde as mpx


@pytest.mark.parametrize("coords", [1, 3, 5])
@pytest.mark.parametrize("turned", [False, True])
def test_few_coordinates_meet_the_rows_of_a_weight(coords, turned):
    """There is no product then. The random programs compare such layers with float64."""
    names, weight = "txyzw"[:coords], jnp.ones((coords, 8))
    net = lambda p: jnp.sum(jnp.tanh(weight.T @ p if turned else p @ weight))
    terms = mpx.partials(net, ["u", f"u_{names[0]}{names[-1]}"], coords=names, outputs="u")
    jaxpr = jax.make_jaxpr(jax.vmap(terms))(jnp.ones((6, coords)))
    assert ("broadcast_like" in [e.primitive.name for e in equations(jaxpr)]) == (coords <= 4)


@pytest.mark.parametrize(
    "function",
    [lambda q: q ** (1 + q[::-1]), jnp.cumprod],
    ids=["power", "cumprod"],
)
def test_the_first_product_is_full_behind_a_function_without_a_rule(function):
    """Coordinates that went through nested forward mode were rounded to half at a weight, as if a
    layer had computed them."""
    rng = np.random.default_rng(0)
    first, last = (jnp.asarray(rng.normal(size=s), "float16") for s in ((2, 8), (8, 1)))
    net = lambda q: (jnp.tanh(function(q) @ first) @ last)[0]
    run = mpx.partials(net, ["u", "u_x"], coords="xy", outputs="u")
    rows = run.report(jnp.array([0.3, 0.8])).equations
    assert "nested" in [row.rule for row in rows]
    products = [row.precision.split()[0] for row in rows if row.rule == "product"]
    assert products == ["float32", "float16"]

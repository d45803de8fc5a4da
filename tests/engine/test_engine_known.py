"""What the derivative engine knows of coordinates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import equations, in_float64, relative

import mpx_pde as mpx


@pytest.mark.parametrize("coords", [1, 3, 5])
@pytest.mark.parametrize("turned", [False, True])
def test_few_coordinates_meet_the_rows_of_a_weight(coords, turned):
    """No product then, and one sum over points for all that its gradient is made of."""
    names, rng = "txyzw"[:coords], np.random.default_rng(0)
    weight, bias, last = (jnp.asarray(rng.normal(size=s), "float32") for s in ((coords, 8), 8, 8))
    points = jnp.asarray(rng.normal(size=(6, coords)), "float32")
    terms = ["u", *(f"u_{c}" for c in names), f"u_{names[0]}{names[-1]}"]

    def net(params, p):
        weight, bias, last = params
        first = weight.T @ p if turned else p @ weight
        return jnp.tanh(first + bias) @ last

    def nested(params, p):
        slope, curve = jax.grad(net, 1)(params, p), jax.hessian(net, 1)(params, p)
        return [net(params, p), *slope, curve[0, -1]]

    def loss(of):
        square = lambda out: sum((i + x) ** 2 for i, x in enumerate(out))
        return lambda params, points: jnp.mean(jax.vmap(lambda p: square(of(params, p)))(points))

    engine = lambda params, p: list(
        mpx.partials(lambda p: net(params, p), terms, coords=names, outputs="u")(p).values()
    )
    args = (weight, bias, last), points
    gradient = jax.grad(loss(engine), (0, 1))
    got = jax.jit(gradient)(*args)
    with jax.enable_x64(True):
        want = jax.jit(jax.grad(loss(nested), (0, 1)))(*in_float64(args))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative(a, b) < 1e-5  # float32
    names_of = [e.primitive.name for e in equations(jax.make_jaxpr(loss(engine))(*args))]
    assert ("beside" in names_of) == (coords <= 4)


@pytest.mark.parametrize(
    "function",
    [lambda q: jnp.mod(q, 0.7), lambda q: jnp.arctan2(q[::-1], 1 + q**2), jnp.cumprod],
    ids=["mod", "arctan2", "cumprod"],
)
def test_the_first_product_is_full_behind_a_function_without_a_rule(function):
    """Coordinates that went through nested forward mode were rounded to half where they met a
    weight, as if they came out of a layer."""
    rng = np.random.default_rng(0)
    first, last = (jnp.asarray(rng.normal(size=s), "float16") for s in ((2, 8), (8, 1)))
    net = lambda q: (jnp.tanh(function(q) @ first) @ last)[0]
    run = mpx.partials(net, ["u", "u_x"], coords="xy", outputs="u")
    rows = run.report(jnp.array([0.3, 0.8])).equations
    assert "nested" in [row.rule for row in rows]
    products = [row.precision.split()[0] for row in rows if row.rule == "product"]
    assert products == ["float32", "float16"]

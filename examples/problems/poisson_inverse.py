"""What a medium conducts, from what is measured: a in −∇·(a ∇u) = f on the unit square.

u is measured at random points; a is known at the edges, and to be found inside. With
u = sin πx sin πy, a = 1/(1 + x² + y² + (x − 1)² + (y − 1)²), and f of these (PInv of PINNacle).
"""

import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._problem import Problem, grid, on_faces, uniform


LOW, HIGH = (0, 0), (1, 1)


def medium(x, y):
    return 1 / (1 + x**2 + y**2 + (x - 1) ** 2 + (y - 1) ** 2)


def exact(point):
    x, y = point
    return jnp.stack([jnp.sin(jnp.pi * x) * jnp.sin(jnp.pi * y), medium(x, y)])


def source(x, y):
    """−a Δu − ∇a·∇u."""
    pi, a = jnp.pi, medium(x, y)
    u_x = pi * jnp.cos(pi * x) * jnp.sin(pi * y)
    u_y = pi * jnp.sin(pi * x) * jnp.cos(pi * y)
    slopes = a**2 * ((4 * x - 2) * u_x + (4 * y - 2) * u_y)
    return 2 * pi**2 * a * jnp.sin(pi * x) * jnp.sin(pi * y) + slopes


def network(key):
    return mpx.nn.CoordinateMLP(2, 2, 32, 3, key=key)


def loss(fields, points, *, derivatives=None):
    given = {"coords": "xy", "outputs": "ua", "scaling": derivatives}
    names = ["a", "u_x", "u_y", "a_x", "a_y", "u_xx", "u_yy"]
    d = jax.vmap(mpx.partials(fields, names, **given))(points["inside"])
    flux = d["a"] * (d["u_xx"] + d["u_yy"]) + d["a_x"] * d["u_x"] + d["a_y"] * d["u_y"]
    balance = flux + source(*points["inside"].T)
    known = jax.vmap(mpx.partials(fields, ["u"], **given))(points["measured"])["u"]
    edges = jax.vmap(mpx.partials(fields, ["a"], **given))(points["edges"])["a"]
    wrong = known - jax.vmap(exact)(points["measured"])[:, 0]
    wrong_edges = edges - jax.vmap(exact)(points["edges"])[:, 1]
    return jnp.mean(balance**2) / 10 + 10 * (jnp.mean(wrong**2) + jnp.mean(wrong_edges**2))


def sample(key):
    inside, measured, edges = jax.random.split(key, 3)
    return {
        "inside": uniform(inside, 256, LOW, HIGH),
        "measured": uniform(measured, 128, LOW, HIGH),
        "edges": on_faces(edges, 64, LOW, HIGH, axes=(0, 1)),
    }


PROBLEM = Problem(
    title="Poisson, inverse",
    coords="xy",
    order=2,
    network=network,
    loss=loss,
    sample=sample,
    exact=exact,
    at=grid(np.linspace(0, 1, 51), np.linspace(0, 1, 51)),
    fields="ua",
)

"""The conductivity of a medium, inferred from measurements: a in −∇·(a ∇u) = f on the unit square.

u is measured at random points; a is known at the edges and to be found inside. The solution is
u = sin πx sin πy, a = 1/(1 + x² + y² + (x − 1)² + (y − 1)²), with the f that fits these (PInv of
PINNacle).
"""

import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._problem import coordinate_mlp, draws, grid, misfit, problem


LOW, HIGH = (0, 0), (1, 1)


def medium(x, y):
    return 1 / (1 + x**2 + y**2 + (x - 1) ** 2 + (y - 1) ** 2)


def exact(point):
    x, y = point
    return jnp.stack([jnp.sin(jnp.pi * x) * jnp.sin(jnp.pi * y), medium(x, y)])


def source(x, y):
    """Returns −a Δu − ∇a·∇u."""
    pi, a = jnp.pi, medium(x, y)
    u_x = pi * jnp.cos(pi * x) * jnp.sin(pi * y)
    u_y = pi * jnp.sin(pi * x) * jnp.cos(pi * y)
    slopes = a**2 * ((4 * x - 2) * u_x + (4 * y - 2) * u_y)
    return 2 * pi**2 * a * jnp.sin(pi * x) * jnp.sin(pi * y) + slopes


network = coordinate_mlp(2, 2, 32, 3)


def loss(fields, points, *, derivatives=None):
    given = {"coords": "xy", "outputs": "ua", "scaling": derivatives}
    names = ["a", "u_x", "u_y", "a_x", "a_y", "u_xx", "u_yy"]
    d = jax.vmap(mpx.partials(fields, names, **given))(points["inside"])
    flux = d["a"] * (d["u_xx"] + d["u_yy"]) + d["a_x"] * d["u_x"] + d["a_y"] * d["u_y"]
    balance = flux + source(*points["inside"].T)
    wrong = misfit(fields, exact, points["measured"], "u", given)
    wrong_edges = misfit(fields, exact, points["edges"], "a", given)
    return jnp.mean(balance**2) / 10 + 10 * (wrong + wrong_edges)


sample = draws(inside=(256, LOW, HIGH), measured=(128, LOW, HIGH), edges=(64, LOW, HIGH, (0, 1)))
AT = grid(np.linspace(0, 1, 51), np.linspace(0, 1, 51))
PROBLEM = problem(__name__, "Poisson, inverse", coords="xy", order=2, fields="ua")

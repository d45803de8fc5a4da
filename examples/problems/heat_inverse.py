"""The conductivity of a medium, inferred from how it cools: a in u_t = ∇·(a ∇u) + f on the unit
square, up to t = 1.

u is measured at random points and times. a does not depend on time and is known at the edges. The
solution is u = e^(−t) sin πx sin πy, a = 2 + sin πx sin πy, with the f that fits these (HInv of
PINNacle).
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._problem import draws, grid, misfit, problem


LOW, HIGH = (0, 0, 0), (1, 1, 1)


def bump(x, y):
    return jnp.sin(jnp.pi * x) * jnp.sin(jnp.pi * y)


def exact(point):
    t, x, y = point
    return jnp.stack([jnp.exp(-t) * bump(x, y), 2 + bump(x, y)])


def source(t, x, y):
    """Returns u_t − a Δu − ∇a·∇u."""
    pi = jnp.pi
    cx, cy = jnp.cos(pi * x) * jnp.sin(pi * y), jnp.sin(pi * x) * jnp.cos(pi * y)
    spread = 2 * pi**2 * (2 + bump(x, y)) * bump(x, y) - pi**2 * (cx**2 + cy**2)
    return jnp.exp(-t) * (spread - bump(x, y))


class Both(eqx.Module):
    """Temperature and conductivity, each by its own network."""

    temperature: mpx.nn.CoordinateMLP
    conductivity: mpx.nn.CoordinateMLP

    def __call__(self, point):
        u, a = self.temperature(point), self.conductivity(point[1:])
        return jnp.stack([u.astype(point.dtype), 2 + a.astype(point.dtype)])


def network(key):
    one, two = jax.random.split(key)
    make = mpx.nn.CoordinateMLP
    return Both(make(3, "scalar", 32, 3, key=one), make(2, "scalar", 32, 2, key=two))


def loss(fields, points, *, derivatives=None):
    given = {"coords": "txy", "outputs": "ua", "scaling": derivatives}
    names = ["a", "u_t", "u_x", "u_y", "a_x", "a_y", "u_xx", "u_yy"]
    d = jax.vmap(mpx.partials(fields, names, **given))(points["inside"])
    flux = d["a"] * (d["u_xx"] + d["u_yy"]) + d["a_x"] * d["u_x"] + d["a_y"] * d["u_y"]
    balance = d["u_t"] - flux - source(*points["inside"].T)
    wrong = misfit(fields, exact, points["measured"], "u", given)
    wrong_edges = misfit(fields, exact, points["edges"], "a", given)
    return jnp.mean(balance**2) / 100 + 10 * wrong + wrong_edges


sample = draws(inside=(256, LOW, HIGH), measured=(128, LOW, HIGH), edges=(64, LOW, HIGH, (1, 2)))
AT = grid(np.linspace(0, 1, 6), np.linspace(0, 1, 26), np.linspace(0, 1, 26))
PROBLEM = problem(__name__, "Heat, inverse", coords="txy", order=2, fields="ua")

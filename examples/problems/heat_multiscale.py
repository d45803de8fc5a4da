"""Heat with two scales, u_t = u_xx / (500π)² + u_yy / π² on the unit square, up to t = 5.

With u = 0 at the edges and u = sin 20πx sin πy at first, u decays as e^(−1.0016 t) (Heat2d-MS of
PINNacle). The ten waves along x are hard for a network. A solution that starts with a period of
1/10 keeps it, since the edges lie between waves: the network is periodic and sees one wave.
"""

import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._problem import coordinate_mlp, draws, grid, problem


A, B = 1 / (500 * np.pi) ** 2, 1 / np.pi**2
END = 5.0


def start(x, y):
    return jnp.sin(20 * jnp.pi * x) * jnp.sin(jnp.pi * y)


def exact(point):
    t, x, y = point
    return start(x, y) * jnp.exp(-(A * 400 + B) * np.pi**2 * t)


def form(point, n):
    t, x, y = point
    return start(x, y) + t / (1 + t) * 4 * y * (1 - y) * n


network = coordinate_mlp(3, "scalar", 48, 3, periodic={1: 0.1}, form=form, units=(END, 1, 1))


def loss(u, points, *, derivatives=None):
    operator = {"heat": {"t": 1.0, "xx": -A, "yy": -B}}
    terms = mpx.linear_operator(u, operator, coords="txy", outputs="u", scaling=derivatives)
    heat = jax.vmap(terms)(points["inside"])["heat_u"]
    return jnp.mean(heat**2) + jnp.mean(jax.vmap(u)(points["edges"]) ** 2)


sample = draws(
    inside=(512, (0, 0, 0), (END, 1, 1)),
    edges=(64, (0, 0, 0), (END, 0, 1)),  # at x = 0, and thus at x = 1
)
AT = grid(np.linspace(0, END, 26), np.linspace(0, 1, 81), np.linspace(0, 1, 9))
PROBLEM = problem(__name__, "Heat, multiscale", coords="txy", order=2, steps=4000)

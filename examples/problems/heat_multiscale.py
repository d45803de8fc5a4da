"""Heat with two scales, u_t = u_xx / (500π)² + u_yy / π² on the unit square, up to t = 5.

With u = 0 at the edges and u = sin 20πx sin πy at first: u decays as e^(−1.0016 t) (Heat2d-MS of
PINNacle). The ten waves along x are what is hard; Fourier features give them to the network.
"""

import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._runner import InUnits, Problem, grid, uniform


A, B = 1 / (500 * np.pi) ** 2, 1 / np.pi**2
END = 5.0


def start(x, y):
    return jnp.sin(20 * jnp.pi * x) * jnp.sin(jnp.pi * y)


def exact(point):
    t, x, y = point
    return start(x, y) * jnp.exp(-(A * 400 + B) * np.pi**2 * t)


def network(key):
    mlp = mpx.nn.CoordinateMLP(3, "scalar", 48, 3, key=key, fourier_features=(48, 1.5))

    def form(point, n):
        t, x, y = point
        edges = 16 * x * (1 - x) * y * (1 - y)
        return start(x, y) + t / (1 + t) * edges * n

    return mpx.nn.Ansatz(InUnits(mlp, (END, 0.2, 1)), form)


def loss(u, points, *, derivatives=None):
    operator = {"heat": {"t": 1.0, "xx": -A, "yy": -B}}
    terms = mpx.linear_operator(u, operator, coords="txy", outputs="u", scaling=derivatives)
    return jnp.mean(jax.vmap(terms)(points)["heat_u"] ** 2)


PROBLEM = Problem(
    title="Heat, multiscale",
    coords="txy",
    order=2,
    network=network,
    loss=loss,
    sample=lambda key: uniform(key, 512, low=(0, 0, 0), high=(END, 1, 1)),
    exact=exact,
    steps=4000,
    at=grid(np.linspace(0, END, 26), np.linspace(0, 1, 81), np.linspace(0, 1, 9)),
)

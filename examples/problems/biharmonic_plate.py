"""The bending of a clamped plate, Δ²u = f on the unit square, u = 0 and no slope at the edges.

f is chosen so that u = sin² πx sin² πy. The operator takes fourth derivatives, in one stream.
"""

import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._problem import coordinate_mlp, grid, problem, uniform


SIZE = 8 * np.pi**4


def exact(point):
    x, y = point
    return (jnp.sin(jnp.pi * x) * jnp.sin(jnp.pi * y)) ** 2


def load(x, y):
    """Returns f / 8π⁴, by sin² πx = (1 − cos 2πx) / 2."""
    cx, cy = jnp.cos(2 * jnp.pi * x), jnp.cos(2 * jnp.pi * y)
    return -cx * (1 - cy) / 2 - (1 - cx) * cy / 2 + cx * cy


def form(point, n):
    x, y = point
    return (16 * x * (1 - x) * y * (1 - y)) ** 2 * n


network = coordinate_mlp(2, "scalar", 32, 3, form=form)


def loss(u, points, *, derivatives=None):
    operator = {"bending": "biharmonic"}
    terms = mpx.linear_operator(u, operator, coords="xy", outputs="u", scaling=derivatives)
    left = jax.vmap(terms)(points)["bending_u"] / SIZE
    return jnp.mean((left - load(*points.T)) ** 2)


sample = lambda key: uniform(key, 256, low=(0, 0), high=(1, 1))
AT = grid(np.linspace(0, 1, 65), np.linspace(0, 1, 65))
PROBLEM = problem(__name__, "Clamped plate", coords="xy", order=4)

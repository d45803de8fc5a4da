"""A pulse in two media, u_tt = c(x)² u_xx on 0 ≤ x ≤ 1 with fixed ends, up to t = 0.5.

c² grows from 1 to 2 around x = ½, where a part of the pulse is reflected (after Wave2d-CG of
PINNacle). The reference is by central differences on 2,000 cells.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._problem import Reference, coordinate_mlp, grid, problem, uniform
from .references import wave


END = 0.5


def square_of_speed(x, tanh=jnp.tanh):
    return 1.5 + tanh(20 * (x - 0.5)) / 2


def start(x, exp=jnp.exp):
    return exp(-120 * (x - 0.3) ** 2)


def form(point, n):
    t, x = point
    return start(x) + t**2 / (0.1 + t**2) * 4 * x * (1 - x) * n


network = coordinate_mlp(2, "scalar", 48, 3, fourier_features=(32, 1.5), form=form)


def loss(u, points, *, derivatives=None):
    operator = {"wave": {"tt": 1.0, "xx": lambda point: -square_of_speed(point[1])}}
    terms = mpx.linear_operator(u, operator, coords="tx", outputs="u", scaling=derivatives)
    return jnp.mean(jax.vmap(terms)(points)["wave_u"] ** 2) / 1e4


@functools.cache
def reference(cells=2000):
    speed = lambda x: np.sqrt(square_of_speed(x, np.tanh))
    u = wave(speed, lambda x: start(x, np.exp), time=END, cells=cells, frames=25)
    every = cells // 100
    return Reference(grid(np.linspace(0, END, 26), np.linspace(0, 1, 101)), u[:, ::every].ravel())


sample = lambda key: uniform(key, 384, low=(0, 0), high=(END, 1))
PROBLEM = problem(__name__, "Wave in two media", coords="tx", order=2)

"""The wave equation u_tt = 4 u_xx on 0 ≤ x ≤ 1 with fixed ends, up to t = 1.

From u(0, x) = sin πx + ½ sin 4πx at rest, the solution is u = sin πx cos 2πt + ½ sin 4πx cos 8πt
(Wang, Yu & Perdikaris, *When and why PINNs fail to train*, 2022; Wave1d-C of PINNacle).
"""

import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._deep import Deep
from ._problem import coordinate_mlp, grid, mean_square, problem, uniform


SIZE = 8 * np.pi**2  # scale of ½ u_xx


def exact(point):
    t, x = point
    pi = jnp.pi
    return jnp.sin(pi * x) * jnp.cos(2 * pi * t) + jnp.sin(4 * pi * x) * jnp.cos(8 * pi * t) / 2


def form(point, n):  # meets the initial and boundary values
    t, x = point
    start = jnp.sin(jnp.pi * x) + jnp.sin(4 * jnp.pi * x) / 2
    return start + t**2 / (0.01 + t**2) * 4 * x * (1 - x) * n


network = coordinate_mlp(2, "scalar", 48, 3, fourier_features=(32, 2.0), form=form)


def residual(u, point, derivatives=None):
    operator = {"wave": {"tt": 1 / (4 * SIZE), "xx": -1 / SIZE}}
    terms = mpx.linear_operator(u, operator, coords="tx", outputs="u", scaling=derivatives)
    return terms(point)["wave_u"]


loss = mean_square(residual)


sample = lambda key: uniform(key, 384, low=(0, 0), high=(1, 1))
AT = grid(np.linspace(0, 1, 101), np.linspace(0, 1, 101))
DEEP = Deep(residual=residual, form=form, low=(0, 0), high=(1, 1), turns={0: 4, 1: 2})
PROBLEM = problem(__name__, "Wave equation, two modes", coords="tx", order=2)

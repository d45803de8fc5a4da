"""The wave equation u_tt = u_xx + u_yy on the unit square with fixed edges, up to t = 6.

From u(0, x, y) = sin πx sin πy + ½ sin 2πx sin πy at rest, through about four and seven periods,
the solution is u = sin πx sin πy cos √2 πt + ½ sin 2πx sin πy cos √5 πt (after Wave2d-MS of
PINNacle). The frequencies of the Fourier features are about as large as those of u, up to 1.6.
"""

import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._problem import coordinate_mlp, grid, problem, uniform


END = 6.0
MODES = ((1.0, 1), (0.5, 2))  # amplitude, and waves along x


def exact(point):
    t, x, y = point
    mode = lambda m: jnp.sin(m * jnp.pi * x) * jnp.cos(np.sqrt(m**2 + 1) * np.pi * t)
    return sum(size * mode(m) for size, m in MODES) * jnp.sin(jnp.pi * y)


def form(point, n):
    t, x, y = point
    start = sum(size * jnp.sin(m * jnp.pi * x) for size, m in MODES) * jnp.sin(jnp.pi * y)
    return start + t**2 / (1 + t**2) * 16 * x * (1 - x) * y * (1 - y) * n


network = coordinate_mlp(3, "scalar", 48, 3, fourier_features=(48, 1.0), form=form)


def loss(u, points, *, derivatives=None):
    operator = {"wave": {"tt": 1.0, "xx": -1.0, "yy": -1.0}}
    terms = mpx.linear_operator(u, operator, coords="txy", outputs="u", scaling=derivatives)
    return jnp.mean(jax.vmap(terms)(points)["wave_u"] ** 2) / 100


sample = lambda key: uniform(key, 512, low=(0, 0, 0), high=(END, 1, 1))
AT = grid(np.linspace(0, END, 61), np.linspace(0, 1, 17), np.linspace(0, 1, 17))
PROBLEM = problem(__name__, "Wave equation, long time", coords="txy", order=2, steps=4000)

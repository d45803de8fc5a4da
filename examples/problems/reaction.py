"""Reaction, u_t = ρ u (1 − u) with ρ = 5, for 0 ≤ x ≤ 2π up to t = 1.

From the bell u₀(x) = exp(−(x − π)² / 2 (π/4)²) each point grows by itself:
u = u₀ e^(ρt) / (1 − u₀ + u₀ e^(ρt)). Plain networks fail on this problem (Krishnapriyan et al.,
2021), because u = 0 is almost as good a solution.
"""

import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._deep import Deep
from ._problem import coordinate_mlp, grid, mean_square, problem, uniform


RHO = 5.0


def start(x):
    return jnp.exp(-((x - jnp.pi) ** 2) / (2 * (jnp.pi / 4) ** 2))


def exact(point):
    t, x = point
    grown = start(x) * jnp.exp(RHO * t)
    return grown / (1 - start(x) + grown)


def form(point, n):
    return start(point[1]) + point[0] * n


network = coordinate_mlp(2, "scalar", 32, 3, fourier_features=(16, 0.3), form=form)


def residual(u, point, derivatives=None):
    d = mpx.partials(u, ["u", "u_t"], coords="tx", outputs="u", scaling=derivatives)(point)
    return d["u_t"] - RHO * d["u"] * (1 - d["u"])


loss = mean_square(residual)


sample = lambda key: uniform(key, 256, low=(0, 0), high=(1, 2 * np.pi))
AT = grid(np.linspace(0, 1, 65), np.linspace(0, 2 * np.pi, 129))
DEEP = Deep(residual=residual, form=form, low=(0, 0), high=(1, 2 * np.pi))
PROBLEM = problem(__name__, "Reaction, ρ = 5", coords="tx", order=1)

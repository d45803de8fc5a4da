"""Convection, u_t + β u_x = 0 with β = 50, periodic on 0 ≤ x ≤ 2π, up to t = 1.

From u(0, x) = sin x, nearly eight waves pass each point: u = sin(x − β t). Plain networks fail on
this problem (Krishnapriyan et al., *Characterizing possible failure modes in physics-informed
neural networks*, 2021), and TF32 does too (PINN_FP64). Time is measured by s = β t, in which the
wave has speed 1, and Fourier features give the network its frequencies.
"""

import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._deep import Deep
from ._problem import coordinate_mlp, grid, mean_square, problem, uniform


BETA = 50.0


def exact(point):
    s, x = point
    return jnp.sin(x - s)


def form(point, n):  # meets the initial values
    s, x = point
    return jnp.sin(x) + s / (1 + s) * n


features = {"periodic": {1: 2 * np.pi}, "fourier_features": (32, 0.2)}
network = coordinate_mlp(2, "scalar", 32, 3, **features, form=form)


def residual(u, point, derivatives=None):
    operator = {"transport": {"s": 1.0, "x": 1.0}}
    terms = mpx.linear_operator(u, operator, coords="sx", outputs="u", scaling=derivatives)
    return terms(point)["transport_u"]


loss = mean_square(residual)


sample = lambda key: uniform(key, 512, low=(0, 0), high=(BETA, 2 * np.pi))
AT = grid(np.linspace(0, BETA, 201), np.linspace(0, 2 * np.pi, 65))
DEEP = Deep(
    residual=residual,
    form=form,
    low=(0, 0),
    high=(BETA, 2 * np.pi),
    periodic={1: 2 * np.pi},
    turns={0: BETA / (2 * np.pi)},
    marches=True,
)
PROBLEM = problem(__name__, "Convection, β = 50", coords="sx", order=1, steps=6000)

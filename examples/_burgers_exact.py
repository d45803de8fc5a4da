"""The exact solution of the viscous Burgers equation that `burgers.py` is measured against.

The Cole–Hopf transformation turns

    u_t + u u_x = ν u_xx,    u(0, x) = −sin(πx),    u(t, ±1) = 0

into the heat equation, whose solution is a Gaussian integral:

    u(t, x) = −∫ sin(πy) f(y) exp(−η²/4νt) dη  /  ∫ f(y) exp(−η²/4νt) dη

with y = x − η and f(y) = exp(−cos(πy) / 2πν) (Basdevant et al., Computers & Fluids 14, 1986).
With η = √(4νt) z both integrals are Gauss–Hermite quadratures.
"""

import numpy as np
from numpy.typing import ArrayLike


NU = 0.01 / np.pi


def exact_solution(t: ArrayLike, x: ArrayLike, nu: float = NU, nodes: int = 100) -> np.ndarray:
    """The solution in float64 for `0 ≤ t ≤ 1`; `t` and `x` broadcast against each other.

    100 nodes give it to about 1e-15 for ν = 0.01/π: the two valleys of f that compete at the shock
    lie at z = ±9 when t = 1, and 50 nodes are still off by 1e-7 there.
    """
    t, x = np.asarray(t, np.float64), np.asarray(x, np.float64)
    z, weights = np.polynomial.hermite.hermgauss(nodes)
    y = x[..., None] - np.sqrt(4 * nu * t)[..., None] * z
    f = weights * np.exp(-np.cos(np.pi * y) / (2 * np.pi * nu))
    return -np.sum(np.sin(np.pi * y) * f, axis=-1) / np.sum(f, axis=-1)

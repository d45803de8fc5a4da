"""The Klein–Gordon equation u_tt − u_xx + u³ = f on 0 ≤ x ≤ 1, up to t = 1.

f, the boundary values and the initial values are those of u = x cos 5πt + (x t)³ (Wang, Yu &
Perdikaris, 2022).
"""

import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._deep import Deep, from_conditions
from ._problem import coordinate_mlp, draws, grid, problem, with_values


W = 5 * np.pi
LOW, HIGH = (0, 0), (1, 1)


def exact(point):
    t, x = point
    return x * jnp.cos(W * t) + (x * t) ** 3


def source(point):
    t, x = point
    return -(W**2) * x * jnp.cos(W * t) + 6 * x**3 * t - 6 * x * t**3 + exact(point) ** 3


rise = lambda t: t**2 / (0.01 + t**2)
form = lambda point, n: point[1] * (1 + rise(point[0]) * n)


network = coordinate_mlp(2, "scalar", 32, 3, fourier_features=(32, 1.5), form=form)


def residual(u, point, derivatives=None):
    given = {"coords": "tx", "outputs": "u", "scaling": derivatives}
    d = mpx.linear_operator(u, {"wave": {"tt": 1.0, "xx": -1.0}}, ["u"], **given)(point)
    return (d["wave_u"] + d["u"] ** 3 - source(point)) / W**2


loss = with_values(residual, exact, "ends", "u", coords="tx", outputs="u")


sample = draws(inside=(256, LOW, HIGH), ends=(64, LOW, HIGH, (1,)))
AT = grid(np.linspace(0, 1, 101), np.linspace(0, 1, 101))
DEEP = Deep(
    residual=residual,
    form=from_conditions(exact, LOW, HIGH, rise),
    low=LOW,
    high=HIGH,
    turns={0: W / (2 * np.pi)},
)
PROBLEM = problem(__name__, "Klein–Gordon equation", coords="tx", order=2)

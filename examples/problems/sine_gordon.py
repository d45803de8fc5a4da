"""A breather of the sine-Gordon equation u_tt = u_xx − sin u, on −8 ≤ x ≤ 8 up to t = 4.

u = 4 arctan(√(1 − ω²) cos ωt / (ω cosh √(1 − ω²) x)) with ω = 0.6, from rest. The boundary values
are those of the solution.
"""

import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._deep import Deep, from_conditions
from ._problem import coordinate_mlp, draws, from_start, grid, problem, with_values


W = 0.6
S = np.sqrt(1 - W**2)
LOW, HIGH = (0.0, -8.0), (4.0, 8.0)


def exact(point):
    t, x = point
    return 4 * jnp.arctan(S / W * jnp.cos(W * t) / jnp.cosh(S * x))


rise = lambda t: t**2 / (1 + t**2)
at_start = from_start(exact, rise)
network = coordinate_mlp(2, "scalar", 32, 3, fourier_features=(16, 0.15), form=at_start)


def residual(u, point, derivatives=None):
    given = {"coords": "tx", "outputs": "u", "scaling": derivatives}
    d = mpx.linear_operator(u, {"wave": {"tt": 1.0, "xx": -1.0}}, ["u"], **given)(point)
    return d["wave_u"] + jnp.sin(d["u"])


loss = with_values(residual, exact, "ends", "u", 10, coords="tx", outputs="u")


sample = draws(inside=(256, LOW, HIGH), ends=(64, LOW, HIGH, (1,)))
AT = grid(np.linspace(0, 4, 41), np.linspace(-8, 8, 161))
DEEP = Deep(
    residual=residual,
    form=from_conditions(exact, LOW, HIGH, rise),
    low=LOW,
    high=HIGH,
    steep={1: 2},
)
PROBLEM = problem(__name__, "Sine-Gordon, a breather", coords="tx", order=2)

"""A travelling wave of Fisher's equation u_t = u_xx + 6 u (1 − u), on −4 ≤ x ≤ 10 up to t = 1.

u = (1 + e^(x − 5t))^−2 (Ablowitz & Zeppetella, 1979). Initial and boundary values are those of the
solution.
"""

import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._problem import coordinate_mlp, draws, from_start, grid, misfit, problem


LOW, HIGH = (0.0, -4.0), (1.0, 10.0)


def exact(point):
    t, x = point
    return (1 + jnp.exp(x - 5 * t)) ** -2


network = coordinate_mlp(2, "scalar", 32, 3, fourier_features=(16, 0.15), form=from_start(exact))


def loss(u, points, *, derivatives=None):
    given = {"coords": "tx", "outputs": "u", "scaling": derivatives}
    heat = mpx.linear_operator(u, {"heat": {"t": 1.0, "xx": -1.0}}, ["u"], **given)
    d = jax.vmap(heat)(points["inside"])
    wrong = misfit(u, exact, points["ends"], ["u"], given)
    residual = d["heat_u"] - 6 * d["u"] * (1 - d["u"])
    return jnp.mean(residual**2) + 10 * wrong


sample = draws(inside=(256, LOW, HIGH), ends=(64, LOW, HIGH, (1,)))
AT = grid(np.linspace(0, 1, 41), np.linspace(-4, 10, 141))
PROBLEM = problem(__name__, "Fisher, a travelling wave", coords="tx", order=2)

"""Two solitons of the Korteweg–de Vries equation u_t + 6 u u_x + u_xxx = 0, −10 ≤ x ≤ 10,
0 ≤ t ≤ 3.

The fast one overtakes the slow one (Hirota, 1971): u = 2 (ln F)_xx with
F = 1 + e^a + e^b + A e^(a + b), a = k x − k³ t + δ for each. Initial and boundary values are those
of the solution.
"""

import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._deep import Deep, from_conditions
from ._problem import coordinate_mlp, from_start, grid, problem, uniform, with_values


K, L = 1.4, 0.9  # of the fast and the slow soliton, with the speeds k²
A = ((K - L) / (K + L)) ** 2
LOW, HIGH, END = -10.0, 10.0, 3.0


def exact(point):
    t, x = point
    a = jnp.exp(K * (x + 6) - K**3 * t)
    b = jnp.exp(L * (x + 1) - L**3 * t)
    f = 1 + a + b + A * a * b
    f_x = K * a + L * b + (K + L) * A * a * b
    f_xx = K**2 * a + L**2 * b + (K + L) ** 2 * A * a * b
    return 2 * (f_xx / f - (f_x / f) ** 2)


network = coordinate_mlp(2, "scalar", 40, 3, fourier_features=(24, 0.15), form=from_start(exact))


def residual(u, point, derivatives=None):
    given = {"coords": "tx", "outputs": "u", "scaling": derivatives}
    linear = {"linear": {"t": 1.0, "xxx": 1.0}}
    d = mpx.linear_operator(u, linear, ["u", "u_x"], **given)(point)
    return d["linear_u"] + 6 * d["u"] * d["u_x"]


loss = with_values(residual, exact, "ends", "u", 10, coords="tx", outputs="u")


def sample(key):
    inside, ends = jax.random.split(key)
    t = uniform(ends, 64, low=(0,), high=(END,))
    sides = jnp.where(jnp.arange(64) % 2 == 0, LOW, HIGH)[:, None]
    return {
        "inside": uniform(inside, 512, low=(0, LOW), high=(END, HIGH)),
        "ends": jnp.concatenate([t, sides], axis=1),
    }


AT = grid(np.linspace(0, END, 61), np.linspace(LOW, HIGH, 201))


def slope(u, point):
    """Returns the error of u_x on the right, the third boundary condition."""
    return jax.grad(u)(point)[1] - jax.grad(exact)(point)[1]


DEEP = Deep(
    residual=residual,
    form=from_conditions(exact, (0, LOW), (END, HIGH), lambda t: t),
    low=(0, LOW),
    high=(END, HIGH),
    steep={1: 3},
    soft=[(slope, (0, HIGH), (END, HIGH))],
)
PROBLEM = problem(__name__, "Korteweg–de Vries, two solitons", coords="tx", order=3, steps=3000)

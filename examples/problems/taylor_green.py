"""Decaying Taylor–Green vortices, u_t + u·∇u + ∇p = ν ∇²u, ∇·u = 0, up to t = 2.

With ν = 0.1, periodic over 2π in both directions (Taylor & Green, 1937), the solution is
u = −cos x sin y e^(−2νt), v = sin x cos y e^(−2νt), p = −(cos 2x + cos 2y) e^(−4νt) / 4.
The pressure is given at x = y = 0.
"""

import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._deep import Deep
from ._problem import coordinate_mlp, draws, grid, problem, with_values


NU, END, TURN = 0.1, 2.0, 2 * np.pi


def exact(point):
    t, x, y = point
    slow = jnp.exp(-2 * NU * t)
    u, v = -jnp.cos(x) * jnp.sin(y) * slow, jnp.sin(x) * jnp.cos(y) * slow
    return jnp.stack([u, v, -(jnp.cos(2 * x) + jnp.cos(2 * y)) * slow**2 / 4])


def form(point, n):
    u, v, _ = exact(point * jnp.asarray([0, 1, 1], point.dtype))  # the initial velocities
    return jnp.stack([u + point[0] * n[0], v + point[0] * n[1], n[2]])


network = coordinate_mlp(3, 3, 40, 3, periodic={1: TURN, 2: TURN}, form=form)


def residual(fields, point, derivatives=None):
    names = ["u", "v", "u_t", "v_t", *(f"{f}_{c}" for f in "uvp" for c in "xy")]
    given = {"coords": "txy", "outputs": "uvp", "scaling": derivatives}
    d = mpx.laplacian(fields, names, over="xy", **given)(point)

    def momentum(f, pressure):
        carried = d["u"] * d[f"{f}_x"] + d["v"] * d[f"{f}_y"]
        return d[f"{f}_t"] + carried + pressure - NU * d[f"lap_{f}"]

    mass = d["u_x"] + d["v_y"]
    return jnp.stack([momentum("u", d["p_x"]), momentum("v", d["p_y"]), mass])


loss = with_values(residual, exact, "corner", "p", coords="txy", outputs="uvp")


sample = draws(inside=(384, (0, 0, 0), (END, TURN, TURN)), corner=(16, (0, 0, 0), (END, 0, 0)))
AT = grid(np.linspace(0, END, 9), np.linspace(0, TURN, 33), np.linspace(0, TURN, 33))
CORNER = (0, 0, 0), (END, 0, 0)
DEEP = Deep(
    residual=residual,
    form=form,
    low=(0, 0, 0),
    high=(END, TURN, TURN),
    periodic={1: TURN, 2: TURN},
    soft=[(lambda fields, point: (fields(point) - exact(point))[2], *CORNER)],
    outputs=3,
)
PROBLEM = problem(__name__, "Taylor–Green vortices", coords="txy", order=2, fields="uvp")

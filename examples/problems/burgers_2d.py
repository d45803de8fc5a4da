"""Burgers' equations in the plane, u_t + u u_x + v u_y = Δu / Re and v alike, up to t = 1.

Here Re = 100 on the unit square, with the initial and boundary values of Fletcher's solution
(*Generating exact solutions of the two-dimensional Burgers' equations*, 1983), a front along the
diagonal: u = ¾ − 1/4(1 + e), v = ¾ + 1/4(1 + e), e = exp((4y − 4x − t) Re/32).
"""

import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._problem import coordinate_mlp, draws, from_start, grid, misfit, problem


RE = 100.0
LOW, HIGH = (0, 0, 0), (1, 1, 1)


def exact(point):
    t, x, y = point
    front = 1 / (4 * (1 + jnp.exp((4 * y - 4 * x - t) * RE / 32)))
    return jnp.stack([0.75 - front, 0.75 + front])


network = coordinate_mlp(3, 2, 48, 3, fourier_features=(24, 0.6), form=from_start(exact))


def loss(fields, points, *, derivatives=None):
    given = {"coords": "txy", "outputs": "uv", "scaling": derivatives}
    names = ["u", "v", *(f"{f}_{c}" for f in "uv" for c in "txy")]
    d = jax.vmap(mpx.laplacian(fields, names, over="xy", **given))(points["inside"])

    def balance(f):
        carried = d["u"] * d[f"{f}_x"] + d["v"] * d[f"{f}_y"]
        return d[f"{f}_t"] + carried - d[f"lap_{f}"] / RE

    wrong = misfit(fields, exact, points["edges"], "uv", given)
    return jnp.mean(balance("u") ** 2 + balance("v") ** 2) + 10 * wrong


sample = draws(inside=(384, LOW, HIGH), edges=(128, LOW, HIGH, (1, 2)))
AT = grid(np.linspace(0, 1, 11), np.linspace(0, 1, 33), np.linspace(0, 1, 33))
PROBLEM = problem(__name__, "Burgers in the plane", coords="txy", order=2, fields="uv")

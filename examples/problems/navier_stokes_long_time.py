"""Vortices that turn around each other: the Navier–Stokes equations in the plane up to t = 3.

The fields are velocity and vorticity: ω_t + u ω_x + v ω_y = ν Δω, u_x + v_y = 0, ω = v_x − u_y,
with ν = 0.05, periodic over 2π (after NS2d-LT of PINNacle). The reference is by Exponax on 64²
points.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._problem import Reference, coordinate_mlp, grid, problem, uniform
from .references import vortices


NU, END, TURN = 0.05, 3.0, 2 * np.pi


def start(x, y, cos=jnp.cos, sin=jnp.sin):
    """Returns the initial u, v, ω of the stream function cos x cos y + ½ sin(x + 2y)."""
    u = -cos(x) * sin(y) + cos(x + 2 * y)
    v = sin(x) * cos(y) - cos(x + 2 * y) / 2
    return u, v, 2 * cos(x) * cos(y) + 5 * sin(x + 2 * y) / 2


def form(point, n):
    t, x, y = point
    return jnp.stack(start(x, y)) + t / (1 + t) * n


features = {"periodic": {1: TURN, 2: TURN}, "fourier_features": (48, 0.3)}
network = coordinate_mlp(3, 3, 48, 3, **features, form=form, units=(END, 1, 1))


def loss(fields, points, *, derivatives=None):
    names = ["u", "v", "w", "w_t", "w_x", "w_y", "u_x", "u_y", "v_x", "v_y"]
    given = {"coords": "txy", "outputs": "uvw", "scaling": derivatives}
    d = jax.vmap(mpx.laplacian(fields, names, over="xy", **given))(points)
    vorticity = d["w_t"] + d["u"] * d["w_x"] + d["v"] * d["w_y"] - NU * d["lap_w"]
    mass = d["u_x"] + d["v_y"]
    rotation = d["v_x"] - d["u_y"] - d["w"]
    return jnp.mean(vorticity**2 + mass**2 + rotation**2)


@functools.cache
def reference(n=64, time_step=0.01):
    x = np.arange(n) * TURN / n
    *_, w = start(x[:, None], x[None], np.cos, np.sin)
    given = {"viscosity": NU, "time": END, "time_step": time_step, "frames": 6}
    fields = vortices(w, **given)[:, :, ::2, ::2]
    values = np.moveaxis(fields, 1, -1).reshape(-1, 3)
    return Reference(grid(np.linspace(0, END, 7), x[::2], x[::2]), values)


sample = lambda key: uniform(key, 384, low=(0, 0, 0), high=(END, TURN, TURN))
PROBLEM = problem(
    __name__, "Navier–Stokes, long time", coords="txy", order=2, fields="uvw", steps=4000
)

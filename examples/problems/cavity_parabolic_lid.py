"""The cavity at Re = 100 under a lid of speed 4x (1 − x): steady Navier–Stokes in the unit square.

    u u_x + v u_y + p_x = ν Δu,    u v_x + v v_y + p_y = ν Δv,    u_x + v_y = 0,

with no slip at the other walls (NS2d-C of PINNacle, which has a reference by COMSOL, as for the lid
that it calls a4). The velocity is continuous, unlike under a uniform lid. The reference is by
finite volumes, extrapolated from two grids.
"""

import dataclasses
from functools import partial

import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._deep import Deep
from ._problem import Reference, coordinate_mlp, grid, mean_square, problem, uniform
from .references import cached, cavity_fields


NU = 1 / 100
LOW, HIGH = (0.0, 0.0), (1.0, 1.0)


def form(point, outputs):
    """Builds u, v, p from the outputs of the network; meets the velocities at the walls."""
    x, y = point
    inside = 16 * x * (1 - x) * y * (1 - y)
    lid = 4 * x * (1 - x) * y**2
    return jnp.stack([lid, 0 * x, 0 * x]) + outputs * jnp.stack([inside, inside, 1 + 0 * x])


network = coordinate_mlp(2, 3, 32, 4, fourier_features=(16, 0.5), form=form)


def residual(fields, point, derivatives=None):
    """Returns momentum and mass; the latter weighs √2 times as much."""
    names = ["u", "v", "u_x", "u_y", "v_x", "v_y", "p_x", "p_y"]
    given = {"coords": "xy", "outputs": "uvp", "scaling": derivatives}
    d = mpx.laplacian(fields, names, **given)(point)
    x = d["u"] * d["u_x"] + d["v"] * d["u_y"] + d["p_x"] - NU * d["lap_u"]
    y = d["u"] * d["v_x"] + d["v"] * d["v_y"] + d["p_y"] - NU * d["lap_v"]
    return jnp.stack([x, y, np.sqrt(2) * (d["u_x"] + d["v_y"])])


loss = mean_square(residual)
sample = lambda key: uniform(key, 384, LOW, HIGH)


def reference(cells=50):
    solved = lambda cells: {"fields": cavity_fields(cells, "parabola")}
    fields = cached("cavity_parabolic_lid", solved, version=2, cells=cells)["fields"]
    centers = (np.arange(cells) + 0.5) / cells
    return Reference(grid(centers, centers), fields.reshape(3, -1).T)


DEEP = Deep(residual=residual, form=form, low=LOW, high=HIGH, outputs=3)
_FULL = problem(
    __name__,
    "Cavity, parabolic lid",
    coords="xy",
    order=2,
    fields="uvp",
    free=(2,),
    steps=4000,
)
PROBLEM = dataclasses.replace(
    _FULL, quick=dataclasses.replace(_FULL, reference=partial(reference, 10))
)

"""Flow over a backward-facing step, steady Navier–Stokes at Re = 50.

The channel has height 1 and length 3, and its lower half is closed for x < ½ (after NS2d-CG of
PINNacle). A parabola of mean speed 1 enters above the step; p = 0 and v = 0 at the outlet. The
reference is by finite volumes, with 40 cells over the height.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._problem import Reference, coordinate_mlp, grid, problem, uniform
from .references import channel


NU, LENGTH, STEP, HALF = 0.02, 3.0, 0.5, 0.5


def inlet(y, where=jnp.where):
    """Returns u at x = 0, a parabola over the upper half."""
    return where(y > HALF, 24 * (y - HALF) * (1 - y), 0.0)


def form(point, n):
    """Meets no slip at the upper and lower wall, and the pressure at the outlet."""
    x, y = point
    walls = 4 * y * (1 - y)
    return jnp.stack([walls * n[0], walls * n[1], 4 * (LENGTH - x) * n[2]])


network = coordinate_mlp(2, 3, 48, 4, fourier_features=(24, 0.5), form=form)


def loss(fields, points, *, derivatives=None):
    given = {"coords": "xy", "outputs": "uvp", "scaling": derivatives}
    names = ["u", "v", *(f"{f}_{c}" for f in "uvp" for c in "xy")]
    d = jax.vmap(mpx.laplacian(fields, names, **given))(points["fluid"])
    carried = lambda f: d["u"] * d[f"{f}_x"] + d["v"] * d[f"{f}_y"]
    x = carried("u") + d["p_x"] - NU * d["lap_u"]
    y = carried("v") + d["p_y"] - NU * d["lap_v"]
    # The corner of the step is singular and gets a smaller weight.
    apart = jnp.sum((points["fluid"] - jnp.asarray([STEP, HALF], x.dtype)[None]) ** 2, axis=1)
    near = jnp.minimum(apart / 0.1**2, 1.0)
    balance = near * (0.2 * (x**2 + y**2) + (d["u_x"] + d["v_y"]) ** 2)
    velocity = jax.vmap(mpx.partials(fields, ["u", "v"], **given))
    entry, step, exit_ = (velocity(points[k]) for k in ("inlet", "step", "outlet"))
    wrong = (entry["u"] - inlet(points["inlet"][:, 1])) ** 2 + entry["v"] ** 2
    stuck = step["u"] ** 2 + step["v"] ** 2
    return jnp.mean(balance) + 5 * (jnp.mean(wrong) + jnp.mean(stuck) + jnp.mean(exit_["v"] ** 2))


def sample(key):
    low, high, entry, step, exit_, side = jax.random.split(key, 6)
    # In proportion to the areas above and behind the step.
    above = uniform(high, 96, (0, HALF), (STEP, 1))
    behind = uniform(low, 416, (STEP, 0), (LENGTH, 1))
    top = uniform(step, 32, (0, HALF), (STEP, HALF))
    return {
        "fluid": jnp.concatenate([above, behind]),
        "inlet": uniform(entry, 32, (0, HALF), (0, 1)),
        "step": jnp.concatenate([top, uniform(side, 32, (STEP, 0), (STEP, HALF))]),
        "outlet": uniform(exit_, 32, (LENGTH, 0), (LENGTH, 1)),
    }


@functools.cache
def reference(cells=40):
    solid = lambda x, y: (x < STEP) & (y < HALF)
    given = {"length": LENGTH, "viscosity": NU, "cells": cells}
    axes, fields = channel(solid, lambda y: inlet(y, np.where), **given)
    return Reference(grid(*axes), fields.reshape(3, -1).T)


PROBLEM = problem(__name__, "Backward-facing step", coords="xy", order=2, fields="uvp", steps=4000)

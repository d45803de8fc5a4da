"""A block with three fins on a warm chip, in three dimensions: how heat spreads and leaves it.

ΔT = 0 in the solid. Heat q(x, y), shaped like a bell, comes in from below; elsewhere the surface is
cooled by ∂T/∂n = −T. T minimizes the energy ∫ |∇T|²/2 + ∫ T²/2 − ∫ q T, over the solid, its cooled
surface and the chip. At the roots of the fins ∇T is singular, so mean squares of ΔT fail there. The
geometry is given by signed distances; each box and each face has points in proportion to its size.
The reference is by finite volumes on cells of 1/40.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._problem import Reference, coordinate_mlp, grid, problem
from .geometry import Box, area, distance, inside, surface, volume
from .references import conduction


BASE = Box((0, 0, 0), (1, 1, 0.2))
FINS = [Box((x, 0, 0.2), (x + 0.1, 1, 0.7)) for x in (0.1, 0.45, 0.8)]
SOLID = [BASE, *FINS]
SIZE = 0.3  # scale of T


def chip(x, y, exp=jnp.exp):
    """Returns the heat that comes in."""
    return exp(-((x - 0.5) ** 2 + (y - 0.5) ** 2) / (2 * 0.2**2))


form = lambda point, n: SIZE * n
network = coordinate_mlp(3, "scalar", 48, 3, fourier_features=(24, 0.5), form=form)


def loss(t, points, *, derivatives=None):
    terms = mpx.partials(t, ["t_x", "t_y", "t_z"], coords="xyz", outputs="t", scaling=derivatives)
    d = jax.vmap(terms)(points["inside"])
    spread = volume(SOLID) * jnp.mean(d["t_x"] ** 2 + d["t_y"] ** 2 + d["t_z"] ** 2) / 2
    at, normals, there = points["surface"]
    value = jax.vmap(t)(at)
    below = (at[:, 2] == 0.0) & (normals[:, 2] < 0)
    exchanged = jnp.where(below, -chip(at[:, 0], at[:, 1]) * value, value**2 / 2)
    return 10 * (spread + area(SOLID) * jnp.mean(there * exchanged))


def sample(key):
    one, two = jax.random.split(key)
    return {"inside": inside(one, SOLID, 384), "surface": surface(two, SOLID, 512)}


@functools.cache
def reference(cells=40):
    axes = [(np.arange(round(n * cells)) + 0.5) / cells for n in (1, 1, 0.7)]
    points = grid(*axes)
    with jax.enable_x64(True):
        solid = np.asarray(distance(SOLID, jnp.asarray(points, jnp.float64)) < 0)
    heat = chip(*np.meshgrid(axes[0], axes[1], indexing="ij"), np.exp)
    t = conduction(solid.reshape([len(x) for x in axes]), heat, 1 / cells)
    return Reference(points[solid], t.ravel()[solid])


PROBLEM = problem(
    __name__,
    "Finned block on a chip, 3D",
    coords="xyz",
    order=1,
    fields="t",
    family="3D",
    steps=3000,
)

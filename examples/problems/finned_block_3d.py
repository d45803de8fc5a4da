"""A block with three fins on a warm chip, in three dimensions: how heat spreads and leaves it.

ΔT = 0 in the solid; a bell of heat q(x, y) comes in from below, and elsewhere the surface is cooled
by ∂T/∂n = −T. The geometry is given by signed distances, with as many points in a box or on a face
as its size asks for. The reference is by finite volumes on cells of 1/40.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._runner import Problem, Reference, grid
from .geometry import Box, distance, inside, surface
from .references import conduction


BASE = Box((0, 0, 0), (1, 1, 0.2))
FINS = [Box((x, 0, 0.2), (x + 0.1, 1, 0.7)) for x in (0.1, 0.45, 0.8)]
SOLID = [BASE, *FINS]
SIZE = 0.1  # of T


def chip(x, y, exp=jnp.exp):
    """The heat that comes in."""
    return exp(-((x - 0.5) ** 2 + (y - 0.5) ** 2) / (2 * 0.2**2))


def network(key):
    mlp = mpx.nn.CoordinateMLP(3, "scalar", 48, 3, key=key, fourier_features=(24, 0.5))
    return mpx.nn.Ansatz(mlp, lambda point, n: SIZE * n)


def loss(t, points, *, derivatives=None):
    given = {"coords": "xyz", "outputs": "t", "scaling": derivatives}
    balance = jax.vmap(mpx.laplacian(t, **given))(points["inside"])["lap_t"]
    at, normals, there = points["surface"]
    d = jax.vmap(mpx.partials(t, ["t", "t_x", "t_y", "t_z"], **given))(at)
    out = jnp.sum(normals * jnp.stack([d["t_x"], d["t_y"], d["t_z"]], axis=1), axis=1)
    below = at[:, 2] == 0.0
    wrong = jnp.where(below & (normals[:, 2] < 0), out - chip(at[:, 0], at[:, 1]), out + d["t"])
    return 0.05 * jnp.mean(balance**2) + 10 * jnp.sum(there * wrong**2) / jnp.sum(there)


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


PROBLEM = Problem(
    title="Finned block on a chip, 3D",
    coords="xyz",
    order=2,
    network=network,
    loss=loss,
    sample=sample,
    reference=reference,
    fields="t",
    family="3D",
    steps=3000,
)

"""Laplace's equation in a square with four round holes: u = 0 around the holes, u = 1 at the edges.

The domain is −½ ≤ x, y ≤ ½ with holes of radius 0.1 at (±0.3, ±0.3) (Poisson2d-C of PINNacle). The
reference is a harmonic series that meets the boundary values to 1e-7.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._problem import Reference, coordinate_mlp, grid, on_faces, problem, uniform
from .references import harmonic


RADIUS = 0.1
CENTRES = np.asarray([(x, y) for x in (-0.3, 0.3) for y in (-0.3, 0.3)])
LOW, HIGH = (-0.5, -0.5), (0.5, 0.5)


network = coordinate_mlp(2, "scalar", 32, 3, fourier_features=(16, 1.0))


def loss(u, points, *, derivatives=None):
    given = {"coords": "xy", "outputs": "u", "scaling": derivatives}
    laplacian = jax.vmap(mpx.laplacian(u, **given))(points["inside"])["lap_u"]
    apart = points["inside"][:, None] - jnp.asarray(CENTRES, points["inside"].dtype)[None]
    fluid = jnp.all(jnp.sum(apart**2, axis=2) > RADIUS**2, axis=1)
    value = jax.vmap(mpx.partials(u, ["u"], **given))
    edges, holes = value(points["edges"])["u"], value(points["holes"])["u"]
    wrong = jnp.mean((edges - 1) ** 2) + jnp.mean(holes**2)
    return jnp.mean(jnp.where(fluid, laplacian, 0.0) ** 2) / 100 + 10 * wrong


def around(angles):
    """Returns points around all holes."""
    ring = RADIUS * jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=-1)
    return (jnp.asarray(CENTRES, ring.dtype)[:, None] + ring[None]).reshape(-1, 2)


def sample(key):
    inside, edges, holes = jax.random.split(key, 3)
    angles = jax.random.uniform(holes, (32,), maxval=2 * np.pi)
    return {
        "inside": uniform(inside, 384, LOW, HIGH),
        "edges": on_faces(edges, 128, LOW, HIGH, axes=(0, 1)),
        "holes": around(angles),
    }


@functools.cache
def solution(order=60):
    """Returns the series and the bound on its error."""
    s = np.linspace(-0.5, 0.5, 201)
    edges = np.concatenate([np.stack([np.full_like(s, c), s], axis=1) for c in (-0.5, 0.5)])
    edges = np.concatenate([edges, edges[:, ::-1]])
    with jax.enable_x64(True):
        holes = np.asarray(around(jnp.linspace(0, 2 * np.pi, 200, endpoint=False)))
    values = np.concatenate([np.ones(len(edges)), np.zeros(len(holes))])
    given = [(*centre, RADIUS) for centre in CENTRES]
    return harmonic(np.concatenate([edges, holes]), values, given, order=order)


def reference():
    points = grid(np.linspace(-0.5, 0.5, 61), np.linspace(-0.5, 0.5, 61))
    inside = (np.linalg.norm(points[:, None] - CENTRES, axis=2) > RADIUS).all(axis=1)
    return Reference(points[inside], solution()[0](points[inside]))


PROBLEM = problem(__name__, "Laplace with four holes", coords="xy", order=2)

"""The linear Poisson–Boltzmann equation −Δu + 64 u = f in a square with four round holes.

Here f = 10 (17 + x² + y²) sin πx sin 4πy on −1 ≤ x, y ≤ 1, u = 1 around the holes and u = 0.2 at
the edges (PINNacle, which has a reference by COMSOL). The reference is a particular solution plus a
series that meets the boundary values to 1e-8.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._problem import Reference, coordinate_mlp, grid, problem, uniform
from .references import boundary_of, screened


K, SIZE, A, B = 8.0, 10.0, np.pi, 4 * np.pi
HOLES = ((0.5, 0.5, 0.2), (0.4, -0.4, 0.4), (-0.2, -0.7, 0.1), (-0.6, 0.5, 0.3))
EDGE, HOLE = 0.2, 1.0
LOW, HIGH = (-1.0, -1.0), (1.0, 1.0)
CENTRES, RADII = np.asarray(HOLES)[:, :2], np.asarray(HOLES)[:, 2]


def form(point, n):  # meets the values at the edges
    x, y = point
    return EDGE + (1 - x**2) * (1 - y**2) * n


network = coordinate_mlp(2, "scalar", 48, 3, fourier_features=(32, 1.0), form=form)


def source(x, y):
    return SIZE * (17 + x**2 + y**2) * jnp.sin(A * x) * jnp.sin(B * y)


def loss(u, points, *, derivatives=None):
    given = {"coords": "xy", "outputs": "u", "scaling": derivatives}
    d = jax.vmap(mpx.laplacian(u, ["u"], **given))(points["inside"])
    residual = -d["lap_u"] + K**2 * d["u"] - source(*points["inside"].T)
    apart = points["inside"][:, None] - jnp.asarray(CENTRES, residual.dtype)[None]
    fluid = jnp.all(jnp.sum(apart**2, axis=2) > jnp.asarray(RADII, residual.dtype) ** 2, axis=1)
    holes = jax.vmap(mpx.partials(u, ["u"], **given))(points["holes"])["u"]
    inside = jnp.mean(jnp.where(fluid, residual / K**2, 0.0) ** 2)
    return inside + 10 * jnp.mean((holes - HOLE) ** 2)


def sample(key):
    inside, holes = jax.random.split(key)
    angles = jax.random.uniform(holes, (4, 48, 1), maxval=2 * np.pi)
    ring = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=2)
    radii = jnp.asarray(RADII, ring.dtype)[:, None, None]
    around = jnp.asarray(CENTRES, ring.dtype)[:, None] + radii * ring
    return {"inside": uniform(inside, 512, LOW, HIGH), "holes": around.reshape(-1, 2)}


# --- The reference ---------------------------------------------------------------------------


def particular(points):
    """Returns a solution of the equation that meets no boundary values.

    It is (α + β (x² + y²)) S + γ x ∂S/∂x + δ y ∂S/∂y with S = sin πx sin 4πy.
    """
    x, y = points.T
    decay = A**2 + B**2 + K**2  # −ΔS + k² S = decay · S
    beta = SIZE / decay
    gamma = 4 * beta / decay
    alpha = (17 * SIZE + 4 * beta - 2 * gamma * (A**2 + B**2)) / decay
    (sx, cx), (sy, cy) = ((np.sin(w), np.cos(w)) for w in (A * x, B * y))
    slopes = A * x * cx * sy + B * y * sx * cy
    return (alpha + beta * (x**2 + y**2)) * sx * sy + gamma * slopes


def off(solution, edge=1001, around=701):
    """Returns the largest error of a solution at the boundary, which bounds it everywhere."""
    edges, holes = boundary_of(HOLES, edge, around)
    return max(np.abs(solution(p) - u).max() for p, u in ((edges, EDGE), (holes, HOLE)))


@functools.cache
def solution(order=30, sources=40):
    """Returns the solution, a function of points `[n, 2]`."""
    edges, holes = boundary_of(HOLES, 600, 400)
    points = np.concatenate([edges, holes])
    values = np.r_[np.full(len(edges), EDGE), np.full(len(holes), HOLE)] - particular(points)
    rest = screened(points, values, HOLES, k=K, order=order, sources=sources)
    return lambda points: particular(points) + rest(points)


@functools.cache
def reference():
    points = grid(np.linspace(-1, 1, 81), np.linspace(-1, 1, 81))
    fluid = (np.linalg.norm(points[:, None] - CENTRES, axis=2) > RADII).all(axis=1)
    return Reference(points[fluid], solution()(points[fluid]))


PROBLEM = problem(__name__, "Poisson–Boltzmann with four holes", coords="xy", order=2, steps=3000)

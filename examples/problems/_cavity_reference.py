"""Lid-driven cavity flow: published center lines, and a finite-volume solution in float64."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from scipy.interpolate import CubicSpline

from ._newton import solve


KARMAN, MIXING = 0.419, 0.09
"""The mixing length is the smaller of `KARMAN` times the distance to the nearest wall and `MIXING`
times the largest such distance, 1/2."""


def _values(text: str) -> Float[np.ndarray, "15"]:
    return np.array(text.split(), np.float64)


# C. H. Marchi, R. Suero, L. K. Araki, The lid-driven square cavity flow: numerical solution with a
# 1024 x 1024 grid, J. Braz. Soc. Mech. Sci. Eng. 31 (2009), Re = 100, extrapolated: u at (1/2, s)
# and v at (s, 1/2) for s = 1/16, ..., 15/16.
MARCHI_S = np.arange(1, 16) / 16
MARCHI_U = _values(
    "-0.041974991 -0.077125399 -0.109816214 -0.141930064 -0.172712391 -0.198470859 -0.212962392 "
    "-0.209149142 -0.182080595 -0.131256301 -0.060245594 0.027874448 0.140425325 0.310557090 "
    "0.597466694"
)
MARCHI_V = _values(
    "0.094807616 0.149243000 0.174342933 0.179243328 0.169132064 0.145730201 0.108775865 "
    "0.057536559 -0.007748504 -0.084066715 -0.163010143 -0.227827313 -0.253768577 -0.218690812 "
    "-0.123318170"
)


class Cavity(NamedTuple):
    """A solution on n × n cells: values at the faces and centers of the grid, by x and y."""

    u: Float[np.ndarray, "n+1 n"]  # at x = i/n, y = (j + 1/2)/n
    v: Float[np.ndarray, "n n+1"]  # at x = (i + 1/2)/n, y = j/n
    p: Float[np.ndarray, "n n"]


def mixing_length(x, y):
    """Returns l of the zero-equation model."""
    distance = jnp.minimum(jnp.minimum(x, 1 - x), jnp.minimum(y, 1 - y))
    return jnp.minimum(KARMAN * distance, MIXING * 0.5)


@functools.cache
def reference(
    reynolds: float = 100.0, n: int = 96, turbulence: bool = False, lid: str = "uniform"
) -> Cavity:
    """Computes steady flow under a lid, by central differences on a staggered grid.

    **Arguments:**

    - `reynolds`: 1/ν.
    - `n`: the number of cells along a side.
    - `turbulence`: whether to add the viscosity of the zero-equation model.
    - `lid`: its speed, `"uniform"` (1) or `"parabola"` (4x (1 − x)).

    **Returns:** a `Cavity`, second-order accurate away from the two corners of the lid.
    """
    h, nu = 1 / n, 1 / reynolds
    faces = np.linspace(0, 1, n + 1)
    speed = {"uniform": np.ones(n + 1), "parabola": 4 * faces * (1 - faces)}[lid][:, None]

    def residual(q):
        u, v, p = q  # u on the right face of each cell, v on its upper face
        u = jnp.concatenate([jnp.zeros_like(u[:1]), u])
        v = jnp.concatenate([jnp.zeros_like(v[:, :1]), v], axis=1)
        # Beyond a wall, values that make the velocity at the wall their mean: 0, or the lid's.
        u_wide = jnp.concatenate([-u[:, :1], u, 2 * speed - u[:, -1:]], axis=1)
        v_wide = jnp.concatenate([-v[:1], v, -v[-1:]])
        u_x, v_y = jnp.diff(u, axis=0) / h, jnp.diff(v, axis=1) / h  # at centers
        shear = jnp.diff(u_wide, axis=1) / h + jnp.diff(v_wide, axis=0) / h  # at corners
        at_center, at_corner = nu, nu
        if turbulence:
            at_center, at_corner = _viscosity(u_x, v_y, shear, h, nu)
        mean_x = lambda z: (z[1:] + z[:-1]) / 2
        mean_y = lambda z: (z[:, 1:] + z[:, :-1]) / 2
        normal_x = mean_x(u) ** 2 + p - 2 * at_center * u_x
        normal_y = mean_y(v) ** 2 + p - 2 * at_center * v_y
        across = mean_y(u_wide) * mean_x(v_wide) - at_corner * shear
        x_momentum = jnp.diff(normal_x, axis=0) / h + jnp.diff(across[1:-1], axis=1) / h
        y_momentum = jnp.diff(normal_y, axis=1) / h + jnp.diff(across[:, 1:-1], axis=0) / h
        mass = u_x + v_y
        # The pressure is known up to a constant, and one mass balance follows from the others.
        mass = mass.at[0, 0].set(p[0, 0])
        x_equation = jnp.concatenate([x_momentum, u[-1:]])
        y_equation = jnp.concatenate([y_momentum, v[:, -1:]], axis=1)
        return jnp.stack([x_equation, y_equation, mass])

    start = np.zeros((3, n, n))
    if turbulence or reynolds > 500:  # from zero, Newton's method does not converge
        near = reference(reynolds if turbulence else reynolds / 2, n, lid=lid)
        start = np.stack([near.u[1:], near.v[:, 1:], near.p])
    u, v, p = solve(residual, start)
    u, v = np.pad(u, ((1, 0), (0, 0))), np.pad(v, ((0, 0), (1, 0)))
    return Cavity(u, v, p - p.mean())


def center_lines(
    s: Float[np.ndarray, " s"],
    reynolds: float = 100.0,
    n: int = 64,
    turbulence: bool = False,
    lid: str = "uniform",
) -> tuple[Float[np.ndarray, " s"], Float[np.ndarray, " s"]]:
    """Returns u at (1/2, s) and v at (s, 1/2), extrapolated from grids of n and n/2 cells; both
    numbers are even."""
    fine, coarse = (_sample(reference(reynolds, k, turbulence, lid), s) for k in (n, n // 2))
    u, v = ((4 * f - c) / 3 for f, c in zip(fine, coarse, strict=True))
    return u, v


def cavity_fields(n: int, lid: str, reynolds: float = 100.0) -> Float[np.ndarray, "3 n n"]:
    """Returns u, v, p at the centers of n × n cells, extrapolated from grids of 3n and n cells.

    The center of a cell is that of the middle one of its nine parts, so nothing is interpolated.
    """
    two = []
    for k in (3 * n, n):
        flow = reference(reynolds, k, lid=lid)
        at = np.stack([flow.u[1:] + flow.u[:-1], flow.v[:, 1:] + flow.v[:, :-1], 2 * flow.p]) / 2
        two.append(at[:, k // n // 2 :: k // n, k // n // 2 :: k // n])
    return (9 * two[0] - two[1]) / 8


def _sample(flow: Cavity, s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Interpolates by cubic splines through faces on the center lines and walls at their ends."""
    n = len(flow.p)
    at = np.concatenate([[0.0], (np.arange(n) + 0.5) / n, [1.0]])
    u = CubicSpline(at, np.concatenate([[0.0], flow.u[n // 2], [1.0]]))(s)
    v = CubicSpline(at, np.concatenate([[0.0], flow.v[:, n // 2], [0.0]]))(s)
    return u, v


def _viscosity(u_x, v_y, shear, h, nu):
    """Returns ν + l² √(2 u_x² + 2 v_y² + (u_y + v_x)²) at the centers and corners of the cells."""
    n = len(u_x)
    centers = (jnp.arange(n) + 0.5) * h
    corners = jnp.arange(n + 1) * h
    four = lambda z: (z[1:, 1:] + z[1:, :-1] + z[:-1, 1:] + z[:-1, :-1]) / 4
    normal = 2 * u_x**2 + 2 * v_y**2
    length = mixing_length(centers[:, None], centers[None, :])
    at_center = nu + length**2 * jnp.sqrt(normal + four(shear**2) + 1e-12)
    length = mixing_length(corners[:, None], corners[None, :])
    at_corner = nu + length**2 * jnp.sqrt(four(jnp.pad(normal, 1, mode="edge")) + shear**2 + 1e-12)
    return at_center, at_corner

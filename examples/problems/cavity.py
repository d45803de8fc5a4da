"""The lid-driven cavity at Re = 100: steady Navier–Stokes in the unit square.

    u u_x + v u_y + p_x = (2 ν u_x)_x + (ν (u_y + v_x))_y,
    u v_x + v v_y + p_y = (ν (u_y + v_x))_x + (2 ν v_y)_y,      u_x + v_y = 0,

with u = 1 on the whole lid and no slip at the other walls. The velocity jumps in the two corners of
the lid. There the flow is that of a plate that scrapes along another (Taylor, 1962), with pressures
like 1/r. A lift contains these corners and meets all boundary conditions. The network, multiplied
by a function that vanishes at the walls, learns the rest.

The reference is published: thirty values of u on the vertical and of v on the horizontal center
line, to nine digits, by Marchi, Suero & Araki (2009).
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, PRNGKeyArray

import mpx_pde as mpx

from ._deep import Deep
from ._problem import STEPS_PER_CALL, coordinate_mlp, problem, values_at
from .references import MARCHI_S, MARCHI_U, MARCHI_V, center_lines, mixing_length


NU = 1 / 100
BATCH = 384  # collocation points in a step
MASS = 0.3  # weight of the mass balance


# --- The fields ------------------------------------------------------------------------------


# The stream function r f(θ) of a plate (θ = 0) that scrapes along another (θ = π/2).
_B = 1 / (np.pi / 2 - 2 / np.pi)
_A, _C = -_B * np.pi / 2, 2 * _B / np.pi


def stream_function(x: Float[Array, ""], y: Float[Array, ""]) -> Float[Array, ""]:
    """Returns the product of both corners' solutions. Its velocities are 1 on the lid, 0 at the
    walls, and those of the scraping plate in the corners."""
    d = 1 - y

    def corner(x):
        angle = jnp.arctan2(d, x)
        return _A + _B * angle + _C * angle * x / d

    return -d * corner(x) * corner(1 - x) * y**2


def form(
    point: Float[Array, "2"], outputs: Float[Array, "3"], nu: float | Float[Array, ""] = NU
) -> Float[Array, "3"]:
    """Builds u, v, p from the outputs of the network."""
    x, y = point
    y = jnp.minimum(y, 1 - 1e-6)  # corners are singular, and so is the lid by the formula
    d = 1 - y
    left = (_B * d + _C * x) / (x**2 + d**2)
    right = (_B * d + _C * (1 - x)) / ((1 - x) ** 2 + d**2)
    minus_v, u = jax.grad(stream_function, (0, 1))(x, y)
    lift = jnp.stack([u, -minus_v, 2 * nu * (right - left)])
    inside = 16 * x * (1 - x) * y * (1 - y)
    return lift + outputs * jnp.stack([inside, inside, jnp.ones_like(inside)])


network = coordinate_mlp(2, 3, 32, 4, fourier_features=(16, 0.5), form=form)


FIRST = ["u", "v", "u_x", "u_y", "v_x", "v_y", "p_x", "p_y"]
SECOND = ["u_xx", "u_yy", "v_xx", "v_yy"]


def strain(d: dict[str, Array]) -> Array:
    """Returns √G of the turbulence model; never 0, where it has no derivative."""
    shear = d["u_y"] + d["v_x"]
    return jnp.sqrt(2 * d["u_x"] ** 2 + 2 * d["v_y"] ** 2 + shear**2 + 1e-6)


def turbulent_viscosity(fields: Any, point: Float[Array, "2"], derivatives: Any) -> Any:
    """Returns ν = 1/Re + l² √G and its two derivatives, by differentiating ν as a field."""

    def nu(p):
        names = ["u_x", "u_y", "v_x", "v_y"]
        d = mpx.partials(fields, names, coords="xy", outputs="uvp", scaling=derivatives)(p)
        return NU + mixing_length(p[0], p[1]) ** 2 * strain(d)

    names = ["nu", "nu_x", "nu_y"]
    n = mpx.partials(nu, names, coords="xy", outputs=["nu"], scaling=derivatives)(point)
    return n["nu"], n["nu_x"], n["nu_y"]


def residuals(
    fields: Any,
    point: Float[Array, "2"],
    derivatives: Any = None,
    viscosity: Callable | None = None,
) -> Float32[Array, "3"]:
    """Returns mass and momentum at a point; `viscosity(fields, point, derivatives)` is ν, ν_x,
    ν_y."""
    names = FIRST + SECOND
    d = mpx.partials(fields, names, coords="xy", outputs="uvp", scaling=derivatives)(point)
    nu, nu_x, nu_y = (NU, 0.0, 0.0) if viscosity is None else viscosity(fields, point, derivatives)
    shear = d["u_y"] + d["v_x"]
    x_stress = nu * (d["u_xx"] + d["u_yy"]) + 2 * nu_x * d["u_x"] + nu_y * shear
    y_stress = nu * (d["v_xx"] + d["v_yy"]) + 2 * nu_y * d["v_y"] + nu_x * shear
    x_momentum = d["u"] * d["u_x"] + d["v"] * d["u_y"] + d["p_x"] - x_stress
    y_momentum = d["u"] * d["v_x"] + d["v"] * d["v_y"] + d["p_y"] - y_stress
    return jnp.stack([d["u_x"] + d["v_y"], x_momentum, y_momentum])


def weighted(
    fields: Any, point: Float[Array, "2"], derivatives: Any = None, viscosity: Any = None
) -> Float32[Array, "3"]:
    """Returns the residuals; momentum weighs less near the two corners, where it is 1/r."""
    mass, x, y = residuals(fields, point, derivatives, viscosity)
    corner = jnp.minimum(point[0], 1 - point[0]) ** 2 + (1 - point[1]) ** 2
    near = lambda radius: jnp.minimum(corner / radius**2, 1.0)
    return jnp.stack([jnp.sqrt(MASS * near(0.01)) * mass, near(0.1) * x, near(0.1) * y])


def loss(fields, points, *, derivatives=None, viscosity=None):
    at = lambda p: weighted(fields, p, derivatives, viscosity)
    return jnp.mean(jnp.sum(jax.vmap(at)(points) ** 2, axis=1))


def choose_points(_: Any, key: PRNGKeyArray) -> Float32[Array, "steps batch 2"]:
    # Closer to the lid, the derivatives of the formula lose their digits.
    high = jnp.array([1.0, 0.998])
    return jax.random.uniform(key, (STEPS_PER_CALL, BATCH, 2), maxval=high)


# --- Errors ----------------------------------------------------------------------------------


@cache
def center_line_reference(turbulence: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the places on the center lines, and the reference of u and v there."""
    if not turbulence:
        return MARCHI_S, MARCHI_U, MARCHI_V
    s = np.linspace(0, 1, 129)[1:-1]
    return s, *center_lines(s, 1 / NU, turbulence=True)


def lines(fields: Any, s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns u at (1/2, s) and v at (s, 1/2)."""
    half = np.full_like(s, 0.5)
    values = values_at(fields, np.r_[np.stack([half, s], axis=1), np.stack([s, half], axis=1)])
    return values[: len(s), 0], values[len(s) :, 1]


def errors(fields: Any, turbulence: bool = False) -> dict[str, float]:
    """Returns relative L2 errors on the center lines: both together, then each."""

    def relative(got, want):
        return float(np.linalg.norm(got - want) / np.linalg.norm(want))

    s, *want = center_line_reference(turbulence)
    got = lines(fields, s)
    out = {"rel. L2 error": relative(np.concatenate(got), np.concatenate(want))}
    return out | {name: relative(g, w) for name, g, w in zip("uv", got, want, strict=True)}


DEEP = Deep(residual=weighted, form=form, low=(0, 0), high=(1, 0.998), outputs=3)
PROBLEM = problem(
    __name__, "Lid-driven cavity", coords="xy", order=2, points=choose_points, steps=4000
)

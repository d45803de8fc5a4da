"""Flow and temperature around three heated fins in a channel, in two dimensions, at Re = 20.

    u·∇u + ∇p = ν ∇²u,      ∇·u = 0,      u·∇T = D ∇²T,

with a parabola of u and T = 0 at the inlet, no slip and T = 1 at the fins, no slip and no heat flux
at the walls, p = 0 and v = 0 at the outlet. It is the two-dimensional heat sink of PhysicsNeMo, but
with ν = D = 0.05, fins half as long and a channel of length 2.

The geometry is given by distance functions. A smooth one that vanishes at the fins (by R-functions,
Sukumar & Srivastava, 2022) builds all boundary conditions into the fields, except the heat flux at
the walls, which is a term of the loss. The exact distance tells where points are. A further term
requires that each cross-section lets through what enters. The reference is a finite-volume solution
of our own. All fields are singular in the corners of the fins, so at its resolution the reference
is itself uncertain by about 1% in u and T, and by 2 to 4% in v and p.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, PRNGKeyArray

import mpx_pde as mpx

from ._problem import STEPS_PER_CALL, Reference, coordinate_mlp, grid, problem
from .geometry import Box, distance
from .references import channel


X_IN, X_OUT = -0.5, 1.5
Y_LOW, Y_HIGH = -0.5, 0.5
FINS = ((0.0, 0.5, -0.3, -0.2), (0.0, 0.5, -0.05, 0.05), (0.0, 0.5, 0.2, 0.3))
"""Each fin from x to x and from y to y."""
VISCOSITY, DIFFUSIVITY = 0.05, 0.05
SPEED = 1.5
"""The largest speed at the inlet, where u is a parabola: a mean of 1, and Re = 20."""
PRESSURE = 10.0  # about the drop across the fins
MOMENTUM = 0.2  # weight of the momentum balance, whose terms are of the size of the pressure
THROUGH = 4.0  # weight of the flow through cross-sections
BATCH, WALL = 512, 64  # points in the fluid and on the walls, in a step
SECTIONS, ACROSS = 8, 80  # cross-sections in a step, and points on each
CANDIDATES = 80_000  # points in the channel, from which those in the fluid are taken


# --- The geometry and the reference ------------------------------------------------------------


def inlet(y):
    """Returns u at the inlet."""
    return SPEED * (1 - 4 * y**2)


def fin_distance(x: Float[Array, "..."], y: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns the signed distance to the nearest fin, negative inside."""
    at = jnp.stack(jnp.broadcast_arrays(x, y), axis=-1)
    boxes = [Box((x0, y0), (x1, y1)) for x0, x1, y0, y1 in FINS]
    return distance(boxes, at.reshape(-1, 2)).reshape(at.shape[:-1])


@cache
def reference(cells: int = 80) -> Reference:
    """Computes the reference; `cells` over the height, a multiple of 20, fit the fins exactly."""
    if cells % 20:
        raise ValueError(f"`reference` needs a multiple of 20 as `cells`, but got {cells}.")
    (x, y), fields = channel(
        lambda x, y: np.asarray(fin_distance(jnp.asarray(x + X_IN), jnp.asarray(y + Y_LOW))) < 0,
        lambda y: inlet(y + Y_LOW),
        length=X_OUT - X_IN,
        viscosity=VISCOSITY,
        diffusivity=DIFFUSIVITY,
        cells=cells,
    )
    return Reference(grid(x + X_IN, y + Y_LOW), fields.reshape(4, -1).T)


# --- The fields ------------------------------------------------------------------------------


def away(x: Float[Array, ""], y: Float[Array, ""]) -> Float[Array, ""]:
    """Returns 0 at the fins, about the distance to them nearby, and 1 far away; smooth in the
    fluid."""

    def from_fin(box):
        x0, x1, y0, y1 = box
        # Each is positive between two parallel lines; both are positive inside the fin.
        a = (x - x0) * (x1 - x) / (x1 - x0)
        b = (y - y0) * (y1 - y) / (y1 - y0)
        distance = jnp.sqrt(a**2 + b**2) - a - b
        return distance / (distance + 0.05)

    one, two, three = map(from_fin, FINS)
    return one * two * three


def form(point: Float[Array, "2"], outputs: Float[Array, "4"]) -> Float[Array, "4"]:
    """Builds u, v, p, T from the outputs of the network."""
    x, y = point
    near, far = away(x, y), away(jnp.full_like(x, X_IN), y)
    inside, passed, ahead = 1 - 4 * y**2, x - X_IN, X_OUT - x
    u = near * (inlet(y) / far + inside * passed * outputs[0])
    v = near * inside * passed * ahead * outputs[1]
    t = 1 - near * (1 / far + passed * outputs[3])
    return jnp.stack([u, v, PRESSURE * ahead * outputs[2], t])


network = coordinate_mlp(2, 4, 48, 4, fourier_features=(24, 0.7), form=form)


# --- The equations ---------------------------------------------------------------------------


OUTPUTS = ["u", "v", "p", "t"]
TERMS = ["u", "v", *(f"{f}_{c}" for f in OUTPUTS for c in "xy")]
TERMS += [f"{f}_{c}{c}" for f in "uvt" for c in "xy"]
CORNERS = np.array([(x, y) for *xs, y0, y1 in FINS for x in xs for y in (y0, y1)], np.float32)


def residuals(
    fields: Any, points: Float[Array, "batch 2"], derivatives: Any = None
) -> Float32[Array, "4 batch"]:
    """Returns the residuals of mass, momentum and heat. All but the first are singular in the
    corners of the fins and get smaller weights there."""
    terms = mpx.partials(fields, TERMS, coords="xy", outputs=OUTPUTS, scaling=derivatives)
    d = jax.vmap(terms)(points)

    def transport(name, diffusivity):
        carried = d["u"] * d[f"{name}_x"] + d["v"] * d[f"{name}_y"]
        return carried - diffusivity * (d[f"{name}_xx"] + d[f"{name}_yy"])

    x = transport("u", VISCOSITY) + d["p_x"]
    y = transport("v", VISCOSITY) + d["p_y"]
    heat = transport("t", DIFFUSIVITY)
    apart = points[:, None, :] - CORNERS[None, :, :]
    near = jnp.minimum(jnp.sqrt(jnp.min(jnp.sum(apart**2, axis=2), axis=1)) / 0.1, 1.0) ** 2
    return jnp.stack([d["u_x"] + d["v_y"], MOMENTUM * near * x, MOMENTUM * near * y, near * heat])


def loss(fields, points, *, derivatives=None):
    inside = residuals(fields, points["fluid"], derivatives)
    terms = mpx.partials(fields, ["t_y"], coords="xy", outputs=OUTPUTS, scaling=derivatives)
    flux = jax.vmap(terms)(points["wall"])["t_y"]
    # Each cross-section must let through a mean speed of 1.
    u = mpx.partials(fields, ["u"], coords="xy", outputs=OUTPUTS, scaling=derivatives)
    speed = jax.vmap(jax.vmap(u))(points["sections"])["u"]
    x, y = jnp.moveaxis(points["sections"], -1, 0)
    through = jnp.mean(jnp.where(fin_distance(x, y) > 0, speed, 0.0), axis=1)
    return (
        jnp.mean(jnp.sum(inside**2, axis=0))
        + jnp.mean(flux**2)
        + THROUGH * jnp.mean((through - 1) ** 2)
    )


def choose_points(_: Any, key: PRNGKeyArray) -> dict[str, Float32[Array, "steps batch 2"]]:
    fluid, wall, side, section = jax.random.split(key, 4)
    low, high = jnp.array([X_IN, Y_LOW]), jnp.array([X_OUT, Y_HIGH])
    points = jax.random.uniform(fluid, (CANDIDATES, 2), minval=low, maxval=high)
    # Sorts points in the fluid first. On a fin's surface the root would have no slope.
    outside = fin_distance(points[:, 0], points[:, 1]) > 1e-4
    points = points[jnp.argsort(~outside)][: STEPS_PER_CALL * BATCH]
    shape = (STEPS_PER_CALL, WALL)
    x = jax.random.uniform(wall, shape, minval=X_IN, maxval=X_OUT)
    y = jax.random.choice(side, jnp.array([Y_LOW, Y_HIGH]), shape)
    at = jax.random.uniform(section, (STEPS_PER_CALL, SECTIONS, 1), minval=X_IN, maxval=X_OUT)
    across = jnp.linspace(Y_LOW, Y_HIGH, 2 * ACROSS + 1)[1::2]
    return {
        "sections": jnp.stack(jnp.broadcast_arrays(at, across[None, None, :]), axis=-1),
        "fluid": points.reshape(STEPS_PER_CALL, BATCH, 2),
        "wall": jnp.stack([x, y], axis=-1),
    }


PROBLEM = problem(
    __name__, "Heat sink", coords="xy", order=2, points=choose_points, fields="uvpt", steps=3000
)

"""The heat sink: its geometry, and a finite-volume solution in float64.

A channel of height 1 with three heated fins, as in the two-dimensional heat sink of PhysicsNeMo,
with slower flow and a shorter channel.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from _newton import solve
from jaxtyping import Array, Bool, Float
from scipy.interpolate import RegularGridInterpolator


X_IN, X_OUT = -0.5, 1.5
Y_LOW, Y_HIGH = -0.5, 0.5
FINS = ((0.0, 0.5, -0.3, -0.2), (0.0, 0.5, -0.05, 0.05), (0.0, 0.5, 0.2, 0.3))
"""Each from x to x and from y to y."""
VISCOSITY, DIFFUSIVITY = 0.05, 0.05
SPEED = 1.5
"""The largest at the inlet, where u is a parabola: a mean of 1, and Re = 20."""


def inlet(y):
    """u at the inlet."""
    return SPEED * (1 - 4 * y**2)


def fin_distance(x: Float[Array, "..."], y: Float[Array, "..."]) -> Float[Array, "..."]:
    """The signed distance to the nearest fin, negative inside."""

    def to(box):
        x0, x1, y0, y1 = box
        dx = jnp.abs(x - (x0 + x1) / 2) - (x1 - x0) / 2
        dy = jnp.abs(y - (y0 + y1) / 2) - (y1 - y0) / 2
        outside = jnp.hypot(jnp.maximum(dx, 0), jnp.maximum(dy, 0))
        return outside + jnp.minimum(jnp.maximum(dx, dy), 0)

    return functools.reduce(jnp.minimum, map(to, FINS))


class HeatSink(NamedTuple):
    """A solution at the centres of the cells, by x and y; solid cells hold NaN."""

    x: Float[np.ndarray, " nx"]
    y: Float[np.ndarray, " ny"]
    u: Float[np.ndarray, "nx ny"]
    v: Float[np.ndarray, "nx ny"]
    p: Float[np.ndarray, "nx ny"]
    t: Float[np.ndarray, "nx ny"]
    solid: Bool[np.ndarray, "nx ny"]
    outflow: float
    heating: float  # what the fins give off, by the gradients of the temperature at their walls
    heat_outflow: float  # what is carried out, less what comes in

    def sample(self, x, y) -> dict[str, np.ndarray]:
        """u, v, p, t at points of the fluid that are centres of cells of a grid of half as many."""
        out = {}
        for name in "uvpt":
            table = RegularGridInterpolator((self.x, self.y), getattr(self, name))
            out[name] = table((x, y))
        return out


@functools.cache
def reference(n: int = 40) -> HeatSink:
    """Steady flow and temperature by central differences on a staggered grid.

    No slip at walls and fins; at the inlet a parabola and temperature 0; at the outlet p = 0,
    v = 0 and no change of u and of temperature along x. Fins have the temperature 1, walls are
    insulated.

    **Arguments:**

    - `n`: cells over the height of the channel, a multiple of 20, so that fins are whole cells.

    **Returns:** a `HeatSink`.
    """
    if n % 20:
        raise ValueError(f"`reference` needs a multiple of 20 as `n`, but got {n}.")
    h = 1 / n
    nx, ny = round((X_OUT - X_IN) * n), n
    x = X_IN + (np.arange(nx) + 0.5) * h
    y = Y_LOW + (np.arange(ny) + 0.5) * h
    solid = np.asarray(fin_distance(jnp.asarray(x[:, None]), jnp.asarray(y[None, :]))) < 0
    flow = solve(functools.partial(channel_flow, h=h, y=y, solid=solid), np.zeros((3, nx, ny)))
    u, v, p = flow
    heat = functools.partial(_heat, u=u, v=v, h=h, y=y, solid=solid)
    [t] = solve(lambda q: heat(q)[0], np.zeros((1, nx, ny)), reach=1)
    with jax.enable_x64(True):
        _, heating, out = heat(jnp.asarray(t[None]))
    u_faces = np.concatenate([inlet(y)[None], u])
    v_faces = np.pad(v, ((0, 0), (1, 0)))
    fluid = lambda z: np.where(solid, np.nan, z)
    return HeatSink(
        x=x,
        y=y,
        u=fluid((u_faces[1:] + u_faces[:-1]) / 2),
        v=fluid((v_faces[:, 1:] + v_faces[:, :-1]) / 2),
        p=fluid(p),
        t=fluid(t),
        solid=solid,
        outflow=float(u[-1].sum() * h),
        heating=float(heating),
        heat_outflow=float(out),
    )


def _mirror(own, neighbour, deep):
    """Inside a solid, what makes the velocity at its wall 0."""
    return jnp.where(deep, -own, neighbour)


def channel_flow(q, *, h, y, solid, inlet=inlet, viscosity=VISCOSITY):
    """Residuals of momentum and mass: u on the right face of each cell, v on its upper face."""
    u, v, p = q
    # Faces within a solid or at its wall, and those of which both cells are solid.
    right = np.concatenate([solid[1:], np.zeros_like(solid[:1])])
    above = np.concatenate([solid[:, 1:], np.ones_like(solid[:, :1])], axis=1)
    u_shut, u_deep = solid | right, solid & right
    v_shut, v_deep = solid | above, solid & above

    # Neighbours to the left, right, below and above. Beyond the outlet, u goes on as it came.
    u_left = jnp.concatenate([inlet(y)[None], u[:-1]])
    u_right = jnp.concatenate([u[1:], u[-2:-1]])
    below, over = np.roll(u_deep, 1, 1), np.roll(u_deep, -1, 1)
    below[:, 0], over[:, -1] = True, True
    u_below = _mirror(u, jnp.roll(u, 1, 1), below)
    u_above = _mirror(u, jnp.roll(u, -1, 1), over)
    left, after = np.roll(v_deep, 1, 0), np.roll(v_deep, -1, 0)
    left[0], after[-1] = True, True
    v_left = _mirror(v, jnp.roll(v, 1, 0), left)
    v_right = _mirror(v, jnp.roll(v, -1, 0), after)
    v_below = jnp.concatenate([jnp.zeros_like(v[:, :1]), v[:, :-1]], axis=1)
    v_above = jnp.concatenate([v[:, 1:], jnp.zeros_like(v[:, :1])], axis=1)

    p_right = jnp.concatenate([p[1:], -p[-1:]])
    p_above = jnp.concatenate([p[:, 1:], p[:, -1:]], axis=1)
    # v at the places of u: of the four faces around; u at the places of v.
    v_cell = (v + v_below) / 2
    v_at_u = (v_cell + jnp.concatenate([v_cell[1:], -v_cell[-1:]])) / 2
    u_cell = (u + u_left) / 2
    u_at_v = (u_cell + jnp.concatenate([u_cell[:, 1:], u_cell[:, -1:]], axis=1)) / 2

    def momentum(own, left, right, below, above, u, v, gradient):
        carried = u * (right - left) / (2 * h) + v * (above - below) / (2 * h)
        spread = (left + right + below + above - 4 * own) / h**2
        return carried + gradient / h - viscosity * spread

    x_momentum = momentum(u, u_left, u_right, u_below, u_above, u, v_at_u, p_right - p)
    y_momentum = momentum(v, v_left, v_right, v_below, v_above, u_at_v, v, p_above - p)
    mass = (u - u_left + v - v_below) / h
    return jnp.stack(
        [
            jnp.where(u_shut, u, x_momentum),
            jnp.where(v_shut, v, y_momentum),
            jnp.where(solid, p, mass),
        ]
    )


def _heat(q, *, u, v, h, y, solid):
    """Residual of the temperature, and what fins give off and what is carried away."""
    [t] = q
    u = np.concatenate([inlet(y)[None], u])
    v = np.pad(v, ((0, 0), (1, 0)))
    solid_x = np.pad(solid, ((1, 1), (0, 0)))
    solid_y = np.pad(solid, ((0, 0), (1, 1)))
    # Beyond inlet and outlet; walls are insulated, and nothing flows through them.
    t_x = jnp.concatenate([-t[:1], t, t[-1:]])
    t_y = jnp.pad(t, ((0, 0), (1, 1)), mode="edge")

    def flux(speed, low, high, low_solid, high_solid):
        """Through faces; that into or out of a fin is conduction from its wall."""
        low_wall = jnp.where(low_solid, 2 - high, low)
        high_wall = jnp.where(high_solid, 2 - low, high)
        both = low_solid & high_solid
        conducted = jnp.where(both, 0.0, -DIFFUSIVITY * (high_wall - low_wall) / h)
        return speed * (low_wall + high_wall) / 2 + conducted

    x_flux = flux(u, t_x[:-1], t_x[1:], solid_x[:-1], solid_x[1:])
    y_flux = flux(v, t_y[:, :-1], t_y[:, 1:], solid_y[:, :-1], solid_y[:, 1:])
    balance = (jnp.diff(x_flux, axis=0) + jnp.diff(y_flux, axis=1)) / h
    residual = jnp.where(solid, t - 1, balance)[None]
    # Out of the faces between a fin and the fluid.
    off_x = np.where(solid_x[:-1] & ~solid_x[1:], 1, 0) - np.where(
        solid_x[1:] & ~solid_x[:-1], 1, 0
    )
    off_y = np.where(solid_y[:, :-1] & ~solid_y[:, 1:], 1, 0) - np.where(
        solid_y[:, 1:] & ~solid_y[:, :-1], 1, 0
    )
    heating = h * (jnp.sum(off_x * x_flux) + jnp.sum(off_y * y_flux))
    return residual, heating, h * jnp.sum(x_flux[-1] - x_flux[0])

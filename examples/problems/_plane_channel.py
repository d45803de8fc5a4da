"""Flow and heat in a channel with solids, in two dimensions, by finite volumes in float64."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from ._newton import solve as newton


def channel(
    solid: Callable[[np.ndarray, np.ndarray], np.ndarray],
    inlet: Callable[[np.ndarray], np.ndarray],
    *,
    length: float,
    viscosity: float,
    cells: int,
    diffusivity: float | None = None,
) -> tuple[tuple[np.ndarray, np.ndarray], Float[np.ndarray, "fields nx ny"]]:
    """Computes steady flow through a channel of height 1 with solids, by second-order finite
    volumes.

    No slip at walls and solids, u = `inlet(y)` at x = 0, p = 0 and v = 0 at x = `length`. With a
    `diffusivity` the flow carries a temperature, which is 0 at the inlet and 1 in solids; the walls
    are insulated.

    **Arguments:**

    - `solid(x, y)`: whether the cell with this center is solid.
    - `cells`: the number of cells over the height.

    **Returns:** the centers' x and y, and u, v, p and the temperature there; NaN in solids.
    """
    h = 1 / cells
    x, y = (np.arange(round(length * cells)) + 0.5) * h, (np.arange(cells) + 0.5) * h
    stuck = solid(x[:, None], y[None, :])
    given = {"h": h, "y": y, "solid": stuck, "inlet": inlet, "viscosity": viscosity}
    u, v, p = newton(lambda q: flow(q, **given), np.zeros((3, len(x), len(y))))
    u, v = np.concatenate([inlet(y)[None], u]), np.pad(v, ((0, 0), (1, 0)))
    fields = [(u[1:] + u[:-1]) / 2, (v[:, 1:] + v[:, :-1]) / 2, p]
    if diffusivity is not None:
        given = {"u": u, "v": v, "h": h, "solid": stuck, "diffusivity": diffusivity}
        fields += [*newton(lambda q: heat(q, **given)[0], np.zeros((1, len(x), len(y))), reach=1)]
    return (x, y), np.where(stuck, np.nan, np.stack(fields))


def _mirror(own, neighbour, deep):
    """Sets values inside a solid that make the velocity at its wall 0."""
    return jnp.where(deep, -own, neighbour)


def flow(q, *, h, y, solid, inlet, viscosity):
    """Returns residuals of momentum and mass; u is on the right face of each cell, v on the
    upper."""
    u, v, p = q
    # Faces within a solid or at its wall, and faces between two solid cells.
    right = np.concatenate([solid[1:], np.zeros_like(solid[:1])])
    above = np.concatenate([solid[:, 1:], np.ones_like(solid[:, :1])], axis=1)
    u_shut, u_deep = solid | right, solid & right
    v_shut, v_deep = solid | above, solid & above

    # Neighbors to the left, right, below and above. Beyond the outlet, u continues unchanged.
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
    # v at the places of u is the mean over four faces, and so is u at the places of v.
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
    equations = (u_shut, u, x_momentum), (v_shut, v, y_momentum), (solid, p, mass)
    return jnp.stack([jnp.where(*equation) for equation in equations])


def heat(q, *, u, v, h, solid, diffusivity):
    """Returns the temperature's residual, the heat that solids release, and the heat carried away.

    `u` and `v` are the velocities on all faces.
    """
    [t] = q
    solid_x = np.pad(solid, ((1, 1), (0, 0)))
    solid_y = np.pad(solid, ((0, 0), (1, 1)))
    # Values beyond inlet and outlet. Walls are insulated, and nothing flows through them.
    t_x = jnp.concatenate([-t[:1], t, t[-1:]])
    t_y = jnp.pad(t, ((0, 0), (1, 1)), mode="edge")

    def flux(speed, low, high, low_solid, high_solid):
        """Returns the flux through faces; into or out of a fin it is conduction from its wall."""
        low_wall = jnp.where(low_solid, 2 - high, low)
        high_wall = jnp.where(high_solid, 2 - low, high)
        both = low_solid & high_solid
        conducted = jnp.where(both, 0.0, -diffusivity * (high_wall - low_wall) / h)
        return speed * (low_wall + high_wall) / 2 + conducted

    x_flux = flux(u, t_x[:-1], t_x[1:], solid_x[:-1], solid_x[1:])
    y_flux = flux(v, t_y[:, :-1], t_y[:, 1:], solid_y[:, :-1], solid_y[:, 1:])
    balance = (jnp.diff(x_flux, axis=0) + jnp.diff(y_flux, axis=1)) / h
    residual = jnp.where(solid, t - 1, balance)[None]
    # The flux out of the faces between a fin and the fluid.
    off_x, off_y = -np.diff(solid_x.astype(int), axis=0), -np.diff(solid_y.astype(int), axis=1)
    heating = h * (jnp.sum(off_x * x_flux) + jnp.sum(off_y * y_flux))
    return residual, heating, h * jnp.sum(x_flux[-1] - x_flux[0])

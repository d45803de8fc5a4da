"""Flow and temperature around a finned block on a chip with the zero-equation turbulence model.

The channel and the block are those of `fpga_laminar.py`, at Re = 50. The viscosity of eddies
depends on the shear rate of the fluid and on the distance d to the nearest wall (Xue et al.,
equation 1):

    u·∇u + ∇p = ∇·(2 ν S),   u·∇T = ∇·(ν ∇T),   ν = ν₀ + l² √(2 S:S),   l = min(0.419 d, 0.045),

where S is the symmetric part of ∇u. The derivatives of ν are written out by the product rule, so
that all terms are derivatives of the fields. The reference is by finite volumes.
"""

import itertools

import jax
import jax.numpy as jnp

import mpx_pde as mpx

from ._channel import channel_problem, mixing_length
from ._finite_volumes import reference
from .fpga_laminar import CHANNEL as LAMINAR


CHANNEL = LAMINAR._replace(viscosity=0.02, mixing=0.09 * 0.5)
AXES = ("ux", "vy", "wz")
TERMS = [*"uvw", *(f"{f}_{c}" for f in "uvwpt" for c in "xyz"), "t_xx", "t_yy", "t_zz"]
TERMS += [
    f"{f}_{a}{b}" for a, b in itertools.combinations_with_replacement("xyz", 2) for f in "uvw"
]


def viscosity(d, at):
    """Returns 2 S, ν and ∇ν, from derivatives of the velocities at points."""
    slope = lambda f, *cs: d[f"{f}_{''.join(sorted(cs))}"]
    # Without arguments this is 2 S, with an axis its derivative along it: `[3, 3, n]`.
    table = lambda *cs: jnp.stack(
        [jnp.stack([slope(f, c, *cs) + slope(g, b, *cs) for g, c in AXES]) for f, b in AXES]
    )
    strain = table()
    size = jnp.sqrt(jnp.sum(strain**2, axis=(0, 1)) / 2 + 1e-6)  # a root has no slope at 0
    size_grad = jnp.stack([jnp.sum(strain * table(c), axis=(0, 1)) / 2 / size for c in "xyz"])
    square = lambda point: mixing_length(CHANNEL, point[None])[0] ** 2
    length, length_grad = jax.vmap(jax.value_and_grad(square))(at)
    nu = CHANNEL.viscosity + length * size
    return strain, nu, length[None] * size_grad + length_grad.T * size[None]


def residuals(fields, at, given):
    """Returns the residuals of mass, momentum along x, y and z, and heat."""
    d = jax.vmap(mpx.partials(fields, TERMS, **given))(at)
    strain, nu, nu_grad = viscosity(d, at)
    carried = lambda f: d["u"] * d[f"{f}_x"] + d["v"] * d[f"{f}_y"] + d["w"] * d[f"{f}_z"]
    spread = lambda f: nu * (d[f"{f}_xx"] + d[f"{f}_yy"] + d[f"{f}_zz"])
    drag = jnp.sum(strain * nu_grad[None], axis=1)
    force = [carried(f) + d[f"p_{c}"] - spread(f) - drag[i] for i, (f, c) in enumerate(AXES)]
    along = sum(nu_grad[i] * d[f"t_{c}"] for i, c in enumerate("xyz"))
    return d["u_x"] + d["v_y"] + d["w_z"], force, carried("t") - spread("t") - along


PROBLEM = channel_problem(
    "FPGA heat sink, zero-equation turbulence, 3D",
    CHANNEL,
    residuals,
    reference,
    pressure=2.0,
    fluid=512,
    steps=2500,
)

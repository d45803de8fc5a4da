"""Flow and temperature around a finned block on a chip, in three dimensions, at Re = 20.

This is the laminar FPGA of PhysicsNeMo, a problem of Xue et al., with three fins in place of
seventeen, a shorter channel and a slower flow:

    u·∇u + ∇p = ν Δu,      ∇·u = 0,      u·∇T = ν ΔT.

A product of parabolas of mean speed 1 enters with T = 0, the fluid sticks to walls and block, and
p = v = w = 0 at the outlet. The block is of metal and conducts so well that it has a single
temperature, 1. Around it the chip gives off heat, ∂T/∂n = 2; the other walls are insulated. The
reference is by finite volumes.
"""

import jax

import mpx_pde as mpx

from ._channel import Channel, channel_problem
from ._finite_volumes import reference
from .geometry import Box


NU = 0.05
BASE = Box((0.4, -0.35, 0.0), (0.9, 0.35, 0.1))
FINS = [Box((0.4, y, 0.1), (0.9, y + 0.1, 0.6)) for y in (-0.35, -0.05, 0.25)]
CHANNEL = Channel(
    space=Box((0.0, -0.55, 0.0), (1.8, 0.55, 1.0)),
    block=(BASE, *FINS),
    viscosity=NU,
    chip=Box((0.3, -0.45), (1.0, 0.45)),
    heat=2.0,
)


def residuals(fields, at, given, nu=NU):
    """Returns the residuals of mass, momentum along x, y and z, and heat."""
    names = [*"uvw", *(f"{f}_{c}" for f in "uvwpt" for c in "xyz")]
    d = jax.vmap(mpx.laplacian(fields, names, **given))(at)
    carried = lambda f: d["u"] * d[f"{f}_x"] + d["v"] * d[f"{f}_y"] + d["w"] * d[f"{f}_z"]
    force = [carried(f) + d[f"p_{c}"] - nu * d[f"lap_{f}"] for f, c in ("ux", "vy", "wz")]
    return d["u_x"] + d["v_y"] + d["w_z"], force, carried("t") - nu * d["lap_t"]


PROBLEM = channel_problem(
    "FPGA heat sink, laminar, 3D", CHANNEL, residuals, reference, pressure=4.0
)

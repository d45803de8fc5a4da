"""Flow and temperature around a heat sink of three fins, in three dimensions, at Re = 25.

In the three-fin heat sink of PhysicsNeMo, the fin in the middle has its own size: here it is
shorter and higher than those at the sides. The equations are those of `fpga_laminar.py`,

    u·∇u + ∇p = ν Δu,      ∇·u = 0,      u·∇T = ν ΔT,

with a product of parabolas of mean speed 1 and T = 0 at the inlet, u = 0 at walls and block, T = 1
at the block, ∂T/∂n = 1 where the chip beneath the block is exposed, no heat through other walls,
and p = v = w = 0 at the outlet. The reference is by finite volumes.
"""

import functools

from ._channel import Channel, channel_problem
from ._finite_volumes import reference
from .fpga_laminar import residuals
from .geometry import Box


NU = 0.04
BASE = Box((0.4, -0.35, 0.0), (1.0, 0.35, 0.2))
SIDES = [Box((0.4, y, 0.2), (1.0, y + 0.1, 0.5)) for y in (-0.35, 0.25)]
MIDDLE = Box((0.5, -0.05, 0.2), (0.9, 0.05, 0.7))
CHANNEL = Channel(
    space=Box((0.0, -0.55, 0.0), (1.8, 0.55, 1.0)),
    block=(BASE, *SIDES, MIDDLE),
    viscosity=NU,
    chip=Box((0.3, -0.45), (1.1, 0.45)),
    heat=1.0,
)


PROBLEM = channel_problem(
    "Heat sink of three fins, 3D",
    CHANNEL,
    functools.partial(residuals, nu=NU),
    reference,
    pressure=4.0,
)

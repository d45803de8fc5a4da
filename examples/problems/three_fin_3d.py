"""Flow and temperature around a heat sink of three fins, in three dimensions, at Re = 25.

After the three-fin heat sink of PhysicsNeMo, whose fin in the middle has a size of its own: here it
is shorter and higher than those at the sides. The equations are those of `fpga_laminar.py`,

    u·∇u + ∇p = ν Δu,      ∇·u = 0,      u·∇T = ν ΔT,

with a product of parabolas of mean speed 1 and T = 0 at the inlet, u = 0 at walls and block, T = 1
at the block, ∂T/∂n = 1 where the chip beneath it comes out, no heat through other walls, and
p = v = w = 0 at the outlet. The reference is by finite volumes.
"""

import functools

import mpx_pde as mpx

from ._channel import Channel, draw, form, total
from ._finite_volumes import reference
from ._problem import Problem
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


def network(key, width=64, depth=4):
    mlp = mpx.nn.CoordinateMLP(3, 5, width, depth, key=key, fourier_features=(32, 0.5))
    return mpx.nn.Ansatz(mlp, form(CHANNEL, pressure=4.0))


def loss(fields, points, *, derivatives=None):
    given = {"coords": "xyz", "outputs": "uvwpt", "scaling": derivatives}
    wrong = residuals(fields, points["fluid"].at, given, nu=NU)
    return total(wrong, fields, points, given)


def sample(key, fluid=640, walls=128, across=16):
    return draw(CHANNEL, key, fluid=fluid, walls=walls, sections=4, across=across)


# The network is that of PhysicsNeMo.
PAPER = {
    "network": functools.partial(network, width=512, depth=6),
    "sample": functools.partial(sample, fluid=16_384, walls=4096, across=64),
    "steps": 400_000,
}


PROBLEM = Problem(
    title="Heat sink of three fins, 3D",
    coords="xyz",
    order=2,
    network=network,
    loss=loss,
    sample=sample,
    reference=functools.partial(reference, CHANNEL),
    fields="uvwpt",
    free=(3,),
    family="3D",
    steps=3000,
    paper=PAPER,
)

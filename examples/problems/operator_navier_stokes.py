"""Turbulence that decays, the vorticity at t = 0 ↦ that at t = 1 learnt by an FNO.

ω_t + v·∇ω = ν Δω on the unit torus with ν = 1e-3, by Exponax on 64² points, of which every second
is taken. `examples/navier_stokes.py` has more of it.
"""

import numpy as np

import mpx_pde as mpx

from ._operators import Pairs, operator
from .references import navier_stokes_data


TRAIN, TEST = 300, 60


def data():
    fields = navier_stokes_data(TRAIN + TEST, 64, seed=0)
    first, last = (x[:, None, ::2, ::2] / np.sqrt(np.mean(x[:TRAIN] ** 2)) for x in fields)
    return Pairs(first[:TRAIN], last[:TRAIN]), Pairs(first[TRAIN:], last[TRAIN:])


PROBLEM = operator(
    title="Navier–Stokes by an FNO",
    data=data,
    network=lambda key: mpx.nn.FNO(1, 1, 24, 4, (12, 12), key=key),
)

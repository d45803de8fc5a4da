"""Darcy flow −∇·(a ∇u) = 1 through a medium of two materials, a ↦ u learnt by an FNO.

On the unit square with u = 0 at its edges and a jumping between 3 and 12 (Li et al., 2021), on 32²
points: finite volumes in float64 on 64², of which every second point is taken. `examples/darcy.py`
has more of it.
"""

import numpy as np

import mpx_pde as mpx

from ._operators import Pairs, operator
from .references import darcy_data


TRAIN, TEST = 300, 60


def data():
    a, u = (x[:, None, ::2, ::2] for x in darcy_data(TRAIN + TEST, 64, seed=0))
    a = (a - a[:TRAIN].mean()) / a[:TRAIN].std()
    u = u / np.sqrt(np.mean(u[:TRAIN] ** 2))
    return Pairs(a[:TRAIN], u[:TRAIN]), Pairs(a[TRAIN:], u[TRAIN:])


PROBLEM = operator(
    title="Darcy flow by an FNO",
    data=data,
    network=lambda key: mpx.nn.FNO(1, 1, 24, 4, (12, 12), domain_padding=0.25, key=key),
)

"""Darcy flow −∇·(a ∇u) = 1 through a medium of two materials; an FNO learns a ↦ u.

The domain is the unit square with u = 0 at its edges, and a jumps between 3 and 12 (Li et al.,
2021). The FNO is trained on 64² points and also tested on 128² and 256². The data are by finite
volumes in float64 on 128² and 256² points; training takes every second point.
"""

import mpx_pde as mpx

from ._operators import Pairs, operator
from .references import darcy_data


POINTS, TRAIN, TESTS = 64, 1024, 100


def pairs(count: int, points: int, seed: int) -> Pairs:
    """Returns coefficients as −1 and 1, and solutions in units of 1/150, about their size."""
    a, u = darcy_data(count, points, seed=seed)
    return Pairs((a[:, None] - 7.5) / 4.5, 150 * u[:, None])


def data(train=TRAIN, tests=TESTS):
    a, u = (x[..., ::2, ::2] for x in pairs(train + tests, 2 * POINTS, seed=0))
    return Pairs(a[:train], u[:train]), Pairs(a[train:], u[train:])


def finer(count):
    return pairs(count, 4 * POINTS, seed=1)


network = lambda key: mpx.nn.FNO(1, 1, 32, 4, (12, 12), domain_padding=0.25, remat=False, key=key)
PROBLEM = operator(__name__, "Darcy flow by an FNO", steps=14_000)

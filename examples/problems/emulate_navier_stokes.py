"""Kolmogorov flow, vorticity driven by a wave of force; an FNO learns its time step.

ω_t + v·∇ω = ν Δω − λ ω + f, periodic over 2π with ν = 0.02 on 32² points, in a statistically steady
state. A step is 0.2. Exponax makes the data.
"""

import exponax

import mpx_pde as mpx

from ._operators import emulator


POINTS, EXTENT = 32, 6.283185307179586


def stepper(points=POINTS, substeps=10):
    one = exponax.stepper.KolmogorovFlowVorticity(
        2, EXTENT, points, 0.2 / substeps, diffusivity=0.02, injection_mode=3, injection_scale=1.0
    )
    return exponax.repeat(one, substeps)


def initial(key, points=POINTS):
    return exponax.ic.RandomTruncatedFourierSeries(2, cutoff=4, std_one=True)(points, key=key)


network = lambda key: mpx.nn.FNO(1, 1, 20, 4, (12, 12), key=key)
PROBLEM = emulator(
    __name__, "Kolmogorov flow, time steps by an FNO", spin_up=50, batch=8, steps=600
)

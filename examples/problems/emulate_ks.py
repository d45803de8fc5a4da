"""The Kuramoto–Sivashinsky equation u_t + u u_x + u_xx + u_xxxx = 0; an FNO learns its time step.

The fields are periodic over 32 on 64 points and chaotic: two solutions separate by a factor of e in
about 12 units of time, so every model loses the solution at some time. A step is half a unit.
Exponax makes the data, after a spin-up of 100 units.
"""

import exponax

import mpx_pde as mpx

from ._operators import emulator


POINTS, EXTENT = 64, 32.0


def stepper(points=POINTS, substeps=5):
    solver = exponax.stepper.KuramotoSivashinskyConservative
    return exponax.repeat(solver(1, EXTENT, points, 0.5 / substeps), substeps)


def initial(key, points=POINTS):
    return exponax.ic.RandomTruncatedFourierSeries(1, cutoff=5, std_one=True)(points, key=key)


network = lambda key: mpx.nn.FNO(1, 1, 32, 4, (20,), key=key)
PROBLEM = emulator(
    __name__, "Kuramoto–Sivashinsky, time steps by an FNO", told=(1, 5, 10, 20, 40), spin_up=200
)

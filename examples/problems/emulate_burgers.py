"""Burgers' equation u_t + u u_x = ν u_xx; a Fourier neural operator learns its time step of 0.1.

The fields are periodic over 2π with ν = 0.05 on 128 points, and start from random waves that
steepen into shocks. Exponax makes the data, in ten steps of 0.01 each.
"""

import exponax

import mpx_pde as mpx

from ._operators import emulator


POINTS, EXTENT = 128, 6.283185307179586


def stepper(points=POINTS, substeps=10):
    one = exponax.stepper.Burgers(1, EXTENT, points, 0.1 / substeps, diffusivity=0.05)
    return exponax.repeat(one, substeps)


def initial(key, points=POINTS):
    return exponax.ic.RandomTruncatedFourierSeries(1, cutoff=5, std_one=True)(points, key=key)


network = lambda key: mpx.nn.FNO(1, 1, 24, 4, (32,), key=key)
PROBLEM = emulator(__name__, "Burgers, time steps by an FNO")

"""Fisher's equation u_t = D Δu + r u (1 − u) in the plane, time steps learnt by a U-Net.

Periodic on the unit square with D = 0.002 and r = 5 on 32² points, from random fields in [0, 1]. A
step is 0.05. Exponax makes the data; the network is a U-Net of pdequinox.
"""

import exponax
import pdequinox

from ._operators import emulator


POINTS = 32


def stepper(points=POINTS, substeps=5):
    solver = exponax.stepper.reaction.FisherKPP
    one = solver(2, 1.0, points, 0.05 / substeps, diffusivity=0.002, reactivity=5.0)
    return exponax.repeat(one, substeps)


def initial(key, points=POINTS):
    waves = exponax.ic.RandomTruncatedFourierSeries(2, cutoff=4)
    return exponax.ic.ClampingICGenerator(waves, (0.0, 0.8))(points, key=key)


network = lambda key: pdequinox.arch.ClassicUNet(
    2, 1, 1, hidden_channels=8, num_levels=2, use_norm=False, key=key
)
PROBLEM = emulator(__name__, "Fisher, time steps by a U-Net", batch=8, steps=600)

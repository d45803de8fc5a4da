"""Fisher's equation u_t = D Δu + r u (1 − u) in the plane; a U-Net learns its time step.

The fields are periodic on the unit square with D = 0.002 and r = 5 on 32² points, and start from
random values in [0, 1]. A step is 0.05. Exponax makes the data; the U-Net is that of pdequinox.
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

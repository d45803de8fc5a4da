"""Decaying turbulence, ω_t + v·∇ω = ν Δω in the plane; a ResNet learns its time step.

The fields are periodic on the unit square with ν = 1e-3 on 32² points, and start from a random
vorticity of standard deviation 3. A step is 0.05. Exponax makes the data; the network is a ResNet
of pdequinox with dilated convolutions, which see further.
"""

import exponax
import pdequinox

from ._operators import emulator


POINTS = 32


def stepper(points=POINTS, substeps=10):
    one = exponax.stepper.NavierStokesVorticity(2, 1.0, points, 0.05 / substeps, diffusivity=1e-3)
    return exponax.repeat(one, substeps)


def initial(key, points=POINTS):
    waves = exponax.ic.RandomTruncatedFourierSeries(2, cutoff=4, std_one=True)
    return 3 * waves(points, key=key)


network = lambda key: pdequinox.arch.DilatedResNet(
    2, 1, 1, hidden_channels=12, num_blocks=2, use_norm=False, key=key
)
PROBLEM = emulator(__name__, "Decaying turbulence, time steps by a ResNet", batch=8, steps=600)

"""The Korteweg–de Vries equation u_t + 6 u u_x + u_xxx = 0, time steps learnt by a residual
network.

Periodic over 20 on 96 points, with a little hyperdiffusion (0.01 u_xxxx) as Exponax has it. A step
is 0.05. The network is a ResNet of pdequinox with periodic convolutions.
"""

import exponax
import pdequinox

from ._operators import emulator


POINTS, EXTENT = 96, 20.0


def stepper(points=POINTS, substeps=10):
    # Exponax has the opposite sign of u.
    one = exponax.stepper.KortewegDeVries(
        1, EXTENT, points, 0.05 / substeps, convection_scale=6.0, dispersivity=1.0
    )
    return exponax.repeat(one, substeps)


def initial(key, points=POINTS):
    return exponax.ic.RandomTruncatedFourierSeries(1, cutoff=5, std_one=True)(points, key=key)


PROBLEM = emulator(
    title="Korteweg–de Vries, time steps by a ResNet",
    stepper=stepper,
    initial=initial,
    network=lambda key: pdequinox.arch.ClassicResNet(
        1, 1, 1, hidden_channels=24, num_blocks=4, key=key
    ),
    told=(1, 5, 10, 20),
)

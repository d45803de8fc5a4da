"""The Korteweg–de Vries equation u_t + 6 u u_x + u_xxx = −0.068 u_xxxx, time steps learnt by a
residual network.

Periodic over 20 on 96 points, from waves between −2.2 and 2.2. A step is 0.032: that is as hard on
this grid as in APEBench, by its measures 2 for convection, 14 for dispersion and 9 for
hyperdiffusion (Koehler et al., 2024). Short waves are the fastest: one of five points goes 18
points in a step, and 3 % of it are left then. So the network, of pdequinox, has dilated
convolutions, which see 22 points to each side.
"""

import exponax
import jax
import pdequinox

from ._operators import emulator


POINTS, EXTENT = 96, 20.0


def stepper(points=POINTS, substeps=50):
    # Exponax has the opposite sign of u. Its Runge–Kutta coefficients are real numbers, which those
    # of waves that disperse are not: that is of first order in time, and so the steps are short.
    one = exponax.stepper.KortewegDeVries(
        *(1, EXTENT, points, 0.032 / substeps), convection_scale=6.0, hyper_diffusivity=0.068
    )
    return exponax.repeat(one, substeps)


def initial(key, points=POINTS):
    return 2.2 * exponax.ic.RandomTruncatedFourierSeries(1, cutoff=5, max_one=True)(points, key=key)


network = lambda key: pdequinox.arch.DilatedResNet(
    *(1, 1, 1),
    hidden_channels=24,
    num_blocks=1,
    use_norm=False,
    activation=jax.nn.gelu,
    key=key,
)
PROBLEM = emulator(__name__, "Korteweg–de Vries, time steps by a ResNet", told=(1, 5, 10, 20, 50))

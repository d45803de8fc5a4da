"""The Korteweg–de Vries equation u_t + 6 u u_x + u_xxx = −0.068 u_xxxx; a residual network learns
its time step.

The fields are periodic over 20 on 96 points, and start from waves between −2.2 and 2.2. A step is
0.032. On this grid that is as hard as in APEBench, by its measures 2 for convection, 14 for
dispersion and 9 for hyperdiffusion (Koehler et al., 2024). Short waves are the fastest: a wave of
five points travels 18 points in a step, after which 3 % of it is left. So the network, of
pdequinox, has dilated convolutions, which see 22 points to each side.
"""

import exponax
import jax
import pdequinox

from ._operators import emulator


POINTS, EXTENT = 96, 20.0


def stepper(points=POINTS, substeps=50):
    # Exponax has the opposite sign of u. Its Runge–Kutta coefficients are real, but dispersive
    # waves need complex ones. It is therefore of first order in time, and needs short steps.
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

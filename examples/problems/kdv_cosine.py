"""The Korteweg–de Vries equation u_t + u u_x + 0.0025 u_xxx = 0 from a cosine, up to t = 1.

The solution has the period 2 and starts from cos πx. It steepens, and breaks up into a train of
solitons (Zabusky & Kruskal, 1965). PirateNets (Wang et al., 2024) end at an error of 4.3e-4. The
reference is a Fourier method of fourth order in time.
"""

import functools

import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._deep import Deep
from ._problem import Reference, coordinate_mlp, grid, mean_square, problem, uniform
from .references import etdrk4


DISPERSION, TURN = 0.0025, 2.0


def form(point, n):
    t, x = point
    return jnp.cos(jnp.pi * x) + t * n


features = {"periodic": {1: TURN}, "fourier_features": (32, 1.0)}
network = coordinate_mlp(2, "scalar", 48, 3, **features, form=form)


def residual(u, point, derivatives=None):
    operator = {"linear": {"t": 1.0, "xxx": DISPERSION}}
    given = {"coords": "tx", "outputs": "u", "scaling": derivatives}
    d = mpx.linear_operator(u, operator, ["u", "u_x"], **given)(point)
    return d["linear_u"] + d["u"] * d["u_x"]


loss = mean_square(residual)


@functools.cache
def reference(n=512, steps=8000):
    x = np.arange(n) * TURN / n - 1
    k = np.pi * np.arange(n // 2 + 1)
    transport = lambda u: -0.5 * np.fft.irfft(1j * k * np.fft.rfft(u**2), n)
    start, linear = np.cos(np.pi * x), 1j * DISPERSION * k**3
    u = etdrk4(start, linear, transport, dt=1 / steps, steps=steps, every=steps // 50)
    return Reference(grid(np.linspace(0, 1, 51), x), u.ravel())


sample = lambda key: uniform(key, 512, low=(0, -1), high=(1, 1))
DEEP = Deep(
    residual=residual,
    form=form,
    low=(0, -1),
    high=(1, 1),
    periodic={1: TURN},
    waves=3,
    marches=True,
)
PROBLEM = problem(__name__, "Korteweg–de Vries, from a cosine", coords="tx", order=3)

"""The Kuramoto–Sivashinsky equation u_t + α u u_x + β u_xx + γ u_xxxx = 0, up to t = 0.06.

The solution is periodic over 2π and starts from cos x (1 + sin x), with α = 100/16, β = 100/16²,
γ = 100/16⁴ (PINNacle goes on to t = 1). By t = 0.06, |u_x| has grown from 2 to 11. At t = 0.1 it is
40, in fronts that a single network for all times does not follow. The reference is a Fourier method
of fourth order in time.
"""

import functools

import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._deep import Deep
from ._problem import Reference, coordinate_mlp, grid, mean_square, problem, uniform
from .references import etdrk4


A, B, C = 100 / 16, 100 / 16**2, 100 / 16**4
END, TURN = 0.06, 2 * np.pi


def form(point, n):
    t, x = point
    return jnp.cos(x) * (1 + jnp.sin(x)) + t / END * n


features = {"periodic": {1: TURN}, "fourier_features": (32, 0.6)}
network = coordinate_mlp(2, "scalar", 48, 3, **features, form=form, units=(END, 1))


def residual(u, point, derivatives=None):
    operator = {"linear": {"t": 1.0, "xx": B, "xxxx": C}}
    given = {"coords": "tx", "outputs": "u", "scaling": derivatives}
    d = mpx.linear_operator(u, operator, ["u", "u_x"], **given)(point)
    return (d["linear_u"] + A * d["u"] * d["u_x"]) / 10


loss = mean_square(residual)


@functools.cache
def reference(n=256, steps=600, end=END, frames=30):
    x = np.arange(n) * TURN / n
    k = np.arange(n // 2 + 1)
    slope = lambda u: np.fft.irfft(1j * k * np.fft.rfft(u), n)
    transport = lambda u: -A / 2 * slope(u**2)
    linear = B * k**2 - C * k**4
    start = np.cos(x) * (1 + np.sin(x))
    u = etdrk4(start, linear, transport, dt=end / steps, steps=steps, every=steps // frames)
    return Reference(grid(np.linspace(0, end, frames + 1), x), u.ravel())


sample = lambda key: uniform(key, 384, low=(0, 0), high=(END, TURN))
DEEP = Deep(residual=residual, form=form, low=(0, 0), high=(END, TURN), periodic={1: TURN})
PROBLEM = problem(__name__, "Kuramoto–Sivashinsky, until it is steep", coords="tx", order=4)

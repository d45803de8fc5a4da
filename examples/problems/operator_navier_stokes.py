"""Decaying turbulence; an FNO learns the map from the vorticity at t = 0 to that at t = 1.

ω_t + v·∇ω = ν Δω on the unit torus with ν = 1e-3, on 64² points, and also tested on 128² and 256².
The initial fields are those of Li et al. (2021), N(0, (−Δ + 49)^−2.5), with a standard deviation
of 2: where the vorticity has that value, the fluid turns by one radian. Exponax solves
the equation in float64. A network that does not see its position commutes with translations, as the
equation does.
"""

import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._operators import Pairs, operator
from .references import cached, solve_vorticity


POINTS, TRAIN, TESTS = 64, 1024, 100
STD, MODES = 2.0, 16


def initial(key, points):
    """Draws the same function of x and y on any number of points, from random Fourier modes."""
    k = jnp.arange(-MODES, MODES + 1)
    sizes = (4 * jnp.pi**2 * (k[:, None] ** 2 + k**2) + 49.0) ** -1.25
    sizes = sizes.at[MODES, MODES].set(0.0)  # no mean
    real, imaginary = jax.random.normal(key, (2, *sizes.shape), jnp.float64)
    waves = jnp.exp(2j * jnp.pi * jnp.outer(jnp.arange(points) / points, k))
    field = (waves @ (sizes * (real + 1j * imaginary)) @ waves.T).real
    return STD * field / jnp.sqrt(jnp.sum(sizes**2))


def solved(count: int, points: int, seed: int) -> dict[str, np.ndarray]:
    """Returns fields at t = 0 and at t = 1."""
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(seed), count)
        first = jax.lax.map(lambda key: initial(key, points), keys)
        last = solve_vorticity(first, time=1.0, viscosity=1e-3, time_step=1 / (2 * points))
        return {"first": np.asarray(first, np.float32), "last": np.asarray(last, np.float32)}


def pairs(count: int, points: int, seed: int) -> Pairs:
    fields = cached("vorticity", solved, version=1, count=count, points=points, seed=seed)
    return Pairs(*(fields[name][:, None] / STD for name in ("first", "last")))


def data(train=TRAIN, tests=TESTS):
    inputs, outputs = pairs(train + tests, POINTS, seed=0)
    return Pairs(inputs[:train], outputs[:train]), Pairs(inputs[train:], outputs[train:])


def finer(count):
    return pairs(count, 4 * POINTS, seed=1)


network = lambda key: mpx.nn.FNO(1, 1, 32, 4, (12, 12), grid_embedding=False, remat=False, key=key)
PROBLEM = operator(__name__, "Navier–Stokes by an FNO", steps=24_000)

"""The Poisson equation −Δu = f in ten dimensions, on the unit cube.

With f = (π²/4) Σᵢ sin(πxᵢ/2) and the values of the solution on all faces, the solution is
u = Σᵢ sin(πxᵢ/2) (PNd of PINNacle, which has five dimensions).
"""

import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._deep import Deep
from ._problem import coordinate_mlp, draws, problem, uniform, with_values


SIZE, COORDS = 10, "abcdefghij"
LOW, HIGH = (0,) * SIZE, (1,) * SIZE


def exact(x):
    return jnp.sum(jnp.sin(jnp.pi / 2 * x))


network = coordinate_mlp(SIZE, "scalar", 48, 3)


def residual(u, point, derivatives=None):
    lap = mpx.laplacian(u, coords=COORDS, outputs="u", scaling=derivatives)(point)["lap_u"]
    return lap + np.pi**2 / 4 * exact(point)


loss = with_values(residual, exact, "faces", "u", 10, coords=COORDS, outputs="u")


sample = draws(inside=(256, LOW, HIGH), faces=(200, LOW, HIGH, range(SIZE)))
AT = np.asarray(uniform(jax.random.key(1), 4096, LOW, HIGH), np.float64)
DEEP = Deep(
    residual=residual,
    form=lambda point, n: n,
    low=LOW,
    high=HIGH,
    turns=dict.fromkeys(range(SIZE), 1 / 4),
    soft=[(lambda u, point: 3 * (u(point) - exact(point)), LOW, HIGH, range(SIZE))],
)
PROBLEM = problem(__name__, "Poisson in 10 dimensions", coords=COORDS, order=2)

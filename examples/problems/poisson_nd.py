"""The Poisson equation −Δu = f in ten dimensions, on the unit cube.

With f = (π²/4) Σᵢ sin(πxᵢ/2) and the values of the solution on all faces: u = Σᵢ sin(πxᵢ/2) (PNd of
PINNacle, which has five).
"""

import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._problem import draws, misfit, problem, uniform


SIZE = 10
COORDS = "abcdefghij"
LOW, HIGH = (0,) * SIZE, (1,) * SIZE


def exact(x):
    return jnp.sum(jnp.sin(jnp.pi / 2 * x))


def network(key):
    return mpx.nn.CoordinateMLP(SIZE, "scalar", 48, 3, key=key)


def loss(u, points, *, derivatives=None):
    given = {"coords": COORDS, "outputs": "u", "scaling": derivatives}
    inside = jax.vmap(mpx.laplacian(u, **given))(points["inside"])["lap_u"]
    source = np.pi**2 / 4 * jax.vmap(exact)(points["inside"])
    wrong = misfit(u, exact, points["faces"], ["u"], given)
    return jnp.mean((inside + source) ** 2) + 10 * wrong


sample = draws(inside=(256, LOW, HIGH), faces=(200, LOW, HIGH, range(SIZE)))
AT = np.asarray(uniform(jax.random.key(1), 4096, LOW, HIGH), np.float64)
PROBLEM = problem(__name__, "Poisson in 10 dimensions", coords=COORDS, order=2)

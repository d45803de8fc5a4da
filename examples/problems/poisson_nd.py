"""The Poisson equation −Δu = f in ten dimensions, on the unit cube.

With f = (π²/4) Σᵢ sin(πxᵢ/2) and the values of the solution on all faces: u = Σᵢ sin(πxᵢ/2) (PNd of
PINNacle, which has five).
"""

import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._problem import Problem, on_faces, uniform


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
    faces = jax.vmap(mpx.partials(u, ["u"], **given))(points["faces"])["u"]
    wrong = faces - jax.vmap(exact)(points["faces"])
    return jnp.mean((inside + source) ** 2) + 10 * jnp.mean(wrong**2)


def sample(key):
    inside, faces = jax.random.split(key)
    return {
        "inside": uniform(inside, 256, LOW, HIGH),
        "faces": on_faces(faces, 200, LOW, HIGH, axes=range(SIZE)),
    }


PROBLEM = Problem(
    title="Poisson in 10 dimensions",
    coords=COORDS,
    order=2,
    network=network,
    loss=loss,
    sample=sample,
    exact=exact,
    at=np.asarray(uniform(jax.random.key(1), 4096, LOW, HIGH), np.float64),
)

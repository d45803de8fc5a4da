"""A travelling wave of Fisher's equation u_t = u_xx + 6 u (1 − u), on −4 ≤ x ≤ 10 up to t = 1.

u = (1 + e^(x − 5t))^−2 (Ablowitz & Zeppetella, 1979). Initial and boundary values are those of the
solution.
"""

import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._problem import Problem, grid, on_faces, uniform


LOW, HIGH = (0.0, -4.0), (1.0, 10.0)


def exact(point):
    t, x = point
    return (1 + jnp.exp(x - 5 * t)) ** -2


def network(key):
    mlp = mpx.nn.CoordinateMLP(2, "scalar", 32, 3, key=key, fourier_features=(16, 0.15))

    def form(point, n):
        return exact(point * jnp.asarray([0, 1], point.dtype)) + point[0] * n

    return mpx.nn.Ansatz(mlp, form)


def loss(u, points, *, derivatives=None):
    given = {"coords": "tx", "outputs": "u", "scaling": derivatives}
    heat = mpx.linear_operator(u, {"heat": {"t": 1.0, "xx": -1.0}}, ["u"], **given)
    d = jax.vmap(heat)(points["inside"])
    ends = jax.vmap(mpx.partials(u, ["u"], **given))(points["ends"])["u"]
    wrong = ends - jax.vmap(exact)(points["ends"])
    residual = d["heat_u"] - 6 * d["u"] * (1 - d["u"])
    return jnp.mean(residual**2) + 10 * jnp.mean(wrong**2)


def sample(key):
    inside, ends = jax.random.split(key)
    return {
        "inside": uniform(inside, 256, LOW, HIGH),
        "ends": on_faces(ends, 64, LOW, HIGH, axes=(1,)),
    }


PROBLEM = Problem(
    title="Fisher, a travelling wave",
    coords="tx",
    order=2,
    network=network,
    loss=loss,
    sample=sample,
    exact=exact,
    at=grid(np.linspace(0, 1, 41), np.linspace(-4, 10, 141)),
)

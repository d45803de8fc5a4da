"""Burgers' equations in the plane, u_t + u u_x + v u_y = Δu / Re and v alike, up to t = 1.

At Re = 100 on the unit square, with the initial and boundary values of Fletcher's solution
(*Generating exact solutions of the two-dimensional Burgers' equations*, 1983), a front along the
diagonal: u = ¾ − 1/4(1 + e), v = ¾ + 1/4(1 + e), e = exp((4y − 4x − t) Re/32).
"""

import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._problem import Problem, grid, on_faces, uniform


RE = 100.0
LOW, HIGH = (0, 0, 0), (1, 1, 1)


def exact(point):
    t, x, y = point
    front = 1 / (4 * (1 + jnp.exp((4 * y - 4 * x - t) * RE / 32)))
    return jnp.stack([0.75 - front, 0.75 + front])


def network(key):
    mlp = mpx.nn.CoordinateMLP(3, 2, 48, 3, key=key, fourier_features=(24, 0.6))

    def form(point, n):
        start = point * jnp.asarray([0, 1, 1], point.dtype)
        return exact(start) + point[0] * n

    return mpx.nn.Ansatz(mlp, form)


def loss(fields, points, *, derivatives=None):
    given = {"coords": "txy", "outputs": "uv", "scaling": derivatives}
    names = ["u", "v", *(f"{f}_{c}" for f in "uv" for c in "txy")]
    d = jax.vmap(mpx.laplacian(fields, names, over="xy", **given))(points["inside"])

    def balance(f):
        carried = d["u"] * d[f"{f}_x"] + d["v"] * d[f"{f}_y"]
        return d[f"{f}_t"] + carried - d[f"lap_{f}"] / RE

    edges = jax.vmap(mpx.partials(fields, ["u", "v"], **given))(points["edges"])
    wrong = jnp.stack([edges["u"], edges["v"]], axis=1) - jax.vmap(exact)(points["edges"])
    return jnp.mean(balance("u") ** 2 + balance("v") ** 2) + 10 * jnp.mean(wrong**2)


def sample(key):
    inside, edges = jax.random.split(key)
    return {
        "inside": uniform(inside, 384, LOW, HIGH),
        "edges": on_faces(edges, 128, LOW, HIGH, axes=(1, 2)),
    }


PROBLEM = Problem(
    title="Burgers in the plane",
    coords="txy",
    order=2,
    network=network,
    loss=loss,
    sample=sample,
    exact=exact,
    at=grid(np.linspace(0, 1, 11), np.linspace(0, 1, 33), np.linspace(0, 1, 33)),
    fields="uv",
)

"""The Helmholtz equation Δu + u = f on −1 ≤ x, y ≤ 1, with u = sin πx sin 4πy (Wang et al., 2021).

A factor that vanishes on the boundary multiplies the network. `mpx.laplacian` computes its
Laplacian by propagating value, gradient and Laplacian through each layer in one product. Points are
chosen where the residual is large.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

import mpx_pde as mpx

from ._deep import Deep
from ._problem import adaptive, coordinate_mlp, grid, problem


A = (1, 4)  # half waves in a unit length, in x and in y
K = 1.0  # the wave number
SIZE = np.pi**2 * (A[0] ** 2 + A[1] ** 2)  # −Δu / u of the solution


def solution(point: Float[Array, "2"]) -> Float[Array, ""]:
    return jnp.sin(A[0] * jnp.pi * point[0]) * jnp.sin(A[1] * jnp.pi * point[1])


class HelmholtzNetwork(eqx.Module):
    """u(x, y) = (1 − x²) (1 − y²) N(x, y)."""

    mlp: mpx.nn.CoordinateMLP

    def __call__(self, point: Float[Array, "2"]) -> Float[Array, ""]:
        x, y = point
        return (1 - x**2) * (1 - y**2) * self.mlp(point)


def source(points: Float[Array, "batch 2"]) -> Float32[Array, " batch"]:
    """Returns f = Δu + k² u of the solution."""
    sines = jnp.prod(jnp.sin(jnp.pi * jnp.asarray(A, points.dtype)[None] * points), axis=1)
    return (K**2 - SIZE) * sines.astype(jnp.promote_types(sines.dtype, jnp.float32))


def residuals(
    u: HelmholtzNetwork, points: Float[Array, "batch 2"], derivatives: Any = None
) -> Float32[Array, " batch"]:
    """Returns (Δu + k² u − f) / `SIZE`, by the product rule for the boundary factor."""
    terms = mpx.laplacian(u.mlp, ["n", "n_x", "n_y"], coords="xy", outputs="n", scaling=derivatives)
    n = jax.vmap(terms)(points)
    x, y = points.T
    p, q = 1 - x**2, 1 - y**2
    slopes = -2 * x * q * n["n_x"] - 2 * y * p * n["n_y"]
    laplacian = p * q * n["lap_n"] + 2 * slopes - 2 * (p + q) * n["n"]
    return (laplacian + K**2 * p * q * n["n"] - source(points)) / SIZE


def loss(u, points, *, derivatives=None):
    return jnp.mean(residuals(u, points, derivatives) ** 2)


points = adaptive(residuals, low=(-1, -1), high=(1, 1), batch=256)
mlp = coordinate_mlp(2, "scalar", 32, 3, fourier_features=(32, 1.0), full_precision_last=True)
network = lambda key: HelmholtzNetwork(mlp(key))
AT = grid(np.linspace(-1, 1, 129), np.linspace(-1, 1, 129))


def residual(u: Any, point: Float[Array, "2"]) -> Float[Array, ""]:
    """Returns the same for a network that does not have the factor built in."""
    d = mpx.laplacian(u, ["u"], coords="xy", outputs="u")(point)
    return (d["lap_u"] + K**2 * d["u"] - source(point[None])[0]) / SIZE


DEEP = Deep(
    residual=residual,
    form=lambda point, n: (1 - point[0] ** 2) * (1 - point[1] ** 2) * n,
    low=(-1, -1),
    high=(1, 1),
    turns={0: A[0], 1: A[1]},
)
PROBLEM = problem(
    __name__,
    "Helmholtz equation",
    coords="xy",
    order=2,
    exact=solution,
    optimizer="adam",
    learning_rate=2e-3,
    steps=4000,
)

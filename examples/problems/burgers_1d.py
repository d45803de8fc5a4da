"""Burgers' equation u_t + u u_x = ν u_xx with ν = 0.01/π, on −1 ≤ x ≤ 1 up to t = 1.

The solution is −sin πx at first and 0 at the ends, and forms a shock 0.01 wide (Raissi et al.,
2019). It is that of Cole and Hopf, whose transformation gives the heat equation (Basdevant et al.,
Computers & Fluids 14, 1986). Points are chosen where the residual is large.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, PRNGKeyArray
from numpy.typing import ArrayLike

import mpx_pde as mpx

from ._deep import Deep
from ._problem import Reference, adaptive, grid, problem


NU = 0.01 / np.pi
T, X = np.linspace(0, 1, 101), np.linspace(-1, 1, 257)


def solution(t: ArrayLike, x: ArrayLike, nodes: int = 100) -> Float[np.ndarray, "..."]:
    """Computes the solution in float64 for `0 ≤ t ≤ 1`; `t` and `x` broadcast:

        u(t, x) = −∫ sin(πy) f(y) exp(−η²/4νt) dη  /  ∫ f(y) exp(−η²/4νt) dη

    with y = x − η and f(y) = exp(−cos(πy) / 2πν). With η = √(4νt) z both integrals are
    Gauss–Hermite quadratures. 100 nodes are accurate to about 1e-15: the two valleys of f that
    compete at the shock lie at z = ±9 when t = 1, where 50 nodes still err by 1e-7.
    """
    t, x = np.asarray(t, np.float64), np.asarray(x, np.float64)
    z, weights = np.polynomial.hermite.hermgauss(nodes)
    y = x[..., None] - np.sqrt(4 * NU * t)[..., None] * z
    f = weights * np.exp(-np.cos(np.pi * y) / (2 * np.pi * NU))
    return -np.sum(np.sin(np.pi * y) * f, axis=-1) / np.sum(f, axis=-1)


@cache
def reference() -> Reference:
    points = grid(T, X)
    return Reference(points, solution(*points.T))


def form(point, n):  # meets the initial and boundary values
    t, x = point
    return -jnp.sin(jnp.pi * x) + t * (1 - x**2) * n


class BurgersNetwork(eqx.Module):
    """u(t, x) = −sin(πx) + t (1 − x²) N(t, x), which meets the initial and boundary values.

    The coordinates, the first and last layers and all activation arithmetic stay in float32. Only
    the products of the hidden layers, nearly all of the work, are in half precision.
    (`mpx.nn.CoordinateMLP` is such a network too; this one shows how it works.)
    """

    first: mpx.FullPrecision
    hidden: list[eqx.nn.Linear]
    last: mpx.FullPrecision
    activation: Callable

    def __init__(self, width: int = 32, depth: int = 4, *, key: PRNGKeyArray):
        first, last, *hidden = jax.random.split(key, depth + 1)
        self.first = mpx.FullPrecision(eqx.nn.Linear(2, width, key=first))
        self.hidden = [eqx.nn.Linear(width, width, key=k) for k in hidden]
        self.last = mpx.FullPrecision(eqx.nn.Linear(width, 1, key=last))
        self.activation = mpx.nn.tanh  # evaluated in float32, even if its input is half precision

    def __call__(self, point: Float[Array, "2"]) -> Float[Array, ""]:
        t, x = point
        h = self.activation(self.first(jnp.stack([2 * t - 1, x])))
        for layer in self.hidden:
            h = self.activation(layer(h.astype(layer.weight.dtype)))  # half if the weights are
        n = self.last(h.astype(point.dtype))[0]
        return form(point, n)


def residuals(
    u: Any, points: Float[Array, "batch 2"], derivatives: Any = None
) -> Float32[Array, " batch"]:
    """Returns u_t + u u_x − ν u_xx, divided by √(1 + |u_x|).

    Without the weight, points inside the shock, where every term is above 100, would dominate the
    loss.
    """
    terms = ["u", "u_t", "u_x", "u_xx"]
    d = jax.vmap(mpx.partials(u, terms, coords="tx", outputs="u", scaling=derivatives))(points)
    weight = jax.lax.stop_gradient(jax.lax.rsqrt(1 + jnp.abs(d["u_x"])))
    return weight * (d["u_t"] + d["u"] * d["u_x"] - NU * d["u_xx"])


def loss(u, points, *, derivatives=None):
    return jnp.mean(residuals(u, points, derivatives) ** 2)


points = adaptive(residuals, low=(0, -1), high=(1, 1))
network = lambda key: BurgersNetwork(key=key)


DEEP = Deep(
    residual=lambda u, point: residuals(u, point[None])[0], form=form, low=(0, -1), high=(1, 1)
)
PROBLEM = problem(__name__, "Burgers' equation", coords="tx", order=2)

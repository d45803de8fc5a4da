"""The Allen–Cahn equation u_t = 1e-4 u_xx + 5 (u − u³), periodic on −1 ≤ x ≤ 1, up to t = 1.

The initial values are x² cos πx (Raissi et al., 2019). The values ±1 are stable, with fronts about
0.01 wide between them. The reference is a Fourier method of fourth order in time. Points are chosen
where the residual is large.
"""

from functools import cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

import mpx_pde as mpx

from ._deep import Deep
from ._problem import Reference, adaptive, coordinate_mlp, grid, problem
from .references import allen_cahn


D, REACTION = 1e-4, 5.0
T, X = np.linspace(0, 1, 101), np.linspace(-1, 1, 257)


@cache
def reference(points: int = 4096, steps: int = 800) -> Reference:
    """Computes the reference with so many points and time steps, on the grid of `T` and `X`."""
    x = np.linspace(-1, 1, points, endpoint=False)
    given = {"diffusivity": D, "reaction": REACTION, "length": 2.0, "time": 1.0}
    start = x**2 * np.cos(np.pi * x)
    u = allen_cahn(start, **given, steps=steps, every=steps // 100)[:, :: points // 256]
    return Reference(grid(T, X), np.concatenate([u, u[:, :1]], axis=1).ravel())  # x = 1 is x = −1


def start(point: Float[Array, "2"]) -> Float[Array, ""]:
    """Returns u₀(t, x), the initial values at t = 0.

    The initial x² cos(πx) has a kink at ±1, which diffusion rounds off. So as t grows, the x² turns
    into (1 − cos πx) / 2, which is smooth and equals it at 0 and ±1.
    """
    t, x = point
    smooth = (1 - jnp.cos(jnp.pi * x)) / 2
    return (smooth + jnp.exp(-10 * t) * (x**2 - smooth)) * jnp.cos(jnp.pi * x)


class AllenCahnNetwork(eqx.Module):
    """u(t, x) = u₀(t, x) + t N(t, x), with N periodic in x."""

    mlp: mpx.nn.CoordinateMLP

    def __call__(self, point: Float[Array, "2"]) -> Float[Array, ""]:
        t, x = point
        return start(point) + t * self.mlp(jnp.stack([2 * t - 1, x]))


def residuals(
    u: Any, points: Float[Array, "batch 2"], derivatives: Any = None
) -> Float32[Array, " batch"]:
    """Returns u_t − D u_xx − 5 (u − u³), times e^(−5t).

    Where u is small, an error at time t has grown by e^(5 (1 − t)) at the end. Without the weight,
    training ends in a wrong solution, with fronts where early errors put them.
    """
    terms = mpx.partials(u, ["u", "u_t", "u_xx"], coords="tx", outputs="u", scaling=derivatives)
    d = jax.vmap(terms)(points)
    residual = d["u_t"] - D * d["u_xx"] - REACTION * (d["u"] - d["u"] ** 3)
    return jnp.exp(-REACTION * points[:, 0].astype(residual.dtype)) * residual


def loss(u, points, *, derivatives=None):
    return jnp.mean(residuals(u, points, derivatives) ** 2)


points = adaptive(residuals, low=(0, -1), high=(1, 1))
options = {"periodic": {1: 2.0}, "full_precision_last": True}
mlp = coordinate_mlp(2, "scalar", 32, 4, **options)
network = lambda key: AllenCahnNetwork(mlp(key))


def form(point, n):
    """Starts from initial values whose kink at ±1 spreads as heat does.

    The kink |d| at the distance d becomes d erf(d/s) + s/√π exp(−(d/s)²) with s² = 4 D t. A kink
    that stayed would be no solution, but would leave a residual only at ±1.
    """
    t, x = point
    d, s = 1 - jnp.abs(x), jnp.sqrt(4 * D * (t + 1e-9))
    rounded = d * jax.scipy.special.erf(d / s) + s / np.sqrt(np.pi) * jnp.exp(-((d / s) ** 2))
    return (1 - 2 * rounded + d**2) * jnp.cos(jnp.pi * x) + t * n


DEEP = Deep(
    residual=lambda u, point: residuals(u, point[None])[0],
    form=form,
    low=(0, -1),
    high=(1, 1),
    periodic={1: 2.0},
)
PROBLEM = problem(__name__, "Allen–Cahn equation", coords="tx", order=2)

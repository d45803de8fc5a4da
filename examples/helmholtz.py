"""The Helmholtz equation by a physics-informed network, in float32, float16 and bfloat16.

The problem (Wang et al., 2021) is

    Δu + u = f     in the square −1 ≤ x, y ≤ 1,     u = 0 on its boundary,

with f such that u = sin(πx) sin(4πy): four waves in one direction and one in the other. The network
stands behind a factor that vanishes on the boundary, and its Laplacian comes from `mpx.laplacian`,
which propagates value, gradient and Laplacian through each layer in one product.

    python examples/helmholtz.py
    python examples/helmholtz.py --quick
    python examples/helmholtz.py --precision float16 naive-float16 --seed 1

How it is trained stands in `_pinn.py`, and what precision means in its function `step`.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from _pinn import (
    PRECISIONS,
    Problem,
    Result,
    Training,
    arguments,
    choose,
    draw_fields,
    evaluate,
    run,
    run_main,
    uniform,
)
from jaxtyping import Array, Float, Float32, PRNGKeyArray
from numpy.typing import ArrayLike

import mpx_pde as mpx


BATCH = 256  # collocation points in a step
CANDIDATES = 4096  # points that they are chosen from
A = (1, 4)  # half waves in a unit length, in x and in y
K = 1.0  # the wave number
SIZE = np.pi**2 * (A[0] ** 2 + A[1] ** 2)  # −Δu of the exact solution, over u


def exact_solution(x: ArrayLike, y: ArrayLike) -> np.ndarray:
    return np.sin(A[0] * np.pi * np.asarray(x)) * np.sin(A[1] * np.pi * np.asarray(y))


# --- The network -----------------------------------------------------------------------------


class HelmholtzNetwork(eqx.Module):
    """u(x, y) = (1 − x²) (1 − y²) N(x, y)."""

    mlp: mpx.nn.CoordinateMLP

    def __init__(self, *, key: PRNGKeyArray):
        self.mlp = mpx.nn.CoordinateMLP(
            2, "scalar", 32, 3, key=key, fourier_features=(32, 1.0), full_precision_last=True
        )

    def __call__(self, point: Float[Array, "2"]) -> Float[Array, ""]:
        x, y = point
        return (1 - x**2) * (1 - y**2) * self.mlp(point)


# --- The equation ----------------------------------------------------------------------------


def source(points: Float[Array, "batch 2"]) -> Float32[Array, " batch"]:
    """f = Δu + k² u of the exact solution."""
    sines = jnp.prod(jnp.sin(jnp.pi * jnp.asarray(A, points.dtype)[None] * points), axis=1)
    return (K**2 - SIZE) * sines.astype(jnp.promote_types(sines.dtype, jnp.float32))


def residuals(
    u: HelmholtzNetwork, points: Float[Array, "batch 2"], derivatives: Any = None
) -> Float32[Array, " batch"]:
    """Δu + k² u − f over the size of f, by the product rule for the boundary factor."""
    terms = mpx.laplacian(u.mlp, ["n", "n_x", "n_y"], coords="xy", outputs="n", scaling=derivatives)
    n = jax.vmap(terms)(points)
    x, y = points.T
    p, q = 1 - x**2, 1 - y**2
    slopes = -2 * x * q * n["n_x"] - 2 * y * p * n["n_y"]
    laplacian = p * q * n["lap_n"] + 2 * slopes - 2 * (p + q) * n["n"]
    return (laplacian + K**2 * p * q * n["n"] - source(points)) / SIZE


def loss(
    u: HelmholtzNetwork, points: Float[Array, "batch 2"], *, derivatives: Any = None
) -> Float32[Array, ""]:
    return jnp.mean(residuals(u, points, derivatives) ** 2)


def choose_points(u: HelmholtzNetwork, key: PRNGKeyArray) -> Float32[Array, "steps batch 2"]:
    candidate_key, choice_key = jax.random.split(key)
    points = uniform(candidate_key, CANDIDATES, low=(-1, -1), high=(1, 1))
    return choose(choice_key, points, residuals(u, points), BATCH)


# --- Results ---------------------------------------------------------------------------------


X = Y = np.linspace(-1, 1, 129)
EXACT = exact_solution(*np.meshgrid(X, Y, indexing="ij"))


def errors(u: HelmholtzNetwork) -> dict[str, float]:
    error = np.linalg.norm(evaluate(u, X, Y) - EXACT) / np.linalg.norm(EXACT)
    return {"rel. L2 error": float(error)}


def draw(figure: Any, results: Sequence[Result]) -> None:
    fields = [evaluate(r.model, X, Y) for r in results]
    draw_fields(figure, results, fields, EXACT, (X, Y), names=("x", "y"), field="u(x, y)")


PROBLEM = Problem(
    name="helmholtz",
    title="Helmholtz equation",
    network=lambda key: HelmholtzNetwork(key=key),
    loss=loss,
    points=choose_points,
    errors=errors,
    draw=draw,
    derivatives=lambda _, mode: mpx.DerivativeScaling.per_direction("xy", order=2, mode=mode),
    full=Training(5_000, 2e-3),
    quick=Training(1_000, 5e-3),
)


def main(precisions: Sequence[str] = PRECISIONS, **options: Any) -> dict[str, Result]:
    """Trains in each precision; the options are those of `_pinn.run`."""
    # Behind Fourier features the first layer, which is float32, is half of so narrow a network.
    warnings.filterwarnings("ignore", category=mpx.PrecisionWarning)
    return run(PROBLEM, precisions, **options)


if __name__ == "__main__":
    run_main(main, arguments(__doc__, PROBLEM, out="outputs/helmholtz"))

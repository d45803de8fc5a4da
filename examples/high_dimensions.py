"""The Poisson equation in 1,000 dimensions by a physics-informed network and sampled derivatives.

The problem (Hu et al., *Tackling the curse of dimensionality with physics-informed neural
networks*, 2024) is

    Δu = f    for |x| < 1,    u = 0    on the sphere |x| = 1,

where f is such that the solution is

    u(x) = (1 − |x|²) Σᵢ cᵢ sin(xᵢ + cos(xᵢ₊₁) + xᵢ₊₁ cos(xᵢ)),

with 999 random coefficients cᵢ: no product of functions of one coordinate each, and no function of
the radius. A Laplacian is the sum of 1,000 second derivatives. Of these each step draws 16
(`samples` of `mpx.linear_operator`), the same for all of its points.

    python examples/high_dimensions.py
    python examples/high_dimensions.py --quick
    python examples/high_dimensions.py --precision float16 bfloat16 --seed 1

How it is trained stands in `_pinn.py`, and what precision means in its function `step`.
"""

from collections.abc import Sequence
from typing import Any

import _pinn
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
    run,
    run_main,
)
from jaxtyping import Array, Float, Float32, PRNGKeyArray

import mpx_pde as mpx


SIZE = 1000
COORDS = [f"x{i}" for i in range(SIZE)]
SAMPLES = 16  # second derivatives in a step
BATCH = 64  # collocation points in a step
COEFFICIENTS = np.random.default_rng(0).standard_normal(SIZE - 1).astype(np.float32)


# --- The solution ----------------------------------------------------------------------------


def interaction(x: Float[Array, "size"]) -> Float[Array, ""]:
    """Σᵢ cᵢ sin(xᵢ + cos(xᵢ₊₁) + xᵢ₊₁ cos(xᵢ))."""
    a, b = x[:-1], x[1:]
    return jnp.sum(COEFFICIENTS * jnp.sin(a + jnp.cos(b) + b * jnp.cos(a)))


def solution(x: Float[Array, "size"]) -> Float[Array, ""]:
    return (1 - jnp.sum(x**2)) * interaction(x)


def right_hand_side(x: Float[Array, "size"]) -> Float[Array, ""]:
    """The Laplacian of the solution, by hand.

    With g the sum of interactions, Δ((1 − r²) g) = (1 − r²) Δg − 4 x·∇g − 2 n g.
    """
    a, b = x[:-1], x[1:]
    phase = a + jnp.cos(b) + b * jnp.cos(a)
    slope_a, slope_b = 1 - b * jnp.sin(a), jnp.cos(a) - jnp.sin(b)
    curved = -b * jnp.cos(a) - jnp.cos(b)  # of the phase, in both coordinates together
    sin, cos = COEFFICIENTS * jnp.sin(phase), COEFFICIENTS * jnp.cos(phase)
    laplacian = jnp.sum(cos * curved - sin * (slope_a**2 + slope_b**2))
    outwards = jnp.sum(cos * (a * slope_a + b * slope_b))
    return (1 - jnp.sum(x**2)) * laplacian - 4 * outwards - 2 * SIZE * jnp.sum(sin)


# --- The network -----------------------------------------------------------------------------


class BallNetwork(eqx.Module):
    """u(x) = (1 − |x|²) N(x), which vanishes on the sphere."""

    mlp: eqx.nn.MLP

    def __init__(self, *, key: PRNGKeyArray):
        self.mlp = eqx.nn.MLP(SIZE, "scalar", 128, 3, activation=jnp.tanh, key=key)

    def __call__(self, point: Float[Array, "size"]) -> Float[Array, ""]:
        return (1 - jnp.sum(point**2)) * self.mlp(point)


# --- The equation ----------------------------------------------------------------------------


def loss(u: BallNetwork, batch: Any, *, derivatives: Any = None) -> Float32[Array, ""]:
    """The mean of (Δu − f)², over what f² comes to: its 2 n g has a sum of n random terms.

    The square of an estimate is larger than the square of its mean. Two estimates that are drawn
    apart have a product without that bias.
    """
    points, keys = batch

    def residuals(key):
        operator = mpx.linear_operator(
            u,
            {"lap": "laplacian"},
            coords=COORDS,
            outputs="u",
            scaling=derivatives,
            samples=SAMPLES // 2,
            key=key,
        )
        return jax.vmap(lambda x: operator(x)["lap_u"] - right_hand_side(x))(points)

    first, second = residuals(keys[0]), residuals(keys[1])
    return jnp.mean(first * second) / (4.0 * SIZE**3)


def ball(key: PRNGKeyArray, *shape: int) -> Float32[Array, "..."]:
    """Points with a uniform radius: of a uniform distribution all would lie next to the sphere."""
    direction_key, radius_key = jax.random.split(key)
    direction = jax.random.normal(direction_key, (*shape, SIZE))
    radius = jax.random.uniform(radius_key, (*shape, 1))
    return radius * direction / jnp.linalg.norm(direction, axis=-1, keepdims=True)


def choose_points(u: BallNetwork, key: PRNGKeyArray) -> tuple[Array, Array]:
    """Points for the next steps, and keys for what they sample."""
    del u
    points_key, sample_key = jax.random.split(key)
    steps = _pinn.STEPS_PER_CALL
    return ball(points_key, steps, BATCH), jax.random.split(sample_key, (steps, 2))


# --- Results ---------------------------------------------------------------------------------


TEST_POINTS = 2000


def compared(u: Any) -> tuple[Float[np.ndarray, "points"], Float[np.ndarray, "points"]]:
    """The network and the solution at points that no training saw."""
    x = ball(jax.random.key(12345), TEST_POINTS)
    values = eqx.filter_jit(lambda u, x: (jax.vmap(lambda p: u(p))(x), jax.vmap(solution)(x)))
    got, want = values(u, x)
    return np.asarray(got, np.float64), np.asarray(want, np.float64)


def errors(u: BallNetwork) -> dict[str, float]:
    got, want = compared(u)
    return {"rel. L2 error": float(np.linalg.norm(got - want) / np.linalg.norm(want))}


def draw(figure: Any, results: Sequence[Result]) -> None:
    """The networks over the solution, at the test points."""
    for axes, result in zip(
        np.ravel(figure.subplots(1, len(results), sharey=True)), results, strict=True
    ):
        got, want = compared(result.model)
        axes.plot(want, got, ".", markersize=2)
        ends = [want.min(), want.max()]
        axes.plot(ends, ends, "k", linewidth=0.8)
        axes.set(title=f"{result.label}: error {result.error:.1e}", xlabel="solution")
    np.ravel(figure.axes)[0].set_ylabel("network")


PROBLEM = Problem(
    name="high_dimensions",
    title="Poisson equation in 1,000 dimensions",
    network=lambda key: BallNetwork(key=key),
    loss=loss,
    points=choose_points,
    errors=errors,
    draw=draw,
    # A scale for each order: with one for each of 1,000 coordinates, half a million histograms.
    derivatives=lambda _, mode: mpx.DerivativeScaling.per_order(2, mode=mode),
    full=Training(6_000, 1e-3),
    quick=Training(1_000, 1e-3),
)


def main(precisions: Sequence[str] = PRECISIONS, **options: Any) -> dict[str, Result]:
    """Trains in each precision; the options are those of `_pinn.run`."""
    return run(PROBLEM, precisions, **options)


if __name__ == "__main__":
    run_main(main, arguments(__doc__, PROBLEM, out="outputs/high_dimensions"))

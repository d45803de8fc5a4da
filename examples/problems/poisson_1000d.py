"""The Poisson equation in the unit ball of 1,000 dimensions, by sampled second derivatives.

The equation is Δu = f for |x| < 1 and u = 0 on the sphere, with f such that the solution is

    u(x) = (1 − |x|²) Σᵢ cᵢ sin(xᵢ + cos(xᵢ₊₁) + xᵢ₊₁ cos(xᵢ))

with 999 random coefficients cᵢ. It is neither a product of functions of one coordinate each nor a
function of the radius (Hu et al., *Tackling the curse of dimensionality with physics-informed
neural networks*, 2024). A Laplacian is the sum of 1,000 second derivatives. Each step draws 16 of
these (`samples` of `mpx.linear_operator`), the same for all of its points.
"""

from functools import cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, PRNGKeyArray

import mpx_pde as mpx

from ._problem import STEPS_PER_CALL, Reference, problem


SIZE = 1000
COORDS = [f"x{i}" for i in range(SIZE)]
SAMPLES = 16  # second derivatives in a step
BATCH = 64  # collocation points in a step
COEFFICIENTS = np.random.default_rng(0).standard_normal(SIZE - 1).astype(np.float32)


def solution(x: Float[Array, "size"]) -> Float[Array, ""]:
    a, b = x[:-1], x[1:]
    return (1 - jnp.sum(x**2)) * jnp.sum(COEFFICIENTS * jnp.sin(a + jnp.cos(b) + b * jnp.cos(a)))


def right_hand_side(x: Float[Array, "size"]) -> Float[Array, ""]:
    """Returns the Laplacian of the solution, derived by hand.

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


class BallNetwork(eqx.Module):
    """u(x) = (1 − |x|²) N(x), which vanishes on the sphere."""

    mlp: eqx.nn.MLP

    def __init__(self, *, key: PRNGKeyArray):
        self.mlp = eqx.nn.MLP(SIZE, "scalar", 128, 3, activation=jnp.tanh, key=key)

    def __call__(self, point: Float[Array, "size"]) -> Float[Array, ""]:
        return (1 - jnp.sum(point**2)) * self.mlp(point)


def loss(u, batch, *, derivatives=None):
    """Returns the mean of (Δu − f)² over the size of f², whose 2 n g has a sum of n random terms.

    The square of an estimate is larger than the square of its mean. The product of two independent
    estimates does not have that bias.
    """
    points, keys = batch
    given = {"coords": COORDS, "outputs": "u", "scaling": derivatives, "samples": SAMPLES // 2}

    def residuals(key):
        operator = mpx.linear_operator(u, {"lap": "laplacian"}, key=key, **given)
        return jax.vmap(lambda x: operator(x)["lap_u"] - right_hand_side(x))(points)

    first, second = residuals(keys[0]), residuals(keys[1])
    return jnp.mean(first * second) / (4.0 * SIZE**3)


def ball(key: PRNGKeyArray, *shape: int) -> Float32[Array, "..."]:
    """Draws points with a uniform radius; uniform points would all lie next to the sphere."""
    direction_key, radius_key = jax.random.split(key)
    direction = jax.random.normal(direction_key, (*shape, SIZE))
    radius = jax.random.uniform(radius_key, (*shape, 1))
    return radius * direction / jnp.linalg.norm(direction, axis=-1, keepdims=True)


def choose_points(u: Any, key: PRNGKeyArray) -> tuple[Array, Array]:
    """Draws points for the next steps, and keys for their samples of derivatives."""
    del u
    points_key, sample_key = jax.random.split(key)
    keys = jax.random.split(sample_key, (STEPS_PER_CALL, 2))
    return ball(points_key, STEPS_PER_CALL, BATCH), keys


@cache
def reference() -> Reference:
    """Returns the solution at points outside the training."""
    points = ball(jax.random.key(12345), 2000)
    values = jax.jit(jax.vmap(solution))(points)
    return Reference(*(np.asarray(x, np.float64) for x in (points, values)))


PROBLEM = problem(
    __name__,
    "Poisson equation in 1,000 dimensions",
    order=2,
    network=lambda key: BallNetwork(key=key),
    points=choose_points,
    optimizer="adam",
    learning_rate=1e-3,
    steps=2000,
    # One scale per order: one per coordinate, for 1,000 coordinates, would take half a million
    # histograms.
    derivatives=lambda: mpx.DerivativeScaling.per_order(2),
)

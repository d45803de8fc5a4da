"""Relative errors of fields on the unit square, in float32 whatever the prediction is in."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


def gradient(
    u: Float32[Array, "*batch n m"], *, periodic: bool
) -> tuple[Float32[Array, "*batch n m"], Float32[Array, "*batch n m"]]:
    """Both derivatives on the unit square by central differences; one-sided at the boundary,
    unless that is periodic."""
    n, m = u.shape[-2:]
    if periodic:
        u = jnp.pad(u, [(0, 0)] * (u.ndim - 2) + [(1, 1)] * 2, mode="wrap")
    x, y = jnp.gradient(u, axis=(-2, -1))
    if periodic:
        x, y = x[..., 1:-1, 1:-1], y[..., 1:-1, 1:-1]
    return n * x, m * y


def _squares(u: Float32[Array, "*batch c n m"]) -> Float32[Array, "*batch"]:
    return jnp.sum(u**2, axis=(-3, -2, -1))


def relative_l2(
    prediction: Float[Array, "batch c n m"], truth: Float[Array, "batch c n m"]
) -> Float32[Array, ""]:
    """‖prediction − truth‖ / ‖truth‖, in float32, the mean over the batch."""
    prediction, truth = prediction.astype(jnp.float32), truth.astype(jnp.float32)
    return jnp.mean(jnp.sqrt(_squares(prediction - truth) / _squares(truth)))


def relative_h1(
    prediction: Float[Array, "batch c n m"], truth: Float[Array, "batch c n m"], *, periodic: bool
) -> Float32[Array, ""]:
    """The same with the norm ‖u‖² + ‖∇u‖² in place of ‖u‖²."""
    truth = truth.astype(jnp.float32)
    error = prediction.astype(jnp.float32) - truth

    def norm(u):
        x, y = gradient(u, periodic=periodic)
        return _squares(u) + _squares(x) + _squares(y)

    return jnp.mean(jnp.sqrt(norm(error) / norm(truth)))

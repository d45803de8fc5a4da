"""Steps that try many dampings at once on one eigendecomposition, and take that of the least loss.

So does DSGNAR (arXiv 2607.02194) with 24 trust radii.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from ._rivals import values


TRIED, SPREAD = 24, 4.0
"""The number of dampings that a step tries, and the powers of ten that they span on either side."""


class Tried(eqx.Module):
    """The state between steps: the damping relative to the largest squared norm of a column of the
    Jacobian, and what `Trainer` reads of a state."""

    damping: Any
    loss: Any
    rejected: Any
    iterations: Any


class Radii(eqx.Module):
    """Damped Gauss–Newton steps in the space of residuals, in float64."""

    residuals: tuple[Callable, ...]

    def init(self, model: Any) -> Tried:
        del model
        zero = jnp.zeros((), jnp.int32)
        return Tried(jnp.array(1e-3), jnp.array(jnp.inf), zero, zero)

    def update(self, model: Any, state: Tried, batches: Any) -> tuple[Any, Tried]:
        params, static = eqx.partition(model, eqx.is_inexact_array)
        theta, unravel = ravel_pytree(params)
        at = lambda flat: values(self.residuals, eqx.combine(unravel(flat), static), batches)
        r, jac = at(theta), jax.jacrev(at)(theta)
        size = jnp.max(jnp.sum(jac**2, axis=0))
        sizes, vectors = jnp.linalg.eigh(jac @ jac.T)
        tried = state.damping * 10.0 ** jnp.linspace(-SPREAD, SPREAD, TRIED)
        tried = jnp.clip(tried, 1e-14, 1e12)
        inverse = 1 / (jnp.maximum(sizes, 0.0)[:, None] + size * tried[None])
        steps = -jac.T @ (vectors @ (inverse * (vectors.T @ r)[:, None]))
        losses = jax.vmap(lambda step: jnp.sum(at(theta + step) ** 2), in_axes=1)(steps)
        losses = jnp.where(jnp.isfinite(losses), losses, jnp.inf)
        best, loss = jnp.argmin(losses), jnp.sum(r**2)
        take = losses[best] < loss
        new = unravel(jnp.where(take, theta + steps[:, best], theta))
        damping = jnp.where(take, tried[best], state.damping)
        rejected = state.rejected + (1 - take.astype(jnp.int32))
        after = Tried(damping, jnp.where(take, losses[best], loss), rejected, state.iterations)
        return eqx.combine(new, static), after

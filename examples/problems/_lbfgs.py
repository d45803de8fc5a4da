"""L-BFGS behind a training: on fixed points, with the gradients of the training's precision."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import mpx_pde as mpx


if TYPE_CHECKING:
    from ._runner import Trainer

ITERATIONS = 1000
BATCHES = 16  # of the training, whose points are those of all iterations


def mean_loss(problem: Any) -> Callable[..., Any]:
    """The loss of a problem on several batches at once."""

    def loss(model, points, **given):
        return jnp.mean(jax.vmap(lambda p: problem.loss(model, p, **given))(points))

    return loss


def gradient_of(
    trainer: "Trainer", model: Any, scaling: Any, points: Any
) -> tuple[Any, Callable, Callable]:
    """The arrays of the model, the loss as a function of them, and its value and gradient."""
    arrays, static = eqx.partition(model, eqx.is_inexact_array)

    @jax.custom_vjp
    def value(arrays):
        return gradient(arrays)[0]

    @trainer.transform
    def gradient(arrays):
        step = trainer.gradient(mean_loss(trainer.problem), scaling)
        out, _, finite, grads = step(eqx.combine(arrays, static), points)
        # A step into what cannot be evaluated is too long for the line search.
        return jnp.where(finite, out, jnp.inf), eqx.filter(grads, eqx.is_inexact_array)

    value.defvjp(gradient, lambda grads, ct: (jax.tree.map(lambda g: ct * g, grads),))
    return arrays, value, gradient


def iteration(value: Callable) -> Callable[[tuple], tuple]:
    """An iteration of L-BFGS, from arrays and state to those after it and the loss before it."""
    optimizer = optax.lbfgs()
    evaluate = optax.value_and_grad_from_state(value)

    def step(carry):
        arrays, state = carry
        out, grads = evaluate(arrays, state=state)
        updates, new = optimizer.update(grads, state, arrays, value=out, grad=grads, value_fn=value)
        moved = optax.apply_updates(arrays, updates)
        return mpx.select_tree(mpx.all_finite(moved), (moved, new), (arrays, state)), out

    return step


def finish(trainer: "Trainer", model: Any, scaling: Any, key: Any) -> Any:
    """The model after `ITERATIONS` more, with the scales where the training left them."""
    points = jax.tree.map(
        lambda x: x[: min(BATCHES, trainer.per_call)], trainer.next_points(model, key)
    )
    arrays, value, _ = gradient_of(trainer, model, scaling, points)
    step, count = iteration(value), min(ITERATIONS, trainer.steps)
    run = jax.jit(lambda carry: jax.lax.scan(lambda c, _: step(c), carry, length=count)[0])
    found, _ = run((arrays, optax.lbfgs().init(arrays)))
    return eqx.combine(found, eqx.filter(model, eqx.is_inexact_array, inverse=True))

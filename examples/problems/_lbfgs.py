"""L-BFGS after a training: on fixed points, with the gradients of the training's precision."""

from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import mpx_pde as mpx


if TYPE_CHECKING:
    from ._runner import Trainer

ITERATIONS = 1000
BATCHES = 16  # batches of the training whose points all iterations use


def finish(trainer: "Trainer", model: Any, scaling: Any, key: Any) -> Any:
    """Returns the model after `ITERATIONS` more, with the final scales of the training."""
    batches = min(BATCHES, trainer.per_call)
    points = jax.tree.map(lambda x: x[:batches], trainer.next_points(model, key))
    arrays, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(model, points, **given):
        return jnp.mean(jax.vmap(lambda p: trainer.problem.loss(model, p, **given))(points))

    @jax.custom_vjp
    def value(arrays):
        return gradient(arrays)[0]

    @trainer.transform
    def gradient(arrays):
        out, _, finite, grads = trainer.gradient(loss, scaling)(eqx.combine(arrays, static), points)
        # A step to where the loss cannot be evaluated is too long for the line search.
        return jnp.where(finite, out, jnp.inf), eqx.filter(grads, eqx.is_inexact_array)

    value.defvjp(gradient, lambda grads, ct: (jax.tree.map(lambda g: ct * g, grads),))
    optimizer = optax.lbfgs()
    evaluate = optax.value_and_grad_from_state(value)

    def iteration(carry, _):
        arrays, state = carry
        out, grads = evaluate(arrays, state=state)
        updates, new = optimizer.update(grads, state, arrays, value=out, grad=grads, value_fn=value)
        moved = optax.apply_updates(arrays, updates)
        return mpx.select_tree(mpx.all_finite(moved), (moved, new), carry), None

    count = min(ITERATIONS, trainer.steps)
    run = jax.jit(lambda carry: jax.lax.scan(iteration, carry, length=count)[0])
    return eqx.combine(run((arrays, optimizer.init(arrays)))[0], static)

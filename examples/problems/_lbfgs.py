"""L-BFGS behind a training: on fixed points, with the gradients of the training's precision."""

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


def finish(trainer: "Trainer", model: Any, scaling: Any, key: Any) -> Any:
    """The model after `ITERATIONS` more, with the scales where the training left them."""
    points = jax.tree.map(
        lambda x: x[: min(BATCHES, trainer.per_call)], trainer.next_points(model, key)
    )
    arrays, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(model, points, **given):
        return jnp.mean(jax.vmap(lambda p: trainer.problem.loss(model, p, **given))(points))

    @jax.custom_vjp
    def value(arrays):
        return _gradient(arrays)[0]

    @trainer.transform
    def _gradient(arrays):
        model = eqx.combine(arrays, static)
        out, _, finite, grads = trainer.gradient(loss, scaling)(model, points)
        # A step into what cannot be evaluated is too long for the line search.
        return jnp.where(finite, out, jnp.inf), eqx.filter(grads, eqx.is_inexact_array)

    value.defvjp(_gradient, lambda grads, ct: (jax.tree.map(lambda g: ct * g, grads),))
    optimizer = optax.lbfgs()
    evaluate = optax.value_and_grad_from_state(value)

    def body(carry, _):
        arrays, state = carry
        out, grads = evaluate(arrays, state=state)
        updates, new = optimizer.update(grads, state, arrays, value=out, grad=grads, value_fn=value)
        moved = optax.apply_updates(arrays, updates)
        usable = mpx.all_finite(moved)
        return mpx.select_tree(usable, (moved, new), (arrays, state)), out

    count = min(ITERATIONS, trainer.steps)
    run = jax.jit(lambda carry: jax.lax.scan(body, carry, length=count)[0])
    arrays, _ = run((arrays, optimizer.init(arrays)))
    return eqx.combine(arrays, static)

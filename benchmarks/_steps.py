"""One training step in mixed precision, written with each of the libraries, and by hand.

Each takes and returns the model, the state of the optimizer and the state of its loss scaling:
`step(model, opt_state, scaling, x, y)` returns these three and the loss.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jmp
import optax

import mpx_pde as mpx

from ._report import Report
from ._rivals import RivalMissing, require


START, PERIOD = 2.0**15, 2000
MIN_SCALE = 2.0**-24
MAX_SCALE = {"float16": 2.0**15, "bfloat16": 2.0**127}

UNSCALED = ("float32", "TF32")
"""The steps without mixed precision."""

optimizer = optax.adam(1e-3)


# By hand: what one would write without a library.


class HandScaling(NamedTuple):
    """The state of a dynamic loss scale."""

    scale: jax.Array
    counter: jax.Array
    skipped: jax.Array
    consecutive: jax.Array


def hand_scaling(scale: float) -> HandScaling:
    return HandScaling(jnp.array(scale, jnp.float32), *(jnp.array(0, jnp.int32) for _ in range(3)))


def _cast(tree: Any, dtype: str) -> Any:
    return jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, tree)


def step_by_hand(loss, dtype, period, model, opt_state, scaling, x, y):
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def scaled_loss(params):
        half, rows, targets = _cast((params, x, y), dtype)
        value = loss(eqx.combine(half, static), rows, targets)
        return value * scaling.scale, value

    grads, value = jax.grad(scaled_loss, has_aux=True)(params)
    grads = jax.tree.map(lambda g: g / scaling.scale, grads)
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))

    safe = jax.tree.map(lambda g: jnp.where(finite, g, jnp.zeros_like(g)), grads)
    updates, new_opt_state = optimizer.update(safe, opt_state, params)
    new_params = optax.apply_updates(params, updates)
    keep = lambda new, old: jnp.where(finite, new, old)
    params = jax.tree.map(keep, new_params, params)
    opt_state = jax.tree.map(keep, new_opt_state, opt_state)

    counted = scaling.counter + 1
    grow = finite & (counted >= period)
    grown = jnp.minimum(scaling.scale * 2, MAX_SCALE[dtype])
    shrunk = jnp.maximum(scaling.scale / 2, MIN_SCALE)
    skip = jnp.where(finite, 0, 1)
    scaling = HandScaling(
        jnp.where(finite, jnp.where(grow, grown, scaling.scale), shrunk),
        jnp.where(finite & ~grow, counted, 0),
        scaling.skipped + skip,
        (scaling.consecutive + 1) * skip,
    )
    return eqx.combine(params, static), opt_state, scaling, value


# By the libraries.


def step_by_library(loss, options, model, opt_state, scaling, x, y):
    value, scaling, finite, grads = mpx.filter_value_and_grad(loss, scaling, **options)(model, x, y)
    model, opt_state = mpx.optimizer_update(model, optimizer, opt_state, grads, finite)
    return model, opt_state, scaling, value


class JmpScaling(NamedTuple):
    """What changes in a `jmp.DynamicLossScale`. As a PyTree, that refuses leaves that are no
    arrays, which is what Equinox makes of them."""

    scale: jax.Array
    counter: jax.Array


def jmp_scaling(scale: float) -> JmpScaling:
    return JmpScaling(jnp.array(scale, jnp.float32), jnp.array(0, jnp.int32))


def step_by_jmp(loss, policy, period, model, opt_state, scaling, x, y):
    loss_scale = jmp.DynamicLossScale(*scaling, period=period)
    # `jmp.select_tree` takes trees of arrays only.
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def scaled_loss(params):
        half, rows, targets = policy.cast_to_compute((params, x, y))
        value = policy.cast_to_output(loss(eqx.combine(half, static), rows, targets))
        return loss_scale.scale(value), value

    grads, value = jax.grad(scaled_loss, has_aux=True)(params)
    grads = loss_scale.unscale(grads)
    finite = jmp.all_finite(grads)
    loss_scale = loss_scale.adjust(finite)
    updates, new_opt_state = optimizer.update(grads, opt_state, params)
    new = optax.apply_updates(params, updates), new_opt_state
    params, opt_state = jmp.select_tree(finite, new, (params, opt_state))
    scaling = JmpScaling(loss_scale.loss_scale, loss_scale.counter)
    return eqx.combine(params, static), opt_state, scaling, value


def mpx_scaling(scale: float, period: int) -> Any:
    return require("mpx").DynamicLossScaling(
        jnp.array(scale, jnp.float32), jnp.ones((), jnp.float32), period=period
    )


def step_by_mpx(loss, dtype, model, opt_state, scaling, x, y):
    rival = require("mpx")
    rival.set_half_precision_datatype(getattr(jnp, dtype))
    value, scaling, finite, grads = rival.filter_value_and_grad(loss, scaling)(model, x, y)
    model, opt_state = rival.optimizer_update(model, optimizer, opt_state, grads, finite)
    return model, opt_state, scaling, value


def step_in_float32(loss, model, opt_state, scaling, x, y):
    value, grads = eqx.filter_value_and_grad(loss)(model, x, y)
    updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt_state, scaling, value


def with_products(step: Callable, precision: str) -> Callable:
    """The step with its float32 products in `precision`."""

    def run(*args):
        with jax.default_matmul_precision(precision):
            return step(*args)

    return run


def policy_of(dtype: str) -> str:
    return f"params=float32,compute={dtype},output=float32"


Rival = tuple[Callable[..., Any], Any]


def rivals(
    loss: Callable, dtype: str, scale: float = START, period: int = PERIOD
) -> dict[str, Rival]:
    """The steps by name, each with the state of its scaling. Without MPX if that is missing; on a
    GPU also in TF32."""
    options = {"policy": policy_of(dtype)}
    jmp_policy = jmp.get_policy(policy_of(dtype))
    found: dict[str, Rival] = {
        "by hand": (partial(step_by_hand, loss, dtype, period), hand_scaling(scale)),
        "mpx_pde": (
            partial(step_by_library, loss, options),
            mpx.DynamicLossScaling(scale, period=period),
        ),
        "jmp": (partial(step_by_jmp, loss, jmp_policy, period), jmp_scaling(scale)),
    }
    with suppress(RivalMissing):  # `note_missing` says so, once
        found["MPX"] = partial(step_by_mpx, loss, dtype), mpx_scaling(scale, period)
    float32 = partial(step_in_float32, loss)
    found["float32"] = float32, hand_scaling(1.0)
    if jax.default_backend() == "gpu":  # whose float32 products are TF32, unless told
        found["float32"] = with_products(float32, "highest"), hand_scaling(1.0)
        found["TF32"] = with_products(float32, "tensorfloat32"), hand_scaling(1.0)
    return found


def note_missing(report: Report) -> None:
    """Says which of the rivals is left out."""
    try:
        require("mpx")
    except RivalMissing as e:
        report.note(f"MPX is left out. {e}")

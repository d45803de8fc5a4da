"""What is trained, and one step of it: written with each of the libraries, and by hand.

A `Task` is a network, its loss, its data and the rivals that take its step. A step takes the
optimizer, a state of network, optimizer and loss scaling, and a batch; it returns the new state,
the loss, and what stands beside the loss, such as predictions.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jmp
import optax

import mpx_pde as mpx

from ._deviceless import Compiled, compile_for
from ._report import Report, require


START, PERIOD = 2.0**15, 2000
MIN_SCALE = 2.0**-24
MAX_SCALE = {"float16": 2.0**15, "bfloat16": 2.0**127}

HIGHEST, TF32 = "highest", "tensorfloat32"
"""What JAX may make of products of float32."""

adam = optax.adam(1e-3)

Loss = Callable[..., tuple[Any, Any]]
"""From a network and a batch to the loss, and what stands beside it."""


class Rival(NamedTuple):
    """A way to take the step of a task.

    **Attributes:**

    - `step`: from optimizer, state and batch.
    - `scaling`: the first state of its loss scaling.
    - `products`: what JAX may make of products of float32 that do not ask for a precision.
    - `model`: its network, where that is another than the task's.
    - `needs`: the modules of other libraries that it takes, which need not be there before.
    """

    step: Callable
    scaling: Callable[[], Any] = partial(mpx.DynamicLossScaling, START)
    products: str | None = None
    model: Callable[[], Any] | None = None
    needs: tuple[str, ...] = ()


class Task(NamedTuple):
    """What is trained.

    **Attributes:**

    - `where`: what records call it, size and all.
    - `model`: makes the network, the same each time.
    - `loss`: of network and batch, in the precision of both.
    - `batches`: makes the data, in NumPy.
    - `batch`: the shapes of one of these.
    - `rivals`: by name.
    """

    where: dict[str, Any]
    model: Callable[[], Any]
    loss: Loss
    batches: Callable[[], Sequence[Any]]
    batch: Any
    rivals: Mapping[Any, Rival]
    optimizer: optax.GradientTransformation = adam

    def there(self, report: Report) -> dict[Any, Rival]:
        """The rivals whose libraries are installed, and a note for those that are not."""
        return {name: r for name, r in self.rivals.items() if report.installed(*r.needs)}

    def state(self, rival: Rival) -> tuple[Any, Any, Any]:
        """What a rival begins with."""
        model = (rival.model or self.model)()
        opt_state = self.optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        return model, opt_state, rival.scaling()

    def step(self, rival: Rival) -> Callable[[Any, Any], tuple[Any, Any, Any]]:
        """From state and batch to the new state, the loss and what stands beside it."""

        def run(state, batch):
            with jax.default_matmul_precision(rival.products):
                return rival.step(self.optimizer, state, batch)

        return run

    def compiled(self, target: str, rival: Rival, options: Any = None) -> Compiled:
        """A step that takes over the memory of its state, for a target; `options` are XLA's."""
        state = eqx.filter_eval_shape(lambda: self.state(rival))
        parts = self.step(rival), state, self.batch
        return compile_for(target, *parts, donate=(0,), compiler_options=options)


def alone(loss: Callable[..., Any]) -> Loss:
    """A loss beside which nothing stands."""
    return lambda model, batch, **given: (loss(model, batch, **given), None)


# --- By hand: what one would write without a library -----------------------------------------


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


def by_hand(loss: Loss, dtype: str) -> Rival:
    """Everything cast, with a dynamic loss scale."""

    def step(optimizer, state, batch):
        model, opt_state, scaling = state
        params, static = eqx.partition(model, eqx.is_inexact_array)

        def scaled_loss(params):
            half, half_batch = _cast((params, batch), dtype)
            value, aux = loss(eqx.combine(half, static), half_batch)
            return value * scaling.scale, (value, aux)

        grads, (value, aux) = jax.grad(scaled_loss, has_aux=True)(params)
        grads = jax.tree.map(lambda g: g / scaling.scale, grads)
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))

        safe = jax.tree.map(lambda g: jnp.where(finite, g, jnp.zeros_like(g)), grads)
        updates, new_opt_state = optimizer.update(safe, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        keep = lambda new, old: jnp.where(finite, new, old)
        params = jax.tree.map(keep, new_params, params)
        opt_state = jax.tree.map(keep, new_opt_state, opt_state)

        counted = scaling.counter + 1
        grow = finite & (counted >= PERIOD)
        grown = jnp.minimum(scaling.scale * 2, MAX_SCALE[dtype])
        shrunk = jnp.maximum(scaling.scale / 2, MIN_SCALE)
        skip = jnp.where(finite, 0, 1)
        scaling = HandScaling(
            jnp.where(finite, jnp.where(grow, grown, scaling.scale), shrunk),
            jnp.where(finite & ~grow, counted, 0),
            scaling.skipped + skip,
            (scaling.consecutive + 1) * skip,
        )
        return (eqx.combine(params, static), opt_state, scaling), value, aux

    return Rival(step, partial(hand_scaling, START))


def in_float32(loss: Loss, products: str | None = None) -> Rival:
    """The plain step."""

    def step(optimizer, state, batch):
        model, opt_state, scaling = state
        (value, aux), grads = eqx.filter_value_and_grad(loss, has_aux=True)(model, batch)
        updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return (eqx.apply_updates(model, updates), opt_state, scaling), value, aux

    return Rival(step, partial(hand_scaling, 1.0), products)


# --- By the libraries ------------------------------------------------------------------------


def by_library(loss: Loss, **options: Any) -> Rival:
    """By this library; `options` are those of `mpx.filter_value_and_grad`."""

    def step(optimizer, state, batch):
        model, opt_state, scaling = state
        gradient = mpx.filter_value_and_grad(loss, scaling, has_aux=True, **options)
        (value, aux), scaling, finite, grads = gradient(model, batch)
        model, opt_state = mpx.optimizer_update(model, optimizer, opt_state, grads, finite)
        return (model, opt_state, scaling), value, aux

    return Rival(step)


def by_jmp(loss: Callable[[jmp.Policy], Loss], dtype: str, scaled: bool = True) -> Rival:
    """By jmp as its README has it; the loss may take from its policy what casts to its output."""
    policy = jmp.get_policy(policy_of(dtype))

    def step(optimizer, state, batch):
        model, opt_state, scaling = state
        scaler = jmp.DynamicLossScale(*scaling, period=PERIOD) if scaled else jmp.NoOpLossScale()
        # `jmp.select_tree` takes trees of arrays only.
        params, static = eqx.partition(model, eqx.is_inexact_array)

        def scaled_loss(params):
            half, half_batch = policy.cast_to_compute((params, batch))
            value, aux = loss(policy)(eqx.combine(half, static), half_batch)
            value = policy.cast_to_output(value)
            return scaler.scale(value), (value, aux)

        grads, (value, aux) = jax.grad(scaled_loss, has_aux=True)(params)
        grads = scaler.unscale(grads)
        finite = jmp.all_finite(grads)
        updates, new_opt_state = optimizer.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_opt_state
        params, opt_state = jmp.select_tree(finite, new, (params, opt_state))
        if scaled:
            adjusted: Any = scaler.adjust(finite)
            scaling = adjusted.loss_scale, adjusted.counter
        return (eqx.combine(params, static), opt_state, scaling), value, aux

    # As a PyTree, its loss scale refuses leaves that are no arrays, which is what Equinox makes of
    # them: here is what changes in one.
    start = lambda: (jnp.array(START, jnp.float32), jnp.array(0, jnp.int32))
    return Rival(step, start if scaled else tuple)


def by_mpx(loss: Loss, dtype: str, scale: float = START, products: str | None = None) -> Rival:
    """By MPX (mixed-precision-for-JAX)."""

    def step(optimizer, state, batch):
        rival = require("mpx")
        rival.set_half_precision_datatype(getattr(jnp, dtype))
        model, opt_state, scaling = state
        gradient = rival.filter_value_and_grad(loss, scaling, has_aux=True)
        (value, aux), scaling, finite, grads = gradient(model, batch)
        model, opt_state = rival.optimizer_update(model, optimizer, opt_state, grads, finite)
        return (model, opt_state, scaling), value, aux

    def start():
        scales = jnp.array(scale, jnp.float32), jnp.ones((), jnp.float32)
        return require("mpx").DynamicLossScaling(*scales, period=PERIOD)

    return Rival(step, start, products, needs=("mpx",))


def policy_of(dtype: str) -> str:
    return f"params=float32,compute={dtype},output=float32"


def precision_options(precision: str) -> dict[str, Any]:
    """Of `mpx.filter_value_and_grad`."""
    return {"use_mixed_precision": precision != "float32", "policy": policy_of(precision)}


def rivals(loss: Loss, dtype: str = "float16") -> dict[str, Rival]:
    """The steps by name; on a GPU also in TF32."""
    found = {
        "by hand": by_hand(loss, dtype),
        "mpx_pde": by_library(loss, policy=policy_of(dtype)),
        "jmp": by_jmp(lambda policy: loss, dtype),
        "MPX": by_mpx(loss, dtype),
        "float32": in_float32(loss),
    }
    if jax.default_backend() == "gpu":  # whose float32 products are TF32, unless told
        found["TF32"] = in_float32(loss, TF32)
        found["float32"] = in_float32(loss, HIGHEST)
    return found

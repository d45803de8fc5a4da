"""The first step, taken again with smaller scales until it can be taken.

A run that starts at a scale of 2^15 loses the updates that it takes to find the right one, and with
them batches that nobody sees again. So as long as no step has been taken, a step that overflowed is
evaluated again inside of the step itself.
"""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr
from jaxtyping import Array, Bool

from .._loss_scaling import AbstractLossScaling, DynamicLossScaling
from .._tree import select_tree, with_fields
from .._varying import mark_varying, varying_axes
from ..derivatives import Scaling
from ..interpret._precision_report import arrays_of


ATTEMPTS = 80
"""How often a step is evaluated at most: from 2^15 to the smallest loss scale and derivative scale
it takes 64."""

# What a step returns: `((value, aux), scaling, finite, grads)`.
Step = Callable[[Any], tuple]


def can_search(scaling: Any) -> bool:
    """Whether a scaling knows if a step has been taken, and follows what it sees."""
    return isinstance(scaling, DynamicLossScaling | Scaling)


def _moving(scaling: Any) -> list:
    """What of a scaling another attempt changes. Nothing is skipped, so nothing is counted."""
    caution = [scaling.derivatives.caution] if isinstance(scaling, Scaling) else []
    return [*_scales(scaling), *caution]


def _moved(scaling: Any, moving: Sequence[Array]) -> Any:
    """`scaling` with these for what [`_moving`][] gives."""
    if isinstance(scaling, Scaling):
        *loss, exponents, caution = moving
        derivatives = with_fields(scaling.derivatives, exponents=exponents, caution=caution)
        return with_fields(scaling, loss=_moved(scaling.loss, loss), derivatives=derivatives)
    return with_fields(scaling, loss_scaling=moving[0]) if moving else scaling


def _scales(scaling: AbstractLossScaling) -> list[Array]:
    if isinstance(scaling, Scaling):
        return [*_scales(scaling.loss), scaling.derivatives.exponents]
    return [scaling.loss_scaling] if isinstance(scaling, DynamicLossScaling) else []


def _mendable(scaling: Any, out: tuple, axis_name: Any) -> tuple[Any, Bool[Array, ""]]:
    """The scaling to try next, and whether there is a point in it."""
    (value, _), adjusted, finite, _ = out
    after = _moved(scaling, _moving(adjusted))
    changed = [jnp.any(x != y) for x, y in zip(_scales(after), _scales(scaling), strict=True)]
    # The loss is not scaled when it is computed: no loss scale makes it finite. A derivative in it
    # is scaled.
    helps = _on_any(jnp.isfinite(value), _names(axis_name))
    if isinstance(scaling, Scaling):
        helps = helps | ~adjusted.derivatives.finite(adjusted.derivatives)
    none_taken = scaling.taken_steps == 0
    return after, none_taken & ~finite & helps & jnp.any(jnp.stack(changed))


def _finished(out: tuple, first: AbstractLossScaling) -> tuple:
    """A step that no scale could save is an ordinary skipped step."""
    result, adjusted, finite, grads = out
    return result, select_tree(finite, adjusted, first), finite, grads


def search_eagerly(step: Step, scaling: AbstractLossScaling, out: tuple, axis_name: Any) -> tuple:
    """The step that can be taken, outside of a trace. `out` is what it returned at `scaling`."""
    first = out[1]
    for _ in range(ATTEMPTS - 1):
        scaling, mendable = _mendable(scaling, out, axis_name)
        if not mendable:
            break
        out = step(scaling)
    return _finished(out, first)


def _counts(scaling: Any) -> list:
    """What a scaling was adjusted by, beside whether the gradients were finite."""
    return [scaling.derivatives.counts] if isinstance(scaling, Scaling) else []


def _varying_like(scaling: Any, types: Any) -> Any:
    """A scaling that varies over devices where the one that comes back from a step does."""

    def mark(x, aval):
        return mark_varying(x, varying_axes(aval)) if isinstance(aval, ShapedArray) else x

    return jtu.tree_map(mark, scaling, types)


def _names(axis_name: Any) -> tuple[str, ...]:
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    return tuple(name for name in names if name is not None)


def _on_any(flag: Bool[Array, ""], axes: tuple[str, ...]) -> Bool[Array, ""]:
    """Whether `flag` holds on any device along mapped axes."""
    return lax.psum(flag.astype(jnp.int32), axes) > 0 if axes else flag


def _zeros(aval: Any) -> Array:
    # Axes of a mesh that are explicit are part of a type.
    explicit = any(axis is not None for axis in aval.sharding.spec)
    zeros = jnp.zeros(aval.shape, aval.dtype, device=aval.sharding if explicit else None)
    return mark_varying(zeros, varying_axes(aval))


def search(
    step: Callable[[list[Array]], list[Array]],
    assemble: Callable[[list[Array]], tuple],
    avals: Sequence[Any],
    scaling: AbstractLossScaling,
    axis_name: Any,
) -> tuple[list[Array], list[Array]]:
    """The arrays that a step returns at the largest scales at which it can be taken, and the arrays
    of a scaling with those scales.

    **Arguments:**

    - `step`: takes the arrays of a scaling, and returns those that `assemble` puts together.
    - `avals`: their types.
    - `scaling`: where to start.
    - `axis_name`: the mapped axes whose devices must agree.
    """
    flat = lambda tree: jtu.tree_leaves(eqx.filter(tree, eqx.is_array))
    # All devices take the collectives of a step equally often.
    everywhere = (*jax.sharding.get_abstract_mesh().manual_axes, *_names(axis_name))
    everywhere = tuple(dict.fromkeys(everywhere))
    is_type = lambda x: isinstance(x, ShapedArray)
    types = assemble(list(avals))
    start = _varying_like(scaling, types[1])

    # What XLA carries through a loop it copies, each number in a kernel: as little of the scaling
    # as possible. The rest follows from whether the step can be taken and from what was counted.
    # (As one array, small results would cost fewer still, but parameters that are sharded would be
    # gathered for it.)
    kept, static = eqx.partition((types[0], *types[2:]), is_type)
    kept, treedef = jtu.tree_flatten(kept)

    def body(carry):
        attempt, moving, counts, _ = carry
        at = _moved(start, moving)
        out = assemble(step(flat(at)))
        result, adjusted, finite, grads = out
        following, mendable = _mendable(at, out, axis_name)
        again = _on_any(mendable, everywhere)
        # Where nothing more is tried, the scales stay those of this attempt.
        going_on = mendable & (attempt < ATTEMPTS - 1)
        moving = [
            jnp.where(going_on, x, y) for x, y in zip(_moving(following), moving, strict=True)
        ]
        of_this = finite | (attempt == 0)
        counts = [jnp.where(of_this, x, y) for x, y in zip(_counts(adjusted), counts, strict=True)]
        attempt = jnp.where(again, attempt + 1, ATTEMPTS)
        return attempt, moving, counts, flat((result, finite, grads))

    carry = (
        jnp.zeros((), jnp.int32),
        _moving(start),
        [_zeros(aval) for aval in _counts(types[1])],
        [_zeros(aval) for aval in kept],
    )
    _, found, counts, kept = lax.while_loop(lambda carry: carry[0] < ATTEMPTS, body, carry)
    result, finite, grads = eqx.combine(treedef.unflatten(kept), static)
    # A step that no scale could save is an ordinary skipped step.
    taken = [jnp.where(finite, x, y) for x, y in zip(found, _moving(start), strict=True)]
    adjusted = _moved(start, taken).adjust(finite, *counts)
    return flat((result, adjusted, finite, grads)), flat(_moved(start, found))


def differentiable_search(
    closed: ClosedJaxpr,
    values: list[Array],
    places: Sequence[int],
    assemble: Callable[[list[Array]], tuple],
    scaling: AbstractLossScaling,
    axis_name: Any,
) -> list[Array]:
    """What a step of a jaxpr returns at the largest scales at which it can be taken.

    A loop has no derivative in reverse mode. So its derivative is that of the step at the scales
    that were found.

    **Arguments:**

    - `closed`, `values`: the step and its arguments.
    - `places`: which of them are the arrays of `scaling`.
    - `assemble`, `scaling`, `axis_name`: as for `search`.
    """

    jaxpr = closed.jaxpr

    def at(consts, values, arrays):
        values = list(values)
        for i, x in zip(places, arrays, strict=True):
            values[i] = x
        return arrays_of(ClosedJaxpr(jaxpr, consts), values)

    # A rule that is kept for later may hold no value of the trace that it was made in.
    arrays, static = eqx.partition(scaling, eqx.is_array)
    treedef = jtu.tree_structure(arrays)
    types = closed.out_avals

    def found(consts, values):
        def step(arrays):
            # Tied to the scales, so that XLA keeps no part of the forward pass outside of the loop:
            # it would be in memory all at once.
            return at(*lax.optimization_barrier((consts, values, arrays)))

        start = treedef.unflatten([values[i] for i in places])
        return search(step, assemble, types, eqx.combine(start, static), axis_name)

    run: Any = jax.custom_jvp(lambda consts, values: found(consts, values)[0])

    @run.defjvp
    def _(primals, tangents):
        consts, values = primals
        out, arrays = found(consts, values)
        _, tangent = jax.jvp(lambda consts, values: at(consts, values, arrays), primals, tangents)
        return out, tangent

    return run(list(closed.consts), values)

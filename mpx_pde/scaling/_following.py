"""How a scaling follows the steps of a training, beside what its `adjust` does after each."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._util._types import PyTree
from ..precision._dtypes import LARGEST_SCALE
from ..precision._tree import all_below, with_fields
from ._derivatives import Scaling, loss_scaling_of
from ._loss import DynamicLossScaling


_DESCENT = 4
"""Powers of two by which a scale falls per skipped step until a step has been taken. Without this,
a run would lose up to a dozen steps before its first one."""

_ASCENT = 4
"""Powers of two by which the scale of a loss rises per step, until a step has been skipped, while
the scaled gradient leaves room for them below 1. A gradient is a sum over many points, so the
cotangents of these may be below the range of float16. Where they are much larger than the gradient
instead, each power too many costs a skipped step."""

_VANISHED = 4
"""Gradients that may have vanished before the scale of a loss no longer rises for small ones."""

_FAINT = 8
"""Powers of two below 1 from which on a gradient at the largest scale counts as vanished. Float16
ends 24 powers below 1, and cotangents of single points are smaller than their sum."""


def is_small(grads: PyTree, scaling: Any, top: float) -> Array:
    """Returns whether gradients, which are not scaled, are so small that the scale of the loss
    should rise. They never are for a scale that does not follow the gradients.

    A scale that can only rise to the `top` of float16, since the loss itself is float16, does so
    only for gradients of which even that scale leaves little.
    """
    loss = loss_scaling_of(scaling)
    if not isinstance(loss, DynamicLossScaling):
        return jnp.array(False)
    narrow = top < LARGEST_SCALE
    return all_below(grads, 2.0**-_FAINT / top if narrow else 2.0**-_ASCENT / loss.loss_scaling)


def followed(before: Any, adjusted: Any, small: Array | None, top: float, vanished: Array) -> Any:
    """Returns the scaling for the next step.

    **Arguments:**

    - `before`: the scaling of this step.
    - `adjusted`: what its `adjust` returned.
    - `small`: whether the scale of the loss should rise, or `None` if it never should.
    - `top`: the largest scale that it can rise to.
    - `vanished`: whether the gradient vanished.
    """
    adjusted = _descended(before, adjusted)
    if small is not None:
        adjusted = _ascended(before, adjusted, small, top)
    return _counted(adjusted, vanished)


def _descended(before: Any, after: Any) -> Any:
    """Returns the adjusted scaling `after`, but lets scales that fell fall faster if no step has
    been taken yet.
    """

    def faster(scale: Array, adjusted: Array, fallen: Array, lowest: Any) -> Array:
        fell = (after.taken_steps == 0) & (adjusted < scale)
        return jnp.where(fell, jnp.minimum(adjusted, jnp.maximum(fallen, lowest)), adjusted)

    if isinstance(before, Scaling):
        exponents, lowest = before.derivatives.exponents, before.derivatives.rule.lowest
        new = after.derivatives.exponents
        new = faster(exponents, new, exponents - _DESCENT, np.array(lowest, np.int32))
        derivatives = with_fields(after.derivatives, exponents=new)
        loss = _descended(before.loss, after.loss)
        return with_fields(after, loss=loss, derivatives=derivatives)
    if isinstance(before, DynamicLossScaling):
        scale, lowest = before.loss_scaling, before.min_loss_scaling
        new = faster(scale, after.loss_scaling, scale * 2.0**-_DESCENT, lowest)
        return with_fields(after, loss_scaling=new)
    return after


def _ascended(before: Any, after: Any, small: Array, top: float) -> Any:
    """Returns the adjusted scaling `after`, with a higher scale of the loss if the gradients are
    `small` and no step was skipped so far.

    A few gradients that vanish may be below the range of float16, many are zero for another reason.
    They are counted before this step: if the next scale depended on the zeros of this one, XLA for
    GPUs (JAX 0.10.2) would no longer look for them in the kernels of the update.
    """
    if isinstance(before, Scaling):
        return with_fields(after, loss=_ascended(before.loss, after.loss, small, top))
    if not isinstance(before, DynamicLossScaling):
        return after
    top = before.max_loss_scaling or top
    raised = jnp.minimum(before.loss_scaling * 2.0**_ASCENT, top)
    few = (after.skipped_steps == 0) & (before.vanished_steps < _VANISHED)
    rises = small & few & (raised > after.loss_scaling)
    return with_fields(after, loss_scaling=jnp.where(rises, raised, after.loss_scaling))


def _counted(scaling: Any, vanished: Array) -> Any:
    """Returns a scaling that counts one more vanished gradient if `vanished`."""
    if isinstance(scaling, Scaling):
        loss = _counted(scaling.loss, vanished)
        return with_fields(scaling, loss=loss, vanished=scaling.vanished + vanished)
    if isinstance(scaling, DynamicLossScaling):
        return with_fields(scaling, vanished=scaling.vanished + vanished)
    return scaling

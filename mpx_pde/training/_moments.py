"""Squares of gradients in an optimizer state, for which float16 has no numbers."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.extend.core import ClosedJaxpr

from .._util._calls import called
from .._util._types import PyTree
from ..precision._cast import widen
from ..program import _tables as tables
from ..program._flat import Constant, flatten
from ..program._rebind import bodies_in
from ..program._warnings import warn_user


def warn_of_squares(update: Callable, grads: PyTree, state: PyTree, params: PyTree) -> None:
    """Issues a warning if an optimizer keeps squares of gradients in a state of float16. There they
    are 0 below 2^-25, and an update that is divided by their root is far too large.

    **Arguments:**

    - `update`: the update function of the optimizer.
    - `grads`, `params`: its arguments, widened to float32.
    - `state`: its state as it is.
    """
    try:
        squares = _squares(update, grads, state, params)
    except Exception:  # the update raises it in its turn
        return
    if squares:
        warn_user(
            f"`{called()}` got an `optimizer_state` that holds squares of gradients in float16, at "
            f"{squares[0]} for example. Of small gradients, in Adam below 5e-3, they are 0, and "
            "updates that are divided by their root far too large. Make the state from float32, in "
            "which it stays: `optimizer.init(mpx_pde.cast_to_float32(eqx.filter(model, "
            "eqx.is_inexact_array)))`. Or take bfloat16 parameters. If it is meant, filter "
            "`mpx_pde.PrecisionWarning`."
        )


def _squares(update: Callable, grads: PyTree, state: PyTree, params: PyTree) -> list[str]:
    """Returns the places of squares of gradients in the float16 arrays of an optimizer state."""
    kept = jtu.tree_leaves_with_path(eqx.filter(state, eqx.is_array))
    if not any(x.dtype == jnp.float16 for _, x in kept):
        return []
    closed, out, _ = eqx.filter_make_jaxpr(update)(grads, widen(state), params)
    gradients = len(jtu.tree_leaves(eqx.filter(grads, eqx.is_array)))
    degrees = [1.0] * gradients + [0.0] * (len(closed.in_avals) - gradients)
    new = _degrees(closed, degrees)[len(jtu.tree_leaves(out[0])) :]
    pairs = zip(kept, new, strict=True)
    return [jtu.keystr(at) for (at, x), n in pairs if x.dtype == jnp.float16 and n >= 2]


def _degrees(closed: ClosedJaxpr, degrees: Sequence[float]) -> list[float]:
    """Returns the power of the gradients that each result grows with, from that of each operand."""
    flat = flatten(closed, forward_mode=False)
    of = dict(zip(flat.inputs, degrees, strict=True))

    def degree(x: Any) -> float:
        return 0.0 if isinstance(x, Constant) else of.get(x, 0.0)

    for step in flat.steps:
        each = [degree(x) for x in step.inputs]
        if bodies := bodies_in(step.eqn):
            branches = [_degrees(body, each[start:]) for body, start, _ in bodies]
            results = [max(branch) for branch in zip(*branches, strict=True)]
        elif step.name in tables.CONSTANT:  # signs and comparisons
            results = [0.0] * len(step.outputs)
        elif (exponent := step.exponent(each)) is not None:
            results = [exponent]
        else:
            results = [max(each, default=0.0)] * len(step.outputs)
        of.update(zip(step.outputs, results, strict=True))
    return [degree(x) for x in flat.outputs]

"""Streams that are known while tracing: constant derivatives of coordinates that are only moved.

They are NumPy arrays and are computed with NumPy. JAX would compile each operation on them: slicing
each of a thousand coordinates took minutes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from ...program import _tables as tables
from ...program._flat import Step
from ._jets import Jet, bind_primals, is_inexact
from ._plan import Index, Plan
from ._together import spread_together


def _slice(lead: int, x: np.ndarray, start_indices, limit_indices, strides) -> Any:
    strides = strides or (1,) * len(start_indices)
    cuts = map(slice, start_indices, limit_indices, strides)
    return x[(slice(None),) * lead + tuple(cuts)]


def _transpose(lead: int, x: np.ndarray, permutation) -> Any:
    return x.transpose(*range(lead), *(lead + i for i in permutation))


def _reshape(lead: int, x: np.ndarray, new_sizes, dimensions, **_) -> Any:
    # In column order, the array is transposed first.
    x = x if dimensions is None else _transpose(lead, x, dimensions)
    return x.reshape((*x.shape[:lead], *new_sizes))


def _convert(lead: int, x: np.ndarray, new_dtype, **_) -> Any:
    # Streams are not rounded here, but they are complex where their value is.
    is_complex = np.issubdtype(new_dtype, np.complexfloating)
    return x.astype(np.result_type(x, np.complex64)) if is_complex else x


def _broadcast(lead: int, x: np.ndarray, shape, broadcast_dimensions, **_) -> Any:
    return spread_together([x], shape, tuple(map(int, broadcast_dimensions)))[0]


_MOVES: dict[str, Callable[..., Any]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "slice": _slice,
    "squeeze": lambda lead, x, dimensions: x.squeeze(tuple(lead + i for i in dimensions)),
    "rev": lambda lead, x, dimensions: np.flip(x, tuple(lead + i for i in dimensions)),
    "transpose": _transpose,
    "concatenate": lambda lead, *xs, dimension: np.concatenate(xs, lead + dimension),
    "neg": lambda lead, x: -x,
    "convert_element_type": _convert,
    "copy": lambda lead, x: x,
}
"""The effect of a primitive on arrays with `lead` axes in front of their own."""


def only_moves(step: Step, operands: Sequence[Any]) -> bool:
    """Returns whether an equation only moves coordinates whose derivatives are known numbers."""
    jets = [x for x in operands if isinstance(x, Jet)]
    others = [x for x in operands if not isinstance(x, Jet)]
    if step.name not in tables.COORDINATES or len(step.outputs) != 1:
        return False
    if step.name in tables.SCALINGS and not (len(others) == 1 and operands[0] is jets[0]):
        return False
    streams = [s for x in jets for s in x.streams.values()]
    numbers = all(isinstance(x, np.ndarray | np.generic) for x in others)
    known = numbers and all(isinstance(s, np.ndarray) for s in streams)
    # An index that depends on the point has no streams, but is not a known number either.
    return known and bool(streams) and all(is_inexact(x.primal) for x in jets)


def folded(rule: Callable, eqn: JaxprEqn, operands: list[Any], plan: Plan) -> list[Jet]:
    """Applies a rule to streams that are known while tracing, and drops those that vanish."""
    name = eqn.primitive.name
    if name in tables.ADDITIONS | tables.SCALINGS or not is_inexact(eqn.outvars[0].aval):
        # These rules compute with NumPy if their operands are NumPy arrays.
        (out,) = rule(eqn, operands)
    else:
        (primal,) = bind_primals(eqn, operands)
        known = name in _MOVES
        streams = _by_numpy(eqn, operands, plan) if known else _by_jax(rule, eqn, operands)
        out = Jet(primal, streams)
    numbers = {k: np.asarray(x) for k, x in out.streams.items()}
    return [Jet(out.primal, {k: x for k, x in numbers.items() if np.any(x)})]


def _by_numpy(eqn: JaxprEqn, operands: Sequence[Any], plan: Plan) -> dict[Index, Any]:
    jets, found = [x if isinstance(x, Jet) else Jet(x) for x in operands], {}
    for key in plan.keys:
        if any(key in x.streams for x in jets):
            front = plan.shape(key, ())
            # Boolean zeros, so that the other dtype wins.
            none = [np.zeros((*front, *np.shape(x.primal)), bool) for x in jets]
            parts = [x.streams.get(key, zero) for x, zero in zip(jets, none, strict=True)]
            found[key] = _MOVES[eqn.primitive.name](len(front), *parts, **eqn.params)
    return found


def _by_jax(rule: Callable, eqn: JaxprEqn, operands: Sequence[Any]) -> dict[Index, Any]:
    with jax.ensure_compile_time_eval():
        shadows = [
            Jet(np.zeros(x.primal.shape, x.primal.dtype), x.streams) if isinstance(x, Jet) else x
            for x in operands
        ]
        (out,) = rule(eqn, shadows)
        return out.streams

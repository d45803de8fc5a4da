"""Streams that are known while tracing: constant derivatives of coordinates that are only moved.

They are numbers of NumPy. Worked out by JAX, each operation would be compiled for them: a slice of
each of a thousand coordinates took minutes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from ..interpret import _tables as tables
from ..interpret._flat import Step
from ..interpret._jaxpr import aval_of, own_bind
from ._plan import Index, Plan
from ._streams import Jet, is_inexact, primal_of
from ._together import spread_known


def _broadcast(x: np.ndarray, lead: int, shape, broadcast_dimensions, **_) -> Any:
    dims = (*range(lead), *(lead + int(i) for i in broadcast_dimensions))
    return spread_known(x, (*x.shape[:lead], *shape), dims)


def _slice(x: np.ndarray, lead: int, start_indices, limit_indices, strides) -> Any:
    strides = strides or (1,) * len(start_indices)
    cuts = map(slice, start_indices, limit_indices, strides)
    return x[(slice(None),) * lead + tuple(cuts)]


def _transpose(x: np.ndarray, lead: int, permutation) -> Any:
    return x.transpose(*range(lead), *(lead + i for i in permutation))


def _reshape(x: np.ndarray, lead: int, new_sizes, dimensions, **_) -> Any:
    # By columns it is transposed first.
    x = x if dimensions is None else _transpose(x, lead, dimensions)
    return x.reshape((*x.shape[:lead], *new_sizes))


def _convert(x: np.ndarray, lead: int, new_dtype, **_) -> Any:
    # Not rounded here; but a stream is complex where its value is.
    is_complex = np.issubdtype(new_dtype, np.complexfloating)
    return x.astype(np.result_type(x, np.complex64)) if is_complex else x


_MOVES: dict[str, Callable[..., Any]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "slice": _slice,
    "squeeze": lambda x, lead, dimensions: x.squeeze(tuple(lead + i for i in dimensions)),
    "rev": lambda x, lead, dimensions: np.flip(x, tuple(lead + i for i in dimensions)),
    "transpose": _transpose,
    "neg": lambda x, lead: -x,
    "convert_element_type": _convert,
    "copy": lambda x, lead: x,
}
"""The effect of a primitive of one operand on an array with `lead` axes in front of its own."""


def only_moves(step: Step, operands: Sequence[Any]) -> bool:
    """Returns whether an equation only moves coordinates whose derivatives are known numbers."""
    jets = [x for x in operands if isinstance(x, Jet)]
    others = [x for x in operands if not isinstance(x, Jet)]
    if step.name not in tables.COORDINATES or len(step.outputs) != 1:
        return False
    if step.name in ("mul", "div") and not (len(others) == 1 and operands[0] is jets[0]):
        return False
    streams = [s for x in jets for s in x.streams.values()]
    numbers = all(isinstance(x, np.ndarray | np.generic) for x in others)
    known = numbers and all(isinstance(s, np.ndarray) for s in streams)
    # An index that depends on the point has no streams, and yet is no known number.
    return known and bool(streams) and all(is_inexact(x.primal) for x in jets)


def folded(rule: Callable, eqn: JaxprEqn, operands: list[Any], plan: Plan) -> list[Jet]:
    """A rule on streams that are known while tracing; those that vanish are dropped."""
    (primal,) = own_bind(eqn, list(map(primal_of, operands)))
    if not is_inexact(eqn.outvars[0].aval):
        return [Jet(primal)]
    keys = [k for k in plan.keys if any(isinstance(x, Jet) and k in x.streams for x in operands)]
    found = {k: _by_numpy(eqn, operands, k, plan) for k in keys}
    if any(x is None for x in found.values()):
        found = _by_jax(rule, eqn, operands)
    return [Jet(primal, {k: np.asarray(x) for k, x in found.items() if np.any(np.asarray(x))})]


def _by_numpy(eqn: JaxprEqn, operands: Sequence[Any], key: Index, plan: Plan) -> Any:
    name, lead = eqn.primitive.name, 0 if plan.size(key) is None else 1
    first, *rest = operands
    if name in ("mul", "div"):
        x, factor = first.streams[key], np.asarray(rest[0])
        return x * factor if name == "mul" else x / factor
    if name in ("add", "sub", "concatenate"):
        return _joined(eqn, operands, key, plan)
    move = _MOVES.get(name)
    return None if move is None or rest else move(first.streams[key], lead, **eqn.params)


def _joined(eqn: JaxprEqn, operands: Sequence[Any], key: Index, plan: Plan) -> Any:
    front = plan.shape(key, ())
    parts = []
    for x in operands:
        own = x.streams.get(key) if isinstance(x, Jet) else None
        inner = np.shape(primal_of(x))
        # A number that is added to an array has no axes of its own.
        shape = (*front, *(inner or (1,) * len(aval_of(eqn.outvars[0]).shape)))
        parts.append(np.zeros(shape) if own is None else np.broadcast_to(own, shape))
    dtype = next(s.dtype for x in operands if isinstance(x, Jet) for s in x.streams.values())
    parts = [x.astype(dtype, copy=False) for x in parts]
    if eqn.primitive.name == "concatenate":
        return np.concatenate(parts, len(front) + eqn.params["dimension"])
    return parts[0] - parts[1] if eqn.primitive.name == "sub" else parts[0] + parts[1]


def _by_jax(rule: Callable, eqn: JaxprEqn, operands: Sequence[Any]) -> dict[Index, Any]:
    with jax.ensure_compile_time_eval():
        shadows = [
            Jet(np.zeros(x.primal.shape, x.primal.dtype), x.streams) if isinstance(x, Jet) else x
            for x in operands
        ]
        (out,) = rule(eqn, shadows)
        return out.streams

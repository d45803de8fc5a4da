"""Selections from operands: extrema, clamps, sorted values. The streams of a result are those
of what was picked, so that no plan is asked for."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from ._streams import Jet, Operand, Streams, bind_primals, primal_of


def extremum(eqn: JaxprEqn, operands: Sequence[Operand]) -> list:
    (primal,) = bind_primals(eqn, operands)
    values = list(map(primal_of, operands))
    compare = jnp.greater if eqn.primitive.name == "max" else jnp.less
    half = jnp.where(values[0] == values[1], 0.5, 0.0)
    first = jnp.where(compare(*values), 1.0, half).astype(primal.dtype)
    shares = (first, 1 - first)
    out: Streams = {}
    for share, x in zip(shares, operands, strict=True):
        for key, stream in (x.streams if isinstance(x, Jet) else {}).items():
            part = share * stream
            out[key] = out[key] + part if key in out else part
    return [Jet(primal, out)]


def reduce_extremum(eqn: JaxprEqn, operands: Sequence[Operand]) -> list:
    (x,) = operands
    (primal,) = bind_primals(eqn, operands)
    axes = eqn.params["axes"]
    hit = x.primal == jnp.expand_dims(primal, axes)
    share = hit.astype(primal.dtype)
    share = share / jnp.sum(share, axis=axes, keepdims=True)
    negative = tuple(a - x.primal.ndim for a in axes)
    out = {k: jnp.sum(share * s, axis=negative) for k, s in x.streams.items()}
    return [Jet(primal, out)]


def clamp(eqn: JaxprEqn, operands: Sequence[Operand]) -> list:
    low, x, high = operands
    (primal,) = bind_primals(eqn, operands)
    inside = (x.primal > low) & (x.primal < high)
    # Chosen, not multiplied by zero: outside it may be infinite.
    out = {k: jnp.where(inside, s, jnp.zeros_like(s)) for k, s in x.streams.items()}
    return [Jet(primal, out)]


def sort(eqn: JaxprEqn, operands: Sequence[Operand]) -> list:
    params = {k: eqn.params[k] for k in ("dimension", "is_stable", "num_keys")}
    values = list(map(primal_of, operands))
    places = jax.lax.broadcasted_iota(np.int32, values[0].shape, params["dimension"])
    *primals, order = jax.lax.sort((*values, places), **params)
    axis = params["dimension"] - values[0].ndim
    return [_taken(x, primal, order, axis) for x, primal in zip(operands, primals, strict=True)]


def top_k(eqn: JaxprEqn, operands: Sequence[Operand]) -> list:
    (x,) = operands
    primal, places = bind_primals(eqn, operands)
    axis = eqn.params.get("axis", -1) % x.primal.ndim - x.primal.ndim
    return [_taken(x, primal, places, axis), places]


def _taken(x, primal, places, axis):
    """Returns what a selection along an axis takes of every stream."""
    if not isinstance(x, Jet):
        return primal

    def take(s):
        # A stream may be stacked in front.
        at = jnp.broadcast_to(places, (*s.shape[: s.ndim - places.ndim], *places.shape))
        return jnp.take_along_axis(s, at, axis)

    return Jet(primal, {k: take(s) for k, s in x.streams.items()})


SELECTIONS: dict[str, Callable] = {
    **dict.fromkeys(("max", "min"), extremum),
    **dict.fromkeys(("reduce_max", "reduce_min"), reduce_extremum),
    "clamp": clamp,
    "sort": sort,
    "top_k": top_k,
}
"""By the name of a primitive."""

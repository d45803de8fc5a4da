"""Stacks what the steps of a loop keep.

XLA for CPUs computes bfloat16 in float32. To write the entry of one step, it widens the stack of
all steps and narrows it again, so that a loop takes a time quadratic in its steps (JAX 0.10.2).
Integers with the same bits are written as they are. On other devices this changes nothing.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from ..program._rebind import rebind


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Bits:
    """The bits of a bfloat16 array, as integers."""

    array: Any


def stacked(eqn: JaxprEqn, operands: Sequence[Any], body: Callable[..., list]) -> list:
    """Evaluates a `scan` around a new body. After the results of the `scan`, the body returns a
    PyTree, which is stacked."""

    def evaluated(pack: Callable[[Any], Any], operands: Sequence[Any]) -> list:
        def packed(*args):
            *out, kept = body(*args)
            return [*out, jax.tree.map(pack, kept)]

        return rebind(eqn, operands, [packed])

    def in_bits(*operands):
        *out, kept = evaluated(_packed, operands)
        return [*out, jax.tree.map(_unpacked, kept, is_leaf=lambda x: isinstance(x, _Bits))]

    def as_it_is(*operands):
        return evaluated(lambda x: x, operands)

    if eqn.effects:
        return as_it_is(*operands)
    # Integers have no derivative.
    run = jax.custom_jvp(in_bits)
    run.defjvp(lambda primals, tangents: jax.jvp(as_it_is, primals, tangents))
    return run(*operands)


def _packed(x: Any) -> Any:
    return _Bits(lax.bitcast_convert_type(x, jnp.uint16)) if x.dtype == jnp.bfloat16 else x


def _unpacked(x: Any) -> Any:
    return lax.bitcast_convert_type(x.array, jnp.bfloat16) if isinstance(x, _Bits) else x

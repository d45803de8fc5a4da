"""Evaluates JAX's own functions with mixed products in place of plain ones."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive
from jaxtyping import Array

from ..precision._dtypes import wide
from ..program._jaxpr import aval_of, bodies_of, own_bind, walk
from ..program._tables import CALLS, LAYOUT


def traced(fun: Callable, *avals: Any) -> ClosedJaxpr:
    """Traces a function of arrays with all of them in one dtype, float32 or wider, as JAX's own
    rules require.
    """
    dtype = max((wide(a.dtype) for a in avals), key=lambda dtype: dtype.itemsize)
    return jax.make_jaxpr(fun)(*(a.update(dtype=dtype, weak_type=False) for a in avals))


def replay(
    closed: ClosedJaxpr, args: Sequence, plain: Primitive, mixed: Primitive, **dtypes: Any
) -> list[Array]:
    """Evaluates a jaxpr of movements, sums and products with each `plain` product replaced by a
    `mixed` one.

    Movements (reversals, reshapes, transpositions) take operands of any dtype. Sums and selections
    are taken in the dtype of the trace.
    """

    def evaluate(i, eqn, operands):
        del i
        if eqn.primitive is plain:
            jaxs = ("precision", "preferred_element_type")
            others = {k: v for k, v in eqn.params.items() if k not in jaxs}
            return [mixed.bind(*operands, **dtypes, **others)]
        if eqn.primitive.name in CALLS:
            return replay(bodies_of(eqn)[0], operands, plain, mixed, **dtypes)
        if eqn.primitive.name not in LAYOUT:
            avals = map(aval_of, eqn.invars)
            operands = [jnp.asarray(x, a.dtype) for x, a in zip(operands, avals, strict=True)]
        return own_bind(eqn, operands)

    return walk(closed.jaxpr, closed.consts, args, lambda atom: atom.val, evaluate)

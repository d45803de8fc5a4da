"""Functions with a derivative of their own, computed wider than the program has them."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from ..interpret import _tables as tables
from ..interpret._jaxpr import (
    CALLS,
    aval_of,
    bodies_of,
    differentiable,
    jaxprs_in,
    own_bind,
    pushforward,
    walk,
)
from ._streams import typed


def custom_in_registers(eqn: JaxprEqn, args: Sequence[Any]) -> list:
    """The results of a `custom_jvp_call` for operands that are wider (or narrower) than its own.

    It holds programs in its own dtypes, for its value and for its derivative, which would not take
    such operands. So these are evaluated in the dtype of the widest, at every order.
    """
    real = [x.dtype for x in args if jnp.issubdtype(x.dtype, jnp.floating)]
    dtype = max(real, key=lambda d: d.itemsize, default=None)
    avals = [aval_of(v) for v in eqn.invars]
    if dtype is None or all(a.dtype == x.dtype for a, x in zip(avals, args, strict=True)):
        return own_bind(eqn, args)
    moving, live = differentiable(eqn.invars), differentiable(eqn.outvars)
    (closed,) = bodies_of(eqn)
    fun = jax.custom_jvp(lambda *args: _evaluate(closed, args, dtype))

    @fun.defjvp
    def _(primals, tangents):
        moved = [tangents[i] for i in moving]
        out = _evaluate(pushforward(eqn, moving), [*primals, *moved], dtype)
        values, slopes = out[: len(eqn.outvars)], iter(out[len(eqn.outvars) :])
        none = lambda x: np.zeros(jnp.shape(x), jax.dtypes.float0)
        return values, [next(slopes) if i in live else none(x) for i, x in enumerate(values)]

    return fun(*args)


def _cast(x: Any, dtype: Any) -> Any:
    real = jnp.issubdtype(x.dtype, jnp.floating)
    return x.astype(dtype) if real and x.dtype != dtype else x


def _evaluate(closed: ClosedJaxpr, args: Sequence[Any], dtype: Any) -> list:
    """The results of a jaxpr with `dtype` in place of all real floating-point types."""
    cast = partial(_cast, dtype=dtype)

    def evaluate(i: int, eqn: JaxprEqn, operands: list) -> list:
        del i
        name = eqn.primitive.name
        if name == "custom_jvp_call":
            return custom_in_registers(eqn, operands)
        if name in CALLS:
            return _evaluate(bodies_of(eqn)[0], operands, dtype)
        if name == "convert_element_type":
            dtypes = operands[0].dtype, eqn.params["new_dtype"]
            if all(jnp.issubdtype(d, jnp.floating) for d in dtypes):
                return operands
        if name in tables.PRODUCTS | tables.TYPED or next(jaxprs_in(eqn), None) is not None:
            operands = typed(eqn, operands)
        return list(map(cast, own_bind(eqn, operands)))

    known = lambda atom: cast(np.asarray(atom.val, aval_of(atom).dtype))
    return walk(
        closed.jaxpr, list(map(cast, closed.consts)), list(map(cast, args)), known, evaluate
    )

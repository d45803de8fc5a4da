"""Binds an equation of the program with float32 in place of half."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, primitives

from ..interpret import _tables as tables
from ..interpret._jaxpr import aval_of, close, own_bind


FULL = np.dtype("float32")

_PRODUCTS = {*tables.JAX_PRODUCTS, "ragged_dot_general"}

# What is known to take its dtype from its operands and its parameters: JAX's own operations, and
# ours. A kernel of somebody else may exist in half alone.
_OF_JAX = {
    p.name
    for module in (lax, primitives)
    for attribute, p in vars(module).items()
    if attribute.endswith("_p") and hasattr(p, "name")
}
_KNOWN = {*_OF_JAX, *tables.TABLE, *_PRODUCTS} - tables.TYPED


def is_narrow(dtype: Any) -> bool:
    """Returns whether a dtype is a real floating-point type narrower than float32."""
    is_float = isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jnp.floating)
    return is_float and dtype.itemsize < FULL.itemsize


def is_narrow_array(aval: Any) -> bool:
    # References have a dtype too, and no weak type.
    return hasattr(aval, "weak_type") and is_narrow(getattr(aval, "dtype", None))


def widen(x: Any) -> Any:
    """A narrow array, on the host or not, as float32."""
    if not is_narrow(getattr(x, "dtype", None)):
        return x
    if isinstance(x, np.ndarray | np.generic):
        return np.asarray(x).astype(FULL)
    return lax.convert_element_type(x, FULL)


def _narrow(x: Any, dtype: np.dtype) -> Any:
    # What float32 holds and the dtype does not is no fault of float32.
    largest = float(jnp.finfo(dtype).max)
    x = jnp.where(jnp.isinf(x), x, jnp.clip(x, -largest, largest))
    return lax.convert_element_type(x, dtype)


def _wide_parameter(x: Any, evaluate: Any) -> Any:
    if isinstance(x, ClosedJaxpr | Jaxpr):
        closed = close(x)
        avals = [
            jax.ShapeDtypeStruct(a.shape, FULL) if is_narrow_array(a) else a
            for a in closed.in_avals
        ]
        out = jax.make_jaxpr(evaluate(closed))(*avals)
        return out if isinstance(x, ClosedJaxpr) else out.jaxpr
    if type(x) is type and issubclass(x, np.generic):
        return FULL if is_narrow(np.dtype(x)) else x
    if isinstance(x, np.dtype):
        return FULL if is_narrow(x) else x
    if isinstance(x, tuple):
        parts = [_wide_parameter(y, evaluate) for y in x]
        if all(a is b for a, b in zip(parts, x, strict=True)):
            return x
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return x


def bind_wide(eqn: JaxprEqn, arrays: list, evaluate: Any) -> list:
    """The results of an equation for operands that are float32 where the program has half.

    Casts to half, `reduce_precision` and `tables.STORES` among them, do nothing. `evaluate` makes a
    function in float32 of a jaxpr, such as that of the update of a `scatter`.
    """
    name, params = eqn.primitive.name, dict(eqn.params)
    if name == "reduce_precision" or name in tables.STORES:
        return arrays
    if name == "convert_element_type":
        dtype = FULL if is_narrow(np.dtype(params["new_dtype"])) else params["new_dtype"]
        return [lax.convert_element_type(arrays[0], dtype)]
    if name in tables.MIXED:
        params = {k: _wide_parameter(v, evaluate) for k, v in params.items()}
        return own_bind(eqn.replace(params=params), arrays)
    if name in _PRODUCTS and any(jnp.issubdtype(x.dtype, jnp.inexact) for x in arrays):
        # A plain float32 product is TF32 on a GPU.
        params["precision"] = (lax.Precision.HIGHEST,) * 2
    if not any(is_narrow_array(v.aval) for v in (*eqn.invars, *eqn.outvars)):
        return own_bind(eqn.replace(params=params), arrays)
    if name in _KNOWN:
        params = {k: _wide_parameter(v, evaluate) for k, v in params.items()}
    else:
        arrays = [
            _narrow(x, aval_of(v).dtype) if is_narrow_array(v.aval) else x
            for x, v in zip(arrays, eqn.invars, strict=True)
        ]
    return [widen(x) for x in own_bind(eqn.replace(params=params), arrays)]

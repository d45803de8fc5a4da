"""Computes products in the precision that is chosen for them."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from .._util._varying import match_varying_axes
from ..precision._dtypes import is_half, wide
from ..precision._split import SPLIT_PRODUCTS
from ..products._bilinear import Origin
from ..products._conv import mixed_conv_general_dilated_p
from ..products._dot import mixed_dot_general_p
from ..program import _tables as tables
from ..program._jaxpr import aval_of, own_bind
from ..program._products import asks_for_more, says_its_dtype, sums_nothing


FULL = np.dtype("float32")

_APART = Origin(apart=True)


def precise(eqn: JaxprEqn) -> JaxprEqn:
    """Returns a product that asks for full precision."""
    if eqn.primitive.name in tables.MIXED:
        dtype = wide(eqn.params["dtype"])
        return eqn.replace(params={**eqn.params, "dtype": dtype, "origin": Origin()})
    precision = eqn.params["precision"] or (lax.Precision.HIGHEST,) * 2
    return eqn.replace(params={**eqn.params, "precision": precision})


def is_real(eqn: JaxprEqn) -> bool:
    """Returns whether the result of a product is real, and not complex or an integer."""
    return jnp.issubdtype(aval_of(eqn.outvars[0]).dtype, jnp.floating)


def mixed_product(
    eqn: JaxprEqn, dtype: Any, out_dtype: Any, algorithm: str | None = None, origin: Origin = _APART
) -> Any:
    """Returns a function that evaluates a product as a mixed one."""
    new = mixed_form(eqn, dtype, out_dtype, algorithm, origin)
    return lambda x, y: new.primitive.bind(*match_varying_axes(x, y), **new.params)


def mixed_form(
    eqn: JaxprEqn, dtype: Any, out_dtype: Any, algorithm: str | None = None, origin: Origin = _APART
) -> JaxprEqn:
    """Returns a product as a mixed one with these dtypes and this algorithm."""
    dropped = ("precision", "preferred_element_type", "algorithm")
    params = {k: v for k, v in eqn.params.items() if k not in dropped}
    params |= {"dtype": jnp.dtype(dtype), "out_dtype": jnp.dtype(out_dtype), "origin": origin}
    is_dot = eqn.primitive.name in tables.DOTS
    if is_dot:
        params["algorithm"] = algorithm
    primitive = mixed_dot_general_p if is_dot else mixed_conv_general_dilated_p
    return eqn.replace(primitive=primitive, params=params)


# Products of a program and of its backward pass, for a forward pass in full.


def forward_product(eqn: JaxprEqn, algorithm: str | None) -> JaxprEqn:
    """Returns a product in full, by the algorithm unless the program asks for a precision."""
    dtype, mixed = aval_of(eqn.outvars[0]).dtype, eqn.primitive.name in tables.MIXED
    if mixed and (is_half(eqn.params["dtype"]) or not says_its_dtype(eqn)):
        own = algorithm if dtype == FULL and eqn.primitive.name in tables.DOTS else None
        return mixed_form(eqn, wide(dtype), dtype, own)
    if mixed or algorithm is None or asks_for_more(eqn) or not is_real(eqn):
        return eqn
    takes = dtype == FULL and eqn.primitive.name in tables.DOTS
    return mixed_form(eqn, FULL, FULL, algorithm) if takes else eqn


def backward_product(eqn: JaxprEqn, half: np.dtype) -> JaxprEqn:
    """Returns a product of operands rounded to half, unless it asks for a precision itself. One
    that sums nothing, as an inner product has in its derivative, is in full: it is a scaling."""
    mixed = eqn.primitive.name in tables.MIXED and eqn.params.get("algorithm") is None
    if not is_real(eqn) or asks_for_more(eqn) or (mixed and says_its_dtype(eqn)):
        return eqn
    dtype = aval_of(eqn.outvars[0]).dtype
    rounded = wide(dtype) if sums_nothing(eqn) else half
    return mixed_form(eqn, rounded, dtype, origin=Origin())


# Products without streams, for `autocast`.


def gives_way(eqn: JaxprEqn) -> bool:
    """Returns whether a mixed product is in float32 because no dtype was asked for."""
    return eqn.params["dtype"] == FULL and not says_its_dtype(eqn)


def half_product(eqn: JaxprEqn, arrays: Sequence[Any], dtype: np.dtype, out_dtype: np.dtype) -> Any:
    """Returns a product of halves, accumulated in float32 and returned in `out_dtype`, unless the
    program names another dtype."""
    if eqn.primitive.name in tables.MIXED:
        origin = eqn.params.get("origin", Origin())
        out_dtype = eqn.params["out_dtype"] if origin.out_dtype else out_dtype
    else:
        # A program that multiplies halves into float32 gets float32.
        widens = aval_of(eqn.invars[0]).dtype == dtype and aval_of(eqn.outvars[0]).dtype == FULL
        out_dtype = FULL if widens else out_dtype
    return mixed_product(eqn, dtype, out_dtype, origin=Origin())(*arrays)


def split_product(eqn: JaxprEqn, arrays: Sequence[Any], algorithm: lax.DotAlgorithmPreset) -> Any:
    """Returns a product of float32 arrays by an algorithm that splits them into halves, and adds
    the products of these. Convolutions have no such algorithm, and are taken in float32."""
    name = next((k for k, v in SPLIT_PRODUCTS.items() if v is algorithm), None)
    if name is not None or eqn.primitive.name not in tables.DOTS:
        return mixed_product(eqn, FULL, FULL, name, Origin())(*arrays)
    # A JAX preset that is not in `SPLIT_PRODUCTS`.
    params = {name: eqn.params[name] for name in ("dimension_numbers", "out_sharding")}
    return lax.dot_general(*arrays, **params, precision=algorithm, preferred_element_type=FULL)


def full_product(eqn: JaxprEqn, arrays: Sequence[Any]) -> list:
    """Returns a product in float32, or in a higher precision if the program asks for it."""
    if eqn.primitive.name in tables.MIXED:
        params: dict[str, Any] = {name: wide(eqn.params[name]) for name in ("dtype", "out_dtype")}
        params["origin"] = Origin()
    else:
        dtype = aval_of(eqn.outvars[0]).dtype
        params = {} if dtype == FULL else {"preferred_element_type": wide(dtype)}
    return own_bind(eqn.replace(params={**eqn.params, **params}), arrays)


def multiplied_in(eqn: JaxprEqn, rule: str, dtype: np.dtype, algorithm: Any) -> str | None:
    """Returns the name of the dtype to which a product rounds its operands, or of the algorithm
    that splits them; `None` for other operations."""
    name = eqn.primitive.name
    if name not in tables.PRODUCTS:
        return None
    own = eqn.params.get("dtype", aval_of(eqn.invars[0]).dtype)
    if rule == "own" or (rule == "mixed" and not gives_way(eqn)):
        return own.name
    if rule == "full":
        return wide(own if name in tables.MIXED else FULL).name
    if algorithm is None:
        return dtype.name
    return algorithm.name if name in tables.DOTS else FULL.name

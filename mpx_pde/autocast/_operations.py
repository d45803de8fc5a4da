"""The rules: how one equation, that contains no other, is bound in the dtypes of a policy.

Each takes the policy, the equation and the values of its operands, and returns those of its
results.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from .._bilinear import Given
from .._conv import mixed_conv_general_dilated_p
from .._dot import mixed_dot_general_p, split_dot_general
from .._dtypes import wide
from .._order import rounded_cotangent
from .._split import SPLIT_PRODUCTS
from ..interpret import _tables as tables
from ..interpret._asks import says_its_dtype
from ..interpret._jaxpr import aval_of, differentiable, own_bind
from ._rules import Kind, Policy
from ._values import FULL, Value, computed


Operation = Callable[[Policy, JaxprEqn, Sequence[Value]], list[Value]]


def _computed(policy: Policy, eqn: JaxprEqn, out: Sequence) -> list[Value]:
    return [
        computed(_foreign(x, v.aval, policy), v.aval, policy)
        for x, v in zip(out, eqn.outvars, strict=True)
    ]


def _foreign(x: Any, aval: Any, policy: Policy) -> Any:
    """A result that autocast does not govern, in the dtype of the program, which its uses take: a
    float64, or a half of the other type."""
    other = not policy.governs(aval) and jnp.issubdtype(getattr(aval, "dtype", bool), jnp.floating)
    return lax.convert_element_type(x, aval.dtype) if other and x.dtype != aval.dtype else x


def _in(policy: Policy, dtype: np.dtype, eqn: JaxprEqn, operands: Sequence[Value], **params):
    eqn = eqn.replace(params={**eqn.params, **params}) if params else eqn
    return _computed(policy, eqn, own_bind(eqn, [x.get(dtype) for x in operands]))


def _factors(policy: Policy, operands: Sequence[Value]) -> list:
    # A master is rounded inside of the product, so that its cotangent stays in float32. What was
    # computed is rounded before it, so that what is kept for the backward pass is half.
    return [x.array(policy) if x.kind.master else x.get(policy.dtype) for x in operands]


def _product(policy: Policy, eqn: JaxprEqn, operands: Sequence[Value]) -> list[Value]:
    if policy.algorithm is not None:
        return _split_product(policy, eqn, operands)
    # A program that multiplies halves into float32 gets float32.
    widens = aval_of(eqn.invars[0]).dtype == policy.dtype and aval_of(eqn.outvars[0]).dtype == FULL
    dtypes = {"dtype": policy.dtype, "out_dtype": FULL if widens else policy.dtype}
    dropped = ("precision", "preferred_element_type")
    rest = {k: v for k, v in eqn.params.items() if k not in dropped}
    is_dot = eqn.primitive.name == "dot_general"
    primitive = mixed_dot_general_p if is_dot else mixed_conv_general_dilated_p
    return _computed(policy, eqn, [primitive.bind(*_factors(policy, operands), **rest, **dtypes)])


def _split_product(policy: Policy, eqn: JaxprEqn, operands: Sequence[Value]) -> list[Value]:
    # The hardware splits float32 operands into halves and adds up the products. Convolutions
    # have no such algorithm.
    if eqn.primitive.name == "dot_general":
        return _computed(policy, eqn, [_split(policy, eqn, operands)])
    precision = (lax.Precision.HIGHEST,) * 2
    return _in(policy, FULL, eqn, operands, precision=precision, preferred_element_type=FULL)


def _split(policy: Policy, eqn: JaxprEqn, operands: Sequence[Value]) -> Any:
    arrays = [x.get(FULL) for x in operands]
    params = {name: eqn.params[name] for name in ("dimension_numbers", "out_sharding")}
    name = next((k for k, v in SPLIT_PRODUCTS.items() if v is policy.algorithm), None)
    if name is None:  # a preset of JAX that has no name here
        precision = policy.algorithm
        return lax.dot_general(*arrays, **params, precision=precision, preferred_element_type=FULL)
    return split_dot_general(*arrays, **params, algorithm=name)


def _mixed(policy: Policy, eqn: JaxprEqn, operands: Sequence[Value]) -> list[Value]:
    if eqn.params["dtype"] == FULL and not says_its_dtype(eqn):
        return _supplied(policy, eqn, operands)
    return _computed(policy, eqn, own_bind(eqn, [x.array(policy) for x in operands]))


def _supplied(policy: Policy, eqn: JaxprEqn, operands: Sequence[Value]) -> list[Value]:
    """A mixed product that nobody gave a dtype: what it multiplies in is the policy's."""
    if policy.algorithm is not None:
        if eqn.primitive is not mixed_dot_general_p:
            return _in(policy, FULL, eqn, operands)
        return _computed(policy, eqn, [_split(policy, eqn, operands)])
    given = eqn.params.get("given", Given())
    out_dtype = eqn.params["out_dtype"] if given.out_dtype else policy.dtype
    params = {"dtype": policy.dtype, "out_dtype": out_dtype, "given": Given()}
    arrays = _factors(policy, operands)
    return _computed(policy, eqn, [eqn.primitive.bind(*arrays, **{**eqn.params, **params})])


def _full(policy: Policy, eqn: JaxprEqn, operands: Sequence[Value]) -> list[Value]:
    if eqn.primitive.name in tables.MIXED:
        # In full never means in less than the program asks for.
        dtypes = {name: wide(eqn.params[name]) for name in ("dtype", "out_dtype")}
        eqn = eqn.replace(params={**eqn.params, **dtypes, "given": Given()})
        return _in(policy, FULL, eqn, operands)
    if "preferred_element_type" in eqn.params and aval_of(eqn.outvars[0]).dtype != FULL:
        dtype = wide(aval_of(eqn.outvars[0]).dtype)
        return _in(policy, FULL, eqn, operands, preferred_element_type=dtype)
    return _in(policy, FULL, eqn, operands)


def _half(policy: Policy, eqn: JaxprEqn, operands: Sequence[Value]) -> list[Value]:
    if eqn.primitive.name in tables.MIXED:
        return _supplied(policy, eqn, operands)
    return _in(policy, policy.dtype, eqn, operands)


def _follow(policy: Policy, eqn: JaxprEqn, operands: Sequence[Value]) -> list[Value]:
    if not any(x.kind.half for x in operands):
        return _in(policy, FULL, eqn, operands)
    if not shares(eqn, operands):
        return _in(policy, policy.dtype, eqn, operands)
    # The cotangent of an operand is float32 where the operation is: so it is summed in float32 by
    # whatever broadcasts it, here or in a `vmap` around. The compiler fuses the casts.
    out = _in(policy, FULL, eqn, operands)
    if eqn.primitive.name in ("add", "sub"):
        out = [Value(rounded_cotangent(x.native, policy.dtype), x.kind) for x in out]
    return [
        computed(x.get(policy.dtype), v.aval, policy) if x.kind.governed else x
        for x, v in zip(out, eqn.outvars, strict=True)
    ]


def shares(eqn: JaxprEqn, operands: Sequence[Value]) -> bool:
    """Whether an operation of several operands uses one of them, which may have a cotangent, for
    many others: it broadcasts it, or it is a float32 master, and a `vmap` around may."""
    moving = [
        (x, v)
        for x, v in zip(operands, eqn.invars, strict=True)
        if x.kind.governed and x.kind.const is None and not x.kind.exact
    ]
    if len(operands) == 1 or not moving:
        return False
    shape = aval_of(eqn.outvars[0]).shape
    broadcasts = eqn.primitive.name in tables.ARITHMETIC
    return any(x.kind.master or (broadcasts and aval_of(v).shape != shape) for x, v in moving)


def keeps_full(eqn: JaxprEqn, operands: Sequence[Value]) -> bool:
    """Whether an operation that follows its operands would keep float32 copies of half ones for
    the backward pass."""
    return (
        eqn.primitive.name not in tables.LINEAR
        and any(x.kind.half for x in operands)
        and bool(differentiable(eqn.outvars))
        and shares(eqn, operands)
    )


def _layout(policy: Policy, eqn: JaxprEqn, operands: Sequence[Value]) -> list[Value]:
    kinds = [x.kind for x in operands if x.kind.governed]
    if not all(k.master for k in kinds):
        return _follow(policy, eqn, operands)
    # What only moves a master is one.
    kind = Kind(half=all(k.half for k in kinds), master=True, exact=all(k.exact for k in kinds))
    if len(operands) == 1:
        kind = kind._replace(const=kinds[0].const)
    return [Value(x, kind) for x in own_bind(eqn, [x.get(FULL) for x in operands])]


def _convert(policy: Policy, eqn: JaxprEqn, operands: Sequence[Value]) -> list[Value]:
    (x,) = operands
    before, after = aval_of(eqn.invars[0]).dtype, eqn.params["new_dtype"]
    if not policy.governs(eqn.outvars[0].aval):
        return own(policy, eqn, operands)
    if before == after:
        return [x]
    return [x.as_kind(x.kind._replace(half=after == policy.dtype))]


def own(policy: Policy, eqn: JaxprEqn, operands: Sequence[Value]) -> list[Value]:
    """In the dtypes of the program."""
    args = [x.in_program(v.aval, policy) for x, v in zip(operands, eqn.invars, strict=True)]
    out = _computed(policy, eqn, own_bind(eqn, args))
    if eqn.primitive.name == "convert_element_type" and aval_of(eqn.invars[0]).dtype == bool:
        # Zeros and ones are exact in every dtype: a mask gives way to what it masks.
        return [x.as_kind(x.kind._replace(master=not x.kind.half, exact=True)) for x in out]
    return out


OPERATIONS: dict[str, Operation] = {
    "product": _product,
    "mixed": _mixed,
    "full": _full,
    "half": _half,
    "follow": _follow,
    "layout": _layout,
    "convert": _convert,
    "own": own,
}
"""By the name of a [`Rule`][]."""

"""Recognizes functions with a custom derivative that act on each entry of an array alone."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn

from ...program import _tables as tables
from ...program._jaxpr import aval_of, bodies_of, differentiable, pushforward


def is_logaddexp(eqn: JaxprEqn) -> bool:
    """Returns whether a function with a custom derivative is `jnp.logaddexp`, by its jaxpr."""
    if len(eqn.invars) != 2:
        return False
    avals = [jax.ShapeDtypeStruct(aval_of(v).shape, aval_of(v).dtype) for v in eqn.invars]
    try:
        own = jax.make_jaxpr(jnp.logaddexp)(*avals).jaxpr.eqns[-1]
    except (TypeError, ValueError):  # of shapes or dtypes that it does not take
        return False
    bodies = [str(e.params.get("call_jaxpr")) for e in (eqn, own)]
    return bodies[0] == bodies[1]


def is_pointwise(eqn: JaxprEqn, moving: Sequence[int], order: int) -> bool:
    """Returns whether a function with a custom derivative, and its derivatives up to an order, act
    on each entry alone. A derivative rule may mix entries that the function does not mix."""
    alike = _pointwise(eqn.params["call_jaxpr"])
    return alike and (order < 1 or _pointwise(pushforward(eqn, moving), order - 1))


def _pointwise(closed: ClosedJaxpr, order: int = 0) -> bool:
    """Returns whether a jaxpr and its derivatives up to an order do the same to each entry of the
    operands, whatever the other entries are."""

    def fits(eqn):
        name = eqn.primitive.name
        if name in tables.PUSHES:
            return is_pointwise(eqn, differentiable(eqn.invars), order)
        if name in tables.CALLS:
            return _pointwise(bodies_of(eqn)[0], order)
        if name == "broadcast_in_dim":
            return eqn.invars[0].aval.shape in ((), eqn.outvars[0].aval.shape)
        return name in tables.POINTWISE

    return all(map(fits, closed.jaxpr.eqns))

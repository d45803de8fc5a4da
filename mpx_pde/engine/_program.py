"""Prepares the program of a loss before it is linearized."""

import itertools

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, primitives

from ..program import _tables as tables
from ..program._jaxpr import (
    bodies_of,
    contains,
    with_jaxprs,
)
from ._facts import RECOMPUTED


def without_checkpoints(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a program with calls in place of its checkpoints, which say what is kept. What is in
    one without a policy is marked: its products are computed again. A checkpoint of a loop stays,
    so that the steps of the loop keep nothing."""

    numbers = itertools.count()

    def entered(jaxpr: Jaxpr, region: str) -> Jaxpr:
        return jaxpr.replace(eqns=[one(e, region) for e in jaxpr.eqns])

    def one(eqn: JaxprEqn, region: str) -> JaxprEqn:
        name = eqn.primitive.name
        if name in tables.CHECKPOINTS and not contains(bodies_of(eqn)[0], tables.LOOPS):
            inner = region
            if not region and eqn.params["policy"] is None:
                inner = f"{RECOMPUTED}.{next(numbers)}"
            body = ClosedJaxpr(entered(eqn.params["jaxpr"], inner), ())
            call = {"call_jaxpr": body}
            return eqn.replace(primitive=primitives.closed_call_p, params=call)
        if name in tables.CONTAINERS - tables.CUSTOM:
            eqn = with_jaxprs(eqn, lambda x: entered(x, region))
        if not region:
            return eqn
        info = eqn.source_info
        return eqn.replace(source_info=info.replace(name_stack=info.name_stack.extend(region)))

    return closed.replace(jaxpr=entered(closed.jaxpr, ""))

"""Prepares the program of a loss before it is linearized."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, primitives

from ..program import _tables as tables
from ..program._flat import Constant, Step, read
from ..program._jaxpr import (
    bodies_of,
    contains,
    in_context_of,
    own_bind,
    walk,
    with_jaxprs,
    with_products,
)
from ._custom import custom_in_registers
from ._facts import CONSTANT, DATA, RECOMPUTED, Fact, Facts
from ._products import precise


def prepared(closed: ClosedJaxpr, given: Sequence[Fact], half: np.dtype) -> ClosedJaxpr:
    """Returns a program whose products say which of them stay in full on the way back, and whose
    checkpoints have become marks of what is computed again there.

    In full are products with arrays that the user keeps in full, and with values that half
    precision may be unable to hold.
    """
    return _in_full(_without_checkpoints(closed), given, half)


def evaluated(closed: ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
    """Evaluates a program again. Rules of its functions return arrays of the recorded shapes."""

    def evaluate(_: int, eqn: JaxprEqn, args: list) -> Sequence[Any]:
        with in_context_of(eqn):
            if eqn.primitive.name in tables.CALLS:
                return evaluated(bodies_of(eqn)[0], args)
            own = eqn.primitive.name in tables.CUSTOM
            return custom_in_registers(eqn, args) if own else own_bind(eqn, args)

    known = lambda atom: read(Constant(atom.val, atom.aval), {})
    return walk(closed.jaxpr, closed.consts, operands, known, evaluate)


def _in_full(closed: ClosedJaxpr, given: Sequence[Fact], half: np.dtype) -> ClosedJaxpr:
    facts = Facts(half)
    names = itertools.count()

    def entered(jaxpr: Jaxpr, consts: Sequence, operands: Sequence[int | Constant]) -> tuple:
        env = {}
        for v, x in zip(jaxpr.constvars, consts, strict=True):
            env[v] = next(names)
            facts.of[env[v]] = Fact(DATA if np.ndim(x) else CONSTANT, width=int(np.size(x)))
        env.update(zip(jaxpr.invars, operands, strict=True))
        read = lambda v: Constant(v.val, v.aval) if isinstance(v, Literal) else env[v]
        eqns = []
        for eqn in jaxpr.eqns:
            inputs = tuple(map(read, eqn.invars))
            if eqn.primitive.name in tables.CALLS:
                (body,) = bodies_of(eqn)
                inner, outputs = entered(body.jaxpr, body.consts, inputs)
                eqn = with_jaxprs(eqn, lambda _, inner=inner: inner)
            else:
                outputs = tuple(next(names) for _ in eqn.outvars)
                step = Step(eqn, inputs, outputs)
                facts.add(step)
                if any(facts.of[x].full or facts.of[x].beyond for x in step.variables):
                    eqn = with_products(eqn, precise)
            env.update(zip(eqn.outvars, outputs, strict=True))
            eqns.append(eqn)
        return jaxpr.replace(eqns=eqns), list(map(read, jaxpr.outvars))

    operands = [next(names) for _ in given]
    facts.of.update(zip(operands, given, strict=True))
    jaxpr, _ = entered(closed.jaxpr, closed.consts, operands)
    return closed.replace(jaxpr=jaxpr)


def _without_checkpoints(closed: ClosedJaxpr) -> ClosedJaxpr:
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

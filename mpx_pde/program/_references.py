"""Gathers the equations that use references made in a program, such as those of `jax.new_ref`."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ._flat import Constant, Flat, Step, read
from ._jaxpr import aval_of, in_context_of, own_bind


def with_references_inside(flat: Flat) -> Flat:
    """Returns a program in which all equations between making a reference and its last use are one
    equation, a call. Outside of it there are values only, which interpreters can follow.
    """
    made = {x for step in flat.steps for x in _made_by(step)}
    if not made:
        return flat
    uses = {id(s) for s in flat.steps if not made.isdisjoint((*s.variables, *s.outputs))}
    follows, leads = set[int](), set[int]()
    for step in flat.steps:
        if id(step) in uses or not follows.isdisjoint(step.variables):
            follows.update(step.outputs)
    for step in reversed(flat.steps):
        if id(step) in uses or not leads.isdisjoint(step.outputs):
            leads.update(step.variables)
    after = {id(s) for s in flat.steps if not follows.isdisjoint(s.outputs)}
    before = {id(s) for s in flat.steps if not leads.isdisjoint(s.outputs)}
    inside = [s for s in flat.steps if id(s) in uses or id(s) in after & before]
    outside = [s for s in flat.steps if id(s) not in uses | (after & before)]
    read_outside = {x for s in outside for x in s.variables} | {*flat.outputs}
    results = [x for s in inside for x in s.outputs if x in read_outside]
    steps = [s for s in outside if id(s) not in after]
    steps.append(_as_call(inside, results))
    steps += [s for s in outside if id(s) in after]
    return flat._replace(steps=tuple(steps))


def _made_by(step: Step) -> list[int]:
    """Returns the results of an equation that are references."""
    pairs = zip(step.outputs, step.eqn.outvars, strict=True)
    return [x for x, v in pairs if hasattr(v.aval, "inner_aval")]


def _as_call(steps: Sequence[Step], results: Sequence[int]) -> Step:
    """Returns equations as one call with these results."""
    avals: dict[int | Constant, Any] = {}
    made = {x for step in steps for x in step.outputs}
    for step in steps:
        for x, v in zip(step.inputs, step.eqn.invars, strict=True):
            if x not in made and not (isinstance(x, Constant) and np.ndim(x.value) == 0):
                avals[x] = aval_of(v)

    def run(*args):
        env: dict[Any, Any] = dict(zip(avals, args, strict=True))
        for step in steps:
            with in_context_of(step.eqn):
                operands = [env[x] if x in env else read(x, env) for x in step.inputs]
                env.update(zip(step.outputs, own_bind(step.eqn, operands), strict=True))
        return [env[x] for x in results]

    run.__name__ = "references"
    (eqn,) = jax.make_jaxpr(jax.jit(run))(*avals.values()).jaxpr.eqns
    first = steps[0]
    return Step(
        eqn.replace(source_info=first.eqn.source_info), tuple(avals), tuple(results), first.calls
    )

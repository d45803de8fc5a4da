"""Runs of light operations, which the backward pass evaluates again.

Between two products in half precision stand norms, softmax and activations, whose inside is
float32. Differentiated as it stands, a program keeps several float32 arrays of each for the
backward pass, and with them more memory than it saves. A run of such operations costs hardly more
than reading its operands, so these are kept, in half, and the run is evaluated again.

The derivative engine cuts programs as well (`propagation/_segments.py`), by another walk. There
calls are written out, a layer ends with its products, and all of it is evaluated again from the
streams that entered it. Here a `jit` stays one, traced once however often it is called, and its
scopes decide what is half; a product ends a run and stays outside of it, since what it takes is
kept in half anyway; and a run pays or does not pay by the kinds of its operands, which are known
only when it is reached. What is left in common, which variables go in and out, takes each of them
four lines.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from ..interpret import _tables as tables
from ..interpret._jaxpr import bodies_of, literal
from ..interpret._primitives import asks_for_more
from ._feeding import Feeding
from ._rules import Policy
from ._values import Value


class Segment(NamedTuple):
    """Consecutive equations of a jaxpr, and the variables that go in and out."""

    start: int
    stop: int
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]


def _names(eqn: JaxprEqn) -> set[str]:
    """The primitives in an equation, without the containers that can be entered."""
    bodies = bodies_of(eqn)
    if not bodies:
        return {eqn.primitive.name}
    return set().union(*(_names(inner) for body in bodies for inner in body.jaxpr.eqns))


def _is_light(eqn: JaxprEqn, names: set[str]) -> bool:
    # A loop may be long, and a checkpoint says itself what is kept.
    plain = not bodies_of(eqn) or eqn.primitive.name in ("jit", "custom_jvp_call")
    return plain and names <= tables.LIGHT and not eqn.effects


def segments_of(jaxpr: Jaxpr) -> dict[int, Segment]:
    """The longest runs of light operations that make float32 values, by their first position."""
    last_use = {}
    for i, eqn in enumerate(jaxpr.eqns):
        last_use.update((v, i) for v in eqn.invars if not literal(v))
    last_use.update((v, len(jaxpr.eqns)) for v in jaxpr.outvars if not literal(v))

    out: dict[int, Segment] = {}

    def close(start, stop, full):
        if not full:
            return
        eqns = jaxpr.eqns[start:stop]
        made = {v: None for eqn in eqns for v in eqn.outvars}
        used = {v: None for eqn in eqns for v in eqn.invars if not literal(v)}
        inputs = tuple(v for v in used if v not in made)
        outputs = tuple(v for v in made if last_use.get(v, -1) >= stop)
        out[start] = Segment(start, stop, inputs, outputs)

    start, full = 0, False
    for i, eqn in enumerate(jaxpr.eqns):
        names = _names(eqn)
        if _is_light(eqn, names):
            full = full or not names.isdisjoint(tables.FULL)
        else:
            close(start, i, full)
            start, full = i + 1, False
    close(start, len(jaxpr.eqns), full)
    return out


def multiplied_alone(jaxpr: Jaxpr) -> frozenset[Any]:
    """The variables that go into products of half precision and nowhere else, moved around
    perhaps on the way."""
    used, elsewhere = set(), {v for v in jaxpr.outvars if not literal(v)}
    for eqn in reversed(jaxpr.eqns):
        name, bodies = eqn.primitive.name, bodies_of(eqn)
        if name in tables.PRODUCTS:
            alone = [not asks_for_more(eqn)] * len(eqn.invars)
        elif name in tables.LAYOUT:
            alone = [elsewhere.isdisjoint(eqn.outvars)] * len(eqn.invars)
        elif name == "jit":
            (body,) = bodies
            inside = multiplied_alone(body.jaxpr)
            alone = [v in inside for v in body.jaxpr.invars]
        else:
            alone = [False] * len(eqn.invars)
        for v, is_alone in zip(eqn.invars, alone, strict=True):
            if not literal(v):
                used.add(v)
                if not is_alone:
                    elsewhere.add(v)
    return frozenset(used - elsewhere)


def signature(
    jaxpr: Jaxpr,
    segment: Segment,
    entering: Mapping[Any, Value],
    feeding: Feeding,
    rounded: frozenset[Any],
) -> Hashable:
    """Equal for segments that are the same function of arrays of the same types, as in layers that
    are alike. `entering` are the values of its inputs, in their order, `rounded` the variables that
    it returns in half precision."""
    numbers = {v: i for i, v in enumerate(entering)}

    def read(atom):
        if literal(atom):
            return np.asarray(atom.val).tobytes(), atom.aval
        return numbers[atom]

    equations = []
    for i in range(segment.start, segment.stop):
        eqn = jaxpr.eqns[i]
        operands = tuple(map(read, eqn.invars))
        for v in eqn.outvars:
            numbers[v] = len(numbers)
        params = tuple(sorted(eqn.params.items()))
        where = eqn.source_info.name_stack, eqn.ctx
        feeds = feeding.why.get(i), feeding.inside(i)
        equations.append((eqn.primitive, params, operands, len(eqn.outvars), where, feeds))
    # By `repr`, because 0 and -0 are equal.
    types = tuple((repr(x.kind), jax.typeof(x.native)) for x in entering.values())
    returned = tuple((numbers[v], v in rounded) for v in segment.outputs)
    out = tuple(equations), types, returned
    try:
        hash(out)
    except TypeError:  # a parameter of an equation has no hash: like no other
        return object()
    return out


def pays(operands: Sequence[Value], policy: Policy) -> bool:
    """Whether what a segment would keep is half, but for parameters, which are kept anyway."""
    governed = [x for x in operands if x.kind.governed]
    half = [x for x in governed if x.native.dtype == policy.dtype]
    return bool(half) and all(x in half or x.kind.master for x in governed)

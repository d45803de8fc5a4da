"""Runs of light operations, which the backward pass evaluates again.

Between two products in half precision stand norms, softmax and activations, whose inside is
float32. Differentiated as it stands, a program keeps several float32 arrays of each for the
backward pass, and with them more memory than it saves. A run of such operations costs hardly more
than reading its operands, so these are kept, in half, and the run is evaluated again.

The derivative engine cuts programs as well (`engine/_segments.py`), by another walk. There
a layer ends with its products, and all of it is evaluated again from the streams that entered it.
Here a product ends a run and stays outside of it, since what it takes is kept in half anyway; and a
run pays or does not pay by the kinds of its operands, which are known only when it is reached. What
is left in common, which variables go in and out, takes each of them four lines.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from ..interpret import _tables as tables
from ..interpret._asks import asks_for_more
from ..interpret._flat import Constant, Flat, variables
from ..interpret._jaxpr import bodies_of
from ._feeding import Feeding
from ._rules import Policy
from ._values import Value


class Segment(NamedTuple):
    """Consecutive equations, and the variables that go in and out."""

    start: int
    stop: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def _names(eqn: JaxprEqn) -> set[str]:
    """The primitives in an equation, without the containers that can be entered."""
    bodies = bodies_of(eqn)
    if not bodies:
        return {eqn.primitive.name}
    return set().union(*(_names(inner) for body in bodies for inner in body.jaxpr.eqns))


def _is_light(eqn: JaxprEqn, names: set[str]) -> bool:
    # A loop may be long, and a checkpoint says itself what is kept.
    plain = not bodies_of(eqn) or eqn.primitive.name == "custom_jvp_call"
    return plain and names <= tables.LIGHT and not eqn.effects


def segments_of(flat: Flat) -> dict[int, Segment]:
    """The longest runs of light operations that make float32 values, by their first position."""
    last_use: dict[int, int] = {}
    for i, step in enumerate(flat.steps):
        last_use.update((x, i) for x in variables(step.inputs))
    last_use.update((x, len(flat.steps)) for x in variables(flat.outputs))

    out: dict[int, Segment] = {}

    def close(start, stop, full):
        if not full:
            return
        steps = flat.steps[start:stop]
        made = {x: None for step in steps for x in step.outputs}
        used = dict.fromkeys(x for step in steps for x in variables(step.inputs))
        inputs = tuple(x for x in used if x not in made)
        outputs = tuple(x for x in made if last_use.get(x, -1) >= stop)
        out[start] = Segment(start, stop, inputs, outputs)

    start, full = 0, False
    for i, step in enumerate(flat.steps):
        names = _names(step.eqn)
        if _is_light(step.eqn, names):
            full = full or not names.isdisjoint(tables.FULL)
        else:
            close(start, i, full)
            start, full = i + 1, False
    close(start, len(flat.steps), full)
    return out


def multiplied_alone(flat: Flat) -> frozenset[int]:
    """The variables that go into products of half precision and nowhere else, moved around
    perhaps on the way."""
    used, elsewhere = set[int](), set(variables(flat.outputs))
    for step in reversed(flat.steps):
        name, operands = step.eqn.primitive.name, variables(step.inputs)
        used.update(operands)
        alone = name in tables.JAX_PRODUCTS and not asks_for_more(step.eqn)
        if not alone and not (name in tables.LAYOUT and elsewhere.isdisjoint(step.outputs)):
            elsewhere.update(operands)
    return frozenset(used - elsewhere)


def signature(
    flat: Flat,
    segment: Segment,
    entering: Mapping[int, Value],
    feeding: Feeding,
    rounded: frozenset[int],
) -> Hashable:
    """Equal for segments that are the same function of arrays of the same types, as in layers that
    are alike. `entering` are the values of its inputs, in their order, `rounded` the variables that
    it returns in half precision."""
    numbers = {v: i for i, v in enumerate(entering)}

    def read(x):
        return (np.asarray(x.value).tobytes(), x.aval) if isinstance(x, Constant) else numbers[x]

    equations = []
    for i in range(segment.start, segment.stop):
        eqn, inputs, outputs, _ = flat.steps[i]
        operands = tuple(map(read, inputs))
        for x in outputs:
            numbers[x] = len(numbers)
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

"""The roles of operands: what of an equation depends on the point, whether it is linear in that,
what is still; and which part of a loss is the network, and which is what that is measured by.

A residual is a difference of large numbers, and small. Rounded before the difference is taken, it
would be lost, and with it the gradient; so what follows the network is differentiated as it stands.
The network ends with the last product, or the last loop, that parameters go into. A product with
data (weights of a quadrature, a metric), one of values with each other (a squared norm) and one
that comes to a single number (a sum by trainable weights) may be of the loss.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ..interpret import _tables as tables
from ..interpret._flat import Constant, Flat, Step, variables
from ._streams import DEEP, FIRST, RAW, WILD, takes_derivatives


def stage_after(step: Step, stage: Mapping[int, int]) -> int | None:
    """How far from the point the results of an equation are, by the `stage` of those operands that
    depend on it; `None` if none does."""
    here = max((stage[x] for x in step.variables if x in stage), default=None)
    if here is not None and step.name in tables.PRODUCTS:
        return FIRST if here == RAW else DEEP
    return DEEP if here == FIRST and not is_linear(step, stage) else here


def is_wild(step: Step, stage: Mapping[int, int]) -> bool:
    """Returns whether the results of an equation are derivatives, or made of these by what has no
    bounds."""
    passes = step.name not in tables.BOUNDED and any(stage.get(x) == WILD for x in step.variables)
    return passes or takes_derivatives(step.eqn)


def by_stream(step: Step, stage: Mapping[int, int]) -> bool:
    """Returns whether each stream of a result comes of the same stream of the operands alone."""
    one = step.name in tables.PRODUCTS and len(moving_in(step, stage)) == 1
    return one or is_linear(step, stage)


def is_linear(step: Step, stage: Mapping[int, int]) -> bool:
    """Returns whether an equation is linear in what depends on the point."""
    name = step.name
    moving = moving_in(step, stage)
    scales = name in ("mul", "convert_element_type") and len(moving) == 1
    return name in tables.LINEAR or scales or (name == "div" and moving == [0])


def moving_in(step: Step, stage: Mapping[int, int]) -> list[int]:
    """Which operands of an equation depend on the point."""
    return [i for i, x in enumerate(step.inputs) if not isinstance(x, Constant) and x in stage]


def dependent(flat: Flat, on: Iterable[int]) -> set[int]:
    """Some variables, and all that depends on any of them."""
    out = set(on)
    for step in flat.steps:
        if not out.isdisjoint(step.variables):
            out.update(step.outputs)
    return out


def still_in(flat: Flat) -> set[int]:
    """The variables of a program that have no derivative, whatever it is taken by, and those whose
    derivative leads to nothing, such as what goes into `jax.lax.stop_gradient` alone."""
    out = set[int]()
    every, read = set(flat.inputs), set(variables(flat.outputs))
    for step in flat.steps:
        every.update(step.outputs)
        if step.name in tables.CONSTANT or step.values <= out:
            out.update(step.outputs)
    for step in reversed(flat.steps):
        asked = step.eqn.effects or not read.isdisjoint(step.outputs)
        if asked and step.name not in tables.CONSTANT:
            read.update(step.values)
    return out | (every - read)


def ends_of(
    flat: Flat, params: Collection[int], stage: Collection[int], looped: bool
) -> tuple[frozenset[int], set[int]]:
    """The products, loops and checkpoints of a network, by the positions of their equations, and
    all variables that are made of parameters alone.

    **Arguments:**

    - `params`: the operands of the program that are parameters.
    - `stage`: the variables that are computed of data.
    - `looped`: whether it is the step of a loop, where a single number may be the output of a
        network at one of many points.
    """
    given = set(params)
    ends = set()
    for i, step in enumerate(flat.steps):
        values = step.values
        chosen = values and given.issuperset(values) and not step.alone  # be it by data
        if chosen or not any(x in stage for x in step.variables):
            if not given.isdisjoint(values):
                given.update(step.outputs)
        elif not given.isdisjoint(values):
            # An elementwise product may be written as one that sums nothing up.
            sums = step.name in tables.PRODUCTS and contracted(step) != 1
            out: Any = step.eqn.outvars[0].aval if sums else None
            if step.alone or (sums and (looped or out.size != 1)):
                ends.add(i)
    return frozenset(ends), given


def contracted(step: Step) -> int:
    """How many terms each entry of a product sums up."""
    avals: list[Any] = [v.aval for v in step.eqn.invars[:2]]
    if "dot_general" not in step.name:
        return math.prod(avals[1].shape[1:])
    ((axes, _), _) = step.eqn.params["dimension_numbers"]
    return math.prod(avals[0].shape[i] for i in axes)

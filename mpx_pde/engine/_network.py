"""Which of a loss is the network, and which is what it is measured by.

A residual is a difference of large numbers, and small. Rounded before the difference is taken, it
would be lost, and with it the gradient; so what follows the network is differentiated as it stands.
The network ends with the last product, or the last loop, that parameters go into. A product with
data (weights of a quadrature, a metric), one of values with each other (a squared norm) and one
that comes to a single number (a sum by trainable weights) may be of the loss.
"""

import math
from collections.abc import Collection
from typing import Any

from ..interpret import _tables as tables
from ..interpret._flat import Flat, Step


def ends_of(
    flat: Flat,
    params: Collection[int],
    stage: Collection[int],
    alone: Collection[int],
    looped: bool,
) -> tuple[frozenset[int], set[int]]:
    """The products, loops and checkpoints of a network, by the positions of their equations, and
    all variables that are made of parameters alone.

    **Arguments:**

    - `params`: the operands of the program that are parameters.
    - `stage`: the variables that are computed of data.
    - `alone`: the positions of loops, and of what else holds programs.
    - `looped`: whether it is the step of a loop, where a single number may be the output of a
        network at one of many points.
    """
    given = set(params)
    ends = set()
    for i, step in enumerate(flat.steps):
        values = step.values
        chosen = values and given.issuperset(values) and i not in alone  # be it by data
        if chosen or not any(x in stage for x in step.variables):
            if not given.isdisjoint(values):
                given.update(step.outputs)
        elif not given.isdisjoint(values) and (i in alone or _is_of_network(step, looped)):
            ends.add(i)
    return frozenset(ends), given


def _is_of_network(step: Step, looped: bool) -> bool:
    if step.name not in tables.PRODUCTS or contracted(step) == 1:
        return False  # an elementwise product may be written as one that sums nothing up
    out: Any = step.eqn.outvars[0].aval
    return looped or out.size != 1


def contracted(step: Step) -> int:
    """How many terms each entry of a product sums up."""
    avals: list[Any] = [v.aval for v in step.eqn.invars[:2]]
    if "dot_general" not in step.name:
        return math.prod(avals[1].shape[1:])
    ((axes, _), _) = step.eqn.params["dimension_numbers"]
    return math.prod(avals[0].shape[i] for i in axes)

"""Which of a loss is the network, and which is what it is measured by.

A residual is a difference of large numbers, and small. Rounded before the difference is taken, it
would be lost, and with it the gradient; so what follows the network is differentiated as it stands.
The network ends with the last product, or the last loop, that parameters go into. A product with
data (weights of a quadrature, a metric) and one of values with each other (a squared norm) may be
of the loss.
"""

from collections.abc import Collection

from ..interpret._flat import Constant, Flat, variables
from . import _tables as tables
from ._streams import is_inexact


def ends_of(
    flat: Flat, params: Collection[int], stage: Collection[int], alone: Collection[int]
) -> tuple[frozenset[int], set[int]]:
    """The products, loops and checkpoints of a network, by the positions of their equations, and
    all variables that are made of parameters alone.

    **Arguments:**

    - `params`: the operands of the program that are parameters.
    - `stage`: the variables that are computed of data.
    - `alone`: the positions of loops, and of what else holds programs.
    """
    given = set(params)
    ends = set()
    for i, step in enumerate(flat.steps):
        pairs = zip(step.inputs, step.eqn.invars, strict=True)
        values = [x for x, v in pairs if not isinstance(x, Constant) and is_inexact(v.aval)]
        chosen = values and given.issuperset(values) and i not in alone  # be it by data
        if chosen or not any(x in stage for x in variables(step.inputs)):
            if not given.isdisjoint(values):
                given.update(step.outputs)
        elif not given.isdisjoint(values) and (
            step.eqn.primitive.name in tables.PRODUCTS or i in alone
        ):
            ends.add(i)
    return frozenset(ends), given

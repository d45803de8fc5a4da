"""Which of a loss is the network, and which is what it is measured by.

A residual is a difference of large numbers, and small. Rounded before the difference is taken, it
would be lost, and with it the gradient; so what follows the network is differentiated as it stands.
The network ends with the last product, or the last loop, that parameters or two of its values go
into. A product with data (weights of a quadrature, a metric) and one of a value with itself (a
squared norm) are of the loss.
"""

from collections.abc import Collection

from .._flat import Flat, Step, variables
from .._jaxpr import bodies_of, contains
from . import _tables as tables
from ._streams import is_inexact


def ends_of(
    flat: Flat, params: Collection[int], stage: Collection[int], alone: Collection[int]
) -> tuple[frozenset[int], set[int]]:
    """The products and containers of a network, by the positions of their equations, and all
    variables that are made of parameters alone.

    **Arguments:**

    - `params`: the operands of the program that are parameters.
    - `stage`: the variables that are computed of data.
    - `alone`: the positions of loops, and of what else holds programs.
    """
    given, computed = set(params), set[int]()
    root: dict[int, int] = {}  # what a variable is but for its shape
    out = set()
    for i, step in enumerate(flat.steps):
        inputs, name = variables(step.inputs), step.eqn.primitive.name
        if not any(x in stage for x in inputs):
            if not given.isdisjoint(inputs):
                given.update(step.outputs)
            continue
        if name not in tables.CONSTANT and not (given | computed).isdisjoint(inputs):
            computed.update(step.outputs)
        if name in tables.MOVES and len(inputs) == 1:
            root.update((x, root.get(inputs[0], inputs[0])) for x in step.outputs)
        if name in tables.PRODUCTS or i in alone:
            own = any(x in given and _moves(step, x) for x in inputs)
            values = {root.get(x, x) for x in inputs if x in computed and _moves(step, x)}
            multiplies = name in tables.PRODUCTS or any(
                contains(inner, tables.PRODUCTS) for inner in bodies_of(step.eqn)
            )
            if own or (multiplies and len(values) > 1):
                out.add(i)
    return frozenset(out), given


def _moves(step: Step, x: int) -> bool:
    return is_inexact(step.eqn.invars[step.inputs.index(x)].aval)

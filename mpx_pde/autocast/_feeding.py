"""Where results go: arithmetic that belongs to what comes after it."""

from collections.abc import Iterator
from typing import NamedTuple

from jax.extend.core import JaxprEqn

from ..interpret import _tables as tables
from ..interpret._flat import Constant, Flat, Step, flatten, variables
from ..interpret._jaxpr import bodies_of


MAGNIFIED = "its rounding error would be magnified by what it goes into"
SUMMED = "it goes into a sum, and belongs to it: a product of halves may be out of range"


Summed = frozenset[tuple[int, bool]]
"""Which results of a program go into a sum, and whether they go nowhere else."""


class Feeding(NamedTuple):
    """The facts about a program that are found from its end backwards."""

    why: dict[int, str]
    """The positions of arithmetic that is done in float32, and the reason."""
    containers: dict[int, Summed]
    """Which results of a container go into a sum, by its position, if any."""
    operands: frozenset[int]
    """Which operands go into a sum inside."""

    def inside(self, i: int) -> Summed:
        return self.containers.get(i, frozenset())


def feeding(flat: Flat, summed: Summed = frozenset()) -> Feeding:
    """Looks at a program of which `summed` go into a sum outside."""
    why = dict.fromkeys(_magnified(flat), MAGNIFIED)
    sums = _Sums(flat, summed)
    for i in sums.products:
        why.setdefault(i, SUMMED)
    operands = frozenset(i for i, x in enumerate(flat.inputs) if x in sums.reach)
    return Feeding(why, sums.containers, operands)


def _magnifies(eqn: JaxprEqn) -> bool:
    name = eqn.primitive.name
    return name in tables.MAGNIFYING or (name == "integer_pow" and eqn.params["y"] % 2 == 0)


def _magnified(flat: Flat) -> Iterator[int]:
    """Arithmetic whose result goes, by way of more arithmetic, into a function that magnifies its
    rounding errors."""
    wanted = set[int]()
    for i, step in _backwards(flat):
        name = step.eqn.primitive.name
        arithmetic = name in tables.ARITHMETIC
        here = (arithmetic or name in tables.LAYOUT) and not wanted.isdisjoint(step.outputs)
        if here and arithmetic:
            yield i
        if here or _magnifies(step.eqn):
            wanted.update(variables(step.inputs))


class _Sums:
    """Products of values whose result goes into a sum: squares, by whatever arithmetic they get
    there, and others, where they go nowhere else."""

    def __init__(self, flat: Flat, summed: Summed):
        self.products: list[int] = []
        self.containers: dict[int, Summed] = {}
        self.reach = set[int]()
        """Variables that go into a sum."""
        self.elsewhere = set[int]()
        """Variables that go anywhere else."""
        nowhere_else = dict(summed)
        for i, x in enumerate(flat.outputs):
            if not isinstance(x, Constant):
                if i in nowhere_else:
                    self.reach.add(x)
                if not nowhere_else.get(i, False):
                    self.elsewhere.add(x)
        for i, step in _backwards(flat):
            name, reaching = step.eqn.primitive.name, self._reaching(i, step)
            only = name in _PASSED and self.elsewhere.isdisjoint(step.outputs)
            if name == "mul" and reaching and (_is_square(step) or only):
                self.products.append(i)
            self.reach.update(reaching)
            if not (reaching and (only or name in tables.SUMS)):
                self.elsewhere.update(variables(step.inputs))

    def _reaching(self, i: int, step: Step) -> list[int]:
        """The operands of an equation that go into a sum by way of it."""
        name, operands = step.eqn.primitive.name, variables(step.inputs)
        if name in tables.SUMS:
            return operands
        out = frozenset(
            (j, x not in self.elsewhere) for j, x in enumerate(step.outputs) if x in self.reach
        )
        if name in _PASSED:
            return operands if out else []
        bodies = bodies_of(step.eqn)
        if not bodies or name == "while":
            return []
        # Operands and results of a container are those of what it holds, behind the index of a
        # branch.
        if out:
            self.containers[i] = out
        found = [feeding(flatten(body, forward_mode=False, sharded=True), out) for body in bodies]
        inner = enumerate(step.inputs[int(name == "cond") :])
        return [
            x
            for j, x in inner
            if not isinstance(x, Constant) and any(j in each.operands for each in found)
        ]


_PASSED = tables.ARITHMETIC | tables.LAYOUT | tables.CHOICES


def _is_square(step: Step) -> bool:
    x, y = step.inputs
    return x is y or (not isinstance(x, Constant) and x == y)


def _backwards(flat: Flat) -> Iterator[tuple[int, Step]]:
    return zip(reversed(range(len(flat.steps))), reversed(flat.steps), strict=True)

"""Where results go: arithmetic that belongs to what comes after it."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn

from ..interpret import _tables as tables
from ..interpret._jaxpr import bodies_of, literal


MAGNIFIED = "its rounding error would be magnified by what it goes into"
SUMMED = "it goes into a sum, and belongs to it: a product of halves may be out of range"


Summed = frozenset[tuple[int, bool]]
"""Which results of a jaxpr go into a sum, and whether they go nowhere else."""


class Feeding(NamedTuple):
    """What is known of a jaxpr from its end backwards."""

    why: dict[int, str]
    """The positions of arithmetic that is done in float32, and the reason."""
    containers: dict[int, Summed]
    """Which results of a container go into a sum, by its position, if any."""
    operands: frozenset[int]
    """Which operands go into a sum inside."""
    elsewhere: frozenset[int]
    """Which operands go anywhere else inside."""

    def inside(self, i: int) -> Summed:
        return self.containers.get(i, frozenset())


def feeding(jaxpr: Jaxpr, summed: Summed = frozenset()) -> Feeding:
    """Looks at a jaxpr of which `summed` go into a sum outside."""
    why = dict.fromkeys(_magnified(jaxpr), MAGNIFIED)
    sums = _Sums(jaxpr, summed)
    for i in sums.products:
        why.setdefault(i, SUMMED)
    operands, elsewhere = (
        frozenset(i for i, v in enumerate(jaxpr.invars) if v in found)
        for found in (sums.reach, sums.elsewhere)
    )
    return Feeding(why, sums.containers, operands, elsewhere)


def _magnifies(eqn: JaxprEqn) -> bool:
    name = eqn.primitive.name
    return name in tables.FEEDS or (name == "integer_pow" and eqn.params["y"] % 2 == 0)


def _magnified(jaxpr: Jaxpr) -> Iterator[int]:
    """Arithmetic whose result goes, by way of more arithmetic, into a function that magnifies its
    rounding errors."""
    wanted = set()
    for i, eqn in _backwards(jaxpr):
        arithmetic = eqn.primitive.name in tables.ARITHMETIC
        passes = arithmetic or eqn.primitive.name in tables.LAYOUT
        here = passes and any(v in wanted for v in eqn.outvars)
        if here and arithmetic:
            yield i
        if here or _magnifies(eqn):
            wanted.update(_variables(eqn))


class _Sums:
    """Products of values whose result goes into a sum: squares, by whatever arithmetic they get
    there, and others, where they go nowhere else."""

    def __init__(self, jaxpr: Jaxpr, summed: Summed):
        self.products: list[int] = []
        self.containers: dict[int, Summed] = {}
        self.reach: set[Any] = set()
        """Variables that go into a sum."""
        self.elsewhere: set[Any] = set()
        """Variables that go anywhere else."""
        nowhere_else = dict(summed)
        for i, v in enumerate(jaxpr.outvars):
            if not literal(v):
                if i in nowhere_else:
                    self.reach.add(v)
                if not nowhere_else.get(i, False):
                    self.elsewhere.add(v)
        for i, eqn in _backwards(jaxpr):
            reaching, astray = self._reaching(i, eqn)
            only = eqn.primitive.name in _PASSED
            only = only and all(v not in self.elsewhere for v in eqn.outvars)
            if eqn.primitive.name == "mul" and reaching and (_is_square(eqn) or only):
                self.products.append(i)
            self.reach.update(reaching)
            if not (reaching and (only or eqn.primitive.name in tables.SUMS)):
                self.elsewhere.update(astray)

    def _reaching(self, i: int, eqn: JaxprEqn) -> tuple[list[Any], list[Any]]:
        """The operands of an equation that go into a sum by way of it, and those that may go
        elsewhere by way of it."""
        name, operands = eqn.primitive.name, _variables(eqn)
        if name in tables.SUMS:
            return operands, operands
        out = frozenset(
            (j, v not in self.elsewhere) for j, v in enumerate(eqn.outvars) if v in self.reach
        )
        if name in _PASSED:
            return operands if out else [], operands
        bodies = bodies_of(eqn)
        if not bodies or name == "while":
            return [], operands
        # Operands and results of a container are those of what it holds, behind the index of a
        # branch.
        if out:
            self.containers[i] = out
        skipped = int(name == "cond")
        found = [feeding(body.jaxpr, out) for body in bodies]
        inner = [(j, v) for j, v in enumerate(eqn.invars[skipped:]) if not literal(v)]
        reaching = [v for j, v in inner if any(j in x.operands for x in found)]
        if name != "jit":  # such as a loop, whose carry goes into the next step, too
            return reaching, operands
        return reaching, [v for j, v in inner if any(j in x.elsewhere for x in found)]


_PASSED = frozenset((*tables.ARITHMETIC, *tables.LAYOUT, *tables.CHOICES))


def _is_square(eqn: JaxprEqn) -> bool:
    x, y = eqn.invars
    return x is y


def _variables(eqn: JaxprEqn) -> list[Any]:
    return [v for v in eqn.invars if not literal(v)]


def _backwards(jaxpr: Jaxpr) -> Iterator[tuple[int, JaxprEqn]]:
    return zip(reversed(range(len(jaxpr.eqns))), reversed(jaxpr.eqns), strict=True)

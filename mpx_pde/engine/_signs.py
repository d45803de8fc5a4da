"""Finds what is known of the numbers in a program: signs, bounds, and numbers themselves."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..program import _tables as tables
from ..program._flat import Constant, Step
from ..program._jaxpr import aval_of, size_of
from .taylor._jets import is_inexact


Sign = tuple[Any, int] | None
"""The sign of a value: that of a variable, or of 1, times +1 or -1; `None` if it is not known."""


class Root(NamedTuple):
    """The variable that a bounded value is a function of, and the bound of its magnitude."""

    variable: int
    bound: float


class Numbers(NamedTuple):
    """What is known of the numbers in a variable.

    **Attributes:**

    - `sign`: their sign, relative to a variable or to 1.
    - `root`: the operand of the bounded function that this is a product or power of, if it is one,
        or the distance of such a product to its bound. `1 - tanh(x)` is accurate in `x`, and not in
        `tanh(x)`; `0.7 - tanh(x)` is accurate in neither.
    - `width`: how many there were before they were broadcast.
    - `number`: the number that all of them are, if it is known.
    """

    sign: Sign = None
    root: Root | None = None
    width: int = 1
    number: float | None = None


def numbers_of(x: Constant) -> Numbers:
    """Returns what is known of the numbers in a constant."""
    return Numbers(width=int(np.size(x.value)), number=_number_of(x))


@dataclasses.dataclass(frozen=True)
class Signs:
    """Follows what is known of numbers through a program.

    **Attributes:**

    - `of`: tells what is known of a variable.
    """

    of: Callable[[int], Numbers]

    def of_results(self, step: Step) -> list[Numbers]:
        """Returns what is known of each result of a step."""
        same = step.name in tables.SAME and len(step.inputs) == 1
        number = self.number(step.inputs[0]) if same else None
        sign, root = self._sign(step), self.root(step)
        avals = (aval_of(v) for v in step.eqn.outvars)
        return [Numbers(sign, root, self._width(step, aval), number) for aval in avals]

    def _width(self, step: Step, aval: Any) -> int:
        if step.name in tables.REPEATING:
            return max((self.of(x).width for x in step.variables), default=1)
        return size_of(aval)

    def number(self, x: Any) -> float | None:
        """Returns the number that all entries of an operand are, if it is known."""
        return _number_of(x) if isinstance(x, Constant) else self.of(x).number

    def sign(self, x: Any) -> Sign:
        number = self.number(x)
        if number is not None:
            return (1, 1) if number > 0 else (1, -1) if number < 0 else None
        return None if isinstance(x, Constant) else self.of(x).sign or (x, 1)

    def _is_everywhere(self, sign: Sign) -> bool:
        """Returns whether a sign is that of a single number, and so the same in other places."""
        return sign is not None and (sign[0] == 1 or self.of(sign[0]).width == 1)

    def _sign(self, step: Step) -> Sign:
        """Returns the sign of a result, where it is that of 1 or of another variable."""
        name, signs = step.name, list(map(self.sign, step.inputs))
        if not signs or not all(is_inexact(v.aval) for v in step.eqn.outvars):
            return None
        if name in tables.POSITIVE or (step.power is not None and step.power % 2 == 0):
            return 1, 1
        if name in tables.SCALINGS:
            return _product(*signs)
        if name in tables.NEGATIONS:
            return negated(signs[0])
        if name in tables.ADDITIONS:
            subtracts = name in tables.SUBTRACTIONS
            if self.root(step) is not None:  # the sign of the number
                second = self.number(step.inputs[1]) is not None
                return signs[0] if not second else negated(signs[1]) if subtracts else signs[1]
            return signs[0] if signs[0] == signs[1] and not subtracts else None
        if name in tables.ODD or step.power is not None:
            return signs[0]
        if name in tables.MOVES and len(signs) == 1:
            return signs[0] if self._is_everywhere(signs[0]) else None
        return (1, 1) if name in tables.MAXIMA and (1, 1) in signs else None

    def decays(self, step: Step) -> bool:
        """Returns whether a result is the exponential of what is negative."""
        return step.name in tables.DECAYING and self.sign(step.inputs[0]) == (1, -1)

    def root_of(self, x: Any) -> Root | None:
        return None if isinstance(x, Constant) else self.of(x).root

    def root(self, step: Step) -> Root | None:
        """Returns what a result is a bounded function of, if it is accurate in that."""
        name = step.name
        if name in tables.SATURATING or self.decays(step):
            (x,) = step.inputs
            if isinstance(x, Constant):
                return None
            return Root(x, math.pi / 2 if name in tables.ANGLES else 1.0)
        roots = [r for x in step.inputs if (r := self.root_of(x)) is not None]
        numbers = [abs(n) for x in step.inputs if (n := self.number(x)) is not None]
        others = len(step.inputs) - len(roots) - len(numbers)
        if not roots or others or len({r.variable for r in roots}) > 1:
            return None
        variable, bounds = roots[0].variable, [r.bound for r in roots]
        if name in tables.MOVES or name in tables.NEGATIONS:
            return Root(variable, max([*bounds, *numbers]))
        if name in tables.MULTIPLICATIONS:
            return Root(variable, math.prod([*bounds, *numbers]))
        if step.power is not None and step.power > 0:
            with np.errstate(over="ignore"):
                return Root(variable, float(np.float64(bounds[0]) ** step.power))
        # The distance to a number within the bounds may be small for any argument.
        if name in tables.ADDITIONS and len(roots) == 1 and reaches(numbers[0], roots[0]):
            return Root(variable, bounds[0] + numbers[0])
        return None


def reaches(number: float, root: Root) -> bool:
    """Returns whether a number is not below a bound, up to rounding."""
    return number >= root.bound * (1 - 2.0**-20)


def _number_of(x: Constant) -> float | None:
    if x.number is None:
        return None
    value = np.asarray(x.number)
    return float(value) if value.dtype.kind in "fiu" else None


def negated(a: Sign) -> Sign:
    return None if a is None else (a[0], -a[1])


def _product(a: Sign, b: Sign) -> Sign:
    if a is None or b is None:
        return None
    if a[0] == b[0]:
        return 1, a[1] * b[1]
    if 1 in (a[0], b[0]):
        return (b[0] if a[0] == 1 else a[0]), a[1] * b[1]
    return None

"""Finds what can be computed again from rounded values without losing digits.

A value is *computed again* on the way back if each step from what is kept to it is accurate
relative to its result: a relative error of the operands stays a relative error of about that size.
Sums of values that may cancel, functions of large arguments, and decisions are not. A value that is
*exact*, because it depends on nothing that is rounded, can be computed again by any step.
"""

import dataclasses
import functools as ft
import math
import operator
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from ..program import _tables as tables
from ..program._flat import Constant, Flat, Step, flatten
from ..program._jaxpr import aval_of, bodies_of, scopes_of, size_of
from ._magnitudes import magnitudes
from ._roles import is_wild
from ._segments import is_light
from ._signs import Numbers, Signs, negated, numbers_of, reaches
from ._storage import WILD
from .taylor._jets import is_inexact
from .taylor._univariate import KEPT_TERMS


CONSTANT, MASTER, DATA, COMPUTED = range(4)
"""Levels of a value, by what it depends on: nothing, parameters alone, other arguments alone, or
both. That of a result is the bitwise or of those of its operands."""

RECOMPUTED = "mpx_pde.computed_again"
"""The scope of a `jax.checkpoint`: its products are computed again from what enters it."""


class Fact(NamedTuple):
    """What is known of a variable.

    **Attributes:**

    - `level`: `MASTER`, `DATA` or `COMPUTED`.
    - `exact`: whether it depends on nothing that is rounded on the way back. Values of both levels
        are not, nor are those that are computed from what has to be kept of data.
    - `full`: whether it depends on nothing but arrays that the user keeps in full, and constants.
    - `magnitude`: the power of two by which numbers may have enlarged it (see `magnitudes`);
        infinite for a derivative, which has any size once its scale is taken from it.
    - `numbers`: what is known of the numbers in it.
    - `centered`: whether it is the difference of a value from a narrower one that is computed from
        it, such as its mean, or a multiple of that.
    """

    level: int
    exact: bool = True
    full: bool = False
    magnitude: float = 0.0
    numbers: Numbers = Numbers()
    centered: bool = False


@dataclasses.dataclass(frozen=True)
class Facts:
    """The facts of the variables of a program, and what each can be computed again from.

    **Attributes:**

    - `half`: the dtype that values are rounded to.
    - `of`: a fact for each variable.
    - `wild`: the variables that are derivatives, or are computed from derivatives, with the stage
        `WILD`.
    - `operands`: for each variable that can be computed again, the variables that this takes.
    - `made`: the step that makes each variable.
    - `entering`: the variables that enter a checkpoint. Data that do are kept as they are: they may
        have an offset that a bias takes away.
    - `leaving`: the variables that leave a checkpoint.
    """

    half: np.dtype
    of: dict[int, Fact] = dataclasses.field(default_factory=dict)
    wild: dict[int, int] = dataclasses.field(default_factory=dict)
    operands: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    made: dict[int, Step] = dataclasses.field(default_factory=dict)
    entering: Collection[int] = ()
    leaving: Collection[int] = ()

    @property
    def signs(self) -> Signs:
        return Signs(lambda x: self.of[x].numbers)

    def _add(self, step: Step) -> None:
        """Adds the results of a step whose operands have facts."""
        level = ft.reduce(operator.or_, map(self.level, step.variables), CONSTANT)
        of_exact = level < COMPUTED and all(self.of[x].exact for x in step.variables)
        again = self._operands_again(step, of_exact)
        exact = of_exact and not self.multiplies_in_half(step)
        full = bool(step.variables) and all(self.of[x].full for x in step.variables)
        sizes, numbers = self._magnitudes(step), self.signs.of_results(step)
        centered = self._centers(step)
        for k, v, size, known in zip(step.outputs, step.eqn.outvars, sizes, numbers, strict=True):
            is_data = level == DATA and not full and can_round(aval_of(v))
            own = exact and not (is_data and again is None)
            if is_data and k in self.entering:
                own = True
            # What leaves a checkpoint is not computed again, but read as it is kept.
            if of_exact or k in self.leaving:
                known = known._replace(root=None)
            self.of[k] = Fact(level, own, full, size, known, centered)
            self.made[k] = step
            if again is not None and own == exact:
                self.operands[k] = again

    def fact(self, x: Any) -> Fact:
        """Returns the fact of an operand."""
        return Fact(CONSTANT, numbers=numbers_of(x)) if isinstance(x, Constant) else self.of[x]

    def level(self, x: Any) -> int:
        return CONSTANT if isinstance(x, Constant) else self.of[x].level

    # Accuracy.

    def multiplies_in_half(self, step: Step) -> bool:
        """Returns whether a product is in half if it is computed again, as in a checkpoint. Data
        may have an offset that a bias takes away, so their products are in full."""
        given = (self.of[x] for x in step.variables if self.level(x) != MASTER)
        return _multiplies_again(step) and not any(fact.exact for fact in given)

    def _operands_again(self, step: Step, exact: bool) -> tuple[int, ...] | None:
        """Returns the variables that a step can be evaluated again from; `None` if it cannot.
        `exact` tells that its operands are."""
        name, values = step.name, tuple(dict.fromkeys(step.variables))
        multiplies = _multiplies_again(step)
        if step.eqn.effects or not (multiplies or is_light(step.eqn)):
            return None
        if exact or multiplies:
            return values
        if not all(is_inexact(v.aval) for v in step.eqn.outvars):
            return None  # a decision
        if name in tables.ACCURATE:
            return values
        if name in tables.ADDITIONS:
            return self._operands_of_sum(step, values)
        if name in tables.COMPLEMENTS:
            root = self.signs.root_of(values[0])
            return (root.variable,) if root is not None and reaches(1.0, root) else None
        if self.signs.decays(step):
            return values
        if name in tables.PUSHES and self._inside(step):
            return values
        return None

    def _operands_of_sum(self, step: Step, values: tuple[int, ...]) -> tuple[int, ...] | None:
        """Returns the variables that a sum or difference of two is accurate in, if it cannot cancel
        or if it is the sum of a bias and of deviations from a mean, which have no offset that the
        bias could take away, or of what a checkpoint multiplies again."""
        a, b = step.inputs
        if KEPT_TERMS in scopes_of(step.eqn):
            return values
        # Of a difference from parameters that a value is fitted to, little may be left.
        adds = step.name not in tables.SUBTRACTIONS
        again = bool(region_of(step.eqn))
        if adds and any(
            self._is_bias(x) and (again or self._is_centered(y)) for x, y in ((a, b), (b, a))
        ):
            return values
        signs = self.signs.sign(a), self.signs.sign(b)
        if step.name in tables.SUBTRACTIONS:
            signs = signs[0], negated(signs[1])
        if signs[0] is not None and signs[0] == signs[1]:
            return values
        root = self.signs.root(step)
        return None if root is None else (root.variable,)

    def _is_bias(self, x: Any) -> bool:
        return self.level(x) == MASTER and self.of[x].exact and self.of[x].numbers.width > 1

    def _is_centered(self, x: Any) -> bool:
        return not isinstance(x, Constant) and self.of[x].centered

    def _centers(self, step: Step) -> bool:
        """Returns whether a result is `centered`."""
        if step.name in tables.SUBTRACTIONS:
            x, mean = step.inputs
            if isinstance(x, Constant) or isinstance(mean, Constant):
                return False
            width = lambda k: self.of[k].numbers.width
            return width(mean) < width(x) and self._is_of(mean, x)
        if step.name not in tables.SCALINGS | tables.SAME:
            return False
        factors = step.inputs[:1] if step.name in tables.DIVISIONS else step.inputs
        return sum(map(self._is_centered, factors)) == 1  # a product of two may be a square

    def _is_of(self, k: int, x: int) -> bool:
        """Returns whether a variable is computed from `x`."""
        pending, seen = [k], {k}
        while pending:
            step = self.made.get(pending.pop())
            for y in step.variables if step is not None else ():
                if y == x:
                    return True
                if y not in seen and y > x:  # they are numbered in their order
                    seen.add(y)
                    pending.append(y)
        return False

    def _inside(self, step: Step) -> bool:
        """Returns whether a function with a derivative of its own is accurate in its operands."""
        flat = flatten(bodies_of(step.eqn)[0], forward_mode=False)
        inner = Facts(self.half)
        for k, c in flat.constants.items():
            inner.of[k] = Fact(CONSTANT, numbers=numbers_of(c))
        for k, x in zip(flat.inputs, step.inputs, strict=True):
            sign = self.signs.sign(x)
            sign = sign if sign is not None and sign[0] == 1 else (k, 1)
            fact = self.fact(x)
            numbers = fact.numbers._replace(sign=sign, root=None)
            inner.of[k] = fact._replace(numbers=numbers, full=False, magnitude=0.0)
        for one in flat.steps:
            inner._add(one)
        return all(inner.of[x].exact or x in inner.operands for s in flat.steps for x in s.outputs)

    def _magnitudes(self, step: Step) -> Sequence[float]:
        if self.half == np.float16 and is_wild(step, self.wild):
            self.wild.update(dict.fromkeys(step.outputs, WILD))
            return [math.inf] * len(step.outputs)
        return magnitudes(step, lambda x: self.of[x].magnitude)

    def beyond(self, x: int) -> bool:
        """Returns whether half precision may be unable to hold a value. Data that a number makes
        small are large in units of their own, such as a pressure over that of an atmosphere."""
        smallest, largest = _exponents(self.half)
        magnitude, computed = self.of[x].magnitude, self.of[x].level == COMPUTED
        return magnitude > largest or (computed and magnitude < smallest)


@ft.cache
def _exponents(half: np.dtype) -> tuple[float, float]:
    """Returns the powers of two between which a number keeps all of its digits."""
    info = jnp.finfo(half)
    return math.log2(float(info.smallest_normal)), math.log2(float(info.max))


def facts_of(flat: Flat, operand_facts: Sequence[Fact], half: np.dtype) -> Facts:
    """Returns the facts of a program whose operands have these facts."""
    entering, leaving = _ends_of_checkpoints(flat)
    facts = Facts(half, entering=entering, leaving=leaving)
    for k, c in flat.constants.items():
        level = DATA if np.ndim(c.value) else CONSTANT
        facts.of[k] = Fact(level, numbers=numbers_of(c))
    facts.of.update(zip(flat.inputs, operand_facts, strict=True))
    for step in flat.steps:
        facts._add(step)
    return facts


def can_round(aval: Any) -> bool:
    """Returns whether a value may be rounded if it is kept. Rounding a number saves nothing."""
    return size_of(aval) > 1 and jnp.issubdtype(aval.dtype, jnp.floating)


def region_of(eqn: JaxprEqn) -> str:
    """Returns the scope of the checkpoint that an equation is in, or an empty string."""
    return next((x for x in scopes_of(eqn) if x.startswith(RECOMPUTED)), "")


def _multiplies_again(step: Step) -> bool:
    """Returns whether a step is a product that a checkpoint computes again."""
    return step.name in tables.PRODUCTS and bool(region_of(step.eqn))


def _ends_of_checkpoints(flat: Flat) -> tuple[set[int], set[int]]:
    """Returns the values that enter a checkpoint, and those that leave one. The latter are not
    computed again outside of it."""
    entering, leaving = set[int](), set[int]()
    made: dict[int, str] = {}
    for step in flat.steps:
        region = region_of(step.eqn)
        crossing = [x for x in step.variables if made.get(x, "") != region]
        entering.update(crossing if region else ())
        leaving.update(x for x in crossing if made.get(x))
        made.update(dict.fromkeys(step.outputs, region))
    return entering, leaving

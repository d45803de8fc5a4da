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
from collections.abc import Sequence
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
from ._storage import WILD
from .taylor._jets import is_inexact
from .taylor._rules import KEPT_TERMS


CONSTANT, MASTER, DATA, COMPUTED = range(4)
"""What a value depends on: nothing, parameters alone, other arguments alone, or both. The level of
a result is the bitwise or of those of its operands."""

RECOMPUTED = "mpx_pde.computed_again"
"""The scope of a `jax.checkpoint`: its products are computed again from what enters it."""

Sign = tuple[Any, int] | None
"""The sign of a value: that of a variable, or of 1, times +1 or -1; `None` if it is not known."""


class Fact(NamedTuple):
    """What is known of a variable.

    **Attributes:**

    - `level`: `MASTER`, `DATA` or `COMPUTED`.
    - `exact`: whether it depends on nothing that is rounded on the way back. Values of both levels
        are not, nor are those that are computed from what has to be kept of data.
    - `sign`: its sign, relative to a variable or to 1.
    - `full`: whether it depends on nothing but arrays that the user keeps in full, and constants.
    - `magnitude`: the power of two by which numbers may have enlarged it (see `magnitudes`);
        infinite for a derivative, which has any size once its scale is taken from it.
    - `root`: the operand of the bounded function that this is a product or power of, if it is one.
        `1 - tanh(x)` is accurate in `x`, and not in `tanh(x)`.
    - `width`: the number of entries before it was broadcast.
    """

    level: int
    exact: bool = True
    sign: Sign = None
    root: int | None = None
    width: int = 1
    full: bool = False
    magnitude: float = 0.0


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
    """

    half: np.dtype
    of: dict[int, Fact] = dataclasses.field(default_factory=dict)
    wild: dict[int, int] = dataclasses.field(default_factory=dict)
    operands: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    made: dict[int, Step] = dataclasses.field(default_factory=dict)

    def _add(self, step: Step) -> None:
        """Adds the results of a step whose operands have facts."""
        level = ft.reduce(operator.or_, map(self.level, step.variables), CONSTANT)
        exact = level < COMPUTED and all(self.of[x].exact for x in step.variables)
        again = self._operands_again(step, exact)
        full = bool(step.variables) and all(self.of[x].full for x in step.variables)
        sign, root, sizes = self._sign(step), self._root(step), self._magnitudes(step)
        for k, v, size in zip(step.outputs, step.eqn.outvars, sizes, strict=True):
            aval = aval_of(v)
            has_to_be_kept = again is None and level == DATA and not full and can_round(aval)
            own = exact and not has_to_be_kept
            self.of[k] = Fact(level, own, sign, root, self._width(step, aval), full, size)
            self.made[k] = step
            if again is not None:
                self.operands[k] = again

    def level(self, x: Any) -> int:
        return CONSTANT if isinstance(x, Constant) else self.of[x].level

    def _width(self, step: Step, aval: Any) -> int:
        if step.name in tables.LAYOUT:
            return max((self.of[x].width for x in step.variables), default=1)
        return size_of(aval)

    # Accuracy.

    def _operands_again(self, step: Step, exact: bool) -> tuple[int, ...] | None:
        """Returns the variables that a step can be evaluated again from; `None` if it cannot.
        `exact` tells that its operands are."""
        name, values = step.name, tuple(dict.fromkeys(step.variables))
        multiplies = name in tables.PRODUCTS and bool(region_of(step.eqn))
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
            root = self.of[values[0]].root
            return None if root is None else (root,)
        if self._decays(step):
            return values
        if name in tables.PUSHES and self._inside(step):
            return values
        return None

    def _operands_of_sum(self, step: Step, values: tuple[int, ...]) -> tuple[int, ...] | None:
        """Returns the variables that a sum or difference of two is accurate in, if it cannot cancel
        or if it is the sum of a product and a bias."""
        a, b = step.inputs
        if KEPT_TERMS in scopes_of(step.eqn):
            return values
        # Of a difference from parameters that a value is fitted to, little may be left.
        adds = step.name not in tables.SUBTRACTIONS
        if adds and any(self.level(x) == MASTER and self._is_wide(x) for x in (a, b)):
            return values
        signs = self.sign(a), self.sign(b)
        if step.name in tables.SUBTRACTIONS and signs[1] is not None:
            signs = signs[0], (signs[1][0], -signs[1][1])
        if signs[0] is not None and signs[0] == signs[1]:
            return values
        root = self._root(step)
        exact = [x for x in values if self.of[x].exact]
        return (root, *exact) if root is not None and not any(map(self._is_wide, exact)) else None

    def _is_wide(self, x: Any) -> bool:
        return not isinstance(x, Constant) and self.of[x].width > 1

    def _inside(self, step: Step) -> bool:
        """Returns whether a function with a derivative of its own is accurate in its operands."""
        flat = flatten(bodies_of(step.eqn)[0], forward_mode=False)
        inner = Facts(self.half)
        for k, c in flat.constants.items():
            inner.of[k] = Fact(CONSTANT, width=int(np.size(c.value)))
        for k, x in zip(flat.inputs, step.inputs, strict=True):
            outside = None if isinstance(x, Constant) else self.of[x]
            sign = self.sign(x)
            sign = sign if sign is not None and sign[0] == 1 else (k, 1)
            fact = outside or Fact(CONSTANT)
            inner.of[k] = fact._replace(sign=sign, root=None, full=False, magnitude=0.0)
        for one in flat.steps:
            inner._add(one)
        return all(
            inner.of[x].exact or x in inner.operands for s in flat.steps for x in s.outputs
        )

    def _magnitudes(self, step: Step) -> Sequence[float]:
        if self.half == np.float16 and is_wild(step, self.wild):
            self.wild.update(dict.fromkeys(step.outputs, WILD))
            return [math.inf] * len(step.outputs)
        return magnitudes(step, lambda x: self.of[x].magnitude)

    def beyond(self, x: int) -> bool:
        """Returns whether half precision may be unable to hold a value."""
        return self.of[x].magnitude > _largest(self.half)

    # Signs and bounded functions.

    def sign(self, x: Any) -> Sign:
        if isinstance(x, Constant):
            value = np.asarray(x.value) if np.ndim(x.value) == 0 else None
            if value is None or value.dtype.kind not in "fiu" or value == 0 or value != value:
                return None
            return 1, (1 if value > 0 else -1)
        return self.of[x].sign or (x, 1)

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
            return None if signs[0] is None else (signs[0][0], -signs[0][1])
        if name in tables.ADDITIONS - tables.SUBTRACTIONS:
            return signs[0] if signs[0] == signs[1] else None
        if name in tables.ODD or step.power is not None:
            return signs[0]
        if name in tables.MOVES and len(signs) == 1:
            return signs[0]
        return (1, 1) if name in tables.MAXIMA and (1, 1) in signs else None

    def _decays(self, step: Step) -> bool:
        return step.name in tables.DECAYING and self.sign(step.inputs[0]) == (1, -1)

    def _root(self, step: Step) -> int | None:
        """Returns the variable that a bounded value is a function of."""
        name, moving = step.name, {x for x in step.variables if not self.of[x].exact}
        if name in tables.SATURATING or self._decays(step):
            return moving.pop() if len(moving) == 1 else None
        if name in _BOUNDED_TOO or step.power is not None:
            roots = {self.of[x].root for x in moving}
            return roots.pop() if len(roots) == 1 else None
        return None


_BOUNDED_TOO = tables.MOVES | tables.ADDITIONS | tables.MULTIPLICATIONS | tables.NEGATIONS
"""Operations whose result is bounded if their operands are."""


@ft.cache
def _largest(half: np.dtype) -> float:
    return math.log2(float(jnp.finfo(half).max))


def facts_of(flat: Flat, operand_facts: Sequence[Fact], half: np.dtype) -> Facts:
    """Returns the facts of a program whose operands have these facts."""
    facts = Facts(half)
    for k, c in flat.constants.items():
        facts.of[k] = Fact(DATA if np.ndim(c.value) else CONSTANT, width=int(np.size(c.value)))
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


def _product(a: Sign, b: Sign) -> Sign:
    if a is None or b is None:
        return None
    if a[0] == b[0]:
        return 1, a[1] * b[1]
    if 1 in (a[0], b[0]):
        return (b[0] if a[0] == 1 else a[0]), a[1] * b[1]
    return None

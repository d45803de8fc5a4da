"""Finds the roles of variables, and the rules of equations, in a program of which each equation has
its own precision."""

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn

from ..program import _tables as tables
from ..program._flat import Constant, Flat, Step, variables
from ..program._jaxpr import bodies_of, contains, is_container
from ..program._products import asks_for_more, says_its_dtype
from ._products import gives_way
from ._roles import AbstractRoles, as_key
from ._segments import is_light
from .taylor._jets import is_inexact


class PrecisionRule(NamedTuple):
    """The way in which an equation is evaluated.

    **Attributes:**

    - `name`: `"product"`, `"mixed"`, `"full"`, `"half"`, `"follow"`, `"layout"`, `"convert"` or
        `"own"` (the dtypes of the program).
    - `reason`: why it is evaluated in this way.
    - `known`: whether the primitive has a row in the table.
    - `asked`: whether an override asks for float32.
    """

    name: str
    reason: str
    known: bool = True
    asked: bool = False


@dataclasses.dataclass(frozen=True)
class MixedRoles(AbstractRoles):
    """The roles of variables for an evaluation in which each equation has a precision of its own.

    **Attributes:**

    - `stored`: the variables that count as half. The evaluation adds those that it finds.
    - `rules`: the rule of each equation, by the `id` of its step.
    - `full`: the results of arithmetic that are not stored in half because of their readers, see
        `full_in`.
    - `unrounded`: the variables that are not rounded when they leave a layer, see `near_numbers`
        and `wide_in`.
    - `solved`: the variables that reach a factorization or a solve, see `wide_in`.
    - `scores`: the results of products of many matrices, such as the scores of attention.
    - `numbers`: the masters that are numbers known while tracing. The evaluation adds them.
    """

    stages: dict[int, int]
    full: set[int]
    stored: set[int]
    rules: dict[int, PrecisionRule]
    unrounded: set[int]
    solved: set[int]
    scores: set[int]
    numbers: dict[int, Any]
    final: ClassVar = frozenset[int]()
    unlayered: ClassVar = frozenset[int]()

    def of(self, x: int) -> tuple[Hashable, ...]:
        sets = self.full, self.stored, self.scores, self.unrounded
        return self.stages.get(x), as_key(self.numbers.get(x)), *(x in every for every in sets)

    def stage_of(self, x: int | Constant) -> int | None:
        return None if isinstance(x, Constant) else self.stages.get(x)

    def rule(self, step: Step) -> PrecisionRule:
        return self.rules[id(step)]

    def kind(self, step: Step) -> str:
        # Slow equations and products are not evaluated again. Moves of masters are, so that what
        # masters are broadcast to is not kept.
        return "light" if is_light(step.eqn) else "alone"


def scores_in(flat: Flat) -> set[int]:
    """Returns the results of products of many matrices, and of moves of such results."""
    out = set[int]()
    for step in flat.steps:
        eqn, name = step.eqn, step.eqn.primitive.name
        batched = name in tables.DOTS and eqn.params["dimension_numbers"][1][0]
        moved = name in tables.MOVES and not out.isdisjoint(step.variables)
        out.update(step.outputs if batched or moved else ())
    return out


_RULES = {"half": "product", "itself": "mixed", "float32": "full", "operands": "follow"}
"""The names of rules, by the precision of an operation in the table."""


OF_DERIVATIVES = "multiplies derivatives, which have no scales any more"
INTO_A_SOLVE = "its result goes into a factorization or a solve, which magnifies errors"


def instead_of_halves(step: Step, rule: PrecisionRule, reason: str) -> PrecisionRule:
    """Returns the rule for a product that is in full for a `reason`, given its rule for other
    values. Overrides and products that name their dtype keep theirs."""
    open = rule.name == "product" or (rule.name == "mixed" and gives_way(step.eqn))
    if not open or rule.reason.startswith("half="):
        return rule
    return rule._replace(name="full", reason=reason)


def rule_of(eqn: JaxprEqn) -> PrecisionRule:
    """Returns the rule for an equation without overrides."""
    name = eqn.primitive.name
    if name in tables.JAX_PRODUCTS and asks_for_more(eqn):
        return PrecisionRule("full", "the program asks for this precision itself")
    if name in tables.MIXED and not says_its_dtype(eqn):
        return PrecisionRule("mixed", "a mixed product without a dtype of its own: it is given one")
    if name in tables.PUSHES:
        return PrecisionRule("full" if contains(bodies_of(eqn)[0], tables.FULL) else "follow", "")
    if name not in tables.TABLE:
        return PrecisionRule("own", "unknown to autocast", known=False)
    row = tables.TABLE[name]
    engines = {"layout": "layout", "cast": "convert"}
    return PrecisionRule(engines.get(row.engine, _RULES.get(row.precision, "own")), row.reason)


def moves_masters(step: Step, stages: Mapping[int, int]) -> bool:
    name, avals = step.name, [v.aval for v in step.eqn.invars]
    if any(x in stages for x in step.variables):
        return False
    if not any(is_inexact(v.aval) for v in step.eqn.outvars):
        return True
    # A cast of booleans is a master: zeros and ones are exact in every dtype.
    exact = (is_inexact(x) or getattr(x, "dtype", None) == np.bool_ for x in avals)
    return name in tables.SAME and all(exact)


_PASSED = tables.ARITHMETIC | tables.LAYOUT | tables.CHOICES


def full_in(flat: Flat, inside: bool) -> set[int]:
    """Returns the results of arithmetic that stay in float32 because of their readers. A function
    may magnify their rounding errors. A `mul` that is summed may be too large for half. Results of
    a program `inside` of another one may be summed there."""
    magnified, out = set[int](), set[int]()
    elsewhere = set(variables(flat.outputs))
    summed = set(elsewhere) if inside else set[int]()
    for step in reversed(flat.steps):
        name, operands = step.name, step.variables
        arithmetic, sums = name in tables.ARITHMETIC, not summed.isdisjoint(step.outputs)
        here = (arithmetic or name in tables.LAYOUT) and not magnified.isdisjoint(step.outputs)
        only = name in _PASSED and elsewhere.isdisjoint(step.outputs)
        multiplies = name in tables.MULTIPLICATIONS
        square = multiplies and len(set(operands)) == 1 and len(operands) == 2
        if (arithmetic and here) or (multiplies and sums and (square or only)):
            out.update(step.outputs)
        even = step.power is not None and step.power % 2 == 0
        if here or even or name in tables.MAGNIFYING:
            magnified.update(operands)
        into_sum = name in tables.SUMS or (sums and name in _PASSED)
        summed.update(operands if into_sum or is_container(step.eqn) else ())
        if not (into_sum and (only or name in tables.SUMS)):
            elsewhere.update(operands)
    return out

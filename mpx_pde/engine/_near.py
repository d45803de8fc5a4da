"""Finds values that must not be rounded, because little of a result would be left: values that may
lie near a number from which their distance is taken."""

import functools as ft
import math
from collections.abc import Callable, Collection, Iterable, Mapping

import numpy as np

from ..program import _tables as tables
from ..program._flat import Constant, Flat, Step, flatten, reaching, variables
from ..program._jaxpr import aval_of
from ..program._rebind import bodies_in
from ._roles import still_in


_LEAST = 0.25
"""The least magnitude of a number that counts as one at which activations saturate."""


def summed_in(flat: Flat, stages: Collection[int]) -> set[int]:
    """Returns the results of products, and their sums; variables outside `stages` are ignored."""
    out, adds = set[int](), tables.ADDITIONS | tables.SAME
    for step in flat.steps:
        moving = [x for x in step.variables if x in stages]
        sums = step.name in adds and moving and out.issuperset(moving)
        if step.name in tables.PRODUCTS or sums:
            out.update(step.outputs)
    return out


def near_numbers(
    flat: Flat, outputs: Iterable[int] = (), carried: Iterable[tuple[int, int]] = ()
) -> set[int]:
    """Returns the variables that leave little of a result if they are rounded first.

    Arithmetic or a function may compute their distance to a number, as in 1 - x for a saturated
    activation x. A reduction may pick the largest or smallest, which rounding makes equal to
    others. The results at the positions `outputs` count too. `carried` pairs the position of a
    result with that of the operand that it becomes: the result counts if the operand does."""
    still, sizes = still_in(flat), _numbers(flat)
    positive = {x for s in flat.steps if s.name in tables.POSITIVE for x in s.outputs}
    out = set(variables([x for i, x in enumerate(flat.outputs) if i in {*outputs}]))

    @ft.cache
    def inside(step: Step, places: Collection[int]) -> list[int]:
        return reached_inside(step, lambda flat, _, carried: near_numbers(flat, places, carried))

    def operands_of(step: Step) -> Iterable[int]:
        reaches = step.name in tables.DISTANCES and not out.isdisjoint(step.outputs)
        picks = step.name in tables.EXTREMES and not still.issuperset(step.outputs)
        takes = step.name in tables.NEAR or _leaves_little(step, sizes, positive)
        places = tuple(i for i, x in enumerate(step.outputs) if x in out)
        return (*(step.variables if reaches or picks or takes else ()), *inside(step, places))

    return reaching(flat, out, list(carried), operands_of)


def reached_inside(
    step: Step, reached: Callable[[Flat, int, list[tuple[int, int]]], Collection[int]]
) -> list[int]:
    """Returns the operands of an equation that are `reached` in the programs that it holds. This
    function takes a program, the position of its first operand among those of the equation, and the
    results that a loop carries, paired with the operands that they become."""
    out: list[int] = []
    for body, start, carried in bodies_in(step.eqn):
        flat = flatten(body, forward_mode=True)
        inside = reached(flat, start, list(enumerate(carried)))
        pairs = zip(flat.inputs, step.inputs[start:], strict=False)
        out += variables([x for k, x in pairs if k in inside])
    return out


def _numbers(flat: Flat) -> dict[int, float]:
    """Returns the scalars made of constants alone, with their values; NaN for an unknown one."""
    found = {k: math.nan for k, c in flat.constants.items() if np.ndim(c.value) == 0}
    for step in flat.steps:
        alone = step.inputs and found.keys() >= {*step.variables}
        if alone and all(aval_of(v).shape == () for v in step.eqn.invars):
            moves = step.name in tables.SAME
            values = [_number_of(x, found) for x in step.inputs]
            value = values[0] if moves and len(values) == 1 else math.nan
            found.update(dict.fromkeys(step.outputs, math.nan if value is None else value))
    return found


def _number_of(x: int | Constant, numbers: Mapping[int, float]) -> float | None:
    if not isinstance(x, Constant):
        return numbers.get(x)
    if np.ndim(x.value):
        return None
    known = isinstance(x.value, np.ndarray | np.generic | int | float)
    return complex(x.value).real if known else math.nan


def _leaves_little(step: Step, numbers: Mapping[int, float], positive: Collection[int]) -> bool:
    """Returns whether an equation takes the distance to a number at which activations may saturate.
    Small numbers, as in a norm, and sums of positive numbers and values do not count."""
    if step.name not in tables.ADDITIONS:
        return False
    known = [x for x in (_number_of(x, numbers) for x in step.inputs) if x is not None]
    near = any(not abs(x) < _LEAST for x in known)
    others, adds = step.values - numbers.keys(), step.name not in tables.SUBTRACTIONS
    return near and not (adds and others <= {*positive} and min(known) > 0)

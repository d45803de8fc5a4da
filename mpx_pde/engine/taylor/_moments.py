"""Finds sums of squared deviations from the mean in a program."""

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping

from jax.extend.core import Primitive

from ...program import _tables as tables
from ...program._deviations import Sum, deviations, summed, with_deviations_once
from ...program._flat import Flat, Step, dependent, needed
from ...program._jaxpr import aval_of


LARGEST = 2**16
"""The largest number of entries whose variance is taken from sums of squares. The mean of the first
few is subtracted. These deviate from the mean too, so rounding loses no more than this factor."""

moments_p = Primitive("moments")
"""The sum of an array over axes, and the sum of the squares of its deviations from the mean. The
latter has no derivative if it is `still`."""
moments_p.multiple_results = True

squares_p = Primitive("squares_about_mean")
"""The second result of `moments_p`, with its derivative. Takes this result, the array, and the
deviations."""


def with_moments(flat: Flat, moving: Collection[int], *, by_deviations: bool = False) -> Flat:
    """Returns a program that takes variances of values that depend on `moving` ones in one pass.

    By definition a variance is the mean of the squared deviations from the mean. This takes two
    passes over all streams, and two more in a backward pass. The sums of an array and of its
    squares take one pass, and determine the variance. Its derivative reads the array again.

    `by_deviations`, the derivative is that by definition, which reads the deviations. If they are
    kept for a backward pass anyway, as a norm does for its own, nothing else has to be.
    """
    flat = with_deviations_once(flat)
    made = flat.made
    depends = dependent(flat, moving)
    squares: dict[Sum, tuple[Step, Step]] = {}
    for step in flat.steps:
        found = _squared_deviations(step, made)
        if found is not None and found[0] in depends:
            squares[found] = step, made[made[step.variables[0]].variables[0]]
    if not squares:
        return flat

    numbers = itertools.count(1 + max(x for step in flat.steps for x in step.outputs))
    ends = {id(end): where for where, (end, _) in squares.items()}
    results = {where: end.outputs[0] for where, (end, _) in squares.items()}
    if by_deviations:
        results = {where: next(numbers) for where in squares}
    steps: list[Step] = []
    for step in flat.steps:
        if id(step) in ends:
            where = ends[id(step)]
            if by_deviations:
                steps.append(_with_derivative(step, results[where], where, squares[where][1]))
        elif (where := summed(step)) in squares:
            both = [*step.eqn.outvars, *squares[where][0].eqn.outvars]
            params = {"axes": where[1], "still": by_deviations}
            eqn = step.eqn.replace(primitive=moments_p, params=params, outvars=both)
            steps.append(Step(eqn, step.inputs, (*step.outputs, results[where])))
        else:
            steps.append(step)
    return flat._replace(steps=needed(steps, flat.outputs))


def _with_derivative(end: Step, result: int, where: Sum, centered: Step) -> Step:
    """Returns the equation that gives a sum of squared deviations its derivative."""
    atoms = [*end.eqn.outvars, centered.eqn.invars[0], *centered.eqn.outvars]
    eqn = end.eqn.replace(primitive=squares_p, params={"axes": where[1]}, invars=atoms)
    return dataclasses.replace(end, eqn=eqn, inputs=(result, where[0], *centered.outputs))


def _squared_deviations(step: Step, made: Mapping[int, Step]) -> Sum | None:
    """Returns the variable and the axes of a sum of squared deviations; `None` for others."""
    where = summed(step)
    square = None if where is None else made.get(where[0])
    if where is None or square is None or not _is_square(square):
        return None
    centered = made.get(square.variables[0])
    found = None if centered is None else deviations(centered, made)
    if centered is None or found is None or found[1] != where[1]:
        return None
    shape = aval_of(centered.eqn.outvars[0]).shape
    return found if math.prod(shape[i] for i in where[1]) <= LARGEST else None


def _is_square(step: Step) -> bool:
    if step.name in tables.MULTIPLICATIONS:
        return len(step.variables) == 2 and len(set(step.variables)) == 1
    return step.power == 2 and bool(step.variables)

"""Finds values that are divided by their own sum, as in a softmax.

Such shares add up to 1, and their derivative relies on it: what all of their cotangents have in
common cancels, and so does a share near 1 with a label. Rounded shares add up to 1 ± 2^-9. So the
terms are kept in place of them, and with these the sum of the rounded terms. The derivative of the
logarithm of a sum has shares, too.
"""

from collections.abc import Callable, Mapping, Set as AbstractSet
from typing import NamedTuple

from ..program import _tables as tables
from ..program._deviations import summed
from ..program._flat import Flat, Step
from ._facts import Facts


class Shares(NamedTuple):
    """The shares of a program.

    **Attributes:**

    - `of`: the variables that are shares.
    - `sums`: the sums that their terms are divided by, and those that have logarithms.
    - `guarded`: such sums after a number was added to them, or after their absolute value.
    """

    of: set[int]
    sums: set[int]
    guarded: set[int]

    def all_of(self, flat: Flat) -> set[int]:
        """Returns the shares, their terms, the sums, and what is computed of the sums alone."""
        of_sums, terms = set(self.sums), set[int]()
        for step in flat.steps:
            if not self.sums.isdisjoint(step.outputs):
                terms.update(step.variables)
            elif step.variables and of_sums.issuperset(step.variables):
                of_sums.update(step.outputs)
        return self.of | terms | of_sums


def shares_of(
    flat: Flat, facts: Facts, rounds: Callable[[int], bool], left_out: AbstractSet[int]
) -> Shares:
    """Returns the shares of a program, but those `left_out`. Their terms have a sum that cannot
    cancel, and `rounds` tells which are rounded if they are kept."""
    terms, origin = dict[int, int](), dict[int, int]()
    out = Shares(set(), set(), set())
    for step in flat.steps:
        given = [origin.get(x, x) for x in step.variables]
        divides = step.name in tables.DIVISIONS and len(given) == 2
        if (where := summed(step)) is not None:
            if facts.signs.sign(where[0]) == (1, 1) and rounds(where[0]):
                terms[step.outputs[0]] = given[0]
        elif divides and given[0] == terms.get(given[1]) and left_out.isdisjoint(step.outputs):
            out.of.update(step.outputs)
            out.sums.add(given[1])
        elif len(given) == 1 and step.name in tables.LOGARITHMS and given[0] in terms:
            out.sums.add(given[0])
        elif len(given) == 1 and step.name in tables.SAME:
            origin.update(dict.fromkeys(step.outputs, given[0]))
        elif len(given) == 1 and given[0] in terms and _guards(step, facts):
            origin.update(dict.fromkeys(step.outputs, given[0]))
            out.guarded.update(step.outputs)
    return out


def _guards(step: Step, facts: Facts) -> bool:
    """Returns whether a step changes a sum only where it is near zero, and never makes it less."""
    if step.name in tables.ADDITIONS - tables.SUBTRACTIONS:
        return any((facts.signs.number(x) or 0) > 0 for x in step.inputs)
    return step.name in tables.MAXIMA | (tables.CHOICES & tables.POSITIVE)


def weighted(flat: Flat, facts: Facts) -> set[int]:
    """Returns positive weights, what they multiply, and the sums of both, wherever a program
    divides by a sum of weights and has a sum of their products.

    The derivative of a share w / Σ w, with w = exp(y), is the share times y' - Σ w y' / Σ w. It is
    nearly 0 where the share is nearly 1. So the mean must be that of the same y' and the same w.
    """
    sums = (where[0] for step in flat.steps if (where := summed(step)) is not None)
    weights = {x for x in sums if facts.signs.sign(x) == (1, 1)}
    degrees, factors = dict.fromkeys(weights, 1.0), set[int]()
    divides = sums_products = False
    for step in flat.steps:
        given = {degrees[x] for x in step.variables if x in degrees}
        if not given or len(step.outputs) != 1 or weights.issuperset(step.outputs):
            continue
        found = _degree_after(step, degrees)
        (out,) = step.outputs
        if found:
            degrees[out] = found
        if summed(step) is not None:
            sums_products |= weights.isdisjoint(step.variables)
        elif step.name in tables.MULTIPLICATIONS:
            factors.update(step.variables)
        divides |= step.name in tables.LOGARITHMS | tables.DIVISIONS or (found or 0) < 0
    if not (divides and sums_products):
        return set()
    out = degrees.keys() | factors
    for step in reversed(flat.steps):
        if step.name in tables.SAME and not out.isdisjoint(step.outputs):
            out.update(step.variables)
    return out


def _degree_after(step: Step, degrees: Mapping[int, float]) -> float | None:
    """Returns the power of the weights that the result of a step is proportional to; `None` if
    there is none."""
    given = [degrees.get(x, 0.0) if isinstance(x, int) else 0.0 for x in step.inputs]
    if summed(step) is not None or step.name in tables.SAME | tables.NEGATIONS:
        return given[0]
    if step.name in tables.ADDITIONS:
        return given[0] if len({*given}) == 1 else None
    return None if step.name in tables.PRODUCTS else step.exponent(given)

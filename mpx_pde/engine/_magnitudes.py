"""Finds by how much the numbers in a program may enlarge its values.

A value counts as one of order 1, unless numbers that are known while tracing enter it. These add up
along a program, as in the polynomials by which JAX computes the exponential of a matrix.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from ..program import _tables as tables
from ..program._flat import Constant, Flat, Step, flatten
from ..program._jaxpr import aval_of, size_of
from ..program._rebind import bodies_in
from .taylor._jets import is_inexact


_ORDINARY = 8.0
"""The power of two up to which a number counts as one of order 1."""


def magnitudes(step: Step, of: Callable[[int], float]) -> Sequence[float]:
    """Returns the magnitudes of the results of an equation, as powers of two, given those `of` its
    operands. Those of integers are 0."""
    given = [_of_number(x) if isinstance(x, Constant) else of(x) for x in step.inputs]
    bodies = [(flatten(x, forward_mode=False), start) for x, start, _ in bodies_in(step.eqn)]
    if bodies:
        each = [_of_program(flat, given[start:]) for flat, start in bodies]
        out = list(map(max, zip(*each, strict=True)))
    else:
        out = [_of_result(step, given)] * len(step.outputs)
    pairs = zip(out, step.eqn.outvars, strict=True)
    return [size if is_inexact(v.aval) else 0.0 for size, v in pairs]


def _of_program(flat: Flat, given: Sequence[float]) -> list[float]:
    found = dict(zip(flat.inputs, given, strict=True))
    found.update((k, _of_number(c)) for k, c in flat.constants.items())
    for step in flat.steps:
        found.update(zip(step.outputs, magnitudes(step, found.__getitem__), strict=True))
    return [_of_number(x) if isinstance(x, Constant) else found[x] for x in flat.outputs]


def _of_number(x: Constant) -> float:
    if x.number is None or not is_inexact(x.aval):
        return 0.0
    return _power(abs(float(np.real(x.number))))


def _power(size: float) -> float:
    power = math.log2(size) if 0 < size < math.inf else 0.0
    return power if abs(power) > _ORDINARY else 0.0


def _of_result(step: Step, given: Sequence[float]) -> float:
    name = step.name
    if name in tables.BOUNDED or not given:
        return 0.0
    if (exponent := step.exponent(given)) is not None:
        return exponent
    if name not in tables.LINEAR | tables.ACCURATE | tables.ADDITIONS:
        return 0.0
    many, few = (size_of(aval_of(v[0])) for v in (step.eqn.invars, step.eqn.outvars))
    terms = many / few if name in tables.SUMS & tables.LINEAR and few else 1.0
    return max(given) + _power(terms)

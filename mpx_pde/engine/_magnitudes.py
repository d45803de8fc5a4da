"""Finds by how much the numbers in a program may enlarge its values.

A value counts as one of order 1, unless numbers that are known while tracing enter it. These add up
along a program, as in the polynomials by which JAX computes the exponential of a matrix.
"""

import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from ..program import _tables as tables
from ..program._flat import Constant, Flat, Step, flatten
from ..program._rebind import bodies_in


def magnitudes(step: Step, of: Callable[[int], float]) -> Sequence[float]:
    """Returns the magnitudes of the results of an equation, as powers of two, given those `of` its
    operands."""
    given = [_of_number(x) if isinstance(x, Constant) else of(x) for x in step.inputs]
    bodies = [(flatten(x, forward_mode=False), start) for x, start, _ in bodies_in(step.eqn)]
    if not bodies:
        return [_of_result(step, given)] * len(step.outputs)
    each = [_of_program(flat, given[start:]) for flat, start in bodies]
    return list(map(max, zip(*each, strict=True)))


def _of_program(flat: Flat, given: Sequence[float]) -> list[float]:
    found = dict(zip(flat.inputs, given, strict=True))
    found.update((k, _of_number(c)) for k, c in flat.constants.items())
    for step in flat.steps:
        found.update(zip(step.outputs, magnitudes(step, found.__getitem__), strict=True))
    return [_of_number(x) if isinstance(x, Constant) else found[x] for x in flat.outputs]


def _of_number(x: Constant) -> float:
    if np.ndim(x.value) or not jnp.issubdtype(x.aval.dtype, jnp.number):
        return 0.0  # an array, or the tangent of an integer
    size = abs(float(np.real(x.value)))
    return math.log2(size) if 0 < size < math.inf else 0.0


def _of_result(step: Step, given: Sequence[float]) -> float:
    name = step.name
    if name in tables.BOUNDED or not given:
        return 0.0
    if name in tables.MULTIPLICATIONS | tables.PRODUCTS:
        return sum(given)
    if name in tables.DIVISIONS:
        return given[0] - given[1]
    if step.power is not None:
        return step.power * given[0]
    return max(given) if name in tables.LINEAR | tables.ACCURATE | tables.ADDITIONS else 0.0

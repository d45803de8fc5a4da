"""Finds long products of factors in half precision, one multiplied by the next."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ..program import _tables as tables
from ..program._flat import Constant, Step
from ..program._jaxpr import aval_of, differentiable
from ..program._lines import is_of_jax
from ..program._products import HALVES
from ..program._rebind import carried_by
from ._formulas import dtype_of
from ._known import Known, value_of
from ._sums import UNITS
from ._survey import Seen, Survey


KNOWN = 64
"""The number of known factors from which on a product of them loses too much. They are mostly
alike, as those of `0.999**t`, so each adds up to half a rounding. Computed factors are rounded
differently, and count from as many on as the format has units."""

_NEAR = 1 / 64
"""The distance from 1 within which a product of factors reaches far enough to lose as much."""


def long_products(seen: Seen, survey: Survey, made: Mapping[int, Step]) -> Iterator[str]:
    """Yields the half type of a product of many factors that an equation takes: of `cumprod`, or of
    a value that a loop multiplies in each step.

    `made` are the equations that made the variables of the program so far. Masks and other whole
    numbers do not count.
    """
    if seen.step.name == "scan":
        yield from _of_loop(seen, survey, made)
    elif (axis := _multiplied_along(seen.step)) is not None:
        operand, atom = seen.step.inputs[0], seen.step.eqn.invars[0]
        half, length = dtype_of([atom]), aval_of(atom).shape[axis]
        if half in HALVES and _loses(operand, half, length, survey.known, made):
            yield half


def _multiplied_along(step: Step) -> int | None:
    """Returns the axis along which an equation multiplies up an array, if it is a `cumprod`, or one
    of those that JAX writes out to differentiate it, which first take every other entry."""
    if step.name == "cumprod":
        return step.eqn.params["axis"]
    strides = (step.name == "slice" and step.eqn.params["strides"]) or ()
    if 2 in strides and is_of_jax(step.eqn, "cumprod"):
        return strides.index(2)
    return None


def _of_loop(seen: Seen, survey: Survey, made: Mapping[int, Step]) -> Iterator[str]:
    eqn, (body,) = seen.step.eqn, seen.bodies
    carried = carried_by(eqn)
    halves = [i for i in carried if dtype_of([eqn.invars[i]]) in HALVES]
    found = {
        i: _factors(body.steps, body.inputs[i]).get(body.outputs[i - carried.start]) for i in halves
    }
    if not any(found.values()):
        return
    inside = {**made, **body.made}
    inside.update((y, made[x]) for x, y in seen.entered if isinstance(x, int) and x in made)
    for i, factors in found.items():
        half, length = dtype_of([eqn.invars[i]]), eqn.params["length"]
        if any(_loses(x, half, length, survey.known, inside) for x in factors or ()):
            yield half


def _factors(steps: Iterable[Step], start: int) -> Mapping[Any, tuple[int | Constant, ...]]:
    """Returns the variables that are `start` times factors, with these factors."""
    held: dict[Any, tuple[int | Constant, ...]] = {start: ()}
    for step in steps:
        of_start = [x for x in step.variables if x in held]
        if len(of_start) != 1:
            continue
        if step.name in tables.MULTIPLICATIONS:
            others = tuple(x for x in step.inputs if x != of_start[0])
            held[step.outputs[0]] = (*held[of_start[0]], *others)
        elif step.name in tables.SAME | tables.NEGATIONS and len(step.inputs) == 1:
            held[step.outputs[0]] = held[of_start[0]]
    return held


def _loses(
    x: int | Constant,
    half: str,
    length: int,
    known: Mapping[int, Known | None],
    made: Mapping[int, Step],
) -> bool:
    """Returns whether a product of `length` factors in an array of a half type loses too much."""
    if not isinstance(length, int) or length < KNOWN:
        return False
    if (value := value_of(x, known)) is not None:
        return _are_near_one(value())
    return length >= UNITS[half] and not _is_whole(x, known, made)


def _are_near_one(values: np.ndarray) -> bool:
    away = np.abs(np.abs(np.asarray(values, np.float64)) - 1)
    return bool(np.mean((away > 0) & (away < _NEAR)) > 1 / 2) if values.size else False


_WHOLE = (
    tables.SAME
    | tables.NEGATIONS
    | tables.ADDITIONS
    | tables.SUBTRACTIONS
    | tables.MULTIPLICATIONS
    | tables.SELECTS
    | tables.MAXIMA
    | {"pad", "min", "floor", "round", "sign"}
)
"""Operations whose results are whole numbers if their operands are."""

_STEPWISE = {"floor", "ceil", "round", "sign"}


def _is_whole(
    x: int | Constant,
    known: Mapping[int, Known | None],
    made: Mapping[int, Step],
    depth: int = 12,
) -> bool:
    """Returns whether an array is computed of integers, booleans and whole numbers alone, as masks
    are."""
    if (value := value_of(x, known)) is not None:
        values = np.asarray(value(), np.float64)
        return bool(np.all(values == np.round(values)))
    step = made.get(x) if not isinstance(x, Constant) else None
    if step is None or depth == 0:
        return False
    if step.name in _STEPWISE:
        return True
    return step.name in _WHOLE and all(
        _is_whole(step.inputs[i], known, made, depth - 1) for i in differentiable(step.eqn.invars)
    )

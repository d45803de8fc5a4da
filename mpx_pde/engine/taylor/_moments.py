"""Finds sums of squared deviations from the mean in a program."""

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from ...program import _tables as tables
from ...program._flat import Constant, Flat, Step, dependent, merged, needed
from ...program._jaxpr import aval_of


LARGEST = 2**16
"""The largest number of entries whose variance is taken from sums of squares. The mean of the first
few is subtracted. These deviate from the mean too, so rounding loses no more than this factor."""

moments_p = Primitive("moments")
"""The sum of an array over axes, and the sum of the squares of its deviations from the mean. The
latter has no derivative."""
moments_p.multiple_results = True

squares_p = Primitive("squares_about_mean")
"""The second result of `moments_p`, with its derivative. Takes this result, the array, and the
deviations."""


def with_moments(flat: Flat, moving: Collection[int]) -> Flat:
    """Returns a program that takes variances of values that depend on `moving` ones in one pass.

    By definition a variance is the mean of the squared deviations from the mean. This takes two
    passes over all streams. The sums of an array and of its squares take one pass, and determine
    the variance. Its derivative is that by definition, which reads the deviations: a norm has them
    for its result too.
    """
    flat = merged(flat)
    made = {x: step for step in flat.steps for x in step.outputs}
    depends = dependent(flat, moving)
    squares: dict[tuple[int, tuple[int, ...]], tuple[Step, Step]] = {}
    for step in flat.steps:
        found = _deviations(step, made)
        if found is not None and found[0] in depends:
            squares[found] = step, made[made[step.inputs[0]].variables[0]]
    if not squares:
        return flat

    numbers = itertools.count(1 + max(x for step in flat.steps for x in step.outputs))
    values = {where: next(numbers) for where in squares}
    ends = {id(end): where for where, (end, _) in squares.items()}
    steps: list[Step] = []
    for step in flat.steps:
        if id(step) in ends:
            where = ends[id(step)]
            _, centered = squares[where]
            inputs = (values[where], where[0], *centered.outputs)
            atoms = [*step.eqn.outvars, centered.eqn.invars[0], *centered.eqn.outvars]
            params = {"axes": where[1]}
            eqn = step.eqn.replace(primitive=squares_p, params=params, invars=atoms)
            steps.append(dataclasses.replace(step, eqn=eqn, inputs=inputs))
        elif (where := _summed(step)) in squares:
            both = [*step.eqn.outvars, *squares[where][0].eqn.outvars]
            params = {"axes": where[1]}
            eqn = step.eqn.replace(primitive=moments_p, params=params, outvars=both)
            steps.append(Step(eqn, step.inputs, (*step.outputs, values[where])))
        else:
            steps.append(step)
    return flat._replace(steps=needed(steps, flat.outputs))


def _summed(step: Step) -> tuple[int, tuple[int, ...]] | None:
    """Returns the variable and the axes of a plain sum of real numbers; `None` for others."""
    if step.name != "reduce_sum" or isinstance(x := step.inputs[0], Constant):
        return None
    params, dtype = step.eqn.params, aval_of(step.eqn.invars[0]).dtype
    plain = jnp.issubdtype(dtype, jnp.floating) and params.get("out_sharding") is None
    return (x, tuple(map(int, params["axes"]))) if plain else None


def _deviations(step: Step, made: Mapping[int, Step]) -> tuple[int, tuple[int, ...]] | None:
    """Returns the variable and the axes of a sum of squared deviations; `None` for others."""
    where = _summed(step)
    square = None if where is None else made.get(where[0])
    if where is None or square is None or not _is_square(square):
        return None
    centered = made.get(square.variables[0])
    if centered is None or centered.name not in tables.SUBTRACTIONS or len(centered.variables) != 2:
        return None
    (x, mean), axes = centered.variables, where[1]
    shape = aval_of(centered.eqn.outvars[0]).shape
    count = math.prod(shape[i] for i in axes)
    if aval_of(centered.eqn.invars[0]).shape != shape or not 1 < count <= LARGEST:
        return None
    kept = _mean_of(mean, (x, axes), len(shape), count, made)
    if kept is None:
        return None
    there = len(kept) == len(shape) and all(k in (i, None) for i, k in enumerate(kept))
    rest = {i for i in range(len(shape)) if i not in axes and shape[i] != 1}
    return (x, axes) if (not kept or there) and rest <= set(kept) else None


def _is_square(step: Step) -> bool:
    if step.name in tables.MULTIPLICATIONS:
        return len(step.variables) == 2 and len(set(step.variables)) == 1
    return step.power == 2 and bool(step.variables)


def _mean_of(
    k: int | Constant,
    where: tuple[int, tuple[int, ...]],
    ndim: int,
    count: int,
    made: Mapping[Any, Step],
) -> list[int | None] | None:
    """Returns the array axis that each axis of its mean stands for; `None` for another value."""
    moves, divided = [], False
    while (step := made.get(k)) is not None:
        name = step.name
        if name == "broadcast_in_dim" and len(step.inputs) == 1:
            moves.append(step.eqn.params)
        elif name in tables.DIVISIONS and not divided and _number(step.inputs[1]) == count:
            divided = True
        elif _summed(step) == where and divided:
            kept: list[int | None] = [i for i in range(ndim) if i not in where[1]]
            for params in reversed(moves):
                places = dict(zip(params["broadcast_dimensions"], kept, strict=True))
                kept = [places.get(i) for i in range(len(params["shape"]))]
            return kept
        else:
            return None
        k = step.inputs[0]
    return None


def _number(x: Any) -> Any:
    return x.value if isinstance(x, Constant) and np.ndim(x.value) == 0 else None

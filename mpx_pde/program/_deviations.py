"""Finds deviations from a mean in a program."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from . import _tables as tables
from ._flat import Constant, Flat, Step, merged, needed, renamed
from ._jaxpr import aval_of


Sum = tuple[int, tuple[int, ...]]
"""A sum: the variable, and the axes that it is taken over."""

Axes = Sequence[int | None]
"""The axes of an array that each axis of another one stands for; `None` for an axis of its own."""


def with_deviations_once(flat: Flat) -> Flat:
    """Returns a program that computes nothing twice, and of several deviations of an array from its
    mean over the same axes one. They differ in how they broadcast the mean: a norm subtracts it
    from the array, and the variance in it does so too."""
    flat = merged(flat)
    made = flat.made
    first: dict[Any, int] = {}
    same: dict[int, int] = {}
    for step in flat.steps:
        if (deviation := deviations(step, made)) is not None:
            (x,) = step.outputs
            same[x] = first.setdefault((deviation, aval_of(step.eqn.outvars[0])), x)
    if all(x == y for x, y in same.items()):
        return flat
    steps = [dataclasses.replace(step, inputs=renamed(step.inputs, same)) for step in flat.steps]
    outputs = renamed(flat.outputs, same)
    return flat._replace(steps=needed(steps, outputs), outputs=outputs)


def summed(step: Step) -> Sum | None:
    """Returns the variable and the axes of a plain sum of real numbers; `None` for others."""
    if step.name != "reduce_sum" or isinstance(x := step.inputs[0], Constant):
        return None
    params, dtype = step.eqn.params, aval_of(step.eqn.invars[0]).dtype
    plain = jnp.issubdtype(dtype, jnp.floating) and params.get("out_sharding") is None
    return (x, tuple(map(int, params["axes"]))) if plain else None


def deviations(step: Step, made: Mapping[int, Step]) -> Sum | None:
    """Returns the sum whose mean a step subtracts from the same array; `None` for others."""
    if step.name not in tables.SUBTRACTIONS or len(step.variables) != 2:
        return None
    x, mean = step.variables
    shape = aval_of(step.eqn.outvars[0]).shape
    if aval_of(step.eqn.invars[0]).shape != shape:
        return None
    mean_of = _mean_of(mean, x, shape, made)
    if mean_of is None:
        return None
    axes, axes_left = mean_of
    there = len(axes_left) == len(shape) and all(k in (i, None) for i, k in enumerate(axes_left))
    rest = {i for i in range(len(shape)) if i not in axes and shape[i] != 1}
    return (x, axes) if (not axes_left or there) and rest <= set(axes_left) else None


def axes_after(step: Step, axes: Axes) -> Axes | None:
    """Returns what the axes of a value stand for after a step that leaves all of its numbers, but
    for their signs, as they are; `None` after another step."""
    params = step.eqn.params
    if step.name in tables.CASTS | tables.NEGATIONS | (tables.CHOICES & tables.POSITIVE):
        return axes
    if step.name == "squeeze":
        return [k for i, k in enumerate(axes) if i not in params["dimensions"]]
    if step.name != "broadcast_in_dim" or len(step.inputs) != 1:
        return None
    sizes = aval_of(step.eqn.invars[0]).shape, params["shape"]
    places = zip(params["broadcast_dimensions"], axes, sizes[0], strict=True)
    of = {i: k for i, k, size in places if size == sizes[1][i]}
    return [of.get(i) for i in range(len(sizes[1]))]


def _mean_of(
    k: int | Constant, of: int, shape: tuple[Any, ...], made: Mapping[Any, Step]
) -> tuple[tuple[int, ...], Axes] | None:
    """Returns the axes of the mean of a variable, and the axis of the variable that each axis of
    the mean stands for; `None` for another value."""
    moves: list[Step] = []
    number: Any = None
    while (step := made.get(k)) is not None:
        name, where = step.name, summed(step)
        if name == "broadcast_in_dim" and len(step.inputs) == 1:
            moves.append(step)
        elif name in tables.DIVISIONS and number is None:
            number = _number(step.inputs[1])
        elif where is not None and where[0] == of:
            count = math.prod(shape[i] for i in where[1])
            if number != count or count == 1:
                return None
            axes_left: Axes | None = [i for i in range(len(shape)) if i not in where[1]]
            for move in reversed(moves):
                axes_left = None if axes_left is None else axes_after(move, axes_left)
            return None if axes_left is None else (where[1], axes_left)
        else:
            return None
        k = step.inputs[0]
    return None


def _number(x: int | Constant) -> Any:
    """Returns the value of a number that a program holds, and NaN for any other operand."""
    return x.value if isinstance(x, Constant) and np.ndim(x.value) == 0 else math.nan

"""Tells what of an equation depends on the point, whether it is linear in that, and what is
still."""

from collections.abc import Mapping

from ..interpret import _tables as tables
from ..interpret._flat import Constant, Flat, Step, variables


def by_stream(step: Step, stage: Mapping[int, int]) -> bool:
    """Returns whether each stream of a result comes of the same stream of the operands alone."""
    one = step.name in tables.PRODUCTS and len(moving_in(step, stage)) == 1
    return one or is_linear(step, stage)


def is_linear(step: Step, stage: Mapping[int, int]) -> bool:
    """Returns whether an equation is linear in what depends on the point."""
    name = step.name
    moving = moving_in(step, stage)
    scales = name in ("mul", "convert_element_type") and len(moving) == 1
    return name in tables.LINEAR or scales or (name == "div" and moving == [0])


def moving_in(step: Step, stage: Mapping[int, int]) -> list[int]:
    """Which operands of an equation depend on the point."""
    return [i for i, x in enumerate(step.inputs) if not isinstance(x, Constant) and x in stage]


def still_in(flat: Flat) -> set[int]:
    """The variables of a program that have no derivative, whatever it is taken by, and those whose
    derivative leads to nothing, such as what goes into `jax.lax.stop_gradient` alone."""
    out = set[int]()
    every, read = set(flat.inputs), set(variables(flat.outputs))
    for step in flat.steps:
        every.update(step.outputs)
        if step.name in tables.CONSTANT or step.values <= out:
            out.update(step.outputs)
    for step in reversed(flat.steps):
        asked = step.eqn.effects or not read.isdisjoint(step.outputs)
        if asked and step.name not in tables.CONSTANT:
            read.update(step.values)
    return out | (every - read)

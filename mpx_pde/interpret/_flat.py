"""A jaxpr as one flat list of equations."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, JaxprEqn

from ._jaxpr import CALLS, OF_REVERSE_MODE, bodies_of, walk


class Constant(NamedTuple):
    """An operand that is no variable."""

    value: Any
    aval: Any


class Step(NamedTuple):
    """An equation, with its operands and results by their numbers in the whole program."""

    eqn: JaxprEqn
    inputs: tuple[int | Constant, ...]
    outputs: tuple[int, ...]


class Flat(NamedTuple):
    """A program without calls: what a `jit` or a checkpoint holds stands in its place."""

    steps: tuple[Step, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int | Constant, ...]
    constants: dict[int, Constant]


def flatten(closed: ClosedJaxpr, *, forward_mode: bool) -> Flat:
    """The equations that the results of a jaxpr depend on, with calls written out.

    With `forward_mode` so are checkpoints and `custom_vjp` functions: what they say is of reverse
    mode.
    """
    calls = CALLS | OF_REVERSE_MODE if forward_mode else CALLS
    steps: list[Step] = []
    constants: dict[int, Constant] = {}
    numbers = iter(range(1 << 62))

    def inline(closed: ClosedJaxpr, operands: Sequence[int | Constant]) -> list[int | Constant]:
        jaxpr = closed.jaxpr
        own = [next(numbers) for _ in closed.consts]
        pairs = zip(own, closed.consts, jaxpr.constvars, strict=True)
        constants.update((k, Constant(value, var.aval)) for k, value, var in pairs)
        return walk(jaxpr, own, operands, lambda atom: Constant(atom.val, atom.aval), step)

    def step(i: int, eqn: JaxprEqn, inputs: list) -> Sequence:
        del i
        if eqn.primitive.name in calls:
            return inline(bodies_of(eqn)[0], inputs)
        out = tuple(next(numbers) for _ in eqn.outvars)
        steps.append(Step(eqn, tuple(inputs), out))
        return out

    inputs = tuple(next(numbers) for _ in closed.jaxpr.invars)
    outputs = tuple(inline(closed, inputs))
    return Flat(_needed(steps, outputs), inputs, outputs, constants)


def variables(atoms: Sequence[int | Constant]) -> list[int]:
    return [x for x in atoms if not isinstance(x, Constant)]


def _needed(steps: list[Step], outputs: Sequence[int | Constant]) -> tuple[Step, ...]:
    wanted = set(variables(outputs))
    kept = []
    for step in reversed(steps):
        if step.eqn.effects or not wanted.isdisjoint(step.outputs):
            kept.append(step)
            wanted.update(variables(step.inputs))
    return tuple(reversed(kept))

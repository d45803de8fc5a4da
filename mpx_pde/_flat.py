"""A jaxpr as one flat list of equations."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, JaxprEqn

from ._jaxpr import bodies_of, literal


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


_CALLS = frozenset(
    {
        "jit",
        "pjit",
        "closed_call",
        "core_closed_call",
        "core_call",
        "call",
    }
)

_OF_REVERSE_MODE = frozenset({"remat2", "checkpoint", "custom_vjp_call"})


def flatten(closed: ClosedJaxpr, *, forward_mode: bool) -> Flat:
    """The equations that the results of a jaxpr depend on, with calls written out.

    With `forward_mode` so are checkpoints and `custom_vjp` functions: what they say is of reverse
    mode.
    """
    calls = _CALLS | _OF_REVERSE_MODE if forward_mode else _CALLS
    steps: list[Step] = []
    constants: dict[int, Constant] = {}
    numbers = iter(range(1 << 62))

    def walk(closed: ClosedJaxpr, operands: Sequence[int | Constant]) -> list[int | Constant]:
        jaxpr = closed.jaxpr
        env: dict[Any, int | Constant] = dict(zip(jaxpr.invars, operands, strict=True))
        for var, value in zip(jaxpr.constvars, closed.consts, strict=True):
            number = env[var] = next(numbers)
            constants[number] = Constant(value, var.aval)

        def read(atom):
            return Constant(atom.val, atom.aval) if literal(atom) else env[atom]

        for eqn in jaxpr.eqns:
            inputs = tuple(map(read, eqn.invars))
            if eqn.primitive.name in calls:
                out: Sequence = walk(bodies_of(eqn)[0], inputs)
            else:
                out = tuple(next(numbers) for _ in eqn.outvars)
                steps.append(Step(eqn, inputs, out))
            env.update(zip(eqn.outvars, out, strict=True))
        return [read(v) for v in jaxpr.outvars]

    inputs = tuple(next(numbers) for _ in closed.jaxpr.invars)
    outputs = tuple(walk(closed, inputs))
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

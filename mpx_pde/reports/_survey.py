"""Walks a program once, for all that looks for something in it."""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jax.extend.core import ClosedJaxpr, JaxprEqn

from ..program import _tables as tables
from ..program._flat import Constant, Flat, Step, flatten
from ..program._jaxpr import aval_of, bodies_of
from ..program._lines import Site, site_within
from ..program._rebind import carried_by, operands_in
from ._known import Known, constant, results, value_of


class Seen(NamedTuple):
    """An equation of a program, at any depth.

    **Attributes:**

    - `step`: the equation.
    - `known`: its operands, each as a known array or `None`.
    - `bodies`: the programs inside of it.
    - `taken`: for each of these, the operands that it takes.
    - `around`: the containers and calls around it, outermost first.
    """

    step: Step
    known: Sequence[Known | None]
    bodies: list[Flat]
    taken: list[list[int | Constant]]
    around: tuple[JaxprEqn, ...]

    @property
    def site(self) -> Site:
        """Returns its place in the user's code."""
        return site_within(self.step.eqn, self.around)

    @property
    def inside(self) -> tuple[JaxprEqn, ...]:
        """Returns what is around the equations of its bodies."""
        return (*self.around, self.step.eqn)

    @property
    def entered(self) -> list[tuple[int | Constant, int]]:
        """Returns its operands with the variables that they are inside of its bodies."""
        bodies = zip(self.taken, self.bodies, strict=True)
        return [pair for some, body in bodies for pair in zip(some, body.inputs, strict=True)]


class Survey:
    """A program with what is known of it.

    **Attributes:**

    - `program`: the program.
    - `seen`: its equations and those inside of containers, in their order. No two programs in it
        have a variable of the same number.
    - `known`: the variables that are known while tracing, because they depend on no argument.
    """

    def __init__(self, closed: ClosedJaxpr):
        self.seen: list[Seen] = []
        self.known: dict[int, Known | None] = {}
        self._numbers = itertools.count()
        self.program = self._visit(closed, [None] * len(closed.in_avals), ())

    def _visit(
        self, closed: ClosedJaxpr, known: Sequence[Known | None], around: tuple[JaxprEqn, ...]
    ) -> Flat:
        flat = flatten(closed, forward_mode=False, numbers=self._numbers)
        self.known.update(zip(flat.inputs, known, strict=True))
        self.known.update((k, constant(x.value)) for k, x in flat.constants.items())
        for step in flat.steps:
            values = [value_of(x, self.known) for x in step.inputs]
            seen = Seen(step, values, [], [], (*around, *step.calls))
            self.seen.append(seen)
            steady = _steady(step.eqn, values)
            for body, places in zip(bodies_of(step.eqn), operands_in(step.eqn), strict=True):
                seen.taken.append([step.inputs[i] for i in places])
                inner = [steady.get(i) for i in places]
                seen.bodies.append(self._visit(body, inner, seen.inside))
            self.known.update(zip(step.outputs, self._results(seen), strict=True))
        return flat

    def _results(self, seen: Seen) -> Sequence[Known | None]:
        if not seen.bodies:
            return results(seen.step.eqn, seen.known)
        if seen.step.name in FUNCTIONS:
            return [value_of(x, self.known) for x in seen.bodies[0].outputs]
        return [None] * len(seen.step.outputs)


FUNCTIONS = tables.CALLS | tables.CUSTOM | tables.CHECKPOINTS
"""Containers that evaluate their one program once, on their operands."""


def _steady(eqn: JaxprEqn, known: Sequence[Known | None]) -> Mapping[int, Known | None]:
    """Returns the `known` operands, by their positions, that are the same in each step of a loop
    and on each device."""
    out = dict(enumerate(known[: carried_by(eqn).start]))
    if eqn.primitive.name == "shard_map":  # devices may take parts
        parts = zip(eqn.invars, bodies_of(eqn)[0].in_avals, strict=True)
        whole = [aval_of(atom).shape == inside.shape for atom, inside in parts]
        return {i: x for i, x in out.items() if whole[i]}
    return out

"""Finds the roles of variables in a program that is evaluated on streams."""

import dataclasses
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

from ..program import _tables as tables
from ..program._flat import Constant, Flat, Step, dependent, moving_from, reaching, variables
from ..program._jaxpr import bodies_of, contains, differentiable, pushforward
from ._near import near_numbers, summed_in
from ._roles import AbstractRoles, is_linear, moving_in, still_in
from ._storage import DEEP, FIRST, RAW, Staged, Value, jet_of
from .taylor._jets import Jet, Operand, is_inexact
from .taylor._plan import Index, Plan


_SMALL = 64
"""The largest number of coordinates for which the first product is evaluated again, not kept."""

_VALUE: frozenset[Index] = frozenset({()})
"""The streams of a variable of which only the value is asked for."""


@dataclasses.dataclass(frozen=True)
class StreamRoles(AbstractRoles):
    """The roles of variables for an evaluation with streams.

    **Attributes:**

    - `reached`: how far each variable is from the point, as it is evaluated. What loops return is
        as far as it is in them.
    - `asked`: the streams of each variable that the results depend on, and `()` if they depend on
        its value. After the last nonlinear function, streams that nobody asked for are dropped.
    - `still`: the variables without a derivative, such as a result of `jax.lax.stop_gradient`.
    - `half`: the variables that do not depend on the point and are effectively half.
    - `unlayered`: the variables that lead from the point to a loop that has no derivative in
        reverse mode, and the results of the loop.
    - `moving`: the variables that JAX would give a tangent, although it may be zero everywhere.
    """

    stages: dict[int, int]
    reached: dict[int, int]
    final: set[int]
    stored: set[int]
    asked: dict[int, frozenset[Index]]
    still: set[int]
    half: set[int]
    unlayered: frozenset[int]
    moving: frozenset[int]

    def of(self, x: int) -> tuple[Hashable, ...]:
        sets = self.final, self.stored, self.still, self.half, self.moving
        those = self.stages.get(x), self.reached.get(x)
        return *those, self.asked.get(x), *(x in every for every in sets)

    def asked_of(self, x: int) -> frozenset[Index]:
        """Returns the streams of a variable that the results depend on."""
        return self.asked.get(x, frozenset())

    def needed(self, step: Step, operands: Sequence[Any]) -> list[Any]:
        """Returns the operands of an equation without the streams that its results do not depend
        on. An equation that only leads to a value may have no derivative."""
        values = step.outputs and not any(map(any, map(self.asked_of, step.outputs)))
        return [x.only(()) if values and isinstance(x, Jet) else x for x in operands]

    def stage_of(self, x: int | Constant) -> int | None:
        return None if isinstance(x, Constant) else self.reached.get(x)

    def reach(self, step: Step) -> None:
        """Records how far the results of an equation are from the point."""
        stage = _stage_after(step, self.reached)
        if stage is not None:
            self.reached.update(dict.fromkeys(step.outputs, stage))

    def received(self, step: Step, out: Sequence[Value]) -> list[Operand]:
        """Returns the results of an equation that holds programs, and records how far they are from
        the point."""
        for x, value in zip(step.outputs, out, strict=True):
            self.reached.pop(x, None)
            if isinstance(value, Staged):
                self.reached[x] = value.stage
        return list(map(jet_of, out))

    def rule(self, step: Step) -> None:
        return None

    def kind(self, step: Step) -> str:
        those = [self.stages[x] for x in step.variables if x in self.stages]
        if not those:
            return "constant"
        if max(those) == RAW and step.name in tables.COORDINATES:
            return "raw"
        if step.alone or step.name in tables.AMBIGUOUS:
            return "alone"
        if step.name in tables.PRODUCTS:
            return "light" if max(those) == RAW and _contracted(step) <= _SMALL else "product"
        return "light"


def roles_of(
    flat: Flat,
    entering: Mapping[int, int],
    plan: Plan,
    asked: Iterable[Index],
    carried: Collection[tuple[int, int]] | None,
    *,
    halves: Callable[[Collection[int]], set[int]],
    traced: Iterable[int],
    streams: Iterable[int],
) -> StreamRoles:
    """Returns the roles of a program whose results are wanted with the streams `asked`.

    **Arguments:**

    - `entering`: the stages of the operands that depend on the point.
    - `carried`: for the step of a loop, maybe empty: pairs of the position of a result and that of
        the operand that it becomes.
    - `halves`: returns the variables that are effectively half, given those that depend on the
        point.
    - `traced`, `streams`: the operands that are traced arrays, and those with streams.
    """
    stages = _stages(flat, entering)
    wanted = _wanted(flat, carried or ())
    stored = {x for x, s in stages.items() if s == DEEP and x in wanted}
    stored -= near_numbers(flat, (), carried or ()) - summed_in(flat, stages)
    still = still_in(flat)
    return StreamRoles(
        stages=stages,
        reached=dict(entering),
        final=set(stages) - wanted,
        stored=stored,
        asked=_asked_of(flat, stages, plan, asked),
        still=still,
        half=halves(stages),
        unlayered=_unlayered(flat, stages, still, traced),
        moving=frozenset(moving_from(flat, streams)),
    )


def _stage_after(step: Step, stages: Mapping[int, int]) -> int | None:
    """Returns the stage of the results of an equation, given the `stages` of the operands that
    depend on the point; `None` if none does."""
    here = max((stages[x] for x in step.variables if x in stages), default=None)
    if here is not None and step.name in tables.PRODUCTS:
        return FIRST if here == RAW else DEEP
    return DEEP if here == FIRST and not is_linear(step, stages) else here


def _stages(flat: Flat, entering: Mapping[int, int]) -> dict[int, int]:
    """Returns the stages of the variables that depend on the point."""
    stages = dict(entering)
    for step in flat.steps:
        here = _stage_after(step, stages)
        if here is not None:
            stages.update(dict.fromkeys(step.outputs, here))
    return stages


def _wanted(flat: Flat, carried: Collection[tuple[int, int]]) -> set[int]:
    """Returns all variables that a product or a loop depends on."""
    wanted = set[int]()

    def operands_of(step: Step) -> Iterable[int]:
        ends = step.name in tables.PRODUCTS or step.alone
        return step.variables if ends or not wanted.isdisjoint(step.outputs) else ()

    return reaching(flat, wanted, carried, operands_of)


def _unlayered(
    flat: Flat, stages: Collection[int], still: Collection[int], traced: Iterable[int]
) -> frozenset[int]:
    """Returns the operands and results of `while` loops, and the variables that lead to them, if
    they depend on no traced array but the point. JAX does not differentiate these in reverse mode.
    All that enters or leaves a layer may have a derivative by its type, even if it is zero."""
    at_point = (step for step in flat.steps if any(x in stages for x in step.variables))
    loops = [step for step in at_point if _holds_while(step, still)]
    if not loops:
        return frozenset()
    depends = dependent(flat, traced)
    needed = {x for step in loops for x in (*step.variables, *step.outputs)}
    for step in reversed(flat.steps):
        if not needed.isdisjoint(step.outputs):
            needed.update(step.variables)
    return frozenset(needed - depends)


def _holds_while(step: Step, still: Collection[int]) -> bool:
    bodies = bodies_of(step.eqn)
    if step.name in tables.PUSHES:
        # A rule may refuse to differentiate by an operand that has no derivative.
        moves = lambda i: not isinstance(step.inputs[i], Constant) and step.inputs[i] not in still
        bodies.append(pushforward(step.eqn, list(filter(moves, differentiable(step.eqn.invars)))))
    return step.name in tables.UNBOUNDED or any(contains(b, tables.UNBOUNDED) for b in bodies)


def _asked_of(
    flat: Flat, stages: Mapping[int, int], plan: Plan, asked: Iterable[Index]
) -> dict[int, frozenset[Index]]:
    """Returns the streams of each variable that the results depend on."""
    none: frozenset[Index] = frozenset()
    out = dict.fromkeys(variables(flat.outputs), frozenset(asked))
    for step in reversed(flat.steps):
        keys = none.union(*(out.get(x, none) for x in step.outputs))
        if step.eqn.effects or step.alone:
            keys = plan.everything
        elif keys and step.name in tables.CONSTANT:
            keys = _VALUE
        elif keys and not _by_stream(step, stages):
            keys = plan.needs(keys)
        for x, v in zip(step.inputs, step.eqn.invars, strict=True):
            if not isinstance(x, Constant):
                # Indices and predicates select by their values alone.
                here = keys if is_inexact(v.aval) else keys and _VALUE
                out[x] = out.get(x, none) | here
    return out


def _by_stream(step: Step, stages: Mapping[int, int]) -> bool:
    """Returns whether each stream of a result depends on that stream of the operands alone."""
    one = step.name in tables.PRODUCTS and len(moving_in(step, stages)) == 1
    return one or is_linear(step, stages)


def _contracted(step: Step) -> int:
    """Returns the number of terms that each entry of a product sums."""
    avals: list[Any] = [v.aval for v in step.eqn.invars[:2]]
    if step.name not in tables.DOTS:
        return math.prod(avals[1].shape[1:])
    ((axes, _), _) = step.eqn.params["dimension_numbers"]
    return math.prod(avals[0].shape[i] for i in axes)

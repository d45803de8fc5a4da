"""Divides a program into layers.

Activations, norms and similar operations between two products cost hardly more than reading their
operands. A layer consists of such operations and the products of their results. It keeps only its
inputs for the backward pass, which evaluates it again. So each stream of a network is kept once a
layer.
"""

import dataclasses
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import JaxprEqn

from ..program import _tables as tables
from ..program._flat import Constant, Flat, Step, dependent, moving_from, reaching, variables
from ..program._jaxpr import bodies_of, contains, differentiable, pushforward
from ._near import near_numbers, summed_in
from ._roles import (
    AbstractRole,
    as_key,
    by_stream,
    contracted,
    is_linear,
    moving_in,
    stage_after,
    still_in,
)
from ._storage import DEEP, RAW, Staged, Value, jet_of
from .taylor._jets import Jet, Operand, is_inexact
from .taylor._plan import Index, Plan


_SMALL = 64
"""The largest number of coordinates for which the first product is evaluated again, not kept."""

_VALUE: frozenset[Index] = frozenset({()})
"""The streams of a variable of which only the value is asked for."""


def is_light(eqn: JaxprEqn) -> bool:
    """Returns whether an equation costs hardly more than reading its operands."""
    name, bodies = eqn.primitive.name, bodies_of(eqn)
    if eqn.effects or not bodies:
        return name in tables.LIGHT and not eqn.effects
    inside = (inner for body in bodies for inner in body.jaxpr.eqns)
    return name in tables.CALLS | tables.PUSHES and all(map(is_light, inside))


class Part(NamedTuple):
    """Consecutive equations, and the variables that they take and return."""

    steps: tuple[Step, ...]
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    alone: bool = True
    checkpointed: bool = False
    multiplies: bool = False


@dataclasses.dataclass(frozen=True)
class StreamRole(AbstractRole):
    """The facts for an evaluation with streams.

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
        stage = stage_after(step, self.reached)
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
            return "light" if max(those) == RAW and contracted(step) <= _SMALL else "product"
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
) -> StreamRole:
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
    return StreamRole(
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


def _stages(flat: Flat, entering: Mapping[int, int]) -> dict[int, int]:
    """Returns the stages of the variables that depend on the point."""
    stages = dict(entering)
    for step in flat.steps:
        here = stage_after(step, stages)
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
        elif keys and not by_stream(step, stages):
            keys = plan.needs(keys)
        for x, v in zip(step.inputs, step.eqn.invars, strict=True):
            if not isinstance(x, Constant):
                # Indices and predicates select by their values alone.
                here = keys if is_inexact(v.aval) else keys and _VALUE
                out[x] = out.get(x, none) | here
    return out


def _by_itself(step: Step, alone: bool = True) -> Part:
    inputs = tuple(dict.fromkeys(step.variables))
    return Part((step,), inputs, step.outputs, alone)


def parts_of(flat: Flat, roles: AbstractRole) -> list[Part]:
    """Divides a program into parts."""
    kinds = {step: roles.kind(step) for step in flat.steps}
    steps, behind = _behind_products(kinds, roles, {*variables(flat.outputs)})
    last: dict[int, int] = {}
    for i, step in enumerate(steps):
        last.update((x, i) for x in step.variables)
    last.update((x, len(steps)) for x in variables(flat.outputs))

    out: list[Part] = []
    pending: list[tuple[int, Step]] = []
    products: set[int] = set()

    def close():
        if not pending:
            return
        steps = tuple(s for _, s in pending)
        stop = pending[-1][0]
        made = {x for s in steps for x in s.outputs}
        used = dict.fromkeys(x for s in steps for x in s.variables)
        inputs = tuple(x for x in used if x not in made)
        outputs = tuple(x for s in steps for x in s.outputs if last.get(x, -1) > stop)
        curved = any(not is_linear(s, roles.stages) for s in steps if kinds[s] == "light")
        out.append(Part(steps, inputs, outputs, False, curved, bool(products)))
        pending.clear()
        products.clear()

    waiting: set[int] = set()  # results of what is or was pending
    for i, step in enumerate(steps):
        kind = kinds[step]
        if kind in ("light", "product") and not roles.unlayered.isdisjoint(step.outputs):
            out.append(_by_itself(step, alone=False))
            continue
        if kind == "raw" and not waiting.isdisjoint(step.variables):
            kind = "light"
        if kind in ("constant", "raw"):
            # These depend on nothing that is pending, and must not end a layer.
            out.append(_by_itself(step))
            continue
        if kind == "alone":
            close()
            out.append(_region(step, [x for x in step.outputs if last.get(x, -1) > i]))
            continue
        waiting.update(step.outputs)
        follows = any(x in products for x in step.variables)
        joins = not behind.isdisjoint(step.outputs)
        if follows and not joins:
            close()
        pending.append((i, step))
        if kind == "product" or (follows and joins):
            products.update(step.outputs)
    close()
    return out


def _behind_products(
    kinds: Mapping[Step, str], roles: AbstractRole, read: Collection[int]
) -> tuple[list[Step], set[int]]:
    """Returns the equations in an order in which results of products are moved or added at once,
    and the variables that these moves and additions return.

    A layer ends with these and not with its products. If a product is added to a value that goes
    around it, only the sum is kept. If its axes are reordered, only one array is written.
    """
    readers: dict[int, list[Step]] = {}
    for step in kinds:
        for x in dict.fromkeys(step.variables):
            readers.setdefault(x, []).append(step)
    behind = set[int]()
    for step, kind in kinds.items():
        chain = [*step.outputs] if kind == "product" else []
        while chain and roles.final.isdisjoint(chain) and chain[-1] not in read:
            following = readers.get(chain[-1], [])
            name = following[0].eqn.primitive.name if len(following) == 1 else ""
            if name not in tables.ADDITIONS and name not in tables.ORDERS:
                break
            chain += following[0].outputs
            if name == "transpose" or len(moving_in(following[0], roles.stages)) == 2:
                behind.update(chain[1:])
    if not behind:
        return list(kinds), behind
    out: list[Step] = []
    waiting = {x for step in kinds for x in step.outputs}

    def place(step: Step) -> None:
        out.append(step)
        waiting.difference_update(step.outputs)
        for x in step.outputs:
            for reader in readers.get(x, ()):
                ready = waiting.isdisjoint(reader.variables)
                if ready and not behind.isdisjoint(reader.outputs) and waiting & {*reader.outputs}:
                    place(reader)

    for step in kinds:
        if not step.outputs or waiting & {*step.outputs}:
            place(step)
    return out, behind


def _region(step: Step, outputs: Sequence[int]) -> Part:
    """Returns an equation as a part. A checkpoint that holds products is a layer of its own."""
    if step.name not in tables.CHECKPOINTS or not contains(bodies_of(step.eqn)[0], tables.PRODUCTS):
        return _by_itself(step)
    return _by_itself(step, alone=False)._replace(outputs=tuple(outputs), multiplies=True)


def signature(part: Part, roles: AbstractRole, values: Sequence[Any]) -> Hashable:
    """Returns a key that is equal for layers that are the same function of arrays of the same
    types, at the same lines of the user's code."""
    numbers = {x: i for i, x in enumerate(part.inputs)}

    def of(x: int | Constant) -> Hashable:
        if not isinstance(x, Constant):
            return numbers[x]
        # An array in the program is compared by identity. For operands the type is enough.
        is_array = isinstance(x.value, jax.Array)
        return id(x.value) if is_array else as_key(x.value), x.aval

    steps = []
    for step in part.steps:
        operands = tuple(map(of, step.inputs))
        for x in step.outputs:
            numbers[x] = len(numbers)
        rule = roles.rule(step)
        for e in (step.eqn, *step.calls):
            where = e.source_info.traceback, e.source_info.name_stack, e.ctx
            steps.append((*e.params.items(), e.primitive, where))
        steps.append((operands, rule))
    leaves, treedef = jax.tree.flatten(values)
    given = treedef, tuple(map(as_key, leaves))
    facts = tuple(map(roles.of, numbers))
    out = tuple(steps), given, facts, tuple(numbers[x] for x in part.outputs)
    try:
        hash(out)
    except TypeError:  # a parameter of an equation has no hash: the layer equals no other
        return object()
    return out


def multiplied_only(
    steps: Sequence[Step],
    outputs: Iterable[int],
    is_product: Callable[[Step], bool],
    moves: Collection[str],
) -> set[int]:
    """Returns the variables that only products read, directly or after moves."""
    read, used = set(outputs), set[int]()
    for step in reversed(steps):
        used.update(step.variables)
        moved = step.name in moves and read.isdisjoint(step.outputs)
        if not moved and not is_product(step):
            read.update(step.variables)
    return used - read

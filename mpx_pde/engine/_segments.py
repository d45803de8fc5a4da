"""Divides a program into layers.

Activations, norms and similar operations between two products cost hardly more than reading their
operands. A layer consists of such operations and the products of their results. It keeps only its
inputs for the backward pass, which evaluates it again. So each stream of a network is kept once a
layer.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import JaxprEqn

from ..program import _tables as tables
from ..program._flat import Constant, Flat, Step, variables
from ..program._jaxpr import bodies_of, contains
from ._roles import AbstractRoles, as_key, is_linear, moving_in


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


def _by_itself(step: Step, alone: bool = True) -> Part:
    inputs = tuple(dict.fromkeys(step.variables))
    return Part((step,), inputs, step.outputs, alone)


def parts_of(flat: Flat, roles: AbstractRoles) -> list[Part]:
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
    kinds: Mapping[Step, str], roles: AbstractRoles, read: Collection[int]
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


def signature(part: Part, roles: AbstractRoles, values: Sequence[Any]) -> Hashable:
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

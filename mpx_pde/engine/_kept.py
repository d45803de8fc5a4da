"""Plans what a program keeps for its backward pass: what is read there, and how.

A forward program returns its results and what is kept; a backward program takes this and
cotangents. A `scan` of the first and the `scan` of the second that transposes it are such a pair,
too, and what they keep is planned in the same way.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ..program import _tables as tables
from ..program._deviations import with_deviations_once
from ..program._flat import Constant, Flat, Step, dependent, flatten, variables
from ..program._jaxpr import aval_of, bodies_of, size_of as entries_of
from ..program._rebind import bodies_in, carried_by
from ._facts import COMPUTED, MASTER, Fact, Facts, can_round, facts_of
from ._minimum_cut import chosen
from ._of_loss import Cotangent, OfLoss
from ._shares import shares_of, weighted
from ._signs import Numbers


@dataclasses.dataclass(frozen=True, eq=False)
class Passes:
    """A forward program, a backward program, and what is kept in between.

    **Attributes:**

    - `forward`, `backward`: the programs.
    - `wanted`: for operands of the backward program, the value of the forward program that they
        are.
    - `facts`: the facts of the variables of the forward program.
    - `kept`: for each variable that is kept, whether it is rounded.
    - `sums`: kept sums of terms that are kept rounded. They are the sums of the rounded terms.
    - `operands`: those of the forward program that the backward one needs.
    - `loops`: the passes of the bodies of a `scan` and its transpose, by the `id` of both steps.
    - `stacked`: for the step of such a transpose, the `scan` and the positions of the operands that
        it stacked, each with the position of the result.
    - `in_full`: the equations, by their `id`, of products of the backward program that are not
        rounded.
    """

    forward: Flat
    backward: Flat
    wanted: dict[int, int | Constant]
    facts: Facts
    kept: dict[int, bool]
    sums: set[int]
    operands: tuple[int, ...]
    loops: dict[int, "Passes"]
    stacked: dict[int, tuple[Step, dict[int, int]]]
    in_full: frozenset[int]


def passes_of(
    forward: Flat,
    backward: Flat,
    wanted: dict[int, int | Constant],
    operand_facts: Sequence[Fact],
    half: np.dtype,
    moving: Collection[int] | None = None,
    from_loss: Collection[int] | None = None,
    levels: Mapping[int, int] | None = None,
) -> Passes:
    """Returns both passes of a program, with what is kept. `operand_facts` are those of the forward
    program. Of the operands of the backward one, `moving` depend on a cotangent, and `from_loss`
    are cotangents of the loss: all that are not `wanted`, if not given. `levels` are those of
    operands that are neither."""
    facts = facts_of(forward, operand_facts, half)

    def factors_of(x: int | Constant) -> frozenset[int]:
        return frozenset(y for y in variables([x]) if facts.level(y) & MASTER or y not in exactly)

    exactly = {x for x, fact in facts.of.items() if fact.exact}
    cotangents = {*backward.inputs} - wanted.keys()
    moves = dependent(backward, cotangents if moving is None else moving)
    from_loss = cotangents if from_loss is None else from_loss
    factors = {k: factors_of(x) for k, x in wanted.items()}
    of = dict.fromkeys(from_loss, Cotangent.term(frozenset()))
    levels = {**(levels or {}), **{k: facts.level(x) for k, x in wanted.items()}}
    of_loss = OfLoss(backward, moves, of, factors, levels, exactly)
    loops, stacked = _loops_of(forward, backward, wanted, facts, half, of_loss)
    inside = {t.inputs[i] for t in backward.steps if id(t) in stacked for i in stacked[id(t)][1]}
    reads = {x for k, x in wanted.items() if k not in inside and not isinstance(x, Constant)}
    for t in backward.steps:
        if id(t) in stacked:
            reads.update(_closed_over(loops[id(t)], stacked[id(t)][0]))
    free = {x for x in (*forward.inputs, *forward.constants) if facts.of[x].exact}
    avals: dict[int, Any] = {
        k: v.aval for s in forward.steps for k, v in zip(s.outputs, s.eqn.outvars, strict=True)
    }
    read = _read_exactly(backward, wanted.keys() - inside, moves)
    exact = set(variables([wanted[k] for k in read]))
    means = set[int]().union(*_before_moves(weighted(forward, facts), facts))
    exact |= means

    def narrows(x: int) -> bool:
        fact = facts.of[x]
        several = x in avals and can_round(avals[x])
        return several and not (fact.exact or fact.full or facts.beyond(x) or x in exact)

    shares = shares_of(forward, facts, narrows, _multiplied(backward, wanted))
    rounds = lambda x: narrows(x) and x not in shares.of
    of_shares = shares.all_of(forward)
    added, moved = _before_moves(of_loss.added - exactly - of_shares, facts)
    moved -= exact
    exact |= (added | moved) - of_shares

    def size_of(x: int) -> int:
        if x not in avals:
            return 1  # an operand of a body
        width = half.itemsize if rounds(x) else getattr(avals[x].dtype, "itemsize", 8)
        return entries_of(avals[x]) * width

    of_means = {x for x in means if means.issuperset(facts.operands.get(x, (None,)))}
    whole = (exact - moved - of_means).union(facts.leaving)
    operands = {x: some for x, some in facts.operands.items() if x not in whole}
    again = (shares.sums | shares.guarded) - whole
    operands.update((x, facts.made[x].variables) for x in again)
    kept = chosen(reads, operands, free, size_of)
    small = unrounded({x: size_of(x) for x in kept})
    kept = {x: rounds(x) and x not in small for x in kept}
    needs = _closure(reads, operands, kept)
    sums = {x for x in shares.sums & needs if kept.get(*facts.made[x].variables)}
    kept.update(dict.fromkeys(sums, False))
    needed = tuple(x for x in forward.inputs if x in needs and x in free)
    in_full = frozenset(of_loss.in_full)
    return Passes(forward, backward, wanted, facts, kept, sums, needed, loops, stacked, in_full)


def unrounded(sizes: Mapping[int, int]) -> set[int]:
    """Returns the smallest of some arrays, which together take a thirty-second of their bytes at
    most. Rounding these saves nothing."""
    total, out = sum(sizes.values()), set[int]()
    left = total / 32
    for x in sorted(sizes, key=lambda x: sizes[x]):
        left -= sizes[x]
        if left < 0:
            break
        out.add(x)
    return out


_MULTIPLIES = tables.PRODUCTS | tables.SCALINGS | tables.SELECTS
"""Operations of a backward program that are linear in each value that they read."""

_MOVES = tables.SAME | tables.NEGATIONS


def _multiplied(backward: Flat, wanted: Mapping[int, int | Constant]) -> set[int]:
    """Returns the values of the forward program that are operands of products of the backward one.
    Products would round what is computed again, and store it for that."""
    origin: dict[int, int] = {}
    found = set[int]()
    for step in backward.steps:
        given = [origin.get(x, x) for x in step.variables]
        if step.name in tables.PRODUCTS:
            found.update(given)
        elif step.name in tables.SAME and len(given) == 1:
            origin.update(dict.fromkeys(step.outputs, given[0]))
    return set(variables([wanted[k] for k in found if k in wanted]))


def _before_moves(found: Collection[int], facts: Facts) -> tuple[set[int], set[int]]:
    """Returns values as they were before they were moved, for example broadcast, or multiplied by a
    number; and what they were in between."""
    first, later = set[int](), set[int]()
    for x in found:
        while (made := facts.made.get(x)) and made.name in _MOVES | tables.MULTIPLICATIONS:
            if len(made.variables) != 1:
                break
            later.add(x)
            x = made.variables[0]
        first.add(x)
    return first, later - first


_MULTIPLIED_INSIDE = (tables.LOOPS | tables.ONCE) - tables.UNBOUNDED
"""Containers that JAX's own derivatives are in."""


def _read_exactly(backward: Flat, wanted: Collection[int], moves: set[int]) -> set[int]:
    """Returns the operands among `wanted` that a backward program does not only multiply by. JAX's
    own derivatives do nothing else; a rule of the user's, a solve, or a checkpoint that is
    evaluated again may do anything. `moves` are the values that depend on a cotangent."""
    of = {k: {k} for k in wanted}
    found = set[int]()
    for step in backward.steps:
        reached = set[int]().union(*(of.get(x, ()) for x in step.variables))
        if not reached:
            continue
        still = moves.isdisjoint(step.variables)
        # What cancels in a product of two of them may be all of it.
        multiplies = step.name in (_MULTIPLIES - tables.PRODUCTS if still else _MULTIPLIES)
        if step.name in _MOVES or (still and multiplies):
            of.update((x, of.get(x, set()) | reached) for x in step.outputs)
        elif not multiplies:
            found |= reached - _multiplied_inside(step, of, moves)
    return found | set[int]().union(*(of.get(x, ()) for x in variables(backward.outputs)))


def _multiplied_inside(step: Step, of: Mapping[int, set[int]], moves: set[int]) -> set[int]:
    """Returns the operands that a container only multiplies by."""
    reached = set[int]().union(*(of.get(x, ()) for x in step.variables))
    if step.name not in _MULTIPLIED_INSIDE:
        return set()
    exact = set[int]()
    for body, start, carried in bodies_in(step.eqn):
        flat = flatten(body, forward_mode=False, sharded=True)
        chosen_by = [*step.inputs[:start], *(step.inputs[start + i] for i in carried)]
        exact.update(*(of.get(x, ()) for x in variables(chosen_by)))
        pairs = list(enumerate(zip(flat.inputs, step.inputs[start:], strict=True)))
        there = [(i, k, x) for i, (k, x) in pairs if not isinstance(x, Constant)]
        inside = {k: of[x] for i, k, x in there if i not in carried and x in of}
        moving = {k for i, k, x in there if x in moves or i in carried}
        own_moves = dependent(flat, moving)
        exact.update(*(inside[k] for k in _read_exactly(flat, inside, own_moves)))
    return reached - exact


def _closure(
    reads: Collection[int], operands: Mapping[int, Collection[int]], kept: Collection[int]
) -> set[int]:
    """Returns all that is computed again or read to provide `reads`."""
    found, pending = set(reads), list(reads)
    while pending:
        x = pending.pop()
        for y in () if x in kept else operands.get(x, ()):
            if y not in found:
                found.add(y)
                pending.append(y)
    return found


def _closed_over(passes: Passes, scan: Step) -> list[int]:
    """Returns the variables outside of a loop that its body needs on the way back."""
    n_consts = carried_by(scan.eqn).start
    pairs = zip(passes.forward.inputs[:n_consts], scan.inputs[:n_consts], strict=True)
    return [x for k, x in pairs if k in passes.operands and not isinstance(x, Constant)]


def _loops_of(
    forward: Flat,
    backward: Flat,
    wanted: Mapping[int, int | Constant],
    facts: Facts,
    half: np.dtype,
    of_loss: OfLoss,
) -> tuple[dict[int, Passes], dict[int, tuple[Step, dict[int, int]]]]:
    """Finds the loops of the backward program that transpose loops of the forward one, and plans
    what is kept in each of their steps."""
    loops: dict[int, Passes] = {}
    stacked: dict[int, tuple[Step, dict[int, int]]] = {}
    for t in backward.steps:
        found = _stacked_by(forward, backward, wanted, t) if t.name == "scan" else []
        found = [(s, places) for s, places in found if id(s) not in loops]
        if found:
            s, places = max(found, key=lambda pair: len(pair[1]))
            loops[id(s)] = loops[id(t)] = _passes_of_bodies(s, t, places, facts, half, of_loss)
            stacked[id(t)] = s, places
    return loops, stacked


def _stacked_by(
    forward: Flat, backward: Flat, wanted: Mapping[int, int | Constant], t: Step
) -> list[tuple[Step, dict[int, int]]]:
    """Returns the loops of the forward program that `t`, a loop of the backward one, transposes,
    and the positions of the operands that they stacked and of their results. Operands that other
    steps read, too, are left out."""
    of = {x: k for k, x in wanted.items() if not isinstance(x, Constant)}
    first = carried_by(t.eqn).stop
    read_once = {x: i for i, x in enumerate(t.inputs) if i >= first and t.inputs.count(x) == 1}
    for step in backward.steps:
        for x in step.variables if step is not t else ():
            read_once.pop(x, None)
    out = []
    for s in forward.steps:
        if s.name == "scan" and _transposes(t, s):
            results = list(enumerate(s.outputs))[len(carried_by(s.eqn)) :]
            places = {read_once[k]: i for i, y in results if (k := of.get(y)) in read_once}
            out += [(s, places)] if places else []
    return out


def _transposes(t: Step, s: Step) -> bool:
    same = t.eqn.params["length"] == s.eqn.params["length"]
    return same and t.eqn.params["reverse"] != s.eqn.params["reverse"]


def _passes_of_bodies(
    s: Step,
    t: Step,
    places: dict[int, int],
    facts: Facts,
    half: np.dtype,
    of_loss: OfLoss,
) -> Passes:
    bodies = [flatten(bodies_of(x.eqn)[0], forward_mode=False, sharded=True) for x in (s, t)]
    forward, backward = with_deviations_once(bodies[0]), bodies[1]
    carried = carried_by(s.eqn)
    operand_facts = []
    for i, x in enumerate(s.inputs):
        fact = facts.fact(x)
        numbers = fact.numbers._replace(sign=None, root=None)
        if i in carried:
            fact = fact._replace(level=COMPUTED, exact=False, centered=False)
            numbers = Numbers(width=entries_of(aval_of(s.eqn.invars[i])))
        operand_facts.append(fact._replace(numbers=numbers))
    wanted = {backward.inputs[i]: forward.outputs[p] for i, p in places.items()}
    sums = carried_by(t.eqn)
    moving = {k for k, x in zip(backward.inputs, t.inputs, strict=True) if x in of_loss.moves}
    moving.update(backward.inputs[i] for i in sums)
    from_loss = [
        k
        for i, (k, x) in enumerate(zip(backward.inputs, t.inputs, strict=True))
        if of_loss.alone(x) and (i not in sums or backward.outputs[i - sums.start] == k)
    ]
    levels = {k: of_loss.level(x) for k, x in zip(backward.inputs, t.inputs, strict=True)}
    return passes_of(forward, backward, wanted, operand_facts, half, moving, from_loss, levels)

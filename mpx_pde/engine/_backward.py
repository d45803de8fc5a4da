"""Differentiates a program in reverse mode, with values in full and a backward pass in half.

The program is linearized as it stands. What the backward pass reads is computed in full and kept
rounded (see `_keeping.py`), or computed again from what is kept (see `_facts.py`). Cotangents are
float32; products of the backward pass round their operands to half. So there are two programs: the
forward one, which returns what is kept, and the backward one. The bodies of a loop are such a pair
too.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from ..interpret import _tables as tables
from ..interpret._flat import Constant, Flat, Step, flatten, read
from ..interpret._jaxpr import aval_of, bodies_of, in_context_of, own_bind, with_products
from ..interpret._rebind import rebind, scan_counts
from ._facts import COMPUTED, CONSTANT, DATA, Fact, Facts
from ._keeping import chosen, unrounded
from ._products import backward_product, forward_product
from ._streams import is_inexact


class Precisions(NamedTuple):
    """The precisions of both passes.

    **Attributes:**

    - `algorithm`: the split product of the forward pass; `None` for the highest precision.
    - `half`: the dtype of what is kept, and of the operands of products in the backward pass.
    """

    algorithm: str | None
    half: np.dtype

    def bind(self, step: Step, operands: Sequence[Any], *, backward: bool) -> list:
        """Evaluates an equation of one of the two passes."""
        if backward:
            changed = partial(backward_product, half=self.half)
        else:
            changed = partial(forward_product, algorithm=self.algorithm)
        with in_context_of(step.eqn):
            return own_bind(with_products(step.eqn, changed), operands)

    def kept(self, x: Any) -> Any:
        """Rounds an array to half. What overflows becomes NaN, so that it is seen."""
        half = x.astype(self.half)
        if self.half == np.float16:
            half = jnp.where(jnp.isinf(half) & jnp.isfinite(x), jnp.nan, half)
        return lax.optimization_barrier(half)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A forward program, a backward program, and what is kept in between.

    **Attributes:**

    - `forward`, `backward`: the programs.
    - `wanted`: for operands of the backward program, the value of the forward program that they
        are.
    - `facts`: the facts of the variables of the forward program.
    - `kept`: for each variable that is kept, whether it is rounded.
    - `given`: the operands of the forward program that the backward one needs.
    - `loops`: the plan of the bodies of a `scan` and its transpose, by the `id` of both steps.
    - `stacked`: for the step of such a transpose, the `scan` and the positions of the operands that
        it stacked, each with the position of the result.
    """

    forward: Flat
    backward: Flat
    wanted: dict[int, int | Constant]
    facts: Facts
    kept: dict[int, bool]
    given: tuple[int, ...]
    loops: dict[int, "Plan"]
    stacked: dict[int, tuple[Step, dict[int, int]]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Values:
    """What a forward program leaves for the backward one.

    **Attributes:**

    - `kept`: the variables that are kept, rounded or not.
    - `given`: the operands of the forward program that are needed.
    - `loops`: the values of loops, stacked, by the `id` of the step.
    """

    kept: dict[int, Any]
    given: dict[int, Any]
    loops: dict[int, "Values"]


# Planning.


def make_plan(
    forward: Flat,
    backward: Flat,
    wanted: dict[int, int | Constant],
    given: Sequence[Fact],
    half: np.dtype,
) -> Plan:
    """Plans what a program keeps. `given` holds the facts of its operands."""
    facts = Facts(half)
    for k, c in forward.constants.items():
        facts.of[k] = Fact(DATA if np.ndim(c.value) else CONSTANT, width=int(np.size(c.value)))
    facts.of.update(zip(forward.inputs, given, strict=True))
    for step in forward.steps:
        facts.add(step)
    loops, stacked = _loops_of(forward, backward, wanted, facts, half)
    inside = {t.inputs[i] for t in backward.steps if id(t) in stacked for i in stacked[id(t)][1]}
    reads = {x for k, x in wanted.items() if k not in inside and not isinstance(x, Constant)}
    for t in backward.steps:
        if id(t) in stacked:
            reads.update(_closed_over(loops[id(t)], stacked[id(t)][0]))
    free = {x for x in (*forward.inputs, *forward.constants) if facts.of[x].level < COMPUTED}
    avals = {k: v.aval for s in forward.steps for k, v in zip(s.outputs, s.eqn.outvars, strict=True)}

    def rounds(x: int) -> bool:
        fact = facts.of[x]
        real = jnp.issubdtype(avals[x].dtype, jnp.floating) if x in avals else False
        return real and fact.level >= DATA and not (fact.full or fact.beyond)

    def size_of(x: int) -> int:
        if x not in avals:
            return 1  # an operand of a body
        width = half.itemsize if rounds(x) else getattr(avals[x].dtype, "itemsize", 8)
        return int(np.prod(avals[x].shape)) * width

    kept = chosen(reads, facts.operands, free, size_of)
    exact = unrounded({x: size_of(x) for x in kept})
    kept = {x: rounds(x) and x not in exact for x in kept}
    needs = _closure(reads, facts.operands, kept)
    operands = tuple(x for x in forward.inputs if x in needs and x in free)
    return Plan(forward, backward, wanted, facts, kept, operands, loops, stacked)


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


def _closed_over(plan: Plan, scan: Step) -> list[int]:
    """Returns the variables outside of a loop that its body needs on the way back."""
    n_consts, _ = scan_counts(scan.eqn)
    pairs = zip(plan.forward.inputs[:n_consts], scan.inputs[:n_consts], strict=True)
    return [x for k, x in pairs if k in plan.given and not isinstance(x, Constant)]


def _loops_of(
    forward: Flat,
    backward: Flat,
    wanted: Mapping[int, int | Constant],
    facts: Facts,
    half: np.dtype,
) -> tuple[dict[int, Plan], dict[int, tuple[Step, dict[int, int]]]]:
    """Finds the loops of the backward program that transpose loops of the forward one, and plans
    what is kept in each of their steps."""
    readers: dict[int, list[Step]] = {}
    for step in backward.steps:
        for x in set(step.variables):
            readers.setdefault(x, []).append(step)
    of_result = {y: (s, i) for s in forward.steps if s.name == "scan" for i, y in enumerate(s.outputs)}
    loops: dict[int, Plan] = {}
    stacked: dict[int, tuple[Step, dict[int, int]]] = {}
    for t in backward.steps:
        if t.name != "scan":
            continue
        first = sum(scan_counts(t.eqn))
        found: dict[int, dict[int, int]] = {}
        for i, x in enumerate(t.inputs[first:], first):
            s, place = of_result.get(wanted.get(x), (None, 0)) if not isinstance(x, Constant) else (None, 0)
            if s is None or place < scan_counts(s.eqn)[1] or id(s) in loops:
                continue
            if readers[x] == [t] and t.inputs.count(x) == 1 and _transposes(t, s):
                found.setdefault(id(s), {})[i] = place
        if not found:
            continue
        key, places = max(found.items(), key=lambda item: len(item[1]))
        s = next(s for s in forward.steps if id(s) == key)
        plan = _plan_of_bodies(s, t, places, facts, half)
        loops[id(s)] = loops[id(t)] = plan
        stacked[id(t)] = s, places
    return loops, stacked


def _transposes(t: Step, s: Step) -> bool:
    same = t.eqn.params["length"] == s.eqn.params["length"]
    return same and t.eqn.params["reverse"] != s.eqn.params["reverse"]


def _plan_of_bodies(s: Step, t: Step, places: dict[int, int], facts: Facts, half: np.dtype) -> Plan:
    bodies = [flatten(bodies_of(x.eqn)[0], forward_mode=False, sharded=True) for x in (s, t)]
    forward, backward = bodies
    n_consts, n_carry = scan_counts(s.eqn)
    given = []
    for i, x in enumerate(s.inputs):
        fact = Fact(CONSTANT) if isinstance(x, Constant) else facts.of[x]
        level = COMPUTED if n_consts <= i < n_consts + n_carry else fact.level
        given.append(fact._replace(level=level, sign=None, root=None))
    wanted = {backward.inputs[i]: forward.outputs[p] for i, p in places.items()}
    return make_plan(forward, backward, wanted, given, half)


# Evaluation.


def run_forward(
    plan: Plan, operands: Sequence[Any], by: Precisions, needed: Collection[int] | None = None
) -> tuple[list[Any], Values]:
    """Returns the results of the forward program, and what is left for the backward one. Results
    that are not among the `needed` positions are left out."""
    env: dict[int, Any] = {k: c.value for k, c in plan.forward.constants.items()}
    env.update(zip(plan.forward.inputs, operands, strict=True))
    loops: dict[int, Values] = {}
    count = len(plan.forward.outputs)
    asked = set(range(count)) if needed is None else set(needed)
    reads = {plan.forward.outputs[i] for i in asked} | plan.kept.keys()
    reads |= {x for step in plan.forward.steps for x in step.variables}
    reads |= {x for k, x in plan.wanted.items()} if not plan.loops else set()
    for step in plan.forward.steps:
        given = [read(x, env) for x in step.inputs]
        if id(step) in plan.loops:
            inner = plan.loops[id(step)]
            some = [i for i, k in enumerate(step.outputs) if k in reads or i < scan_counts(step.eqn)[1]]
            out, loops[id(step)] = _scan_forward(inner, step, given, by, some)
        else:
            out = by.bind(step, given, backward=False)
        env.update(zip(step.outputs, out, strict=True))
    kept = {k: by.kept(env[k]) if rounded else env[k] for k, rounded in plan.kept.items()}
    values = Values(kept, {k: env[k] for k in plan.given}, loops)
    outputs = plan.forward.outputs
    return [read(x, env) if i in asked else () for i, x in enumerate(outputs)], values


def _scan_forward(
    plan: Plan, step: Step, operands: list[Any], by: Precisions, needed: Collection[int]
) -> tuple[list[Any], Values]:
    """Evaluates a loop, and stacks what its steps keep."""
    n_consts, _ = scan_counts(step.eqn)
    outside = plan.forward.inputs[:n_consts]

    def body(*args):
        out, values = run_forward(plan, args, by, needed)
        given = {k: x for k, x in values.given.items() if k not in outside}
        return [*out, dataclasses.replace(values, given=given)]

    with in_context_of(step.eqn):
        *out, values = rebind(step.eqn, operands, [body])
    return out, values


class Again:
    """The values of a forward program, as the backward one reads them: loaded, or computed again
    when they are first read."""

    def __init__(self, plan: Plan, values: Values, by: Precisions, closed: Mapping[int, Any] = {}):
        self.plan, self.values, self.by = plan, values, by
        self.env: dict[int, Any] = {k: c.value for k, c in plan.forward.constants.items()}
        self.env.update({**closed, **values.given})
        self.made = plan.facts.made

    def __call__(self, x: int | Constant) -> Any:
        if isinstance(x, Constant):
            return read(x, self.env)
        pending = [x]
        while pending:
            k = pending[-1]
            missing = [] if k in self.env or k in self.values.kept else self._missing(k)
            if missing:
                pending.extend(missing)
                continue
            pending.pop()
            if k not in self.env:
                self._make(k)
        return self.env[x]

    def _missing(self, k: int) -> list[int]:
        return [x for x in self.made[k].variables if x not in self.env]

    def _make(self, k: int) -> None:
        if k in self.values.kept:
            x, step = self.values.kept[k], self.made.get(k)
            wide = x if step is None or not self.plan.kept[k] else _wide_of(step, k)
            self.env[k] = x if wide is x else x.astype(wide)
            return
        step = self.made[k]
        again = step.name in tables.PRODUCTS
        out = self.by.bind(step, [read(x, self.env) for x in step.inputs], backward=again)
        self.env.update(zip(step.outputs, out, strict=True))


def _wide_of(step: Step, k: int) -> Any:
    return aval_of(step.eqn.outvars[step.outputs.index(k)]).dtype


def run_backward(
    plan: Plan, values: Values, operands: Mapping[int, Any], by: Precisions, again: Again
) -> list[Any]:
    """Returns the results of the backward program. `operands` are those that are not `wanted`."""
    env: dict[int, Any] = {k: c.value for k, c in plan.backward.constants.items()}
    env.update(operands)
    full = {k for k, x in plan.wanted.items() if _is_full(x, plan.facts)}

    def value(x: int | Constant) -> Any:
        if not isinstance(x, Constant) and x in plan.wanted and x not in env:
            env[x] = again(plan.wanted[x])
        return read(x, env)

    for step in plan.backward.steps:
        if id(step) in plan.loops:
            out = _scan_backward(plan, step, values, value, by, again)
        else:
            given = list(map(value, step.inputs))
            halves = not full.intersection(step.variables)
            if step.name in tables.LAYOUT and not halves:
                full.update(step.outputs)
            in_full = step.name in tables.PRODUCTS and not halves
            out = by.bind(step, given, backward=not in_full)
        env.update(zip(step.outputs, out, strict=True))
    return list(map(value, plan.backward.outputs))


def _is_full(x: int | Constant, facts: Facts) -> bool:
    return not isinstance(x, Constant) and facts.of[x].full


def _scan_backward(
    plan: Plan, step: Step, values: Values, value: Callable, by: Precisions, again: Again
) -> list[Any]:
    """Evaluates the transpose of a loop on what the steps of the loop kept."""
    inner, (scan, places) = plan.loops[id(step)], plan.stacked[id(step)]
    outside = {
        k: again(x)
        for k, x in zip(inner.forward.inputs, scan.inputs, strict=False)
        if k in inner.given and k not in values.loops[id(scan)].given
    }
    first = min(places)
    given = [
        (values.loops[id(scan)] if i == first else ()) if i in places else value(x)
        for i, x in enumerate(step.inputs)
    ]

    def body(*args):
        own: Values = args[first]
        operands = {k: x for i, (k, x) in enumerate(zip(inner.backward.inputs, args, strict=True)) if i not in places}
        return run_backward(inner, own, operands, by, Again(inner, own, by, outside))

    with in_context_of(step.eqn):
        return rebind(step.eqn, given, [body])


# Entry.


def value_and_pullback(
    fun: Callable, moving: Any, fixed: Any, by: Precisions, given: Sequence[Fact], trace: Any
) -> tuple[Any, Callable, Any]:
    """Evaluates `fun(moving, fixed)`, which returns a result and auxiliary arrays, and returns the
    result, its pullback to `moving`, and the auxiliary arrays.

    **Arguments:**

    - `moving`, `fixed`: PyTrees of arrays.
    - `by`: the precisions.
    - `given`: the facts of all arrays in `(moving, fixed)`.
    - `trace`: a context to trace the function in.
    """
    pull: Any = None

    def forward(moving, fixed):
        nonlocal pull
        out, pull, aux = jax.vjp(lambda x: fun(x, fixed), moving, has_aux=True)
        leaves, pull = jax.tree.flatten(pull)
        return (out, aux), leaves

    with trace:
        closed, shapes = jax.make_jaxpr(forward, return_shape=True)(moving, fixed)
        kinds = closed.out_avals
        (out, aux), leaves = shapes
        count = len(kinds) - len(leaves)

        def backward(leaves, cotangents):
            return jax.tree.leaves(jax.tree.unflatten(pull, leaves)(cotangents)[0])

        transposed = jax.make_jaxpr(backward)(list(kinds[count:]), out)
    programs = [flatten(x, forward_mode=False, sharded=True) for x in (closed, transposed)]
    wanted = dict(zip(programs[1].inputs, programs[0].outputs[count:], strict=False))
    plan = make_plan(*programs, wanted, given, by.half)
    results, values = run_forward(plan, jax.tree.leaves((moving, fixed)), by, range(count))
    results, aux = jax.tree.unflatten(jax.tree.structure((out, aux)), results[:count])

    def pullback(cotangent):
        own = programs[1].inputs[len(leaves) :]
        operands = dict(zip(own, jax.tree.leaves(cotangent), strict=True))
        grads = run_backward(plan, values, operands, by, Again(plan, values, by))
        return jax.tree.unflatten(jax.tree.structure(moving), grads)

    return results, pullback, aux

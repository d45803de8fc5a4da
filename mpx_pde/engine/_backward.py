"""Differentiates a program in reverse mode, with values in full and a backward pass in half.

The program is linearized as it stands. What the backward pass reads is computed in full and kept
rounded (see `_keeping.py`), or computed again from what is kept (see `_facts.py`). Cotangents are
float32; products of the backward pass round their operands to half. So there are two programs: the
forward one, which returns what is kept, and the backward one. The bodies of a loop are such a pair
too.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun, primitives

from ..interpret import _tables as tables
from ..interpret._flat import Constant, Flat, Step, flatten, read, variables
from ..interpret._jaxpr import (
    LOOPS,
    aval_of,
    bodies_of,
    contains,
    in_context_of,
    own_bind,
    scopes_of,
    with_jaxprs,
    with_products,
)
from ..interpret._products import KEPT_IN_HALF
from ..interpret._rebind import rebind, scan_counts
from ..interpret._tables import CONTAINERS
from ._facts import COMPUTED, CONSTANT, DATA, RECOMPUTED, Fact, Facts, region_of
from ._keeping import chosen, unrounded
from ._products import backward_product, forward_product


_AGAIN = "rematted_computation"
"""The scope in which JAX evaluates a checkpoint again."""


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
        eqn = self._backward(step.eqn) if backward else self._forward(step.eqn)
        with in_context_of(step.eqn):
            return own_bind(eqn, operands)

    def _forward(self, eqn: JaxprEqn) -> JaxprEqn:
        return with_products(eqn, partial(forward_product, algorithm=self.algorithm))

    def _backward(self, eqn: JaxprEqn) -> JaxprEqn:
        if _AGAIN in scopes_of(eqn):
            return self._forward(eqn)
        if eqn.primitive.name in tables.PRODUCTS:
            return backward_product(eqn, self.half)
        return with_jaxprs(eqn, lambda x: x.replace(eqns=list(map(self._backward, x.eqns))))

    def kept(self, x: Any) -> Any:
        """Rounds an array to half. What overflows becomes NaN, so that it is seen."""
        with jax.named_scope(KEPT_IN_HALF):
            half = x.astype(self.half)
            if self.half == np.float16:
                half = jnp.where(jnp.isinf(half) & jnp.isfinite(x), jnp.nan, half)
            return lax.optimization_barrier(half)


@dataclasses.dataclass(frozen=True, eq=False)
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
    avals = {
        k: v.aval for s in forward.steps for k, v in zip(s.outputs, s.eqn.outvars, strict=True)
    }
    exact = {wanted[k] for k in _read_exactly(backward, wanted.keys() - inside)}
    leaving = _leaving_regions(forward)

    def rounds(x: int) -> bool:
        fact = facts.of[x]
        real = jnp.issubdtype(avals[x].dtype, jnp.floating) if x in avals else False
        return real and fact.level >= DATA and not (fact.full or fact.beyond or x in exact)

    def size_of(x: int) -> int:
        if x not in avals:
            return 1  # an operand of a body
        width = half.itemsize if rounds(x) else getattr(avals[x].dtype, "itemsize", 8)
        return int(np.prod(avals[x].shape)) * width

    whole = exact | leaving
    operands = {x: some for x, some in facts.operands.items() if x not in whole}
    kept = chosen(reads, operands, free, size_of)
    small = unrounded({x: size_of(x) for x in kept})
    kept = {x: rounds(x) and x not in small for x in kept}
    needs = _closure(reads, operands, kept)
    given_again = tuple(x for x in forward.inputs if x in needs and x in free)
    return Plan(forward, backward, wanted, facts, kept, given_again, loops, stacked)


_MULTIPLIES = tables.PRODUCTS | {"mul", "div", "select_n"}
"""Operations of a backward program that are linear in each value that they read."""

_MOVES = tables.LAYOUT | {"convert_element_type", "neg"}


def _read_exactly(backward: Flat, wanted: Collection[int]) -> set[int]:
    """Returns the operands among `wanted` that a backward program does not only multiply by. JAX's
    own derivatives do nothing else; a rule of the user's, a solve, or a checkpoint that is
    evaluated again may do anything."""
    of = {k: {k} for k in wanted}
    found = set[int]()
    for step in backward.steps:
        given = set[int]().union(*(of.get(x, ()) for x in step.variables))
        if not given:
            continue
        if step.name in _MOVES or (step.name in _MULTIPLIES and of.keys() >= {*step.variables}):
            of.update((x, of.get(x, set()) | given) for x in step.outputs)
        elif step.name not in _MULTIPLIES:
            found |= given - _multiplied_inside(step, of)
    return found | set[int]().union(*(of.get(x, ()) for x in variables(backward.outputs)))


def _multiplied_inside(step: Step, of: Mapping[int, set[int]]) -> set[int]:
    """Returns the operands that a container only multiplies by."""
    if step.name not in ("scan", "cond", "shard_map", "jit"):
        return set()
    first = 1 if step.name == "cond" else 0
    carried = range(0)
    if step.name == "scan":
        n_consts, n_carry = scan_counts(step.eqn)
        carried = range(n_consts, n_consts + n_carry)
    exact = set[int]().union(
        *(
            of.get(step.inputs[i], ())
            for i in (*range(first), *carried)
            if not isinstance(step.inputs[i], Constant)
        )
    )
    for body in bodies_of(step.eqn):
        flat = flatten(body, forward_mode=False, sharded=True)
        pairs = list(zip(flat.inputs, step.inputs[first:], strict=True))
        inside = {k for i, (k, x) in enumerate(pairs, first) if x in of and i not in carried}
        lost = _read_exactly(flat, inside)
        exact.update(*(of[x] for k, x in pairs if k in lost))
    return set[int]().union(*(of.get(x, ()) for x in step.variables)) - exact


def _leaving_regions(flat: Flat) -> set[int]:
    """Returns the values that leave a checkpoint. They are not computed again outside of it."""
    made = {x: r for s in flat.steps if (r := region_of(s.eqn)) for x in s.outputs}
    return {
        x for s in flat.steps for x in s.variables if made.get(x, "") not in ("", region_of(s.eqn))
    }


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
    of_result = {
        y: (s, i) for s in forward.steps if s.name == "scan" for i, y in enumerate(s.outputs)
    }
    loops: dict[int, Plan] = {}
    stacked: dict[int, tuple[Step, dict[int, int]]] = {}
    for t in backward.steps:
        if t.name != "scan":
            continue
        first = sum(scan_counts(t.eqn))
        found: dict[int, dict[int, int]] = {}
        for i, x in enumerate(t.inputs[first:], first):
            s, place = (
                of_result.get(wanted.get(x), (None, 0))
                if not isinstance(x, Constant)
                else (None, 0)
            )
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
            some = [
                i for i, k in enumerate(step.outputs) if k in reads or i < scan_counts(step.eqn)[1]
            ]
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
        self.env.update(closed)
        facts = plan.facts.of
        self.env.update((k, x) for k, x in values.given.items() if facts[k].level < DATA)
        self.made = plan.facts.made
        self.before: list[Any] = []
        self.gradients: list[Any] = []

    def __call__(self, x: int | Constant) -> Any:
        if isinstance(x, Constant):
            return read(x, self.env)
        pending = [x]
        while pending:
            k = pending[-1]
            there = k in self.env or k in self.values.kept or k in self.values.given
            missing = [] if there else self._missing(k)
            if missing:
                pending.extend(missing)
                continue
            pending.pop()
            if k not in self.env:
                self._make(k)
        return self.env[x]

    def _in_turn(self, x: Any) -> Any:
        """Returns a kept array, to be read only once the last `gradients` are there. Otherwise XLA
        may compute values of all layers again before the first of them is needed, and leave the
        gradients of all layers for the end."""
        if self.gradients:
            self.before, self.gradients = self.gradients, []
        return lax.optimization_barrier((x, *self.before))[0] if self.before else x

    def _missing(self, k: int) -> list[int]:
        return [x for x in self.made[k].variables if x not in self.env]

    def _make(self, k: int) -> None:
        if k in self.values.given:
            self.env[k] = self._in_turn(self.values.given[k])
            return
        if k in self.values.kept:
            x, step = self._in_turn(self.values.kept[k]), self.made.get(k)
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

    terms = _gradient_terms(plan.backward)
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
        again.gradients += [x for k, x in zip(step.outputs, out, strict=True) if k in terms]
        env.update(zip(step.outputs, out, strict=True))
    return list(map(value, plan.backward.outputs))


def _gradient_terms(backward: Flat) -> set[int]:
    """Returns the values whose sums, moved, are the results of a backward program."""
    found, moves = set(variables(backward.outputs)), tables.LAYOUT | {"add_any"}
    for step in reversed(backward.steps):
        if step.name in moves and not found.isdisjoint(step.outputs):
            found.difference_update(step.outputs)
            found.update(step.variables)
    return found


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
        operands = {
            k: x
            for i, (k, x) in enumerate(zip(inner.backward.inputs, args, strict=True))
            if i not in places
        }
        return run_backward(inner, own, operands, by, Again(inner, own, by, outside))

    with in_context_of(step.eqn):
        return rebind(step.eqn, given, [body])


# Entry.


def without_checkpoints(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a program with calls in place of its checkpoints, which say what is kept. What is in
    one without a policy is marked: its products are computed again. A checkpoint of a loop stays,
    so that the steps of the loop keep nothing."""

    numbers = itertools.count()

    def entered(jaxpr: Jaxpr, region: str) -> Jaxpr:
        return jaxpr.replace(eqns=[one(e, region) for e in jaxpr.eqns])

    def one(eqn: JaxprEqn, region: str) -> JaxprEqn:
        if eqn.primitive.name == "remat2" and not contains(bodies_of(eqn)[0], LOOPS):
            inner = region
            if not region and eqn.params["policy"] is None:
                inner = f"{RECOMPUTED}.{next(numbers)}"
            body = ClosedJaxpr(entered(eqn.params["jaxpr"], inner), ())
            call = {"call_jaxpr": body}
            return eqn.replace(primitive=primitives.closed_call_p, params=call)
        if eqn.primitive.name in CONTAINERS and not eqn.primitive.name.startswith("custom"):
            eqn = with_jaxprs(eqn, lambda x: entered(x, region))
        if not region:
            return eqn
        info = eqn.source_info
        return eqn.replace(source_info=info.replace(name_stack=info.name_stack.extend(region)))

    return closed.replace(jaxpr=entered(closed.jaxpr, ""))


def value_and_pullback(
    fun: Callable, moving: Any, fixed: Any, by: Precisions, given: Sequence[Fact], trace: Any
) -> tuple[Any, "Pullback", Any]:
    """Evaluates `fun(moving, fixed)`, which returns a result and auxiliary arrays, and returns the
    result, its pullback to `moving`, and the auxiliary arrays.

    **Arguments:**

    - `moving`, `fixed`: PyTrees of arrays.
    - `by`: the precisions.
    - `given`: the facts of all arrays in `(moving, fixed)`.
    - `trace`: a context to trace the function in.
    """
    with trace:
        pair, shapes = _transposed(fun, moving, fixed)
        if contains(pair[1], ("remat2",)):
            closed, shapes = jax.make_jaxpr(fun, return_shape=True)(moving, fixed)
            run = jaxpr_as_fun(without_checkpoints(closed))
            tree = jax.tree.structure(shapes)
            again = lambda *args: jax.tree.unflatten(tree, run(*jax.tree.leaves(args)))
            pair, shapes = _transposed(again, moving, fixed)
    forward, backward = (flatten(x, forward_mode=False, sharded=True) for x in pair)
    count = len(jax.tree.leaves(shapes))
    cotangents = len(jax.tree.leaves(shapes[0]))
    residuals = len(backward.inputs) - cotangents
    wanted = dict(zip(backward.inputs[:residuals], forward.outputs[count:], strict=True))
    plan = make_plan(forward, backward, wanted, given, by.half)
    results, values = run_forward(plan, jax.tree.leaves((moving, fixed)), by, range(count))
    out, aux = jax.tree.unflatten(jax.tree.structure(shapes), results[:count])
    trees = jax.tree.structure(moving), backward.inputs[residuals:]
    return out, Pullback(values, plan, by, trees), aux


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pullback:
    """Maps a cotangent of a result to the gradient. Its leaves are what is kept for that."""

    values: Values
    plan: Plan = eqx.field(static=True)
    by: Precisions = eqx.field(static=True)
    names: tuple[Any, tuple[int, ...]] = eqx.field(static=True)

    def __call__(self, cotangent: Any) -> Any:
        structure, inputs = self.names
        own = dict(zip(inputs, jax.tree.leaves(cotangent), strict=True))
        again = Again(self.plan, self.values, self.by)
        return jax.tree.unflatten(
            structure, run_backward(self.plan, self.values, own, self.by, again)
        )


def _transposed(fun: Callable, moving: Any, fixed: Any) -> tuple[tuple, Any]:
    """Returns the forward and the backward program of a function, and the shapes of its results.
    The forward program returns these and what the backward one takes."""
    pull: Any = None

    def forward(moving, fixed):
        nonlocal pull
        out, pull, aux = jax.vjp(lambda x: fun(x, fixed), moving, has_aux=True)
        leaves, pull = jax.tree.flatten(pull)
        return (out, aux), leaves

    closed, (shapes, leaves) = jax.make_jaxpr(forward, return_shape=True)(moving, fixed)

    def backward(leaves, cotangents):
        return jax.tree.leaves(jax.tree.unflatten(pull, leaves)(cotangents)[0])

    kept = closed.out_avals[len(closed.out_avals) - len(leaves) :]
    return (closed, jax.make_jaxpr(backward)(list(kept), shapes[0])), shapes

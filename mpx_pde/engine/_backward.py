"""Differentiates a program in reverse mode, with values in full and a backward pass in half.

The program is linearized as it stands. What the backward pass reads is computed in full and kept
rounded (see `_kept.py`), or computed again from what is kept (see `_facts.py`). Cotangents are
float32; products of the backward pass round their operands to half. So there are two programs: the
forward one, which returns what is kept, and the backward one. The bodies of a loop are such a pair
too.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core.primitives import add_jaxvals_p

from ..program import _tables as tables
from ..program._deviations import with_deviations_once
from ..program._flat import Constant, Flat, Step, evaluated, flatten, merged, read, variables
from ..program._jaxpr import (
    aval_of,
    in_context_of,
    with_products,
)
from ..program._rebind import carried_by, rebind
from ._facts import COMPUTED, DATA, Fact, facts_of
from ._kept import Passes, passes_of
from ._precisions import Precisions
from ._products import precise
from ._program import bind_merged, orders_products, with_products_in_order, without_checkpoints
from ._stacks import stacked


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Values:
    """Values that a forward program leaves for the backward one.

    **Attributes:**

    - `kept`: the variables that are kept, rounded or not.
    - `operands`: those of the forward program that are needed.
    - `loops`: the values of loops, stacked, by the `id` of the step.
    """

    kept: dict[int, Any]
    operands: dict[int, Any]
    loops: dict[int, "Values"]


# Evaluation.


def run_forward(
    passes: Passes, operands: Sequence[Any], by: Precisions, needed: Collection[int] | None = None
) -> tuple[list[Any], Values]:
    """Returns the results of the forward program, and what is left for the backward one. Results
    that are not among the `needed` positions are left out."""
    env = passes.forward.env(operands)
    loops: dict[int, Values] = {}
    count = len(passes.forward.outputs)
    asked = set(range(count)) if needed is None else set(needed)
    reads = {passes.forward.outputs[i] for i in asked} | passes.kept.keys()
    reads |= {x for step in passes.forward.steps for x in step.variables}
    for step in passes.forward.steps:
        args = [read(x, env) for x in step.inputs]
        if id(step) in passes.loops:
            inner = passes.loops[id(step)]
            some = [
                i for i, k in enumerate(step.outputs) if k in reads or i < len(carried_by(step.eqn))
            ]
            out, loops[id(step)] = _scan_forward(inner, step, args, by, some)
        else:
            # What is computed of data alone does not take a split product.
            exact = bool(step.outputs) and passes.facts.of[step.outputs[0]].level < COMPUTED
            own = by._replace(algorithm=None) if exact else by
            out = own.forward(step, args)
        env.update(zip(step.outputs, out, strict=True))
    made = passes.facts.made
    kept = {
        k: by.kept(env[k], made[k]) if rounded else env[k] for k, rounded in passes.kept.items()
    }
    for k in passes.sums:
        (x,) = made[k].variables
        (kept[k],) = by.forward(made[k], [by.rounded(env[x])])
    values = Values(kept, {k: env[k] for k in passes.operands}, loops)
    outputs = passes.forward.outputs
    return [read(x, env) if i in asked else () for i, x in enumerate(outputs)], values


def _scan_forward(
    passes: Passes, step: Step, operands: list[Any], by: Precisions, needed: Collection[int]
) -> tuple[list[Any], Values]:
    """Evaluates a loop, and stacks what its steps keep."""
    outside = passes.forward.inputs[: carried_by(step.eqn).start]

    def body(*args):
        out, values = run_forward(passes, args, by, needed)
        own = {k: x for k, x in values.operands.items() if k not in outside}
        return [*out, dataclasses.replace(values, operands=own)]

    with in_context_of(step.eqn):
        if by.half == jnp.bfloat16:
            *out, values = stacked(step.eqn, operands, body)
        else:
            *out, values = rebind(step.eqn, operands, [body])
    return out, values


class Again:
    """The values of a forward program, as the backward one reads them: loaded, or computed again
    when they are first read."""

    def __init__(self, passes: Passes, values: Values, by: Precisions, closed: Mapping[int, Any]):
        self.passes, self.values, self.by = passes, values, by
        self.env: dict[int, Any] = {k: c.value for k, c in passes.forward.constants.items()}
        self.env.update(closed)
        facts = passes.facts.of
        self.env.update((k, x) for k, x in values.operands.items() if facts[k].level < DATA)
        self.made = passes.facts.made
        self.before: list[Any] = []
        self.gradients: list[Any] = []

    def __call__(self, x: int | Constant) -> Any:
        """Returns a value of the forward program."""
        if isinstance(x, Constant):
            return read(x, self.env)
        pending = [x]
        while pending:
            k = pending[-1]
            there = k in self.env or k in self.values.kept or k in self.values.operands
            missing = () if there else [y for y in self.made[k].variables if y not in self.env]
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

    def _make(self, k: int) -> None:
        if k in self.values.operands:
            self.env[k] = self._in_turn(self.values.operands[k])
            return
        if k in self.values.kept:
            x, step = self._in_turn(self.values.kept[k]), self.made.get(k)
            if step is not None and self.passes.kept[k]:
                x = x.astype(aval_of(step.eqn.outvars[step.outputs.index(k)]).dtype)
            self.env[k] = x
            return
        step = self.made[k]
        operands = [read(x, self.env) for x in step.inputs]
        if self.passes.facts.multiplies_in_half(step):
            out = self.by.again(step, operands)
        else:
            out = self.by.forward(step, operands)
        self.env.update(zip(step.outputs, out, strict=True))


def run_backward(
    again: Again, operands: Mapping[int, Any], still: Collection[int] = ()
) -> list[Any]:
    """Returns the results of the backward program. `operands` are those that are not `wanted`: the
    cotangents, and inside of a loop also what it adds up and its constants. Those that depend on no
    cotangent are `still`."""
    passes = again.passes
    by = again.by._replace(in_full=passes.in_full)
    env: dict[int, Any] = {k: c.value for k, c in passes.backward.constants.items()}
    env.update(operands)
    moving = operands.keys() - still

    def value(x: int | Constant) -> Any:
        if not isinstance(x, Constant) and x in passes.wanted and x not in env:
            env[x] = again(passes.wanted[x])
        return read(x, env)

    terms = _gradient_terms(passes.backward)
    for step in passes.backward.steps:
        moves = [not isinstance(x, Constant) and x in moving for x in step.inputs]
        if id(step) in passes.loops:
            out = _scan_backward(step, value, again, moves)
            moving.update(step.outputs)
        else:
            out, results = by.backward(step, list(map(value, step.inputs)), moves)
            moving.update(x for x, moves in zip(step.outputs, results, strict=True) if moves)
        again.gradients += [x for k, x in zip(step.outputs, out, strict=True) if k in terms]
        env.update(zip(step.outputs, out, strict=True))
    return list(map(value, passes.backward.outputs))


def _gradient_terms(backward: Flat) -> set[int]:
    """Returns the values whose sums, moved, are the results of a backward program."""
    found, moves = set(variables(backward.outputs)), tables.LAYOUT | {add_jaxvals_p.name}
    for step in reversed(backward.steps):
        if step.name in moves and not found.isdisjoint(step.outputs):
            found.difference_update(step.outputs)
            found.update(step.variables)
    return found


def _scan_backward(step: Step, value: Callable, again: Again, moves: Sequence[bool]) -> list[Any]:
    """Evaluates the transpose of a loop on what the steps of the loop kept. What it carries are
    cotangents; `moves` tells which of its other operands depend on one."""
    passes, by = again.passes, again.by
    inner, (scan, places) = passes.loops[id(step)], passes.stacked[id(step)]
    kept = again.values.loops[id(scan)]
    outside = {
        k: again(x)
        for k, x in zip(inner.forward.inputs, scan.inputs, strict=False)
        if k in inner.operands and k not in kept.operands
    }
    carried = carried_by(step.eqn)
    pairs = enumerate(zip(inner.backward.inputs, moves, strict=True))
    still = {k for i, (k, moves) in pairs if not moves and i not in carried}
    first = min(places)
    args = [
        (kept if i == first else ()) if i in places else value(x) for i, x in enumerate(step.inputs)
    ]

    def body(*args):
        own: Values = args[first]
        operands = {
            k: x
            for i, (k, x) in enumerate(zip(inner.backward.inputs, args, strict=True))
            if i not in places
        }
        return run_backward(Again(inner, own, by, outside), operands, still)

    with in_context_of(step.eqn):
        return rebind(step.eqn, args, [body])


# Entry.


def value_and_pullback(
    fun: Callable,
    moving: Any,
    fixed: Any,
    by: Precisions,
    operand_facts: Sequence[Fact],
    trace: Any,
) -> tuple[Any, "Pullback", Any]:
    """Evaluates `fun(moving, fixed)`, which returns a result and auxiliary arrays, and returns the
    result, its pullback to `moving`, and the auxiliary arrays.

    **Arguments:**

    - `moving`, `fixed`: PyTrees of arrays.
    - `by`: the precisions.
    - `operand_facts`: the facts of all arrays in `(moving, fixed)`.
    - `trace`: a context to trace the function in.
    """
    with trace:
        closed, shapes = jax.make_jaxpr(fun, return_shape=True)(moving, fixed)
        if orders_products():
            closed = closed.replace(jaxpr=with_products_in_order(closed.jaxpr))
        program = merged(flatten(without_checkpoints(closed), forward_mode=False))
        facts = facts_of(program, operand_facts, by.half)

        def bind(step, operands):
            in_full = any(facts.of[x].full or facts.beyond(x) for x in step.variables)
            eqn = with_products(step.eqn, precise) if in_full else step.eqn
            return bind_merged(eqn, operands)

        run = partial(evaluated, program, bind=bind)
        tree = jax.tree.structure(shapes)
        whole = lambda *args: jax.tree.unflatten(tree, run(jax.tree.leaves(args)))
        pair, shapes = _transposed(whole, moving, fixed)
    forward, backward = (flatten(x, forward_mode=False, sharded=True) for x in pair)
    forward = with_deviations_once(forward)
    count = len(jax.tree.leaves(shapes))
    cotangents = len(jax.tree.leaves(shapes[0]))
    residuals = len(backward.inputs) - cotangents
    wanted = dict(zip(backward.inputs[:residuals], forward.outputs[count:], strict=True))
    passes = passes_of(forward, backward, wanted, operand_facts, by.half)
    results, values = run_forward(passes, jax.tree.leaves((moving, fixed)), by, range(count))
    out, aux = jax.tree.unflatten(jax.tree.structure(shapes), results[:count])
    trees = jax.tree.structure(moving), backward.inputs[residuals:]
    return out, Pullback(values, passes, by, trees), aux


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pullback:
    """Maps a cotangent of a result to the gradient. Its leaves are what is kept for that."""

    values: Values
    passes: Passes = eqx.field(static=True)
    by: Precisions = eqx.field(static=True)
    names: tuple[Any, tuple[int, ...]] = eqx.field(static=True)

    def __call__(self, cotangent: Any) -> Any:
        structure, inputs = self.names
        own = dict(zip(inputs, jax.tree.leaves(cotangent), strict=True))
        again = Again(self.passes, self.values, self.by, {})
        return jax.tree.unflatten(structure, run_backward(again, own))


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

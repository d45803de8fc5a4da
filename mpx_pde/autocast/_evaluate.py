"""The interpreter: evaluates a jaxpr that was traced in float32 by the rules of a policy."""

from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from .._dtypes import is_half
from ..interpret import _tables as tables
from ..interpret._flat import Constant, Flat, Step, flatten
from ..interpret._jaxpr import (
    bodies_of,
    contains,
    in_context_of,
    inner_scope,
    is_container,
    scopes_of,
)
from ..interpret._lines import line_of, source_of
from ._containers import Containers, Place
from ._feeding import Feeding, Summed, feeding
from ._operations import OPERATIONS, keeps_full, own
from ._report import Recorder
from ._rules import Policy, decide
from ._segments import Segment, multiplied_alone, pays, segments_of, signature
from ._values import Value, constant


class _Plan(NamedTuple):
    """What is known of a jaxpr before it is evaluated."""

    flat: Flat
    feeding: Feeding
    segments: dict[int, Segment]
    rounded: frozenset[int]
    """The variables that only products in half precision use."""
    sources: tuple[Any, ...]
    """The source that each equation is attributed to."""


class _Frame(NamedTuple):
    """The evaluation of one jaxpr."""

    plan: _Plan
    place: Place
    env: dict[int, Value]
    again: bool = False
    """Whether the backward pass evaluates it again."""


class Evaluator:
    """One call of an autocast function."""

    def __init__(self, policy: Policy, note: Recorder | None = None):
        self.policy = policy
        self.note = note
        self.containers = Containers(policy, self.jaxpr, self.leaving)
        # Scopes are read from strings, so only where something asks for them.
        self.scoped = bool(note or policy.half or policy.full)
        # By the identity of a jaxpr, which is kept alive beside what is known of it.
        self.plans: dict[Any, tuple[ClosedJaxpr, _Plan]] = {}
        self.multiplies: dict[int, tuple[Jaxpr, bool]] = {}

    def jaxpr(self, closed: ClosedJaxpr, values: Sequence[Value], place: Place) -> list[Value]:
        policy, plan = self.policy, self._plan(closed, place.summed)
        env = {k: constant(c.value, c.aval, policy) for k, c in plan.flat.constants.items()}
        env.update(zip(plan.flat.inputs, values, strict=True))
        frame = _Frame(plan, place, env)
        alike: dict[Hashable, Callable[..., list[Value]]] = {}
        i = 0
        while i < len(plan.flat.steps):
            segment = plan.segments.get(i)
            if segment and pays([env[x] for x in segment.inputs], policy):
                self._segment(frame, segment, alike)
                i = segment.stop
            else:
                self._equations(frame, i, i + 1)
                i += 1
        return [self._read(x, env) for x in plan.flat.outputs]

    def _read(self, x: int | Constant, env: dict[int, Value]) -> Value:
        return constant(x.value, x.aval, self.policy) if isinstance(x, Constant) else env[x]

    def _plan(self, closed: ClosedJaxpr, summed: Summed) -> _Plan:
        key = id(closed.jaxpr), summed
        if key not in self.plans:
            # With overrides, or products of several halves, others decide what is half.
            policy, flat = self.policy, flatten(closed, forward_mode=False, sharded=True)
            plain = policy.algorithm is None and not policy.half and not policy.full
            rounded = multiplied_alone(flat) if plain else frozenset[int]()
            sources = tuple(source_of(step.eqn, step.calls) for step in flat.steps)
            plan = _Plan(flat, feeding(flat, summed), segments_of(flat), rounded, sources)
            self.plans[key] = closed, plan
        return self.plans[key][1]

    def _equations(self, frame: _Frame, start: int, stop: int) -> None:
        """Evaluates a range of equations, and adds their results to the environment."""
        for i in range(start, stop):
            step = frame.plan.flat.steps[i]
            operands = [self._read(x, frame.env) for x in step.inputs]
            with ExitStack() as stack:
                for eqn in (*step.calls, step.eqn):
                    stack.enter_context(in_context_of(eqn, frame.plan.sources[i]))
                out = self._equation(frame, i, step, operands)
            frame.env.update(zip(step.outputs, out, strict=True))

    def _equation(self, frame: _Frame, i: int, step: Step, operands: list[Value]) -> list[Value]:
        policy, eqn, feeding = self.policy, step.eqn, frame.plan.feeding
        scopes, around = frame.place.scopes, frame.place.around
        if self.scoped:
            scopes = scopes + tuple(x for call in step.calls for x in inner_scope(call))
            around = (*around, *step.calls)
        if is_container(eqn):
            inside = Place(summed=feeding.inside(i))
            if self.scoped:
                inside = inside._replace(scopes=scopes + inner_scope(eqn), around=(*around, eqn))
            if not self._concerns(eqn, operands):
                return own(policy, eqn, operands)
            return self.containers(eqn, operands, inside)
        here = scopes + scopes_of(eqn) if self.scoped else ()
        rule = decide(policy, eqn, [x.kind for x in operands], here, feeding.why.get(i))
        operation = OPERATIONS[rule.name]

        def bound(*values):
            return operation(policy, eqn, values)

        follows = rule.name in ("follow", "layout") and not frame.again
        if follows and keeps_full(eqn, operands):
            out = self._again(bound, operands)(*operands)
        else:
            out = bound(*operands)
        if self.note is None:
            return out
        line = line_of(eqn, around)
        self.note(eqn, line, here, rule, operands, out)
        by = f"`{eqn.primitive.name}` at {line}" if rule.asked else None
        if by is None and eqn.primitive.name in tables.FOLLOWING:
            by = next((x.kind.asked for x in operands if x.kind.asked), None)
        out = [x.as_kind(x.kind._replace(asked=by)) for x in out]
        # A half of the other type stays what it is.
        for x, v in zip(out, eqn.outvars, strict=True):
            if rule.asked and not x.kind.governed:
                self.leaving(x, v.aval)
        return out

    def leaving(self, x: Value, aval: Any) -> None:
        """Notes that the program holds what an override keeps in float32 as a half."""
        dtype = getattr(aval, "dtype", bool)
        if self.note is not None and x.kind.asked and is_half(dtype):
            self.note.rounded[f"{x.kind.asked} to {dtype}"] = None

    def _concerns(self, eqn: JaxprEqn, operands: Sequence[Value]) -> bool:
        """Whether anything changes inside of a container that is a loop, a branch or a rule."""
        return (
            eqn.primitive.name not in self.containers.rules
            or self.scoped
            or any(x.kind.half for x in operands)
            or any(map(self._multiplies, bodies_of(eqn)))
        )

    def _multiplies(self, closed: ClosedJaxpr) -> bool:
        """Whether there is a product in a jaxpr, at any depth."""
        jaxpr = closed.jaxpr
        if id(jaxpr) not in self.multiplies:
            self.multiplies[id(jaxpr)] = jaxpr, contains(closed, tables.JAX_PRODUCTS)
        return self.multiplies[id(jaxpr)][1]

    # What the backward pass evaluates again.

    def _segment(self, frame: _Frame, segment: Segment, alike: dict) -> None:
        """A run of equations. Runs that are alike are traced, differentiated and transposed
        once."""
        plan, entering = frame.plan, {x: frame.env[x] for x in segment.inputs}

        def function(*values):
            inner = dict(zip(entering, values, strict=True))
            self._equations(frame._replace(env=inner, again=True), segment.start, segment.stop)
            # Rounded in here, a result that only products use is half when it is written, and so
            # is its cotangent when it comes back.
            return [
                self._rounded(inner[x]) if x in plan.rounded else inner[x] for x in segment.outputs
            ]

        # With scopes to read or to report, each is one of its own.
        parts = plan.flat, segment, entering, plan.feeding, plan.rounded
        key = object() if self.scoped else signature(*parts)
        if key not in alike:
            alike[key] = self._again(function, list(entering.values()))
        frame.env.update(zip(segment.outputs, alike[key](*entering.values()), strict=True))

    def _rounded(self, x: Value) -> Value:
        """A value as a product takes it."""
        if not x.kind.governed or x.kind.master:
            return x
        return Value(x.get(self.policy.dtype), x.kind)

    def _again(
        self, function: Callable[..., list[Value]], like: Sequence[Value]
    ) -> Callable[..., list[Value]]:
        """A function of values, such as `like`, that the backward pass evaluates again. Those
        that are known stay known."""
        known = [x if x.kind.const is not None else None for x in like]

        def body(*values):
            remaining = iter(values)
            return function(*(next(remaining) if x is None else x for x in known))

        checkpointed = jax.checkpoint(body)

        def call(*values):
            unknown = (x for x, k in zip(values, known, strict=True) if k is None)
            # As they are, without the casts that were made of them outside.
            return checkpointed(*(Value(x.native, x.kind) for x in unknown))

        return call

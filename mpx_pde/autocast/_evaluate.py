"""The interpreter: evaluates a jaxpr that was traced in float32 by the rules of a policy."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from ..interpret import _tables as tables
from ..interpret._jaxpr import (
    bodies_of,
    contains,
    in_context_of,
    inner_scope,
    is_container,
    literal,
    scopes_of,
)
from ._containers import Containers, Place
from ._feeding import Feeding, Summed, feeding
from ._operations import OPERATIONS, keeps_full, own
from ._rules import Policy, Rule, decide
from ._segments import Segment, multiplied_alone, pays, segments_of, signature
from ._values import Value, constant


Note = Callable[[JaxprEqn, tuple[str, ...], Rule, Sequence[Value], Sequence[Value]], None]


class _Plan(NamedTuple):
    """What is known of a jaxpr before it is evaluated."""

    jaxpr: Jaxpr
    feeding: Feeding
    segments: dict[int, Segment]
    rounded: frozenset[Any]


class _Frame(NamedTuple):
    """The evaluation of one jaxpr."""

    jaxpr: Jaxpr
    feeding: Feeding
    scopes: tuple[str, ...]
    env: dict[Any, Value]
    rounded: frozenset[Any] = frozenset()
    """The variables that only products in half precision use."""
    again: bool = False
    """Whether the backward pass evaluates it again."""


class Evaluator:
    """One call of an autocast function."""

    def __init__(self, policy: Policy, note: Note | None = None):
        self.policy = policy
        self.note = note
        self.containers = Containers(policy, self.jaxpr)
        # Scopes are read from strings, so only where something asks for them.
        self.scoped = bool(note or policy.half or policy.full)
        # By the identity of a jaxpr, which is kept alive beside what is known of it.
        self.plans: dict[Any, _Plan] = {}
        self.multiplies: dict[int, tuple[Jaxpr, bool]] = {}

    def jaxpr(self, closed: ClosedJaxpr, values: Sequence[Value], place: Place) -> list[Value]:
        jaxpr, policy = closed.jaxpr, self.policy
        env: dict[Any, Value] = dict(zip(jaxpr.invars, values, strict=True))
        for var, const in zip(jaxpr.constvars, closed.consts, strict=True):
            env[var] = constant(const, var.aval, policy)

        plan = self._plan(jaxpr, place.summed)
        frame = _Frame(jaxpr, plan.feeding, place.scopes, env, plan.rounded)
        alike: dict[Hashable, Callable[..., list[Value]]] = {}
        i = 0
        while i < len(jaxpr.eqns):
            segment = plan.segments.get(i)
            if segment and pays([env[v] for v in segment.inputs], policy):
                self._segment(frame, segment, alike)
                i = segment.stop
            else:
                self._equations(frame, i, i + 1)
                i += 1
        return [self._read(v, env) for v in jaxpr.outvars]

    def _read(self, atom: Any, env: dict[Any, Value]) -> Value:
        return constant(atom.val, atom.aval, self.policy) if literal(atom) else env[atom]

    def _plan(self, jaxpr: Jaxpr, summed: Summed) -> _Plan:
        key = id(jaxpr), summed
        if key not in self.plans:
            # With overrides, or products of several halves, others decide what is half.
            policy = self.policy
            plain = policy.algorithm is None and not policy.half and not policy.full
            rounded = multiplied_alone(jaxpr) if plain else frozenset()
            self.plans[key] = _Plan(jaxpr, feeding(jaxpr, summed), segments_of(jaxpr), rounded)
        return self.plans[key]

    def _equations(self, frame: _Frame, start: int, stop: int) -> None:
        """Evaluates a range of equations, and adds their results to the environment."""
        for i in range(start, stop):
            eqn = frame.jaxpr.eqns[i]
            operands = [self._read(v, frame.env) for v in eqn.invars]
            with in_context_of(eqn):
                out = self._equation(frame, i, eqn, operands)
            frame.env.update(zip(eqn.outvars, out, strict=True))

    def _equation(self, frame: _Frame, i: int, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        policy = self.policy
        if is_container(eqn):
            scopes = frame.scopes + inner_scope(eqn) if self.scoped else ()
            if not self._concerns(eqn, operands):
                return own(policy, eqn, operands)
            return self.containers(eqn, operands, Place(scopes, frame.feeding.inside(i)))
        here = frame.scopes + scopes_of(eqn) if self.scoped else ()
        rule = decide(policy, eqn, [x.kind for x in operands], here, frame.feeding.why.get(i))
        operation = OPERATIONS[rule.name]

        def bound(*values):
            return operation(policy, eqn, values)

        follows = rule.name in ("follow", "layout") and not frame.again
        if follows and keeps_full(eqn, operands):
            out = self._again(bound, operands)(*operands)
        else:
            out = bound(*operands)
        if self.note is not None:
            self.note(eqn, here, rule, operands, out)
        return out

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
            self.multiplies[id(jaxpr)] = jaxpr, contains(closed, tables.PRODUCTS)
        return self.multiplies[id(jaxpr)][1]

    # What the backward pass evaluates again.

    def _segment(self, frame: _Frame, segment: Segment, alike: dict) -> None:
        """A run of equations. Runs that are alike are traced, differentiated and transposed
        once."""
        entering = {v: frame.env[v] for v in segment.inputs}

        def function(*values):
            inner = dict(zip(entering, values, strict=True))
            self._equations(frame._replace(env=inner, again=True), segment.start, segment.stop)
            # Rounded in here, a result that only products use is half when it is written, and so
            # is its cotangent when it comes back.
            return [
                self._rounded(inner[v]) if v in frame.rounded else inner[v] for v in segment.outputs
            ]

        # With scopes to read or to report, each is one of its own.
        parts = frame.jaxpr, segment, entering, frame.feeding, frame.rounded
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

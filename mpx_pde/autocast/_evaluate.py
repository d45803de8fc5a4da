"""The interpreter: evaluates a jaxpr that was traced in float32 by the rules of a policy."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.custom_derivatives
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun

from .._conv import mixed_conv_general_dilated_p
from .._dot import Given, mixed_dot_general_p
from .._jaxpr import (
    TRACED,
    aval_of,
    bind_around,
    bodies_of,
    differentiable,
    in_context_of,
    inner_scope,
    is_container,
    literal,
    own_bind,
    pullback,
    pushforward,
    rebind,
    scan_counts,
    scopes_of,
)
from ..checkpoint_policies import translate
from . import tables
from ._rules import Kind, Policy, Rule, decide, feeding, says_its_dtype
from ._segments import Segment, pays, segments_of, signature
from ._values import FULL, Value, computed, constant


Scopes = tuple[str, ...]
Note = Callable[[JaxprEqn, Scopes, Rule, Sequence[Value], Sequence[Value]], None]


class Evaluator:
    """One call of an autocast function."""

    def __init__(self, policy: Policy, note: Note | None = None):
        self.policy = policy
        self.note = note
        # Scopes are read from strings, so only where something asks for them.
        self.scoped = bool(note or policy.half or policy.full)
        self.traces: dict[Any, tuple[ClosedJaxpr, list[Kind], ClosedJaxpr]] = {}
        # By the identity of a jaxpr, which is kept alive beside what is known of it.
        self.plans: dict[int, tuple[Jaxpr, set[int], dict[int, Segment]]] = {}
        self.multiplies: dict[int, tuple[Jaxpr, bool]] = {}

    def jaxpr(self, closed: ClosedJaxpr, values: Sequence[Value], scopes: Scopes) -> list[Value]:
        jaxpr, policy = closed.jaxpr, self.policy
        env: dict[Any, Value] = dict(zip(jaxpr.invars, values, strict=True))
        for var, const in zip(jaxpr.constvars, closed.consts, strict=True):
            env[var] = constant(const, var.aval, policy)

        _, magnified, segments = self._plan(jaxpr)
        alike: dict[Hashable, tuple[Callable[..., list], list[Kind]]] = {}
        i = 0
        while i < len(jaxpr.eqns):
            segment = segments.get(i)
            if segment and pays([env[v] for v in segment.inputs], policy):
                self._segment(jaxpr, segment, env, scopes, magnified, alike)
                i = segment.stop
            else:
                self._equations(jaxpr, i, i + 1, env, scopes, magnified)
                i += 1
        return [self._read(v, env) for v in jaxpr.outvars]

    def _read(self, atom: Any, env: dict[Any, Value]) -> Value:
        return constant(atom.val, atom.aval, self.policy) if literal(atom) else env[atom]

    def _plan(self, jaxpr: Jaxpr) -> tuple[Jaxpr, set[int], dict[int, Segment]]:
        if id(jaxpr) not in self.plans:
            self.plans[id(jaxpr)] = jaxpr, feeding(jaxpr), segments_of(jaxpr)
        return self.plans[id(jaxpr)]

    def _equations(self, jaxpr, start, stop, env, scopes, magnified) -> None:
        """Evaluates a range of equations, and adds their results to the environment."""
        for i in range(start, stop):
            eqn = jaxpr.eqns[i]
            operands = [self._read(v, env) for v in eqn.invars]
            with in_context_of(eqn):
                out = self._equation(eqn, operands, scopes, i in magnified)
            env.update(zip(eqn.outvars, out, strict=True))

    def _segment(self, jaxpr, segment, env, scopes, magnified, alike) -> None:
        """The same for equations that the backward pass evaluates again. Segments that are alike
        are traced, differentiated and transposed once."""
        entering = {v: env[v] for v in segment.inputs}
        arrays = [x.native for x in entering.values() if x.kind.const is None]
        # With scopes to read or to report, each is one of its own.
        key = object() if self.scoped else signature(jaxpr, segment, entering, magnified)
        if key not in alike:
            alike[key] = self._checkpointed(jaxpr, segment, entering, scopes, magnified)
        function, out_kinds = alike[key]
        env.update(zip(segment.outputs, self._wrap(function(*arrays), out_kinds), strict=True))

    def _checkpointed(self, jaxpr, segment, entering, scopes, magnified):
        """A segment as a function of arrays, and the kinds of its results, once it has been
        called."""
        out_kinds: list[Kind] = []

        def body(*arrays):
            remaining = iter(arrays)
            inner = {
                v: x if x.kind.const is not None else Value(next(remaining), x.kind)
                for v, x in entering.items()
            }
            self._equations(jaxpr, segment.start, segment.stop, inner, scopes, magnified)
            out = [inner[v] for v in segment.outputs]
            out_kinds[:] = [x.kind for x in out]
            return [x.native for x in out]

        return jax.checkpoint(body), out_kinds

    def _multiplies(self, closed: ClosedJaxpr) -> bool:
        """Whether there is a product in a jaxpr, at any depth."""
        jaxpr = closed.jaxpr
        if id(jaxpr) not in self.multiplies:
            found = any(
                eqn.primitive.name in tables.PRODUCTS or any(map(self._multiplies, bodies_of(eqn)))
                for eqn in jaxpr.eqns
            )
            self.multiplies[id(jaxpr)] = jaxpr, found
        return self.multiplies[id(jaxpr)][1]

    def _equation(
        self, eqn: JaxprEqn, operands: list[Value], scopes: Scopes, magnified: bool
    ) -> list[Value]:
        if is_container(eqn):
            return self._container(eqn, operands, scopes)
        here = scopes + scopes_of(eqn) if self.scoped else ()
        rule = decide(self.policy, eqn, [x.kind for x in operands], here, magnified)
        out = getattr(self, f"_{rule.name}")(eqn, operands)
        if self.note is not None:
            self.note(eqn, here, rule, operands, out)
        return out

    # Rules.

    def _computed(self, eqn: JaxprEqn, out: Sequence) -> list[Value]:
        return [computed(x, v.aval, self.policy) for x, v in zip(out, eqn.outvars, strict=True)]

    def _in(self, dtype: np.dtype, eqn: JaxprEqn, operands: list[Value], **params) -> list[Value]:
        eqn = eqn.replace(params={**eqn.params, **params}) if params else eqn
        return self._computed(eqn, own_bind(eqn, [x.get(dtype) for x in operands]))

    def _factor(self, value: Value) -> Any:
        # A master is rounded inside of the product, so that its cotangent stays in float32. What
        # was computed is rounded before it, so that what is kept for the backward pass is half.
        return value.array(self.policy) if value.kind.master else value.get(self.policy.dtype)

    def _product(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        policy, params = self.policy, eqn.params
        if policy.algorithm is not None:
            return self._split_product(eqn, operands)
        # A program that multiplies halves into float32 gets float32.
        widens = (
            aval_of(eqn.invars[0]).dtype == policy.dtype and aval_of(eqn.outvars[0]).dtype == FULL
        )
        dtypes = {"dtype": policy.dtype, "out_dtype": FULL if widens else policy.dtype}
        rest = {k: v for k, v in params.items() if k not in ("precision", "preferred_element_type")}
        is_dot = eqn.primitive.name == "dot_general"
        primitive = mixed_dot_general_p if is_dot else mixed_conv_general_dilated_p
        out = primitive.bind(*map(self._factor, operands), **rest, **dtypes)
        return self._computed(eqn, [out])

    def _split_product(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        # The hardware splits float32 operands into halves and adds up the products. Convolutions
        # have no such algorithm.
        is_dot = eqn.primitive.name == "dot_general"
        precision = self.policy.algorithm if is_dot else (lax.Precision.HIGHEST,) * 2
        return self._in(FULL, eqn, operands, precision=precision, preferred_element_type=FULL)

    def _mixed(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        if eqn.params["dtype"] == FULL and not says_its_dtype(eqn):
            return self._supplied(eqn, operands)
        return self._computed(eqn, own_bind(eqn, [x.array(self.policy) for x in operands]))

    def _supplied(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        """A mixed product that nobody gave a dtype: what it multiplies in is the policy's."""
        policy = self.policy
        if policy.algorithm is not None:
            if eqn.primitive is not mixed_dot_general_p:
                return self._in(FULL, eqn, operands)
            names = ("dimension_numbers", "out_sharding")
            params = {name: eqn.params[name] for name in names}
            arrays = [x.get(FULL) for x in operands]
            product = lax.dot_general(
                *arrays, **params, precision=policy.algorithm, preferred_element_type=FULL
            )
            return self._computed(eqn, [product])
        given = eqn.params.get("given", Given())
        out_dtype = eqn.params["out_dtype"] if given.out_dtype else policy.dtype
        params = {"dtype": policy.dtype, "out_dtype": out_dtype, "given": Given()}
        arrays = map(self._factor, operands)
        return self._computed(eqn, [eqn.primitive.bind(*arrays, **{**eqn.params, **params})])

    def _full(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        if eqn.primitive.name in tables.MIXED:
            params = {"dtype": FULL, "out_dtype": FULL, "given": Given()}
            eqn = eqn.replace(params={**eqn.params, **params})
        if "preferred_element_type" in eqn.params and aval_of(eqn.outvars[0]).dtype != FULL:
            return self._in(FULL, eqn, operands, preferred_element_type=FULL)
        return self._in(FULL, eqn, operands)

    def _half(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        if eqn.primitive.name in tables.MIXED:
            return self._supplied(eqn, operands)
        return self._in(self.policy.dtype, eqn, operands)

    def _follow(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        half = any(x.kind.half for x in operands)
        if half and eqn.primitive.name in tables.ARITHMETIC:
            operands = [self._spread(x, eqn) for x in operands]
        return self._in(self.policy.dtype if half else FULL, eqn, operands)

    def _spread(self, value: Value, eqn: JaxprEqn) -> Value:
        """A value in the shape of the result. JAX sums the cotangent of what an operation
        broadcasts, such as a bias, in the dtype that it has there: so it is broadcast in float32,
        and cast after."""
        shape = aval_of(eqn.outvars[0]).shape
        governed, known = value.kind.governed, value.kind.const is not None
        if not governed or known or np.shape(value.native) == shape:
            return value
        return Value(jnp.broadcast_to(value.get(FULL), shape), value.kind)

    def _layout(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        kinds = [x.kind for x in operands if x.kind.governed]
        if not all(k.master for k in kinds):
            return self._follow(eqn, operands)
        # What only moves a master is one.
        kind = Kind(half=all(k.half for k in kinds), master=True)
        if len(operands) == 1:
            kind = kind._replace(const=kinds[0].const)
        return [Value(x, kind) for x in own_bind(eqn, [x.get(FULL) for x in operands])]

    def _convert(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        (x,) = operands
        before, after = aval_of(eqn.invars[0]).dtype, eqn.params["new_dtype"]
        if not self.policy.governs(eqn.outvars[0].aval):
            return self._own(eqn, operands)
        if before == after:
            return [x]
        return [x.as_kind(x.kind._replace(half=after == self.policy.dtype))]

    def _own(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        args = [self._as_in_program(x, v.aval) for x, v in zip(operands, eqn.invars, strict=True)]
        out = self._computed(eqn, own_bind(eqn, args))
        if eqn.primitive.name == "convert_element_type" and aval_of(eqn.invars[0]).dtype == bool:
            # Zeros and ones are exact in every dtype: a mask gives way to what it masks.
            return [x.as_kind(x.kind._replace(master=not x.kind.half)) for x in out]
        return out

    def _as_in_program(self, value: Value, aval: Any) -> Any:
        return value.get(aval.dtype) if value.kind.governed else value.array(self.policy)

    # Containers.

    def _container(self, eqn: JaxprEqn, operands: list[Value], scopes: Scopes) -> list[Value]:
        name = eqn.primitive.name
        bodies = bodies_of(eqn)
        inner = scopes + inner_scope(eqn) if self.scoped else ()
        if name in TRACED:
            return self._traced(eqn, operands, bodies[0], inner)
        enter = {
            "scan": self._scan,
            "while": self._while,
            "cond": self._cond,
            "shard_map": self._shard_map,
            "custom_jvp_call": self._custom_jvp,
            "custom_vjp_call": self._custom_vjp,
        }.get(name)
        if enter is None:
            return self.jaxpr(bodies[0], operands, inner)
        if not self._concerns(operands, bodies):
            return self._own(eqn, operands)
        return enter(eqn, operands, bodies, inner)

    def _concerns(self, operands: list[Value], bodies: list[ClosedJaxpr]) -> bool:
        """Whether anything changes inside of a container."""
        return (
            self.scoped or any(x.kind.half for x in operands) or any(map(self._multiplies, bodies))
        )

    def _wrap(self, arrays: Sequence, kinds: Sequence[Kind]) -> list[Value]:
        return [Value(x, kind) for x, kind in zip(arrays, kinds, strict=True)]

    def _arrays(self, values: Sequence[Value]) -> list:
        return [x.array(self.policy) for x in values]

    def _body(
        self, closed: ClosedJaxpr, kinds: Sequence[Kind], scopes: Scopes, out_kinds: list[Kind]
    ) -> Callable[..., list]:
        """A function of arrays; tells the kinds of its results in `out_kinds`."""

        def body(*arrays):
            out = self.jaxpr(closed, self._wrap(arrays, kinds), scopes)
            out_kinds[:] = [x.kind for x in out]
            return self._arrays(out)

        # The name under which a function with its own derivative appears.
        body.__name__ = closed.jaxpr.debug_info.func_name
        return body

    def _traced(
        self, eqn: JaxprEqn, operands: list[Value], closed: ClosedJaxpr, scopes: Scopes
    ) -> list[Value]:
        kinds, arrays = tuple(x.kind for x in operands), self._arrays(operands)
        # A function that is called twice with the same kinds is traced, and compiled, once.
        key = id(closed.jaxpr), kinds, tuple(map(jax.typeof, arrays)), scopes
        if key not in self.traces:
            out_kinds: list[Kind] = []
            body = self._body(closed, kinds, scopes, out_kinds)
            self.traces[key] = jax.make_jaxpr(body)(*arrays), out_kinds, closed
        traced, out_kinds, _ = self.traces[key]
        if policy := eqn.params.get("policy"):
            # It was written for the products that are mixed ones now.
            eqn = eqn.replace(params={**eqn.params, "policy": translate(policy)})
        return self._wrap(bind_around(eqn, arrays, traced), out_kinds)

    def _shard_map(self, eqn, operands, bodies, scopes) -> list[Value]:
        out_kinds: list[Kind] = []
        body = self._body(bodies[0], [x.kind for x in operands], scopes, out_kinds)
        return self._wrap(rebind(eqn, self._arrays(operands), [body]), out_kinds)

    def _entering(self, value: Value) -> Value:
        """A value as a loop takes it from outside. Its cotangents add up over the steps, so it
        enters in float32; inside it counts as what it was."""
        kind = value.kind
        if not kind.governed:
            return value
        return Value(value.get(FULL), kind._replace(master=True))

    def _carried(self, value: Value, aval: Any) -> Value:
        """A value as a loop carries it: in the program's dtype. A carry is a sum more often than
        not, and thousands of steps round it thousands of times."""
        return computed(self._as_in_program(value, aval), aval, self.policy)

    def _scan(self, eqn, operands, bodies, scopes) -> list[Value]:
        n_consts, n_carry = scan_counts(eqn)
        n = n_consts + n_carry
        avals = [v.aval for v in eqn.invars]
        consts = [self._entering(x) for x in operands[:n_consts]]
        carry = [
            self._carried(x, a)
            for x, a in zip(operands[n_consts:n], avals[n_consts:n], strict=True)
        ]
        entering = [*consts, *carry, *operands[n:]]
        kinds = [x.kind for x in entering]
        out_kinds: list[Kind] = []

        def body(*arrays):
            out = self.jaxpr(bodies[0], self._wrap(arrays, kinds), scopes)
            out[:n_carry] = [
                self._carried(x, a) for x, a in zip(out[:n_carry], avals[n_consts:n], strict=True)
            ]
            out_kinds[:] = [x.kind for x in out]
            return self._arrays(out)

        return self._wrap(rebind(eqn, self._arrays(entering), [body]), out_kinds)

    def _while(self, eqn, operands, bodies, scopes) -> list[Value]:
        n_test, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        n = n_test + n_body
        avals = [v.aval for v in eqn.invars[n:]]
        consts = [self._entering(x) for x in operands[:n]]
        carry = [self._carried(x, a) for x, a in zip(operands[n:], avals, strict=True)]
        kinds = [x.kind for x in carry]
        test_kinds = [*(x.kind for x in consts[:n_test]), *kinds]
        body_kinds = [*(x.kind for x in consts[n_test:]), *kinds]

        def test(*arrays):
            return self._arrays(self.jaxpr(bodies[0], self._wrap(arrays, test_kinds), scopes))

        def body(*arrays):
            out = self.jaxpr(bodies[1], self._wrap(arrays, body_kinds), scopes)
            return self._arrays([self._carried(x, a) for x, a in zip(out, avals, strict=True)])

        out = rebind(eqn, self._arrays([*consts, *carry]), [test, body])
        return self._computed(eqn, out)

    def _cond(self, eqn, operands, bodies, scopes) -> list[Value]:
        index, *operands = operands
        kinds, arrays = [x.kind for x in operands], self._arrays(operands)
        branches, branch_kinds = [], []
        for closed in bodies:
            out_kinds: list[Kind] = []
            body = self._body(closed, kinds, scopes, out_kinds)
            branches.append(jaxpr_as_fun(jax.make_jaxpr(body)(*arrays)))
            branch_kinds.append(out_kinds)
        agreed = [self._agreed(ks) for ks in zip(*branch_kinds, strict=True)]

        def agreeing(branch):
            def function(*arrays):
                return [
                    x if dtype is None else lax.convert_element_type(x, dtype)
                    for x, dtype in zip(branch(*arrays), agreed, strict=True)
                ]

            return function

        out = rebind(eqn, [*self._arrays([index]), *arrays], [agreeing(b) for b in branches])
        return self._computed(eqn, out)

    def _agreed(self, kinds: Sequence[Kind]) -> np.dtype | None:
        """The dtype in which branches return a value: half if all of them can."""
        if not kinds[0].governed:
            return None
        gives_way = [k.const is not None and self.policy.fits(k.const) for k in kinds]
        half = all(k.half or g for k, g in zip(kinds, gives_way, strict=True))
        return self.policy.dtype if half and any(k.half for k in kinds) else FULL

    # Functions with derivatives of their own: their rules are traced in the program's dtypes, and
    # evaluated by the policy like everything else.

    def _custom_jvp(self, eqn, operands, bodies, scopes) -> list[Value]:
        kinds = [x.kind for x in operands]
        out_kinds: list[Kind] = []
        function = jax.custom_jvp(self._body(bodies[0], kinds, scopes, out_kinds))
        live = differentiable(eqn.outvars)

        def rule(primals, tangents):
            dtypes = [x.dtype for x in jax.eval_shape(function, *primals)]
            # The program's own rule may ask which of its operands are fixed.
            moving = [i for i in differentiable(eqn.invars) if not _is_zero(tangents[i])]
            values = [
                *self._wrap(primals, kinds),
                *(Value(tangents[i], kinds[i]._replace(const=None)) for i in moving),
            ]
            out = self.jaxpr(pushforward(eqn, moving), values, scopes)
            n = len(eqn.outvars)
            primals_out = self._as_dtypes(out[:n], dtypes)
            tangents_out = [np.zeros(x.shape, jax.dtypes.float0) for x in primals_out]
            moved = self._as_dtypes(out[n:], [dtypes[i] for i in live])
            for i, tangent in zip(live, moved, strict=True):
                tangents_out[i] = tangent
            return primals_out, tangents_out

        function.defjvp(rule, symbolic_zeros=True)
        return self._wrap(function(*self._arrays(operands)), out_kinds)

    def _as_dtypes(self, values: Sequence[Value], dtypes: Sequence[np.dtype]) -> list:
        return [
            jnp.asarray(x.get(d) if x.kind.governed else x.array(self.policy))
            for x, d in zip(values, dtypes, strict=True)
        ]

    def _custom_vjp(self, eqn, operands, bodies, scopes) -> list[Value]:
        kinds = [x.kind for x in operands]
        out_kinds: list[Kind] = []
        function = jax.custom_vjp(self._body(bodies[0], kinds, scopes, out_kinds))
        live = differentiable(eqn.outvars)
        # Known once `forward` has been traced, which is before `backward` is.
        known: dict[str, Any] = {}

        def forward(*primals):
            arrays = [x.value for x in primals]
            moving = [i for i in differentiable(eqn.invars) if primals[i].perturbed]
            dtypes = [x.dtype for x in jax.eval_shape(function, *arrays)]
            rule, backward_rule = pullback(eqn, moving)
            out = self.jaxpr(rule, self._wrap(arrays, kinds), scopes)
            n = len(eqn.outvars)
            known.update(
                moving=moving,
                dtypes=[jax.typeof(arrays[i]).dtype for i in moving],
                rule=backward_rule,
                residuals=[x.kind for x in out[n:]],
            )
            return self._as_dtypes(out[:n], dtypes), self._arrays(out[n:])

        def backward(residuals, cotangents):
            values = self._wrap(residuals, known["residuals"])
            for i in live:
                ct = cotangents[i]
                ct = jnp.zeros(ct.shape, ct.dtype) if _is_zero(ct) else ct
                values.append(computed(ct, eqn.outvars[i].aval, self.policy))
            out = [None] * len(eqn.invars)
            moved = self._as_dtypes(self.jaxpr(known["rule"](), values, scopes), known["dtypes"])
            for i, ct in zip(known["moving"], moved, strict=True):
                out[i] = ct
            return tuple(out)

        function.defvjp(forward, backward, symbolic_zeros=True)
        return self._wrap(function(*self._arrays(operands)), out_kinds)


def _is_zero(x: Any) -> bool:
    return isinstance(x, jax.custom_derivatives.SymbolicZero)

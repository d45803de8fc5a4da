"""What holds jaxprs of its own: jitted functions, loops, branches, functions with derivatives of
their own. Here is decided in which dtype values cross their borders; how an inner jaxpr is
evaluated is handed in."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun

from ..checkpoint_policies import translate
from ..interpret._jaxpr import TRACED, bodies_of, differentiable, pullback, pushforward
from ..interpret._rebind import bind_around, rebind, scan_counts
from ..interpret._reverse import is_symbolic_zero, linear_by_pullback, tangent_like
from ._feeding import Summed
from ._rules import Policy
from ._values import FULL, Value, computed


class Place(NamedTuple):
    """Where a jaxpr stands in the program."""

    scopes: tuple[str, ...] = ()
    """The `jax.named_scope`s and jitted functions around it."""
    around: tuple[JaxprEqn, ...] = ()
    """The containers around it, outermost first, where somebody asks for lines."""
    summed: Summed = frozenset()
    """Which of its results go into a sum."""


Evaluate = Callable[[ClosedJaxpr, Sequence[Value], Place], list[Value]]


class Containers:
    """Evaluates equations that hold jaxprs, by what evaluates a jaxpr."""

    def __init__(self, policy: Policy, evaluate: Evaluate, leaving: Callable[[Value, Any], None]):
        self.policy = policy
        self.evaluate = evaluate
        self.leaving = leaving
        # By the identity of a jaxpr, which is kept alive beside what it became.
        self.traces: dict[Any, tuple[ClosedJaxpr, Any, ClosedJaxpr]] = {}
        self.rules = {
            "scan": self._scan,
            "while": self._while,
            "cond": self._cond,
            "shard_map": self._shard_map,
            "custom_jvp_call": self._custom_jvp,
            "custom_vjp_call": self._custom_vjp,
        }

    def __call__(self, eqn: JaxprEqn, operands: Sequence[Value], inside: Place) -> list[Value]:
        name, bodies = eqn.primitive.name, bodies_of(eqn)
        if name in TRACED:
            return self._traced(eqn, operands, bodies[0], inside)
        if name not in self.rules:
            return self.evaluate(bodies[0], operands, inside)
        return self.rules[name](eqn, operands, bodies, inside)

    # Values that cross a border. Each is one array, and what is known of it goes along.

    def _packed(self, values: Sequence[Value]) -> list[Value]:
        return [x.packed(self.policy) for x in values]

    def _arrays(self, values: Sequence[Value]) -> list:
        return [x.array(self.policy) for x in values]

    def _body(self, closed: ClosedJaxpr, inside: Place) -> Callable[..., list[Value]]:
        """A jaxpr as a function of values."""

        def body(*values):
            return self._packed(self.evaluate(closed, values, inside))

        # The name under which a function with its own derivative appears.
        body.__name__ = closed.jaxpr.debug_info.func_name
        return body

    def _as_dtypes(self, values: Sequence[Value], dtypes: Sequence[np.dtype]) -> list:
        return [
            jnp.asarray(x.get(d) if x.kind.governed else x.array(self.policy))
            for x, d in zip(values, dtypes, strict=True)
        ]

    def _like(self, values: Sequence[Value], like: Sequence[Value]) -> list[Value]:
        """Values in the dtypes and of the kinds of others."""
        arrays = self._as_dtypes(values, [x.native.dtype for x in like])
        return [Value(x, y.kind) for x, y in zip(arrays, like, strict=True)]

    # Functions.

    def _traced(self, eqn, operands, closed, inside) -> list[Value]:
        packed = self._packed(operands)
        arrays = [x.native for x in packed]
        # A function that is called twice with the same kinds is traced, and compiled, once. Kinds
        # by `repr`, because 0 and -0 are equal.
        kinds = tuple(repr(x.kind) for x in packed)
        key = id(closed.jaxpr), kinds, tuple(map(jax.typeof, arrays)), inside
        if key not in self.traces:
            body = self._body(closed, inside)
            self.traces[key] = *jax.make_jaxpr(body, return_shape=True)(*packed), closed
        traced, out, _ = self.traces[key]
        if policy := eqn.params.get("policy"):
            # It was written for the products that are mixed ones now.
            eqn = eqn.replace(params={**eqn.params, "policy": translate(policy)})
        bound = bind_around(eqn, arrays, traced)
        return [Value(x, y.kind) for x, y in zip(bound, out, strict=True)]

    def _shard_map(self, eqn, operands, bodies, inside) -> list[Value]:
        return rebind(eqn, self._packed(operands), [self._body(bodies[0], inside)])

    # Loops.

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
        self.leaving(value, aval)
        return computed(value.in_program(aval, self.policy), aval, self.policy)

    def _carry(self, values: Sequence[Value], avals: Sequence) -> list[Value]:
        return [self._carried(x, a) for x, a in zip(values, avals, strict=True)]

    def _scan(self, eqn, operands, bodies, inside) -> list[Value]:
        n_consts, n_carry = scan_counts(eqn)
        n = n_consts + n_carry
        avals = [v.aval for v in eqn.invars[n_consts:n]]
        entering = [
            *map(self._entering, operands[:n_consts]),
            *self._carry(operands[n_consts:n], avals),
            *operands[n:],
        ]

        def body(*values):
            out = self.evaluate(bodies[0], values, inside)
            return self._packed([*self._carry(out[:n_carry], avals), *out[n_carry:]])

        return rebind(eqn, self._packed(entering), [body])

    def _while(self, eqn, operands, bodies, inside) -> list[Value]:
        n = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        avals = [v.aval for v in eqn.invars[n:]]
        entering = [*map(self._entering, operands[:n]), *self._carry(operands[n:], avals)]

        alone = inside._replace(summed=frozenset())

        def test(*values):
            return self._arrays(self.evaluate(bodies[0], values, alone))

        def body(*values):
            return self._packed(self._carry(self.evaluate(bodies[1], values, inside), avals))

        return rebind(eqn, self._packed(entering), [test, body])

    # Branches.

    def _cond(self, eqn, operands, bodies, inside) -> list[Value]:
        index, *packed = self._packed(operands)
        traced, out = zip(
            *(
                jax.make_jaxpr(self._body(closed, inside), return_shape=True)(*packed)
                for closed in bodies
            ),
            strict=True,
        )
        agreed = [self._agreed(values) for values in zip(*out, strict=True)]

        def agreeing(branch):
            def function(*values):
                arrays = [
                    x if dtype is None else lax.convert_element_type(x, dtype)
                    for x, dtype in zip(branch(*jax.tree.leaves(values)), agreed, strict=True)
                ]
                return [
                    computed(x, v.aval, self.policy)
                    for x, v in zip(arrays, eqn.outvars, strict=True)
                ]

            return function

        branches = [agreeing(jaxpr_as_fun(closed)) for closed in traced]
        return rebind(eqn, [index.native, *packed], branches)

    def _agreed(self, values: Sequence[Value]) -> np.dtype | None:
        """The dtype in which branches return a value: half if all of them can."""
        kinds = [x.kind for x in values]
        if not kinds[0].governed:
            return None
        gives_way = [k.const is not None and self.policy.fits(k.const) for k in kinds]
        half = all(k.half or g for k, g in zip(kinds, gives_way, strict=True))
        return self.policy.dtype if half and any(k.half for k in kinds) else FULL

    # Functions with derivatives of their own: their rules are traced in the program's dtypes, and
    # evaluated by the policy like everything else. Which rule that is depends on the operands that
    # move, so it is traced anew for each use, and goes with what that use keeps.

    def _custom_jvp(self, eqn, operands, bodies, inside) -> list[Value]:
        body = self._body(bodies[0], inside)

        def push(primals, tangents, moving, like):
            # The program's own rule may ask which of its operands are fixed.
            moved = (
                Value(tangents[i].native, primals[i].kind._replace(const=None)) for i in moving
            )
            out = self.evaluate(pushforward(eqn, moving), [*primals, *moved], inside)
            n, live = len(like), differentiable(eqn.outvars)
            dtypes = [like[i].native.dtype for i in live]
            return self._like(out[:n], like), self._as_dtypes(out[n:], dtypes)

        return self._with_tangents(eqn, operands, body, push)

    def _custom_vjp(self, eqn, operands, bodies, inside) -> list[Value]:
        body = self._body(bodies[0], inside)

        def push(primals, tangents, moving, like):
            rule, backward_rule = pullback(eqn, moving)
            out = self.evaluate(rule, primals, inside)
            n, live = len(like), differentiable(eqn.outvars)
            primals_out, kept = self._like(out[:n], like), self._packed(out[n:])
            kinds = [x.kind for x in kept]
            dtypes = [primals[i].native.dtype for i in moving]

            def backward(residuals, cotangents):
                values = [Value(x, kind) for x, kind in zip(residuals, kinds, strict=True)]
                for i, ct in zip(live, cotangents, strict=True):
                    values.append(computed(ct, eqn.outvars[i].aval, self.policy))
                back = self.evaluate(backward_rule(), values, inside._replace(summed=frozenset()))
                return self._as_dtypes(back, dtypes)

            moved = linear_by_pullback(
                backward,
                [x.native for x in kept],
                [tangents[i].native for i in moving],
                [primals_out[i].native for i in live],
            )
            return primals_out, moved

        return self._with_tangents(eqn, operands, body, push)

    def _with_tangents(self, eqn, operands, body, push) -> list[Value]:
        """A function of values whose derivative is `push`: of the primals, the tangents, the
        positions of those that move, and what the function returns, with the results and the
        tangents of the differentiable ones."""
        function = jax.custom_jvp(body)

        def rule(primals, tangents):
            moving = [
                i for i in differentiable(eqn.invars) if not is_symbolic_zero(tangents[i].native)
            ]
            out, moved = push(primals, tangents, moving, jax.eval_shape(body, *primals))
            found = dict(zip(differentiable(eqn.outvars), moved, strict=True))
            return out, [
                Value(found[i] if i in found else tangent_like(x.native), x.kind)
                for i, x in enumerate(out)
            ]

        function.defjvp(rule, symbolic_zeros=True)
        return function(*self._packed(operands))

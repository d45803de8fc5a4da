"""Maps streams through primitives: by rules for linear operations, products, elementwise functions
and selections, and by nested forward mode for others."""

import dataclasses
import functools as ft
import math
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from ..._util._varying import match_varying_axes
from ..._util._wrapper import of_some
from ...program import _tables as tables
from ...program._jaxpr import aval_of, bodies_of, differentiable, own_bind, pushforward
from ._jets import Jet, Operand, Streams, bind, bind_primals, each, is_inexact, primal_of, total
from ._plan import Index, Plan, chains, splits, sum_key
from ._together import broadcast_like, joined, sum_together
from ._univariate import (
    CLOSED,
    KEPT_TERMS,
    atan_at_zero,
    closed_derivatives,
    nested_derivatives,
)


@dataclasses.dataclass(frozen=True)
class Rules:
    """The rules of one evaluation.

    **Attributes:**

    - `plan`: the streams.
    - `factors`: for each sum, the factors of its summands. They are numbers, scalars or, for a
        stacked summand, an array with a factor for each direction.
    - `own`: evaluates a function with a derivative of its own, an equation, on arrays.
    - `summed`: whether the gradients of an array that multiplies several streams are summed in one
        pass.
    """

    plan: Plan
    factors: Sequence[Sequence[Any]] = ()
    own: Callable[[JaxprEqn, Sequence[Any]], list] = own_bind
    summed: bool = True

    @ft.cached_property
    def weights(self) -> dict[Index, tuple[tuple[Any, Index], ...]]:
        """Returns the summands of each sum, with their factors."""
        pairs = zip(self.factors, self.plan.sums, strict=True)
        return {sum_key(k): tuple(zip(*pair, strict=True)) for k, pair in enumerate(pairs)}

    # Streams of products and functions.

    def _summands(self, key: Index) -> Sequence[tuple[Any, Index]]:
        return self.weights[key] if key in self.weights else ((None, key),)  # noqa: SIM401

    def gather(self, key: Index, inner: Callable[[Index], Iterable[tuple[int, Any]]]) -> Any:
        """Returns the sum of the terms that `inner` yields, with their counts, for each index of a
        stream. Terms with the same factor are added before they are multiplied by it."""
        found: dict[Any, Any] = {}
        for weight, index in self._summands(key):
            for count, x in inner(index):
                factor = count
                if isinstance(weight, int | float):
                    factor, x = count * weight, self.weighted(1, x, index)
                elif weight is not None:
                    x = self.weighted(weight, x, index)
                found[factor] = found[factor] + x if factor in found else x
        return total(x if factor == 1 else factor * x for factor, x in found.items())

    def weighted(self, weight: Any, x: Any, index: Index) -> Any:
        """Returns a summand times its weight; a stacked one is summed over its directions."""
        one = isinstance(weight, int | float) and weight == 1
        if self.plan.size(index) is not None:
            if np.ndim(weight):
                weighted = jnp.reshape(weight, (-1,) + (1,) * (x.ndim - 1)) * x
                return jnp.sum(weighted, axis=0)
            x = jnp.sum(x, axis=0)
        return x if one else weight * x

    def leibniz(self, op: Callable, a: Jet, b: Jet) -> Streams:
        """Returns the streams of a product of two values that both depend on the point.

        `op(x, y, left, right)` multiplies streams with these keys, either of which may be stacked.
        """

        def terms(index):
            for count, left, right in splits(index):
                if left in a.streams and right in b.streams:
                    yield count, op(a.streams[left], b.streams[right], left, right)

        def parts(key):
            if key in a.streams:
                yield op(a.streams[key], b.primal, key, ())
            if key in b.streams:
                yield op(a.primal, b.streams[key], (), key)
            yield self.gather(key, terms)

        return self._sums(parts)

    def compose(self, derivatives: Sequence[Any], x: Jet) -> Jet:
        """Returns the jet of a function of `x`, given its value and its derivatives."""

        def terms(order, index):
            for count, blocks in chains(index).get(order, ()):
                if all(block in x.streams for block in blocks):
                    yield count, ft.reduce(operator.mul, (x.streams[block] for block in blocks))

        def parts(key):
            if key in x.streams and derivatives[1] is not None:
                yield derivatives[1] * x.streams[key]
            for order in range(2, len(derivatives)):
                if derivatives[order] is not None:
                    curved = self.gather(key, ft.partial(terms, order))
                    yield None if curved is None else derivatives[order] * curved

        return Jet(derivatives[0], self._sums(parts))

    def _sums(self, parts: Callable[[Index], Iterable[Any]]) -> Streams:
        """Returns the streams that are sums of their `parts`; streams without any are omitted."""
        with jax.named_scope(KEPT_TERMS):
            found = {key: total(parts(key)) for key in self.plan.keys}
        return {key: x for key, x in found.items() if x is not None}

    def order(self, x: Jet) -> int:
        """Returns the highest order of derivative that a function of `x` needs."""
        orders = (len(i) for key in self.plan.keys for _, i in self._summands(key))
        return max(orders) if x.streams else 0

    # Rules by primitive. Each takes an equation and its operands, and returns the results.

    def find(self, eqn: JaxprEqn, operands: Sequence[Operand]) -> "JetRule | None":
        """Returns the rule for an equation that is no product or container; `None` without one."""
        if not any(is_inexact(v.aval) for v in eqn.outvars):
            return JET_RULES["constant"]
        row = tables.TABLE.get(eqn.primitive.name)
        rule = None if row is None else JET_RULES.get(row.rule)
        while rule is not None and rule.fits is not None and not rule.fits(self, eqn, operands):
            rule = rule.otherwise
        return rule

    def _constant(self, eqn, operands):
        return list(map(Jet, bind_primals(eqn, operands)))

    def _convert(self, eqn, operands):
        # The evaluation decides where values are rounded, not the program.
        (x,) = operands
        real = jnp.issubdtype(eqn.params["new_dtype"], jnp.floating)
        if real and jnp.issubdtype(x.primal.dtype, jnp.floating):
            return [x]
        return self._linear(eqn, operands)

    def _linear(self, eqn, operands):
        primals = bind_primals(eqn, operands)
        along = lambda key: self._linear_stream(eqn, operands, key)
        return self._by_stream(primals, operands, along)

    def _each(self, eqn, operands):
        """Moves operands to other devices. Each result has the streams of its own operand."""
        own = [x.streams if isinstance(x, Jet) else () for x in operands]
        return [x.only(keys) for x, keys in zip(self._linear(eqn, operands), own, strict=True)]

    def solved(self, solve: Callable, operands: Sequence[Operand], held: int) -> list[Jet]:
        """Returns the results of `solve`, which is linear in all but the first `held` operands."""
        fixed = list(map(primal_of, operands[:held]))
        function = lambda args: solve(*fixed, *args)
        along = lambda key: self._mapped(function, operands[held:], key)
        out = self._by_stream(function(map(primal_of, operands[held:])), operands, along)
        # Results after the solution, such as a residual norm, have no derivative.
        return [x if i < len(operands) - held else x.only(()) for i, x in enumerate(out)]

    def _selection(self, eqn, operands):
        """Selects from the operands. Each stream depends on that stream of the operands alone."""
        at = [i for i, x in enumerate(operands) if isinstance(x, Jet) and is_inexact(x.primal)]
        values = match_varying_axes(*map(primal_of, operands))
        pick = of_some(lambda *args: own_bind(eqn, args), values, at)
        primals, pushed = jax.linearize(pick, *(values[i] for i in at))
        # Tangents must vary over devices as their values do.
        along = lambda args: pushed(*match_varying_axes(*args, *values)[: len(args)])
        jets = [operands[i] for i in at]
        return self._by_stream(primals, jets, lambda key: self._mapped(along, jets, key))

    def _by_stream(self, primals, operands, along: Callable[[Index], Sequence[Any]]) -> list[Jet]:
        """Returns results, each stream of which depends on that stream of the operands alone."""
        moving = [x for x in operands if isinstance(x, Jet)]
        out: list[Streams] = [{} for _ in primals]
        for key in self.plan.keys:
            if any(key in x.streams for x in moving):
                pairs = zip(out, along(key), strict=True)
                out = [{**streams, key: x} if is_inexact(x) else streams for streams, x in pairs]
        return list(map(Jet, primals, out))

    def _together(self, eqn, operands):
        (x,), params = operands, eqn.params
        if params.get("sharding", params.get("out_sharding")) is not None:
            return self._linear(eqn, operands)
        if eqn.primitive.name in tables.LAYOUT:
            # The axes in a program may be NumPy integers.
            return [x.spread(params["shape"], tuple(map(int, params["broadcast_dimensions"])))]
        return summed([x], tuple(map(int, params["axes"])))

    def moments(self, eqn, operands):
        """Returns the sum of an array and the sum of its squared deviations from the mean, in one
        pass. The mean of the first few entries is subtracted before both sums. The results do not
        depend on it, so it has no derivative. If they are to stay `still`, the squares have none
        either (see `squares_about_mean`)."""
        (x,), axes = operands, eqn.params["axes"]
        shape = np.shape(x.primal)
        count, few = math.prod(shape[i] for i in axes), min(shape[axes[-1]], 8)
        stops = {**dict.fromkeys(axes, 1), axes[-1]: few}

        at = (..., *(slice(stops.get(i)) for i in range(len(shape))))
        first = lambda arrays: [lax.stop_gradient(jnp.asarray(s)[at] / few) for s in arrays]
        (start,) = summed(each([x], first), axes)
        others = [i for i in range(len(shape)) if i not in axes]
        y = added(x, start.spread(shape, others), -1)
        held = lambda jet: jax.tree.map(lax.stop_gradient, jet) if eqn.params["still"] else jet
        sums, squares = summed([y, self._square(held(y))], axes)
        squares = added(squares, self._square(held(sums)), -1 / count)
        # For equal entries, rounding may give a negative result, which has no square root.
        least = jnp.where(squares.primal < 0, 0, squares.primal)
        return [added(sums, start, count), dataclasses.replace(squares, primal=least)]

    def squares_about_mean(self, eqn, operands):
        """Gives the sum of squared deviations its derivative. The deviations from the mean add up
        to zero, so the derivative of the mean has no part in it."""
        squares, x, deviations = (x if isinstance(x, Jet) else Jet(x) for x in operands)
        axes = eqn.params["axes"]

        @jax.custom_jvp
        def about_mean(squares, x, deviations):
            return squares

        @about_mean.defjvp
        def _(primals, tangents):
            _, slope = jax.jvp(
                lambda y: summed([self._square(y)], axes)[0], (primals[2],), (tangents[1],)
            )
            # The derivative of this rule takes the value by the rule again.
            return about_mean(*primals), slope

        return [about_mean(squares, x, deviations)]

    def _square(self, x: Jet) -> Jet:
        return self.compose(closed_derivatives("integer_pow", self.order(x), x.primal, 2), x)

    def _linear_stream(self, eqn, operands, key) -> list:
        name = eqn.primitive.name
        if name in tables.ADDITIONS:
            x, y = (x.streams.get(key) if isinstance(x, Jet) else None for x in operands)
            if name in tables.SUBTRACTIONS and y is not None:
                y = -y
            return [total([x, y])]
        if name in tables.GATHERS:
            # An entry that is read out of bounds is a constant, so its derivative is zero.
            eqn = eqn.replace(params={**eqn.params, "fill_value": 0})
        place = lambda args: bind(eqn, args)
        if name in tables.JOINS:
            place = lambda args: [joined(args, eqn.params["dimension"])]
        return self._mapped(place, operands, key)

    def _mapped(self, function, operands, key) -> list:
        """Applies a function to the streams of its operands with one key. An operand without this
        stream is replaced by zeros, unless it is an index or a predicate."""
        args, keys = [], []
        for x in operands:
            moves, value = isinstance(x, Jet) and key in x.streams, primal_of(x)
            keys.append(key if moves else ())
            if moves:
                args.append(x.streams[key])
            else:
                args.append(jnp.zeros_like(value) if is_inexact(value) else value)
        return self.plan.each(lambda *args: function(args), keys)(*args)

    def _mul(self, eqn, operands):
        a, b = operands
        if isinstance(a, Jet) and isinstance(b, Jet):
            (primal,) = bind_primals(eqn, operands)
            return [Jet(primal, self.leibniz(lambda x, y, *_: x * y, a, b))]
        jet, factor = (a, b) if isinstance(a, Jet) else (b, a)
        if isinstance(factor, jax.Array) and jet.streams:
            (factor,) = broadcast_like([factor], jet.primal, summed=self.summed)
            primal = jet.primal * factor
        else:
            (primal,) = bind_primals(eqn, operands)
        return [Jet(primal, {k: x * factor for k, x in jet.streams.items()})]

    def _div(self, eqn, operands):
        a, b = operands
        if isinstance(b, Jet) and np.shape(b.primal) != aval_of(eqn.outvars[0]).shape:
            return self._div_by_shared(eqn, a, b)
        (primal,) = bind_primals(eqn, operands)
        if not isinstance(b, Jet):
            return [Jet(primal, {k: x / b for k, x in a.streams.items()})]
        a_streams = a.streams if isinstance(a, Jet) else {}
        return [Jet(primal, self._quotient(primal, a_streams, b.streams, 1 / b.primal))]

    def _quotient(self, primal: Any, a: Streams, b: Streams, inverse: Any) -> Streams:
        """Returns the streams of q = a / b, which follow from a = q b, order by order. `primal` is
        the value of q, `None` if it is zero, and `inverse` is 1 / b."""
        q: Streams = {}

        def terms(index):
            for count, left, right in splits(index):
                if left in b and right in q:
                    yield count, b[left] * q[right]

        for key in self.plan.keys:
            own = a.get(key)
            first = primal * b[key] if key in b and primal is not None else None
            less = total([first, self.gather(key, terms)])
            if less is not None:
                own = -less if own is None else own - less
            if own is not None:
                q[key] = own * inverse
        return q

    def _atan2(self, eqn, operands):
        """Returns the angle of a vector (x, y). In axes of which the first has its direction and
        length, the vector is (1, 0), and its angle the arc tangent of a quotient that is zero."""
        y, x = (z if isinstance(z, Jet) else Jet(z) for z in operands)
        (primal,) = bind_primals(eqn, operands)
        if not (x.streams or y.streams):
            return [Jet(primal)]
        square = x.primal * x.primal + y.primal * y.primal
        a, b = x.primal / square, y.primal / square
        first, second = self._turned(x, y, a, b), self._turned(x, y, -b, a)
        slope = Jet(primal, self._quotient(None, second, first, 1))
        return [self.compose([primal, *atan_at_zero(self.order(slope))], slope)]

    def _turned(self, x: Jet, y: Jet, a: Any, b: Any) -> Streams:
        """Returns the streams of a x + b y, for constants a and b."""

        def terms(key):
            yield a * x.streams[key] if key in x.streams else None
            yield b * y.streams[key] if key in y.streams else None

        return self._sums(terms)

    def _sqrt(self, eqn, operands):
        """Returns the square root y of x. Its streams follow from x = y², order by order. Powers of
        streams of x, as in the formula of Faà di Bruno, would overflow for a large x."""
        (x,) = operands
        (primal,) = bind_primals(eqn, operands)
        inverse, y = 0.5 / primal if x.streams else None, Streams()

        def terms(index):
            for count, left, right in splits(index):
                if left in y and right in y:
                    yield count, y[left] * y[right]

        for key in self.plan.keys:
            less = self.gather(key, terms)
            own = total([x.streams.get(key), None if less is None else -less])
            if own is not None:
                y[key] = own * inverse
        return [Jet(primal, y)]

    def _div_by_shared(self, eqn, a, b):
        """Divides by a value that is broadcast. For a real result, its inverse is broadcast."""
        shape = aval_of(eqn.outvars[0]).shape
        if _is_complex(eqn.outvars[0]):
            return self._div(eqn, [a, spread(b, shape)])
        derivatives = closed_derivatives("integer_pow", self.order(b), b.primal, -1)
        inverse = spread(self.compose(derivatives, b), shape)
        if not isinstance(a, Jet):
            return [inverse.map(lambda x, _: a * x)]
        streams = self.leibniz(lambda x, y, *_: x * y, a, inverse)
        return [Jet(a.primal * inverse.primal, streams)]

    def _elementwise(self, eqn, operands):
        x, *exponent = operands
        parameter = _number(exponent[0]) if exponent else eqn.params.get("y")
        derivatives = closed_derivatives(eqn.primitive.name, self.order(x), x.primal, parameter)
        return [self.compose(derivatives, x)]

    def _nested_elementwise(self, eqn, operands):
        """Takes derivatives of a function of one variable, which is constant in other operands, by
        nested forward mode."""
        (i,) = _moving(operands)
        x = operands[i]
        bind = self.own if eqn.primitive.name in tables.CUSTOM else own_bind
        whole = lambda *args: bind(eqn, match_varying_axes(*args))[0]
        function = of_some(whole, list(map(primal_of, operands)), [i])
        return [self.compose(nested_derivatives(function, self.order(x), x.primal), x)]

    # Equations without a rule.

    def nested(
        self, fun: Callable[..., list], operands: Sequence[Operand], moving: Collection[int] = ()
    ) -> list[Jet]:
        """Returns the results of `fun`, a function of arrays, with their streams, by the formula of
        Faà di Bruno. The derivatives of `fun` along streams of the operands are taken by nested
        forward mode.

        Operands at the positions `moving` get zeros for streams that they lack, because `fun` may
        ask which of its operands move. The others are held fixed along streams that they lack.
        """
        at = [i for i, x in enumerate(operands) if isinstance(x, Jet) and is_inexact(x.primal)]
        jets = [operands[i] for i in at]
        primals = [x.primal for x in jets]
        of_jets = of_some(fun, list(map(primal_of, operands)), at)
        out = of_jets(*primals)
        live = [i for i, x in enumerate(out) if is_inexact(x)]

        def function(*moved):
            results = of_jets(*moved)
            return [results[i] for i in live]

        def tangent(i: int, x: Jet, block: Index) -> Any:
            if block in x.streams or i not in moving:
                return x.streams.get(block)
            return jnp.zeros(self.plan.shape(block, jnp.shape(x.primal)), x.primal.dtype)

        @ft.cache
        def along(*blocks: Index) -> list[Any] | None:
            """Returns a derivative of `function`; `None` if no operand has one of the streams."""
            if any(all(block not in x.streams for x in jets) for block in blocks):
                return None
            directions = [list(map(tangent, at, jets, len(at) * [block])) for block in blocks]
            derivative = lambda directions: ft.reduce(_pushed, directions, function)(*primals)
            return self.plan.each(derivative, blocks[:1])(directions)

        def curved(k, index):
            for count, blocks in (term for terms in chains(index).values() for term in terms):
                found = along(*blocks)
                if found is not None:
                    yield count, found[k]

        def parts(k, key):
            straight = along(key)
            yield straight and straight[k]
            yield self.gather(key, ft.partial(curved, k))

        streams = {i: self._sums(ft.partial(parts, k)) for k, i in enumerate(live)}
        return [Jet(x, streams.get(i, {})) for i, x in enumerate(out)]

    # Functions with a custom derivative.

    def _is_elementwise(self, eqn, operands) -> bool:
        (out, *more) = eqn.outvars
        moving = _moving(operands)
        if more or len(moving) != 1 or any(map(_is_complex, (*eqn.invars, out))):
            return False
        x = operands[moving[0]]
        shape = jnp.shape(x.primal)
        fits = all(jnp.shape(y) in ((), shape) for y in operands if not isinstance(y, Jet))
        alike = fits and out.aval.shape == shape
        return alike and _pointwise_custom(eqn, moving, self.order(x))

    def _is_softplus(self, eqn, operands) -> bool:
        return _is_logaddexp(eqn) and self._is_elementwise(eqn, operands)

    def _logaddexp(self, eqn, operands):
        (i,) = _moving(operands)
        x, other = operands[i], _number(operands[1 - i])
        return [self.compose(closed_derivatives("logaddexp", self.order(x), x.primal, other), x)]


def _moving(operands: Sequence[Operand]) -> list[int]:
    """Returns the positions of the operands that depend on the point."""
    return [i for i, x in enumerate(operands) if isinstance(x, Jet)]


class JetRule(NamedTuple):
    """A rule for streams.

    **Attributes:**

    - `apply`: a method of `Rules` that takes an equation and its operands.
    - `fits`: returns whether the rule holds for an equation; `None` if it always does.
    - `otherwise`: the rule for equations that it does not hold for; by default they have none.
    """

    apply: Callable[[Rules, JaxprEqn, Sequence[Operand]], list[Jet]]
    fits: Callable[[Rules, JaxprEqn, Sequence[Operand]], bool] | None = None
    otherwise: "JetRule | None" = None

    @property
    def name(self) -> str:
        return self.apply.__name__.strip("_")


def _is_real(rules: Rules, eqn: JaxprEqn, operands: Sequence[Operand]) -> bool:
    return not any(map(_is_complex, eqn.invars))


def _is_of_one(rules: Rules, eqn: JaxprEqn, operands: Sequence[Operand]) -> bool:
    return _moving(operands) == [0] and _is_real(rules, eqn, operands)


def _is_closed(rules: Rules, eqn: JaxprEqn, operands: Sequence[Operand]) -> bool:
    return eqn.primitive.name in CLOSED and _is_of_one(rules, eqn, operands)


def _has_fixed_bounds(rules: Rules, eqn: JaxprEqn, operands: Sequence[Operand]) -> bool:
    return _moving(operands) == [1]


def _updates_once(rules: Rules, eqn: JaxprEqn, operands: Sequence[Operand]) -> bool:
    # Of several updates of one entry, all streams take the one that the value takes.
    return eqn.params["unique_indices"]


_LINEAR, _SELECTION = JetRule(Rules._linear), JetRule(Rules._selection)

JET_RULES: dict[str, JetRule] = {
    "constant": JetRule(Rules._constant),
    "cast": JetRule(Rules._convert),
    "layout": _LINEAR,
    "linear": _LINEAR,
    "each": JetRule(Rules._each),
    "together": JetRule(Rules._together, _is_real, _LINEAR),
    "scatter": JetRule(Rules._linear, _updates_once, _SELECTION),
    "selection": _SELECTION,
    "clamp": JetRule(Rules._selection, _has_fixed_bounds),
    "mul": JetRule(Rules._mul),
    "div": JetRule(Rules._div),
    "sqrt": JetRule(Rules._sqrt),
    "atan2": JetRule(Rules._atan2),
    "moments": JetRule(Rules.moments),
    "squares_about_mean": JetRule(Rules.squares_about_mean),
    "elementwise": JetRule(
        Rules._elementwise, _is_closed, JetRule(Rules._nested_elementwise, _is_of_one)
    ),
    "custom": JetRule(
        Rules._logaddexp,
        Rules._is_softplus,
        JetRule(Rules._nested_elementwise, Rules._is_elementwise),
    ),
}
"""Rules for streams, by their names in the table of primitives. What has none here is a product or
a container, or is differentiated by nested `jvp`, or not at all."""

_ELSEWHERE = {"product", "container", "nested", "opaque"}
assert {row.rule for row in tables.TABLE.values()} == {*JET_RULES} | _ELSEWHERE


def summed(jets: Sequence[Jet], axes: Sequence[int]) -> list[Jet]:
    """Returns the sums of values of one shape over the same axes, in one pass over all values."""
    behind = [i - np.ndim(jets[0].primal) for i in axes]
    return each(jets, lambda arrays: sum_together(arrays, behind))


def added(x: Jet, y: Jet, factor: int | float) -> Jet:
    """Returns `x + factor * y`, where `y` has no streams that `x` does not have."""
    plus = lambda a, b: a - b if factor == -1 else a + factor * b
    streams = {k: plus(s, y.streams[k]) if k in y.streams else s for k, s in x.streams.items()}
    return Jet(plus(x.primal, y.primal), streams)


def aligned(eqn: JaxprEqn, operands: Sequence[Operand]) -> list[Operand]:
    """Returns the operands of an equation. Those that depend on the point are broadcast to the
    shape of the result. JAX leaves numbers and axes of length one as they are, and the stacked
    streams of a number would be taken for an array."""
    name = eqn.primitive.name
    shape = aval_of(eqn.outvars[0]).shape if eqn.outvars else ()
    if name not in tables.BROADCASTS or not shape:
        return list(operands)
    # The rule for `div` spreads the divisor itself.
    places = (0,) if name in tables.DIVISIONS else range(len(operands))
    return [spread(x, shape) if i in places else x for i, x in enumerate(operands)]


def spread(x: Operand, shape: tuple[Any, ...]) -> Operand:
    """Returns a value, broadcast to a shape if it depends on the point."""
    if not isinstance(x, Jet) or np.shape(x.primal) == shape:
        return x
    return x.spread(shape, range(len(shape) - np.ndim(x.primal), len(shape)))


def _pushed(function: Callable, tangents: Sequence[Any]) -> Callable[..., list]:
    """Returns the derivative of a function along the tangents that are not `None`."""
    at = [i for i, x in enumerate(tangents) if x is not None]

    def derivative(*primals):
        some = of_some(function, primals, at)
        return jax.jvp(some, [primals[i] for i in at], [tangents[i] for i in at])[1]

    return derivative


def _number(x: Any) -> Any:
    """Returns a scalar that is known while tracing as a float, another value as an array."""
    if isinstance(x, np.ndarray | np.generic | int | float) and np.ndim(x) == 0:
        return float(x)
    return jnp.asarray(x)


def _is_complex(atom: Any) -> bool:
    return jnp.issubdtype(aval_of(atom).dtype, jnp.complexfloating)


def _is_logaddexp(eqn: JaxprEqn) -> bool:
    """Returns whether a function with a custom derivative is `jnp.logaddexp`, by its jaxpr."""
    if len(eqn.invars) != 2:
        return False
    avals = [jax.ShapeDtypeStruct(aval_of(v).shape, aval_of(v).dtype) for v in eqn.invars]
    own = jax.make_jaxpr(jnp.logaddexp)(*avals).jaxpr.eqns[-1]
    bodies = [str(e.params.get("call_jaxpr")) for e in (eqn, own)]
    return bodies[0] == bodies[1]


def _pointwise_custom(eqn: JaxprEqn, moving: Sequence[int], order: int) -> bool:
    """Returns whether a function with a custom derivative, and its derivatives up to an order, act
    on each entry alone. A derivative rule may mix entries that the function does not mix."""
    alike = _pointwise(eqn.params["call_jaxpr"])
    return alike and (order < 1 or _pointwise(pushforward(eqn, moving), order - 1))


def _pointwise(closed: ClosedJaxpr, order: int = 0) -> bool:
    """Returns whether a jaxpr and its derivatives up to an order do the same to each entry of the
    operands, whatever the other entries are."""

    def fits(eqn):
        name = eqn.primitive.name
        if name in tables.PUSHES:
            return _pointwise_custom(eqn, differentiable(eqn.invars), order)
        if name in tables.CALLS:
            return _pointwise(bodies_of(eqn)[0], order)
        if name == "broadcast_in_dim":
            return eqn.invars[0].aval.shape in ((), eqn.outvars[0].aval.shape)
        return name in tables.POINTWISE

    return all(map(fits, closed.jaxpr.eqns))

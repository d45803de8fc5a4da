"""Combines streams: in sums, products, quotients, roots, and functions of values."""

import dataclasses
import functools as ft
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._util._wrapper import of_some
from ._jets import Jet, Operand, Streams, is_inexact, primal_of, total
from ._plan import Index, Plan, chains, splits, sum_key
from ._univariate import KEPT_TERMS


@dataclasses.dataclass(frozen=True)
class Algebra:
    """The algebra of the streams of one evaluation.

    **Attributes:**

    - `plan`: the streams.
    - `factors`: for each sum, the factors of its summands. They are numbers, scalars or, for a
        stacked summand, an array with a factor for each direction.
    """

    plan: Plan
    factors: Sequence[Sequence[Any]] = ()

    @ft.cached_property
    def weights(self) -> dict[Index, tuple[tuple[Any, Index], ...]]:
        """Returns the summands of each sum, with their factors."""
        pairs = zip(self.factors, self.plan.sums, strict=True)
        return {sum_key(k): tuple(zip(*pair, strict=True)) for k, pair in enumerate(pairs)}

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

        return self.sums(parts)

    def quotient(self, primal: Any, a: Streams, b: Streams, inverse: Any) -> Streams:
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

    def root(self, primal: Any, x: Streams) -> Streams:
        """Returns the streams of y = √x, which follow from x = y², order by order. Powers of
        streams of x, as in the formula of Faà di Bruno, would overflow for a large x. `primal` is
        the value of y."""
        inverse, y = 0.5 / primal if x else None, Streams()

        def terms(index):
            for count, left, right in splits(index):
                if left in y and right in y:
                    yield count, y[left] * y[right]

        for key in self.plan.keys:
            less = self.gather(key, terms)
            own = total([x.get(key), None if less is None else -less])
            if own is not None:
                y[key] = own * inverse
        return y

    def combination(self, a: Any, x: Jet, b: Any, y: Jet) -> Streams:
        """Returns the streams of a x + b y, for constants a and b."""

        def terms(key):
            yield a * x.streams[key] if key in x.streams else None
            yield b * y.streams[key] if key in y.streams else None

        return self.sums(terms)

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

        return Jet(derivatives[0], self.sums(parts))

    def sums(self, parts: Callable[[Index], Iterable[Any]]) -> Streams:
        """Returns the streams that are sums of their `parts`; streams without any are omitted."""
        with jax.named_scope(KEPT_TERMS):
            found = {key: total(parts(key)) for key in self.plan.keys}
        return {key: x for key, x in found.items() if x is not None}

    def order(self, x: Jet) -> int:
        """Returns the highest order of derivative that a function of `x` needs."""
        orders = (len(i) for key in self.plan.keys for _, i in self._summands(key))
        return max(orders) if x.streams else 0

    def nested(
        self,
        fun: Callable[..., list],
        operands: Sequence[Operand],
        moving: Collection[int] = (),
        in_turn: bool = False,
    ) -> list[Jet]:
        """Returns the results of `fun`, a function of arrays, with their streams, by the formula of
        Faà di Bruno. The derivatives of `fun` along streams of the operands are taken by nested
        forward mode.

        Operands at the positions `moving` get zeros for streams that they lack, because `fun` may
        ask which of its operands move. The others are held fixed along streams that they lack.
        `in_turn` tells that the order of directions may matter (see `chains`).
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
            orders = chains(index, in_turn).values()
            for count, blocks in (term for terms in orders for term in terms):
                found = along(*blocks)
                if found is not None:
                    yield count, found[k]

        def parts(k, key):
            straight = along(key)
            yield straight and straight[k]
            yield self.gather(key, ft.partial(curved, k))

        streams = {i: self.sums(ft.partial(parts, k)) for k, i in enumerate(live)}
        return [Jet(x, streams.get(i, {})) for i, x in enumerate(out)]


def _pushed(function: Callable, tangents: Sequence[Any]) -> Callable[..., list]:
    """Returns the derivative of a function along the tangents that are not `None`."""
    at = [i for i, x in enumerate(tangents) if x is not None]

    def derivative(*primals):
        some = of_some(function, primals, at)
        return jax.jvp(some, [primals[i] for i in at], [tangents[i] for i in at])[1]

    return derivative

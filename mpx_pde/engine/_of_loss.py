"""Follows the cotangents of a loss on the way back, up to where they are first added to others.

What is added there is a residual, and its terms may be much larger than it is.
"""

import functools as ft
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr

from ..program import _tables as tables
from ..program._flat import Constant, Flat, Step, dependent, flatten
from ..program._products import product_shape, sums_nothing
from ..program._rebind import bodies_in
from ._facts import COMPUTED, CONSTANT, DATA, MASTER


_NONE = frozenset[int]()

_FOLLOWED = tables.SCALINGS | tables.SELECTS | tables.LINEAR
"""Operations after which a cotangent is followed."""


class Cotangent(NamedTuple):
    """A cotangent in a backward program, described by its factors: values of the forward program
    that depend on parameters.

    **Attributes:**

    - `factors`: those that multiply the cotangent of the loss in it; `None` if it is more than one
        term, or has met what is not followed, such as a product with parameters.
    - `of_sum`: the factors of a term, or of all terms of a sum of such, also multiplied, or moved;
        `None` for others.
    - `first`: the factors that it had when it was one term; `None` if it is made of several that
        differ in them.
    - `products`: the equations, by their `id`, of the products that it went through as one term, or
        as one sum.
    """

    factors: frozenset[int] | None = None
    of_sum: frozenset[int] | None = None
    first: frozenset[int] | None = None
    products: frozenset[int] = _NONE

    @classmethod
    def term(cls, factors: frozenset[int], products: frozenset[int] = _NONE) -> "Cotangent":
        """Returns a cotangent of the loss, times some factors."""
        return cls(factors, factors, factors, products)

    @property
    def is_sum(self) -> bool:
        return self.factors is None and self.of_sum is not None


class OfLoss:
    """The cotangents of the loss in a backward program, times what multiplies them.

    They are followed up to where they are first added to others. What is added there is a residual:
    it is small in the end, and its terms are not, as in `exp(z) - y`, the derivative of
    `exp(z) - y * z`. After a product with parameters or computed values, or a sum, cotangents are
    what the residual gives. A product with a matrix that is fixed may be a term of it, as in
    `K u - f`, the derivative of `u K u / 2 - f u`. So may one with a sum of several terms, which is
    a stress, and no residual, in `B' s(B u) - f`.

    **Attributes:**

    - `moves`: the values that depend on a cotangent.
    - `cotangents`: what is known of these.
    - `factors`: the factors in other values.
    - `levels`: the levels of other values.
    - `exact`: the factors that nothing rounds.
    - `added`: the factors of cotangents that are added to others.
    - `in_full`: the equations, by their `id`, of the products that made these cotangents.
    """

    def __init__(
        self,
        backward: Flat,
        moves: set[int],
        cotangents: Mapping[int, Cotangent],
        factors: Mapping[int, frozenset[int]],
        levels: Mapping[int, int],
        exact: Collection[int],
    ):
        self.moves, self.exact = moves, frozenset(exact)
        self.cotangents, self.factors = {**cotangents}, {**factors}
        self.levels = {**dict.fromkeys(backward.constants, CONSTANT), **levels}
        self.added, self.in_full = set[int](), set[int]()
        for step in backward.steps:
            if moves.isdisjoint(step.variables):
                self.factors.update(dict.fromkeys(step.outputs, self._factors(step.variables)))
                self.levels.update(dict.fromkeys(step.outputs, self.level(*step.variables)))
            elif step.name in tables.ONCE:
                self._enter(step)
            else:
                self.cotangents.update(dict.fromkeys(step.outputs, self._made(step)))

    def _made(self, step: Step) -> Cotangent:
        """Returns what is known of the results of a step that depends on a cotangent."""
        given = [self.cotangents.get(x, _UNKNOWN) for x in step.variables if x in self.moves]
        still = [x for x in step.variables if x not in self.moves]
        level, others = self.level(*still), self._factors(still)
        terms = {x.factors for x in given if x.factors is not None}
        terms |= {others} if still else set()
        first = {x.first for x in given}
        products = _NONE.union(*(x.products for x in given))
        sums = [x.of_sum for x in given if x.of_sum is not None]
        keeps_sums = len(sums) == len(given) and _keeps_sums(step, level)
        of_sum = others.union(*sums) if keeps_sums else None
        adds = step.name in tables.ADDITIONS
        # Of the same factors at other places, as in a difference of neighbours, each is right. So
        # it is in a skip connection, where a residual meets what a product made of it.
        differ = adds and len(terms | first) > 1
        known = _NONE.union(*terms)
        if differ:
            self.added |= known
        # A sum that meets a term of its own is a stress that meets its load.
        loaded = adds and any(x.is_sum for x in given) and bool(terms)
        if differ or loaded:
            self.in_full |= products
            if products and of_sum is not None:
                self.added |= of_sum
                of_sum = _NONE
            products = _NONE
        if step.name in tables.PRODUCTS:
            products |= {id(step.eqn)}
        one_term = not differ and all(x.factors is not None for x in given)
        if one_term and self._follows(step, given, level):
            return Cotangent.term(known, products)
        one = first.pop() if len(first) == 1 else None
        return Cotangent(None, of_sum, one, _NONE if of_sum is None else products)

    def _factors(self, still: Iterable[int]) -> frozenset[int]:
        return _NONE.union(*(self.factors.get(x, _NONE) for x in still))

    def _enter(self, step: Step) -> None:
        """Follows cotangents through the programs in a container, of which one is evaluated."""
        found = [self._inside(step, body, start) for body, start, _ in bodies_in(step.eqn)]
        for inner, _ in found:
            self.added |= inner.added
            self.in_full |= inner.in_full
        for i, x in enumerate(step.outputs):
            of = [
                inner.cotangents.get(y, _UNKNOWN)
                for inner, outputs in found
                if not isinstance(y := outputs[i], Constant) and y in inner.moves
            ]
            self.cotangents[x] = Cotangent(
                _all_of(x.factors for x in of),
                _all_of(x.of_sum for x in of),
                of[0].first if len({x.first for x in of}) == 1 else None,
                _NONE.union(*(x.products for x in of)),
            )

    def _inside(
        self, step: Step, body: ClosedJaxpr, start: int
    ) -> tuple["OfLoss", tuple[int | Constant, ...]]:
        flat = flatten(body, forward_mode=False, sharded=True)
        given = list(zip(flat.inputs, step.inputs[start:], strict=True))
        own = [(k, x) for k, x in given if not isinstance(x, Constant)]
        moves = dependent(flat, [k for k, x in own if x in self.moves])
        cotangents = {k: self.cotangents[x] for k, x in own if x in self.cotangents}
        factors = {k: self.factors[x] for k, x in own if x in self.factors}
        levels = {k: self.level(x) for k, x in given}
        return OfLoss(flat, moves, cotangents, factors, levels, self.exact), flat.outputs

    def _follows(self, step: Step, given: Sequence[Cotangent], level: int) -> bool:
        """Returns whether a step makes one term of the cotangents in it."""
        if step.name not in tables.PRODUCTS | tables.SPARSE:
            return step.name in _FOLLOWED
        # The matrix may be in the cotangent, as `K` is in that of `u u'` in `sum(K * (u u'))`.
        fixed = level != MASTER and not any(x.factors for x in given)
        if level in (CONSTANT, DATA) or fixed:
            return True
        # Products that sum nothing are those of inner products in the loss. The last layer of a
        # network with one output has one, too: of parameters, with a cotangent for each point.
        return sums_nothing(step.eqn) and (level != MASTER or self._is_number(step))

    def _is_number(self, step: Step) -> bool:
        """Returns whether the cotangent in a product is one number for each entry of a batch."""
        _, *rows_and_columns, _ = product_shape(step.eqn)
        return rows_and_columns[0 if step.inputs[0] in self.moves else 1] == 1

    def level(self, *found: Any) -> int:
        """Returns the level of what is computed of some variables or constants."""
        known = (
            CONSTANT if isinstance(x, Constant) else self.levels.get(x, COMPUTED) for x in found
        )
        return ft.reduce(operator.or_, known, CONSTANT)

    def alone(self, x: Any) -> bool:
        """Returns whether a variable is a cotangent of the loss times numbers, data and parameters
        alone."""
        found = self.cotangents.get(x, _UNKNOWN).factors
        return found is not None and self.exact.issuperset(found)


_UNKNOWN = Cotangent()


def _keeps_sums(step: Step, level: int) -> bool:
    """Returns whether a step adds cotangents, or treats a sum of them as its terms. `level` is that
    of its other operands."""
    if step.name in tables.PRODUCTS | tables.SPARSE:
        return level in (CONSTANT, DATA)
    return step.name in _FOLLOWED | tables.ADDITIONS


def _all_of(factors: Iterable[frozenset[int] | None]) -> frozenset[int] | None:
    """Returns all factors, unless some are not known."""
    out = _NONE
    for x in factors:
        if x is None:
            return None
        out |= x
    return out

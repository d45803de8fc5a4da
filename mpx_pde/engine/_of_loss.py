"""Follows the cotangents of a loss on the way back, up to where they are first added to others.

What is added there is a residual, and its terms may be much larger than it is.
"""

import functools as ft
import operator
from collections.abc import Collection, Mapping
from typing import Any

from jax.extend.core import ClosedJaxpr

from ..program import _tables as tables
from ..program._flat import Constant, Flat, Step, dependent, flatten
from ..program._products import product_shape, sums_nothing
from ..program._rebind import bodies_in
from ._facts import COMPUTED, CONSTANT, DATA, MASTER


_NONE = frozenset[int]()

_FOLLOWED = tables.SCALINGS | tables.SELECTS | tables.LINEAR
"""Operations after which a cotangent is followed."""


class OfLoss:
    """The cotangents of the loss in a backward program, times what multiplies them.

    They are followed up to where they are first added to others. What is added there is a residual:
    it is small in the end, and its terms are not, as in `exp(z) - y`, the derivative of
    `exp(z) - y * z`. After a product with parameters or computed values, or a sum, cotangents are
    what the residual gives. A product with a matrix that is fixed may be a term of it, as in
    `K u - f`, the derivative of `u K u / 2 - f u`.

    **Attributes:**

    - `moves`: the values that depend on a cotangent.
    - `levels`: the levels of values that do not.
    - `factors`: for each cotangent that is followed, the values of the forward program that depend
        on parameters and multiply it; also for these values.
    - `exact`: those of them that nothing rounds.
    - `had`: for a cotangent that is no longer followed, as after a product, the factors that it
        had; `None` if it is made of several that differ in them.
    - `products`: for each cotangent that is followed, the equations of the products that made it.
    - `added`: the factors of cotangents that are added to others.
    - `in_full`: the equations, by their `id`, of the products that made these cotangents.
    """

    def __init__(
        self,
        backward: Flat,
        moves: set[int],
        factors: Mapping[int, frozenset[int]],
        levels: Mapping[int, int],
        exact: Collection[int],
    ):
        self.moves, self.exact = moves, frozenset(exact)
        self.levels = {**dict.fromkeys(backward.constants, CONSTANT), **levels}
        self.factors = {**factors}
        self.had = dict[int, frozenset[int] | None]()
        self.products = dict[int, frozenset[int]]()
        self.added, self.in_full = set[int](), set[int]()
        for step in backward.steps:
            if moves.isdisjoint(step.variables):
                self._add_factors(step)
            elif step.name in tables.ONCE:
                self._enter(step)
            else:
                self._add_cotangents(step)

    def _add_factors(self, step: Step) -> None:
        """Adds the results of a step that depends on no cotangent."""
        known = _NONE.union(*(self.factors.get(x, _NONE) for x in step.variables))
        self.factors.update(dict.fromkeys(step.outputs, known))
        self.levels.update(dict.fromkeys(step.outputs, self.level(*step.variables)))

    def _add_cotangents(self, step: Step) -> None:
        """Adds the results of a step that depends on a cotangent."""
        moving = [x for x in step.variables if x in self.moves]
        still = [x for x in step.variables if x not in self.moves]
        given = {self.factors.get(x) for x in moving} | {self.factors.get(x, _NONE) for x in still}
        known = _NONE.union(*(x for x in given if x is not None))
        first = {self.factors.get(x, self.had.get(x)) for x in moving}
        made_by = _NONE.union(*(self.products.get(x, _NONE) for x in moving))
        # Of the same factors at other places, as in a difference of neighbours, each is right. So
        # it is in a skip connection, where a residual meets what a product made of it.
        if step.name in tables.ADDITIONS and len((given - {None}) | first) > 1:
            self.added |= known
            self.in_full |= made_by
        elif None not in given and self._follows(step):
            made_by |= {id(step.eqn)} if step.name in tables.PRODUCTS else _NONE
            self.factors.update(dict.fromkeys(step.outputs, known))
            self.products.update(dict.fromkeys(step.outputs, made_by))
            return
        had = first.pop() if len(first) == 1 else None
        self.had.update(dict.fromkeys(step.outputs, had))

    def _enter(self, step: Step) -> None:
        """Follows cotangents through the programs in a container, of which one is evaluated."""
        found = [self._inside(step, body, start) for body, start, _ in bodies_in(step.eqn)]
        for inner, _ in found:
            self.added |= inner.added
            self.in_full |= inner.in_full
        for i, x in enumerate(step.outputs):
            results = [
                (inner, y)
                for inner, outputs in found
                if not isinstance(y := outputs[i], Constant) and y in inner.moves
            ]
            followed = [o.factors[y] for o, y in results if y in o.factors]
            had = {o.factors.get(y, o.had.get(y)) for o, y in results}
            self.products[x] = _NONE.union(*(o.products.get(y, _NONE) for o, y in results))
            if len(followed) == len(results):
                self.factors[x] = _NONE.union(*followed)
            else:
                self.had[x] = had.pop() if len(had) == 1 else None

    def _inside(
        self, step: Step, body: ClosedJaxpr, start: int
    ) -> tuple["OfLoss", tuple[int | Constant, ...]]:
        flat = flatten(body, forward_mode=False, sharded=True)
        given = list(zip(flat.inputs, step.inputs[start:], strict=True))
        own = [(k, x) for k, x in given if not isinstance(x, Constant)]
        moves = dependent(flat, [k for k, x in own if x in self.moves])
        factors = {k: self.factors[x] for k, x in own if x in self.factors}
        levels = {k: self.level(x) for k, x in given}
        return OfLoss(flat, moves, factors, levels, self.exact), flat.outputs

    def _follows(self, step: Step) -> bool:
        """Returns whether the result of a step is a cotangent of the loss as its operand is."""
        if step.name not in tables.PRODUCTS | tables.SPARSE:
            return step.name in _FOLLOWED
        level = self.level(*(x for x in step.variables if x not in self.moves))
        if level in (CONSTANT, DATA):
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
        return x in self.moves and self.exact.issuperset(self.factors.get(x, [None]))

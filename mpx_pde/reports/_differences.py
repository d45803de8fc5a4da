"""Finds differences that magnify the rounding of what half products computed.

Rounding the operands of a product leaves errors that vary from node to node of a grid. A second
difference of a smooth function is smaller than the function by about the square of the number of
nodes, and these errors are not.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from ..program import _tables as tables
from ..program._flat import Step, flatten
from ..program._jaxpr import aval_of, bodies_of, equations_in
from ..program._lines import line_of
from ..program._products import is_half_product
from ..program._rebind import scan_counts
from ._known import Known, constant, results, value_of
from ._stencils import Stencil, magnified_by_matrix, stencil_of
from ._sums import UNITS


_LEAST = 8
"""The magnification of rounding, in units of a half type, from which on it counts. Differences of
129 nodes in float16 are off by 5 %, of 46 in bfloat16 by 10 %."""


class Magnified(NamedTuple):
    """The line of a difference, what it does, the number of nodes, and by how much it magnifies
    rounding."""

    line: str
    what: str
    nodes: int
    factor: float


def magnified_differences(
    closed: ClosedJaxpr, half: str, parameters: Collection[int] = ()
) -> list[Magnified]:
    """Returns the second differences along a grid, and the products with matrices of differences,
    of values that products of `half` computed, each line once. Operands at the positions
    `parameters` count from where they are rounded.

    Differences are taken by slices, shifts and sums, by a convolution with a known kernel, and by a
    matrix. A dense matrix has to be known while tracing. A sparse one of at least three entries in
    a row counts, unless it is known and does not cancel.
    """
    found: dict[str, Magnified] = {}
    search = _Search(half)
    for one in search.found_in(closed, _Given({*parameters}, set(), {}), ()):
        if one.factor > _LEAST * UNITS[half]:
            found.setdefault(one.line, one)
    return list(found.values())


class _Given(NamedTuple):
    """The operands of a jaxpr, by their positions: those that depend on parameters, those that half
    products computed, and those that are known while tracing."""

    moving: set[int]
    computed: set[int]
    known: dict[int, Known]


class _Search:
    def __init__(self, half: str):
        self.half = half

    def found_in(
        self, closed: ClosedJaxpr, given: _Given, around: tuple[JaxprEqn, ...]
    ) -> Iterator[Magnified]:
        """Yields what is found in a jaxpr inside of the containers `around` it."""
        flat, stencils = flatten(closed, forward_mode=False), dict[int, Stencil]()
        moving, computed = ({flat.inputs[i] for i in at} for at in given[:2])
        known = {k: constant(x.value) for k, x in flat.constants.items()}
        known.update((flat.inputs[i], x) for i, x in given.known.items())
        for step in flat.steps:
            calls, bodies = (*around, *step.calls), bodies_of(step.eqn)
            values = [value_of(x, known) for x in step.inputs]
            moves, reached = (not x.isdisjoint(step.values) for x in (moving, computed))
            makes = self._multiplies(step)
            if moves:
                moving.update(step.outputs)
            if reached or makes or (moves and self._rounds(step)):
                computed.update(step.outputs)
            for body in bodies:
                inner = _Given(
                    _positions(step, moving), _positions(step, computed), _fixed(step, values)
                )
                if step.name == "scan" and makes:
                    first, count = scan_counts(step.eqn)
                    inner.computed.update(range(first, first + count))
                same = len(body.in_avals) == len(step.inputs)
                inner = inner if same else _Given(set(), set(), {})
                yield from self.found_in(body, inner, (*calls, step.eqn))
            if not bodies:
                known.update(zip(step.outputs, results(step.eqn, values), strict=True))
            stencil = stencil_of(step, stencils, values)
            if stencil is not None:
                stencils[step.outputs[0]] = stencil
            if reached or (moves and makes):
                yield from _magnified(step, stencil, values, calls)

    def _multiplies(self, step: Step) -> bool:
        """Returns whether an equation is a half product or contains one."""
        inside = (eqn for body in bodies_of(step.eqn) for eqn in equations_in(body))
        return any(is_half_product(eqn, self.half) for eqn in (step.eqn, *inside))

    def _rounds(self, step: Step) -> bool:
        return step.name in tables.CASTS and aval_of(step.eqn.outvars[0]).dtype == self.half


def _positions(step: Step, among: set[int]) -> set[int]:
    return {i for i, x in enumerate(step.inputs) if x in among}


def _fixed(step: Step, values: Sequence[Known | None]) -> dict[int, Known]:
    """Returns the known operands that are the same at each step of a loop."""
    count = scan_counts(step.eqn)[0] if step.name == "scan" else len(values)
    return {i: x for i, x in enumerate(values[:count]) if x is not None}


def _magnified(
    step: Step,
    stencil: Stencil | None,
    values: Sequence[Known | None],
    calls: tuple[JaxprEqn, ...],
) -> Iterator[Magnified]:
    """Yields a difference that an equation takes."""
    line = line_of(step.eqn, calls)
    if step.name in tables.SPARSE:
        rows = _rows(step, values)
        yield Magnified(line, f"multiplies by a sparse matrix (`{step.name}`)", rows, rows**2)
    elif step.name in tables.DOTS:
        nodes, factor = magnified_by_matrix(step, values)
        yield Magnified(line, "multiplies by a matrix of differences", nodes, factor)
    elif stencil is not None and stencil.is_second_difference:
        what = "takes second differences of"
        yield Magnified(line, what, stencil.nodes, stencil.nodes**2)


def _rows(step: Step, values: Sequence[Known | None]) -> int:
    """Returns the number of rows of a sparse matrix; 0 if it takes no second differences. These
    need three entries in a row, which cancel."""
    count = aval_of(step.eqn.invars[0]).shape[-1]
    rows = max(aval_of(step.eqn.outvars[0]).shape, default=0)
    if not isinstance(rows, int) or not isinstance(count, int) or count <= 2 * rows:
        return 0
    if values[0] is None:
        return rows
    entries = values[0]()
    if step.name.startswith("bcoo") and values[1] is not None and entries.ndim == 1:
        (axes, _), _ = step.eqn.params["dimension_numbers"]
        row = np.delete(values[1](), axes, axis=1)[:, 0]
        total, size = (np.bincount(row, x) for x in (entries, np.abs(entries)))
        cancels = (np.bincount(row, entries != 0) > 2) & (np.abs(total) < 1e-2 * size)
        return rows if np.mean(cancels) > 0.5 else 0
    return 0 if np.all(entries >= 0) or np.all(entries <= 0) else rows

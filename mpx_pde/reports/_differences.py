"""Finds differences that magnify the rounding of what half products computed.

Rounding the operands of a product leaves errors that vary from node to node of a grid. A second
difference of a smooth function is smaller than the function by about the square of the number of
nodes, and these errors are not.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..program import _tables as tables
from ..program._flat import Step
from ..program._jaxpr import aval_of, bodies_of, equations_in
from ..program._products import is_half_product
from ..program._rebind import carried_by
from ._known import Known
from ._stencils import Stencil, magnified_by_matrix, stencil_of
from ._sums import UNITS
from ._survey import Seen, Survey


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
    survey: Survey, half: str, parameters: Collection[int] = ()
) -> list[Magnified]:
    """Returns the second differences along a grid, and the products with matrices of differences,
    of values that products of `half` computed, each line once. Operands at the positions
    `parameters` count from where they are rounded.

    Differences are taken by slices, shifts and sums, by a convolution with a known kernel, and by a
    matrix. A dense matrix has to be known while tracing. A sparse one of at least three entries in
    a row counts, unless it is known and does not cancel.
    """
    found: dict[str, Magnified] = {}
    stencils = _stencils(survey)
    for seen in _rounding(survey, half, parameters):
        what, nodes, factor = _difference(seen, stencils)
        if factor > _LEAST * UNITS[half]:
            line = seen.site.line or "unknown"
            found.setdefault(line, Magnified(line, what, nodes, factor))
    return list(found.values())


def _stencils(survey: Survey) -> dict[int, Stencil]:
    """Returns the variables that are sums of moved copies of another."""
    out: dict[int, Stencil] = {}
    for step, known, *_ in survey.seen:
        if (stencil := stencil_of(step, out, known)) is not None:
            out[step.outputs[0]] = stencil
    return out


def _rounding(survey: Survey, half: str, parameters: Collection[int]) -> Iterator[Seen]:
    """Yields the equations that take what half products computed, and the half products that take
    what depends on parameters."""
    moving, computed = {survey.program.inputs[i] for i in parameters}, set[int]()
    for seen in survey.seen:
        step = seen.step
        moves, reached = (not x.isdisjoint(step.values) for x in (moving, computed))
        makes = _multiplies(step, half)
        if moves:
            moving.update(step.outputs)
        if reached or makes or (moves and _rounds(step, half)):
            computed.update(step.outputs)
        for variables in (moving, computed):
            variables.update(inner for outer, inner in seen.entered if outer in variables)
        if step.name == "scan" and makes:
            computed.update(seen.bodies[0].inputs[i] for i in carried_by(step.eqn))
        if reached or (moves and makes):
            yield seen


def _multiplies(step: Step, half: str) -> bool:
    """Returns whether an equation is a half product or contains one."""
    inside = (eqn for body in bodies_of(step.eqn) for eqn in equations_in(body))
    return any(is_half_product(eqn, half) for eqn in (step.eqn, *inside))


def _rounds(step: Step, half: str) -> bool:
    return step.name in tables.CASTS and aval_of(step.eqn.outvars[0]).dtype == half


def _difference(seen: Seen, stencils: Mapping[int, Stencil]) -> tuple[str, int, float]:
    """Returns what difference an equation takes, of how many nodes, and by how much it magnifies
    rounding: by 0, if it takes none."""
    step, known, *_ = seen
    if step.name in tables.SPARSE:
        rows = _rows(step, known)
        return f"multiplies by a sparse matrix (`{step.name}`)", rows, float(rows**2)
    if step.name in tables.DOTS:
        return "multiplies by a matrix of differences", *magnified_by_matrix(step, known)
    stencil = stencils.get(step.outputs[0]) if step.outputs else None
    if stencil is not None and stencil.is_second_difference:
        return "takes second differences of", stencil.nodes, float(stencil.nodes**2)
    return "", 0, 0.0


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

"""Finds results of products that [`mpx_pde.autocast`][] does not round.

A difference of two values loses their leading digits, and the solution of a linear system magnifies
errors in its matrix. So the float32 sum that a product accumulates is used as it is where it
reaches a difference, a solve or the end of the program before it reaches the next product.
"""

import functools as ft
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..precision._dtypes import is_half
from ..program import _tables as tables
from ..program._flat import Constant, Flat, Step, reaching, variables
from ..program._jaxpr import aval_of, bodies_of
from ._near import reached_inside


_FEW = 4
"""The largest number of terms of a sum in which terms may cancel, as in a stencil. Rounding errors
of more terms average out, as in a mean."""


class Wide(NamedTuple):
    """Variables of a program that are not rounded.

    **Attributes:**

    - `solved`: those that reach a factorization or a solve. The products that make them are in
        full.
    - `unrounded`: these, and those that reach a difference or the end of the program.
    """

    solved: set[int]
    unrounded: set[int]


def wide_in(
    flat: Flat,
    outputs: Collection[int] | None = None,
    solved: Collection[int] = (),
    carried: Iterable[tuple[int, int]] = (),
) -> Wide:
    """Returns the variables of a program that are not rounded.

    **Arguments:**

    - `outputs`, `solved`: the positions of results for which this holds outside of the program.
        `None` stands for a whole program, whose results and everything behind whose last product
        is not rounded.
    - `carried`: pairs of the position of a result and that of the operand that it becomes.
    """
    carried = list(carried)
    solves = _reaching(flat, solved, carried, _solved_by, solved=None)
    places = {*range(len(flat.outputs))} if outputs is None else {*outputs}
    differences = _reaching(flat, {*places, *solved}, carried, _subtracted_by, solved=solved)
    out = solves | differences | (_last(flat) if outputs is None else set())
    return Wide(solves, out)


def _reaching(
    flat: Flat,
    outputs: Collection[int],
    carried: Collection[tuple[int, int]],
    sinks_of: Callable[[Flat, Collection[int]], Callable[[Step], Iterable[int]]],
    solved: Collection[int] | None,
    numbers: Collection[int] = (),
) -> set[int]:
    """Returns the variables that reach the results at the positions `outputs` or the operands that
    `sinks_of` names.

    Decisions, casts to half, sums of many terms and products end the way there. With the positions
    of results that are `solved` for, products that are in full because of these do not. `numbers`
    are operands that repeat a constant scalar."""
    sinks = sinks_of(flat, numbers)
    full = set[int]() if solved is None else _reaching(flat, solved, carried, _solved_by, None)
    made = flat.made
    out = set(variables([x for i, x in enumerate(flat.outputs) if i in outputs]))
    for step in flat.steps:
        out.update(sinks(step))

    @ft.cache
    def inside(step: Step, places: tuple[int, ...]) -> list[int]:
        there = [i for i, x in enumerate(step.outputs) if x in full]

        def reached(flat, start, carried):
            own, onward = dict(enumerate(flat.inputs, start)), {start + i for _, i in carried}
            known = {i for i, x in enumerate(step.inputs) if _is_number(x, made, numbers)} - onward
            known = {own[i] for i in known if i in own}
            here = None if solved is None else there
            return _reaching(flat, places, carried, sinks_of, here, known)

        return reached_inside(step, reached)

    def operands_of(step: Step) -> Iterable[int]:
        if bodies_of(step.eqn):
            return inside(step, tuple(i for i, x in enumerate(step.outputs) if x in out))
        multiplies = step.name in tables.PRODUCTS and full.isdisjoint(step.outputs)
        reached = not out.isdisjoint(step.outputs)
        return step.values if reached and not multiplies and _hands_on(step) else ()

    return reaching(flat, out, carried, operands_of)


def _hands_on(step: Step) -> bool:
    """Returns whether an error of an operand of an equation may matter as much in its result."""
    if step.name in tables.CONSTANT or step.name == "fft":
        return False
    if step.name in tables.CASTS:
        return not is_half(step.eqn.params["new_dtype"])
    if step.name not in tables.SUMS or step.name in tables.EXTREMES or not step.outputs:
        return True
    sizes = (aval_of(v).size for v in (step.eqn.invars[0], step.eqn.outvars[0]))
    many, few = sizes
    return isinstance(many, int) and isinstance(few, int) and many <= _FEW * few


def _last(flat: Flat) -> set[int]:
    """Returns the results that no product depends on, directly or inside of another equation."""
    read = set[int]()
    for step in reversed(flat.steps):
        multiplies = step.name in tables.PRODUCTS or step.holds_products
        if multiplies or not read.isdisjoint(step.outputs):
            read.update(step.variables)
    return {x for step in flat.steps for x in step.outputs} - read


def _solved_by(_: Flat, numbers: Collection[int]) -> Callable[[Step], Iterable[int]]:
    return lambda step: step.values if step.name in tables.SOLVES else ()


def _subtracted_by(flat: Flat, numbers: Collection[int]) -> Callable[[Step], Iterable[int]]:
    """Returns a function that returns the operands of an equation that it subtracts, or that it
    factors or solves for. A sparse matrix may take differences."""
    made = flat.made
    negative = {x for step in flat.steps if step.name in tables.NEGATIONS for x in step.outputs}
    depends = {x for step in flat.steps if step.name in tables.PRODUCTS for x in step.outputs}
    for step in flat.steps:
        if not depends.isdisjoint(step.variables) or step.holds_products:
            depends.update(step.outputs)
    depends.update(flat.inputs)

    def sinks(step: Step) -> Iterable[int]:
        if step.name in tables.SOLVES | tables.SPARSE:
            return step.values
        subtracts = step.name in tables.SUBTRACTIONS or (
            step.name in tables.ADDITIONS and not negative.isdisjoint(step.variables)
        )
        if not subtracts or len(step.values) != 2 or depends.isdisjoint(step.values):
            return ()
        x, y = step.inputs
        none = _is_centered(x, y, made) or _is_centered(y, x, made)
        none = none or _is_number(x, made, numbers) or _is_number(y, made, numbers)
        return () if none or _is_bias(step, made, depends) else step.values

    return sinks


def _is_number(x: Any, made: Mapping[Any, Step], numbers: Collection[int]) -> bool:
    """Returns whether an array repeats a constant scalar, or one of `numbers`."""
    step = made.get(x)
    if step is None or step.name not in tables.SAME or len(step.inputs) != 1:
        return x in numbers or (isinstance(x, Constant) and np.ndim(x.value) == 0)
    return _is_number(step.inputs[0], made, numbers)


def _is_bias(step: Step, made: Mapping[Any, Step], depends: Collection[int]) -> bool:
    """Returns whether an equation subtracts an array that depends on no product and is repeated
    along an axis, as the running mean of a norm is."""
    x, size = step.inputs[1], aval_of(step.eqn.outvars[0]).size
    smaller = aval_of(step.eqn.invars[1]).size != size
    while x not in depends:
        before = made.get(x)
        if smaller or before is None or before.name not in tables.LAYOUT:
            return smaller
        x, smaller = before.inputs[0], aval_of(before.eqn.invars[0]).size != size
    return False


_MOVED = tables.SAME | tables.SELECTS | {"stop_gradient"}
_SCALED = _MOVED | tables.SCALINGS | {"max", "min"}


def _is_centered(x: Any, y: Any, made: Mapping[Any, Step]) -> bool:
    """Returns whether `y` is a reduction of `x`, such as its mean in a norm, or the largest score
    in a softmax. A difference to it normalizes."""
    own = _behind([x], made, _MOVED)
    for k in _behind([y], made, _SCALED):
        step = made.get(k)
        reduced = step.variables if step is not None and step.name in tables.SUMS else ()
        if not own.isdisjoint(_behind(reduced, made, _MOVED)):
            return True
    return False


def _behind(atoms: Iterable[Any], made: Mapping[Any, Step], names: Collection[str]) -> set[Any]:
    """Returns variables, and those that they are made of by the primitives `names`."""
    out, new = set[Any](), [x for x in atoms if not isinstance(x, Constant)]
    while new:
        x = new.pop()
        if x in out:
            continue
        out.add(x)
        step = made.get(x)
        if step is not None and step.name in names:
            new += step.variables
    return out

"""Recognizes formulas and solvers that fail in half precision, where another form does not."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn

from ..program import _tables as tables
from ..program._flat import Constant, Step
from ..program._jaxpr import aval_of, close, contains, jaxprs_in
from ..program._products import HALVES, is_half_product
from ._survey import FUNCTIONS, Seen


_CANCELLED = (
    "little of the difference is left where a mean is several times as large as the deviations "
    "from it, and `jnp.var` subtracts the mean first"
)
_NEAR = (
    "little of the difference is left where x and y are nearer to each other than to 0, and "
    "`jnp.sum((x - y)**2)` subtracts them first"
)
_INFINITE = (
    "a square overflows from 256 on, and the quotient is 0 then, as with an infinite variance"
)
_ITERATIONS = (
    "their residuals are rounded, which the condition of the system magnifies, and their squares "
    "overflow in float16"
)

_FACTORS = (
    "a factor near 1 keeps few digits of its distance from 1, so the product of n factors is off "
    "by up to n / 2 roundings"
)

FORMULAS = {
    "covariance": ("takes `mean(x * y) - mean(x) * mean(y)`", _CANCELLED),
    "distances": ("takes `|x|² + |y|² - 2 x·y`", _NEAR),
    "normalization": ("divides by the root of a sum or mean of squares", _INFINITE),
    "iterations": ("solves a linear system by iterations", _ITERATIONS),
    "factors": ("multiplies many factors, one after the other,", _FACTORS),
}
"""Formulas and solvers that fail in a half type: what each does, and why it fails."""


def formulas(step: Step, origins: "Origins") -> Iterator[tuple[str, str]]:
    """Yields the names in `FORMULAS` that an equation ends, each with its half type."""
    half = dtype_of(step.eqn.outvars)
    if half in HALVES:
        if step.name in tables.SUBTRACTIONS and _is_covariance(step, origins):
            yield "covariance", half
        if step.name in _SOLVERS and _iterates(step.eqn):
            yield "iterations", half
    if half == "float16" and _normalizes(step, origins):
        yield "normalization", half
    if step.name in tables.ADDITIONS and (product := _product_in_distance(step, origins)):
        yield "distances", product


# --- Where arrays come from ----------------------------------------------------------------------


class _Origin(NamedTuple):
    """The origin of an array, but for moves, casts, signs and numbers that it is multiplied by.

    **Attributes:**

    - `root`: the variable or constant that it is then.
    - `atom`: the root in its jaxpr.
    - `step`: the equation that made the root, unless it is an operand of the program.
    """

    root: int | Constant
    atom: Any
    step: Step | None


class Origins:
    """The origins of the arrays of a program.

    **Attributes:**

    - `made`: the equations that made its variables.
    """

    def __init__(self) -> None:
        self.made: dict[int, Step] = {}
        self._same: dict[int, int | Constant] = {}

    def add(self, seen: Seen) -> None:
        """Adds an equation."""
        step = seen.step
        self.made.update(dict.fromkeys(step.outputs, step))
        if step.name in FUNCTIONS:
            self._same.update((inner, outer) for outer, inner in seen.entered)
            self._same.update(zip(step.outputs, seen.bodies[0].outputs, strict=True))

    def of(self, x: int | Constant, atom: Any = None) -> _Origin:
        """Returns where an array comes from, which is `atom` in its jaxpr."""
        while not isinstance(x, Constant):
            if x in self._same:
                x = self._same[x]
                continue
            step = self.made.get(x)
            at = None if step is None else _position_up_to_a_factor(step)
            if step is None or at is None:
                return _Origin(x, atom, step)
            x, atom = step.inputs[at], step.eqn.invars[at]
        return _Origin(x, atom, None)

    def alike(self, x: int | Constant, y: int | Constant) -> bool:
        """Returns whether two arrays are the same up to a factor, perhaps computed twice."""
        a, b = self.of(x), self.of(y)
        if a.root == b.root or a.step is None or b.step is None:
            return a.root == b.root
        summed = a.step.name == b.step.name and a.step.name in tables.ADDITIONS
        return summed and all(map(self.alike, a.step.inputs, b.step.inputs))


def _position_up_to_a_factor(step: Step) -> int | None:
    """Returns the position of the operand that is the result of an equation up to a factor."""
    if step.name in tables.SAME | tables.NEGATIONS and len(step.inputs) == 1:
        return 0
    if step.name in tables.SCALINGS and _is_number(step, 1):
        return 0
    return 1 if step.name in tables.MULTIPLICATIONS and _is_number(step, 0) else None


def _is_number(step: Step, at: int) -> bool:
    """Returns whether an operand of a product is a constant number, or any beside an array."""
    shapes = [aval_of(x).shape for x in (step.eqn.invars[at], step.eqn.invars[1 - at])]
    return shapes[0] == () and (isinstance(step.inputs[at], Constant) or shapes[1] != ())


def dtype_of(atoms: Sequence[Any]) -> str:
    """Returns the name of the dtype of the first of some arrays."""
    return getattr(aval_of(atoms[0]), "dtype", np.dtype(bool)).name if atoms else ""


# --- Formulas ------------------------------------------------------------------------------------


def _is_covariance(step: Step, origins: Origins) -> bool:
    """Returns whether an equation subtracts a product of means from the mean of a product, all of
    arrays of one shape."""
    of_products, of_means = step.inputs
    made = (origins.of(x).step for x in (of_products, *_factors(of_means, origins)))
    sums = [x for x in made if x is not None and x.name == "reduce_sum"]
    if len(sums) != 3:
        return False
    shapes = {aval_of(x.eqn.invars[0]).shape for x in sums}
    return len(shapes) == 1 and bool(_factors(sums[0].inputs[0], origins))


def _product_in_distance(step: Step, origins: Origins) -> str | None:
    """Returns the half type of the product if an equation ends a sum of two sums of squares and a
    product, as in `|x|² + |y|² - 2 x·y`, whose product is rounded or takes rounded arrays."""
    terms = list(_terms(step, origins))
    products = [x for x in terms if x is not None and x.name in tables.DOTS]
    squares = [x for x in terms if x is not None and _sums_squares(x, origins)]
    if len(terms) != 3 or len(products) != 1 or len(squares) != 2:
        return None
    eqn = products[0].eqn
    pairs = zip(products[0].inputs, eqn.invars, strict=True)
    dtypes = [dtype_of(eqn.outvars), *(dtype_of([origins.of(x, atom).atom]) for x, atom in pairs)]
    half = next((x for x in HALVES if is_half_product(eqn, x)), None)
    return half if dtypes[0] == half or dtypes[1:] != [half, half] else None


def _terms(step: Step, origins: Origins, depth: int = 1) -> Iterator[Step | None]:
    """Yields what made the terms of a sum, whose terms may be sums of two terms."""
    for x in step.inputs:
        term = origins.of(x).step
        if term is not None and depth and term.name in tables.ADDITIONS:
            yield from _terms(term, origins, depth - 1)
        else:
            yield term


_SUMS = {"reduce_sum", "psum"}
_PARTS = tables.ADDITIONS | tables.SELECTS | tables.MAXIMA | _SUMS
"""Operations whose result is one of their operands, or a sum of them."""


def _normalizes(step: Step, origins: Origins) -> bool:
    """Returns whether an equation divides by the half root of a sum or mean of squares."""
    if step.name in tables.DIVISIONS:
        roots = _parts(step.inputs[1], origins)
    else:
        roots = [step] if step.name == "rsqrt" else []
    return any(
        root.name in ("sqrt", "rsqrt")
        and dtype_of(root.eqn.outvars) == "float16"
        and any(_sums_squares(part, origins) for part in _parts(root.inputs[0], origins))
        for root in roots
    )


def _parts(x: int | Constant, origins: Origins, depth: int = 4) -> Iterator[Step]:
    """Yields what made a value, and the values that it is chosen from or a sum of."""
    step = origins.of(x).step
    if step is not None:
        yield step
        if depth and step.name in _PARTS:
            for part in step.inputs:
                yield from _parts(part, origins, depth - 1)


def _sums_squares(step: Step, origins: Origins) -> bool:
    if step.name not in _SUMS:
        return False
    factors = _factors(step.inputs[0], origins)
    return len(factors) == 2 and origins.alike(*factors)


def _factors(x: int | Constant, origins: Origins) -> Sequence[int | Constant]:
    """Returns the two factors of a product or a square, and otherwise nothing."""
    step = origins.of(x).step
    if step is None:
        return ()
    if step.power == 2:
        return step.inputs * 2
    return step.inputs if step.name in tables.MULTIPLICATIONS else ()


# --- Solvers -------------------------------------------------------------------------------------

_SOLVERS = {"custom_linear_solve", "linear_solve"}
"""The primitives of JAX's and lineax' solvers."""


def _iterates(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name == "custom_linear_solve":
        return any(contains(close(x), {"while"}) for x in jaxprs_in(eqn))
    return any("max_steps" in getattr(x, "__annotations__", ()) for x in _types(eqn.params))


def _types(params: Mapping[str, Any]) -> Iterator[type]:
    """Yields the types of the PyTrees in the operands of a primitive that is bound by Equinox."""
    nodes = [params["treedef"]]
    while nodes:
        node = nodes.pop()
        nodes += node.children()
        if (data := node.node_data()) is not None:
            yield data[0]

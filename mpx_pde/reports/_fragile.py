"""Finds calls of JAX's functions whose own arithmetic fails in half precision without a word."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from ..program import _tables as tables
from ..program._flat import Constant, Step
from ..program._jaxpr import aval_of, bodies_of, close, contains, jaxprs_in
from ..program._lines import is_of_jax, line_of
from ..program._products import is_half_product
from ._survey import FUNCTIONS, Seen, Survey


class Fragile(NamedTuple):
    """A call in half precision: its line, the function, the half type, and what goes wrong."""

    line: str
    name: str
    dtype: str
    reason: str

    def __str__(self) -> str:
        does, _ = _DOES.get(self.name, (f"calls `{self.name}`", ""))
        return f"{self.line} {does} in {self.dtype}: {self.reason}"


_SQUARES = "its derivative squares the argument, and is 0 from 256 on, where the square overflows"
_OVERFLOWS = "it squares the argument, and the result is 0 where the square overflows, from 256 on"
_CANCELS = "its derivative is a difference of which little is left for large arguments"
_LOGARITHMS = (
    "it subtracts p log q from p log p, of which little is left where p is near q or far from 1"
)
_POWERS = "it takes the exponential of a rounded logarithm"
_PHASE = "it multiplies the argument by π, and the sine of a large rounded phase is arbitrary"
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

_HALVES = ("float16", "bfloat16")
_FUNCTIONS = {
    **dict.fromkeys(("acosh", "asinh", "atan2", "hypot"), (("float16",), _SQUARES)),
    "geomspace": (("bfloat16",), _POWERS),
    "sinc": (_HALVES, _PHASE),
    "soft_sign": (_HALVES, _CANCELS),
    "betaln": (("float16",), _CANCELS),
    **dict.fromkeys(("erfcx", "bessel_i0e", "bessel_i1e"), (_HALVES, _CANCELS)),
    "rel_entr": (_HALVES, _LOGARITHMS),
    "standardize": (("float16",), _OVERFLOWS),
}
"""The half types in which a function fails, and why, by the name of its primitive or of JAX's
function."""

_RIGHT = {"acosh", "asinh", "hypot", "sinc"} if jax.__version_info__ >= (0, 12) else set[str]()
"""Functions that the installed version of JAX has mended."""

_INSIDE = {"lgamma": "betaln", "log": "rel_entr"}
"""Functions that are no call of their own in a program, by a primitive in them. `kl_div` calls
`rel_entr`."""

_DOES = {
    "covariance": ("takes `mean(x * y) - mean(x) * mean(y)`", _CANCELLED),
    "distances": ("takes `|x|² + |y|² - 2 x·y`", _NEAR),
    "normalization": ("divides by the root of a sum or mean of squares", _INFINITE),
    "iterations": ("solves a linear system by iterations", _ITERATIONS),
}
"""Formulas and solvers that fail in a half type: what each does, and why it fails."""

FRAGILE = {name: row for name, row in _FUNCTIONS.items() if name not in _RIGHT}
"""The functions that fail in the installed version of JAX."""


def fragile_calls(survey: Survey) -> list[Fragile]:
    """Returns the calls in a program, each line once.

    `python -m benchmarks sweep` finds such functions: their values or derivatives are wrong in half
    for arguments that half precision holds exactly. So are covariances as differences of means,
    squared distances as differences of products, and iterative solvers.
    """
    return list(dict.fromkeys(_calls(survey)))


def _calls(survey: Survey) -> Iterator[Fragile]:
    rows: dict[int, tuple[str, str, str] | None] = {}
    origins = _Origins()
    for seen in survey.seen:
        for depth, eqn in enumerate(seen.inside):
            if id(eqn) not in rows:
                rows[id(eqn)] = _fails(eqn)
            if (row := rows[id(eqn)]) is not None:
                yield Fragile(line_of(eqn, seen.inside[:depth]), *row)
                break
        else:
            origins.add(seen)
            for name, half in _formulas(seen.step, origins):
                yield Fragile(seen.site.line or "unknown", name, half, _DOES[name][1])


def _fails(eqn: JaxprEqn) -> tuple[str, str, str] | None:
    """Returns the name of an equation, its half type, and why the function fails in it, if so."""
    name, dtype = _name(eqn), _dtype(eqn.outvars)
    dtypes, reason = FRAGILE.get(name, ((), ""))
    return (name, dtype, reason) if dtype in dtypes else None


def _formulas(step: Step, origins: "_Origins") -> Iterator[tuple[str, str]]:
    """Yields the names in `_DOES` that an equation ends, each with its half type."""
    half = _dtype(step.eqn.outvars)
    if half in _HALVES:
        if step.name in tables.SUBTRACTIONS and _is_covariance(step, origins):
            yield "covariance", half
        if step.name in _SOLVERS and _iterates(step.eqn):
            yield "iterations", half
    if half == "float16" and _normalizes(step, origins):
        yield "normalization", half
    if step.name in tables.ADDITIONS and (product := _product_in_distance(step, origins)):
        yield "distances", product


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


# --- Formulas ------------------------------------------------------------------------------------


class _Origin(NamedTuple):
    """Where an array comes from, but for moves, casts, signs and numbers that it is multiplied by.

    **Attributes:**

    - `root`: the variable or constant that it is then.
    - `atom`: the root in its jaxpr.
    - `step`: the equation that made the root, unless it is an operand of the program.
    """

    root: int | Constant
    atom: Any
    step: Step | None

    @property
    def name(self) -> str:
        """Returns the name of the primitive that made the root."""
        return "" if self.step is None else self.step.name


class _Origins:
    """Where the arrays of a program come from."""

    def __init__(self) -> None:
        self._made: dict[int, Step] = {}
        self._same: dict[int, int | Constant] = {}

    def add(self, seen: Seen) -> None:
        """Adds an equation."""
        step = seen.step
        self._made.update(dict.fromkeys(step.outputs, step))
        if step.name in FUNCTIONS:
            self._same.update((inner, outer) for outer, inner in seen.entered)
            self._same.update(zip(step.outputs, seen.bodies[0].outputs, strict=True))

    def of(self, x: int | Constant, atom: Any = None) -> _Origin:
        """Returns where an array comes from, which is `atom` in its jaxpr."""
        while not isinstance(x, Constant):
            if x in self._same:
                x = self._same[x]
                continue
            step = self._made.get(x)
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
        summed = a.name == b.name and a.name in tables.ADDITIONS
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


def _is_covariance(step: Step, origins: _Origins) -> bool:
    """Returns whether an equation subtracts a product of means from the mean of a product, all of
    arrays of one shape."""
    of_products, of_means = step.inputs
    made = (origins.of(x).step for x in (of_products, *_factors(of_means, origins)))
    sums = [x for x in made if x is not None and x.name == "reduce_sum"]
    if len(sums) != 3:
        return False
    shapes = {aval_of(x.eqn.invars[0]).shape for x in sums}
    return len(shapes) == 1 and bool(_factors(sums[0].inputs[0], origins))


def _product_in_distance(step: Step, origins: _Origins) -> str | None:
    """Returns the half type of the product if an equation ends a sum of two sums of squares and a
    product, as in `|x|² + |y|² - 2 x·y`, whose product is rounded or takes rounded arrays."""
    terms = list(_terms(step, origins))
    products = [x for x in terms if x is not None and x.name in tables.DOTS]
    squares = [x for x in terms if x is not None and _sums_squares(x, origins)]
    if len(terms) != 3 or len(products) != 1 or len(squares) != 2:
        return None
    eqn = products[0].eqn
    pairs = zip(products[0].inputs, eqn.invars, strict=True)
    dtypes = [_dtype(eqn.outvars), *(_dtype([origins.of(x, atom).atom]) for x, atom in pairs)]
    half = next((x for x in _HALVES if is_half_product(eqn, x)), None)
    return half if dtypes[0] == half or dtypes[1:] != [half, half] else None


def _terms(step: Step, origins: _Origins, depth: int = 1) -> Iterator[Step | None]:
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


def _normalizes(step: Step, origins: _Origins) -> bool:
    """Returns whether an equation divides by the half root of a sum or mean of squares."""
    if step.name in tables.DIVISIONS:
        roots = _parts(step.inputs[1], origins)
    else:
        roots = [step] if step.name == "rsqrt" else []
    return any(
        root.name in ("sqrt", "rsqrt")
        and _dtype(root.eqn.outvars) == "float16"
        and any(_sums_squares(part, origins) for part in _parts(root.inputs[0], origins))
        for root in roots
    )


def _parts(x: int | Constant, origins: _Origins, depth: int = 4) -> Iterator[Step]:
    """Yields what made a value, and the values that it is chosen from or a sum of."""
    step = origins.of(x).step
    if step is not None:
        yield step
        if depth and step.name in _PARTS:
            for part in step.inputs:
                yield from _parts(part, origins, depth - 1)


def _sums_squares(step: Step, origins: _Origins) -> bool:
    if step.name not in _SUMS:
        return False
    factors = _factors(step.inputs[0], origins)
    return len(factors) == 2 and origins.alike(*factors)


def _factors(x: int | Constant, origins: _Origins) -> Sequence[int | Constant]:
    """Returns the two factors of a product or a square, and otherwise nothing."""
    step = origins.of(x).step
    if step is None:
        return ()
    if step.power == 2:
        return step.inputs * 2
    return step.inputs if step.name in tables.MULTIPLICATIONS else ()


# --- Names ---------------------------------------------------------------------------------------


def _name(eqn: JaxprEqn) -> str:
    """Returns the name of a primitive, or of the function of JAX that is called or made it."""
    name = eqn.params.get("name", eqn.primitive.name)
    if name in _INSIDE and is_of_jax(eqn, _INSIDE[name]):
        return _INSIDE[name]
    if name == "custom_jvp_call":
        name = bodies_of(eqn)[0].jaxpr.debug_info.func_name
    return name.lstrip("_")


def _dtype(atoms: Sequence[Any]) -> str:
    """Returns the name of the dtype of the first of some arrays."""
    return getattr(aval_of(atoms[0]), "dtype", np.dtype(bool)).name if atoms else ""

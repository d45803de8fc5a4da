"""Finds calls of JAX's functions whose own arithmetic fails in half precision without a word."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from ..program import _tables as tables
from ..program._jaxpr import aval_of, bodies_of, close, contains, jaxprs_in
from ..program._lines import line_of


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
    "iterations": ("solves a linear system by iterations", _ITERATIONS),
}
"""Formulas and solvers that fail in both half types: what each does, and why it fails."""

FRAGILE = {name: row for name, row in _FUNCTIONS.items() if name not in _RIGHT}
"""The functions that fail in the installed version of JAX."""


def fragile_calls(closed: ClosedJaxpr) -> list[Fragile]:
    """Returns the calls in a jaxpr, each line once.

    `python -m benchmarks sweep` finds such functions: their values or derivatives are wrong in half
    for arguments that half precision holds exactly. So are covariances as differences of means, and
    iterative solvers.
    """
    return list(dict.fromkeys(_calls(closed, ())))


def _calls(closed: ClosedJaxpr, around: tuple[JaxprEqn, ...]) -> Iterator[Fragile]:
    made = {v: eqn for eqn in closed.jaxpr.eqns for v in eqn.outvars}
    for eqn in closed.jaxpr.eqns:
        name, dtype = _name(eqn), _dtype(eqn)
        dtypes, reason = FRAGILE.get(name, ((), ""))
        if dtype in dtypes:
            yield Fragile(line_of(eqn, around), name, dtype, reason)
            continue
        if dtype in _HALVES and (does := _fails_as(eqn, made)):
            yield Fragile(line_of(eqn, around), does, dtype, _DOES[does][1])
        for body in bodies_of(eqn):
            yield from _calls(body, (*around, eqn))


def _fails_as(eqn: JaxprEqn, made: Mapping[Any, JaxprEqn]) -> str | None:
    """Returns the name in `_DOES` of an equation whose result is half."""
    name = eqn.primitive.name
    if name in tables.SUBTRACTIONS and len(eqn.invars) == 2:
        return "covariance" if _is_covariance(eqn.invars[0], eqn.invars[1], made) else None
    if name == "custom_linear_solve":
        iterates = any(contains(close(x), {"while"}) for x in jaxprs_in(eqn))
        return "iterations" if iterates else None
    return None


def _is_covariance(of_products: Any, of_means: Any, made: Mapping[Any, JaxprEqn]) -> bool:
    """Returns whether the first value is the mean of a product, and the second a product of the
    means of arrays of the same shape. The factors may have been computed twice."""
    summed = _summed(of_products, made)
    factors = [] if summed is None else _factors(summed, made)
    means = [_summed(x, made) for x in _factors(of_means, made)]
    shapes = {getattr(aval_of(x), "shape", None) for x in (*factors, *means) if x is not None}
    return bool(factors) and len(means) == 2 and None not in means and len(shapes) == 1


def _summed(x: Any, made: Mapping[Any, JaxprEqn]) -> Any:
    """Returns what a value is a sum of, times a number; `None` if it is no sum."""
    _, eqn = _origin(x, made)
    return eqn.invars[0] if eqn and eqn.primitive.name == "reduce_sum" else None


def _factors(x: Any, made: Mapping[Any, JaxprEqn]) -> list[Any]:
    """Returns the two factors of a product or a square, and otherwise nothing."""
    _, eqn = _origin(x, made)
    if eqn is None:
        return []
    if eqn.primitive.name == "square" or eqn.params.get("y") == 2:
        return [eqn.invars[0]] * 2
    return list(eqn.invars) if eqn.primitive.name in tables.MULTIPLICATIONS else []


def _origin(x: Any, made: Mapping[Any, JaxprEqn]) -> tuple[Any, JaxprEqn | None]:
    """Returns the value that another one is, moved, cast, or times a number, and its equation."""
    while not isinstance(x, Literal) and (eqn := made.get(x)) is not None:
        by_number = eqn.primitive.name in tables.MULTIPLICATIONS | {"div"}
        if by_number and isinstance(eqn.invars[1], Literal):
            x = eqn.invars[0]
        elif by_number and isinstance(eqn.invars[0], Literal) and eqn.primitive.name != "div":
            x = eqn.invars[1]
        elif eqn.primitive.name in tables.SAME and len(eqn.invars) == 1:
            x = eqn.invars[0]
        else:
            return x, eqn
    return x, None


def _name(eqn: JaxprEqn) -> str:
    """Returns the name of a primitive, or of the function of JAX that is called or made it."""
    name = eqn.params.get("name", eqn.primitive.name)
    if name in _INSIDE and _is_inside(eqn, _INSIDE[name]):
        return _INSIDE[name]
    if name == "custom_jvp_call":
        name = bodies_of(eqn)[0].jaxpr.debug_info.func_name
    return name.lstrip("_")


def _is_inside(eqn: JaxprEqn, function: str) -> bool:
    """Returns whether an equation was traced inside of a function of JAX."""
    frames = getattr(eqn.source_info.traceback, "frames", ())
    return any(f.function_name == function and "jax" in f.file_name for f in frames)


def _dtype(eqn: JaxprEqn) -> str:
    """Returns the name of the dtype of the first result."""
    return getattr(aval_of(eqn.outvars[0]), "dtype", np.dtype(bool)).name if eqn.outvars else ""

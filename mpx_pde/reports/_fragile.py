"""Finds calls of JAX's functions whose own arithmetic fails in half precision without a word."""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from ..program._jaxpr import aval_of, bodies_of
from ..program._lines import line_of


class Fragile(NamedTuple):
    """A call in half precision: its line, the function, the half type, and what goes wrong."""

    line: str
    name: str
    dtype: str
    reason: str


_SQUARES = "its derivative squares the argument, and is 0 from 256 on, where the square overflows"
_OVERFLOWS = "it squares the argument, and the result is 0 where the square overflows, from 256 on"
_CANCELS = "its derivative is a difference of which little is left for large arguments"
_LOGARITHMS = (
    "it subtracts p log q from p log p, of which little is left where p is near q or far from 1"
)
_POWERS = "it takes the exponential of a rounded logarithm"
_PHASE = "it multiplies the argument by π, and the sine of a large rounded phase is arbitrary"

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

FRAGILE = {name: row for name, row in _FUNCTIONS.items() if name not in _RIGHT}
"""The functions that fail in the installed version of JAX."""


def fragile_calls(closed: ClosedJaxpr) -> list[Fragile]:
    """Returns the calls in a jaxpr, each line once.

    `python -m benchmarks sweep` finds such functions: their values or derivatives are wrong in half
    for arguments that half precision holds exactly.
    """
    return list(dict.fromkeys(_calls(closed, ())))


def _calls(closed: ClosedJaxpr, around: tuple[JaxprEqn, ...]) -> Iterator[Fragile]:
    for eqn in closed.jaxpr.eqns:
        name = _name(eqn)
        dtypes, reason = FRAGILE.get(name, ((), ""))
        if (dtype := _dtype(eqn)) in dtypes:
            yield Fragile(line_of(eqn, around), name, dtype, reason)
            continue
        for body in bodies_of(eqn):
            yield from _calls(body, (*around, eqn))


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

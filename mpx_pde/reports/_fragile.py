"""Finds calls of JAX's functions whose own arithmetic fails in half precision without a word."""

from collections.abc import Iterator
from typing import NamedTuple

import jax
from jax.extend.core import JaxprEqn

from ..program._jaxpr import aval_of, bodies_of, size_of
from ..program._lines import NOWHERE, is_of_jax, line_of, site_inside
from ..program._products import HALVES
from ._factors import long_products
from ._formulas import FORMULAS, Origins, dtype_of, formulas
from ._sums import UNITS
from ._survey import Survey


class Fragile(NamedTuple):
    """A call in half precision: its line, the function, the half type, and what goes wrong."""

    line: str
    name: str
    dtype: str
    reason: str

    def __str__(self) -> str:
        does, _ = FORMULAS.get(self.name, (f"calls `{self.name}`", ""))
        return f"{self.line} {does} in {self.dtype}: {self.reason}"


_SQUARES = "its derivative squares the argument, and is 0 from 256 on, where the square overflows"
_OVERFLOWS = "it squares the argument, and the result is 0 where the square overflows, from 256 on"
_CANCELS = "its derivative is a difference of which little is left for large arguments"
_LOGARITHMS = (
    "it subtracts p log q from p log p, of which little is left where p is near q or far from 1"
)
_POWERS = "it takes the exponential of a rounded logarithm"
_DRAWN = (
    "only 128 numbers are drawn then, of a normal distribution none above 2.52, so rare ones never "
    "occur. Draw in float32, and cast what is drawn"
)
_UNBOUNDED = (
    "its uniform number may be 0, once in 1,024 (float16) or 128 draws, and it is infinite then"
)
_EXPONENT = (
    "its derivative is the exponential of a sum of large terms that cancel, and is off by a "
    "multiple for arguments of a hundred"
)
_ALTERNATES = "it is a series whose terms cancel for negative arguments, from about -6 on all of it"
_PHASE = "it multiplies the argument by π, and the sine of a large rounded phase is arbitrary"

_DISTRIBUTIONS = (
    "normal",
    "truncated_normal",
    "gumbel",
    "exponential",
    "laplace",
    "logistic",
    "cauchy",
)
"""Distributions of `jax.random`, of which others are made."""

_LOOKED_UP = (
    "sorted numbers that are so many have equal neighbours in it, and a number drawn or rounded "
    "finds few of their places. `random.choice` with probabilities draws at most 1,024 different "
    "ones (float16), or 128"
)

_FUNCTIONS = {
    **dict.fromkeys(("acosh", "asinh", "atan2", "hypot"), (("float16",), _SQUARES)),
    "geomspace": (("bfloat16",), _POWERS),
    "sinc": (HALVES, _PHASE),
    "soft_sign": (HALVES, _CANCELS),
    "betaln": (("float16",), _CANCELS),
    **dict.fromkeys(("erfcx", "bessel_i0e", "bessel_i1e"), (HALVES, _CANCELS)),
    "rel_entr": (HALVES, _LOGARITHMS),
    **dict.fromkeys(("igamma", "igammac", "regularized_incomplete_beta"), (HALVES, _EXPONENT)),
    "hyp1f1": (HALVES, _ALTERNATES),
    "standardize": (("float16",), _OVERFLOWS),
    **dict.fromkeys(_DISTRIBUTIONS, (("bfloat16",), _DRAWN)),
    "rayleigh": (HALVES, _UNBOUNDED),
}
"""The half types in which a function fails, and why, by the name of its primitive or of JAX's
function."""

_MENDED = {"acosh", "asinh", "erfcx", "hypot", "sinc"}
_RIGHT = _MENDED if jax.__version_info__ >= (0, 12) else set[str]()
"""Functions that the installed version of JAX has mended."""

_INSIDE = {"lgamma": "betaln", "log": "rel_entr"}
"""Functions that are no call of their own in a program, by a primitive in them. `kl_div` calls
`rel_entr`."""

FRAGILE = {name: row for name, row in _FUNCTIONS.items() if name not in _RIGHT}
"""The functions that fail in the installed version of JAX."""


def fragile_calls(survey: Survey) -> list[Fragile]:
    """Returns the calls in a program, each line once.

    `python -m benchmarks sweep` finds such functions: their values or derivatives are wrong in half
    for arguments that half precision holds exactly. So are covariances as differences of means,
    squared distances as differences of products, iterative solvers and long products of factors.
    """
    return list(dict.fromkeys(_calls(survey)))


def _calls(survey: Survey) -> Iterator[Fragile]:
    rows: dict[int, tuple[str, str, str] | None] = {}
    origins = Origins()
    for seen in survey.seen:
        for depth, eqn in enumerate(seen.inside):
            if id(eqn) not in rows:
                rows[id(eqn)] = _fails(eqn)
            if (row := rows[id(eqn)]) is not None:
                yield Fragile(line_of(eqn, seen.inside[:depth]), *row)
                break
        else:
            origins.add(seen)
            long = (("factors", half) for half in long_products(seen, survey, origins.made))
            for name, half in (*formulas(seen.step, origins), *long):
                yield Fragile(seen.site.line or "unknown", name, half, FORMULAS[name][1])


def _fails(eqn: JaxprEqn) -> tuple[str, str, str] | None:
    """Returns the name of an equation, its half type, and why the function fails in it, if so."""
    name, dtype = _name(eqn), dtype_of(eqn.outvars)
    if name == "searchsorted" and (half := dtype_of(eqn.invars[:1])) in HALVES:
        many = size_of(aval_of(eqn.invars[0])) > UNITS[half]
        return (name, half, _LOOKED_UP) if many else None
    dtypes, reason = FRAGILE.get(name, ((), ""))
    return (name, dtype, reason) if dtype in dtypes else None


def _name(eqn: JaxprEqn) -> str:
    """Returns the name of a primitive, or of the function of JAX that is called or made it."""
    name = eqn.params.get("name", eqn.primitive.name)
    body = site_inside(eqn, NOWHERE).body
    if eqn.primitive.name == "jit" and body is None:
        return ""  # a function of the user's, whatever its name
    if name.lstrip("_") in _DISTRIBUTIONS and (body is None or "random" not in body[0]):
        return ""  # `logistic` is also the sigmoid
    if name in _INSIDE and is_of_jax(eqn, _INSIDE[name]):
        return _INSIDE[name]
    if name == "custom_jvp_call":
        name = bodies_of(eqn)[0].jaxpr.debug_info.func_name
    return name.lstrip("_")

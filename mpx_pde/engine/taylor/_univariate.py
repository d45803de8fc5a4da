"""Computes functions of one variable with all their derivatives up to an order.

These are a list (f, f', f'', …), in closed form if there is one. The derivative of this list is
the list from f' on. To differentiate its formulas would take several times as many operations.
"""

import itertools
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array
from numpy.polynomial.polynomial import polyadd, polyder, polymul


KEPT_TERMS = "mpx_pde.kept_terms"
"""The scope of sums whose results are of the size of their terms. A backward pass may compute them
again from these."""

Derivatives = list[Any]
"""A function and its derivatives. A derivative that is zero everywhere is `None`. A derivative that
is the same everywhere is a number."""


@cache
def _factor(order: int, slope: tuple[float, ...], own: tuple[float, ...]) -> tuple[float, ...]:
    """Returns q_k, a polynomial. The derivative of order k is q_k times the first derivative.

    q_1 = 1, and q_(k+1) = slope q_k' + own q_k. `slope` is the derivative of the variable of the
    polynomials, and `own` is the logarithmic derivative of the first derivative.
    """
    if order == 1:
        return (1.0,)
    q = _factor(order - 1, slope, own)
    out = polyadd(polymul(slope, polyder(q)), polymul(own, q))
    return tuple(out.tolist())  # Python numbers have no dtype of their own


def _horner(poly: tuple[float, ...], x: Array) -> Any:
    out: Any = poly[-1]
    for c in poly[-2::-1]:
        out = out * x + c if c else out * x
    return out


def _from_first(f, first, variable, order, slope, own) -> Derivatives:
    """Returns a list whose derivatives are the first one times polynomials in `variable`."""
    rest = (first * _horner(_factor(k, slope, own), variable) for k in range(2, order + 1))
    return [f, first, *rest][: order + 1]


def _saturating(f, first, order, slope, own) -> Derivatives:
    """Returns the list of a function in whose values its derivatives are polynomials. These have
    single zeros."""
    with jax.named_scope(KEPT_TERMS):
        return _from_first(f, first, f, order, slope, own)


def _tanh(x, order):
    y = jnp.tanh(x)
    return _saturating(y, 1 - y * y, order, (1.0, 0.0, -1.0), (0.0, -2.0))


def _tan(x, order):
    y = jnp.tan(x)
    return _from_first(y, 1 + y * y, y, order, (1.0, 0.0, 1.0), (0.0, 2.0))


def _logistic(x, order):
    y = lax.logistic(x)
    return _saturating(y, y * (1 - y), order, (0.0, 1.0, -1.0), (1.0, -2.0))


def _erf(x, order):
    first = 2 / math.sqrt(math.pi) * jnp.exp(-x * x)
    return _from_first(lax.erf(x), first, x, order, (1.0,), (0.0, -2.0))


def _erfc(x, order):
    return [lax.erfc(x), *(-f for f in _erf(x, order)[1:])]


def _logaddexp(x, order, other):
    slope = _logistic(x - other, max(order - 1, 0))
    return [jnp.logaddexp(x, jnp.asarray(other, x.dtype)), *slope][: order + 1]


def _cycle(*functions):
    """Returns a function of `CLOSED`, given its cycle of derivatives: functions and signs."""

    def derivatives(x, order):
        kinds = [functions[k % len(functions)] for k in range(order + 1)]
        made = {fun: fun(x) for fun in dict.fromkeys(fun for fun, _ in kinds)}
        return [made[fun] if sign > 0 else -made[fun] for fun, sign in kinds]

    return derivatives


def _exp2(x, order):
    y = jnp.exp2(x)
    return [y * math.log(2) ** k for k in range(order + 1)]


def _reciprocals(f, x, order):
    """Returns the derivatives of a logarithm of value `f`, with f' = 1 / x."""
    inverse = 1 / x
    out = [f, inverse]
    for k in range(1, order):
        out.append(-k * out[-1] * inverse)
    return out[: order + 1]


def _log2(x, order):
    _, *rest = _reciprocals(None, x, order)
    return [jnp.log2(x), *(f / math.log(2) for f in rest)]


def _power(x, order, exponent):
    """Returns the derivatives of x ** exponent. The exponent is an array or a float."""
    out, factor = [], 1.0
    for k in range(order + 1):
        if isinstance(factor, float) and factor == 0:
            out.append(None)  # without computing a power that may be infinite
        elif k and not isinstance(factor, float):
            # Zero times the pole of a negative power counts as zero: a constant has no slope.
            pole = (factor == 0) & (x == 0)
            out.append(factor * jnp.power(jnp.where(pole, jnp.ones_like(x), x), exponent - k))
        else:
            out.append(factor * jnp.power(x, exponent - k) if k else jnp.power(x, exponent))
        factor = factor * (exponent - k)
    return out


def _integer_power(x, order, exponent):
    out: Derivatives = []
    for k in range(order + 1):
        factor = math.prod(exponent - j for j in range(k))
        if factor == 0:
            out.append(None)
        elif exponent == k:
            out.append(float(factor) if k else jnp.ones_like(x))
        else:
            power = x if exponent - k == 1 else lax.integer_pow(x, exponent - k)
            out.append(power if k == 0 else factor * power)
    return out


def _root(f, first, exponent):
    """Returns a root, for `CLOSED`. Its `first` derivative at 0 is infinite, not NaN."""

    def derivatives(x, order):
        y = f(x)
        out = [y, first(y)][: order + 1]
        for k in range(1, order):
            out.append(out[-1] * (exponent - k) / x)
        return out

    return derivatives


def _inverse(f, first, signs, decay):
    """Returns an inverse function, for `CLOSED`, by its equation p f'' + decay x f' = 0, whose
    derivatives are a recurrence of three terms. `signs` are those of 1 and x² in p."""

    def derivatives(x, order):
        one, square = signs
        p = 1 + x * x if one == square else one * (1 - x) * (1 + x)
        out, inverse = [f(x), first(p)][: order + 1], 1 / p
        for k in range(order - 1):
            terms = (2 * square * k + decay) * x * out[-1]
            if k:
                terms = terms + k * (square * (k - 1) + decay) * out[-2]
            out.append(-inverse * terms)
        return out

    return derivatives


def atan_at_zero(order: int) -> Derivatives:
    """Returns the derivatives of the arc tangent at zero, from the first on."""
    slope = lambda k: float((-1) ** (k // 2) * math.factorial(k - 1)) if k % 2 else None
    return [slope(k) for k in range(1, order + 1)]


def _abs(x, order):
    """Returns the derivatives of `abs`. Its slope at 0 is the one in JAX, which is not the sign."""
    value, slope = jax.jvp(jnp.abs, (x,), (jnp.ones_like(x),))
    return [value, slope, *[None] * (order - 1)][: order + 1]


CLOSED: dict[str, Callable[..., Derivatives]] = {
    "tanh": _tanh,
    "tan": _tan,
    "atan": _inverse(lax.atan, lambda p: 1 / p, (1, 1), 2),
    "atanh": _inverse(lax.atanh, lambda p: 1 / p, (1, -1), -2),
    "asin": _inverse(lax.asin, lax.rsqrt, (1, -1), -1),
    "acos": _inverse(lax.acos, lambda p: -lax.rsqrt(p), (1, -1), -1),
    "asinh": _inverse(lax.asinh, lax.rsqrt, (1, 1), 1),
    "acosh": _inverse(lax.acosh, lax.rsqrt, (-1, 1), 1),
    "logistic": _logistic,
    "erf": _erf,
    "erfc": _erfc,
    "logaddexp": _logaddexp,
    "sin": _cycle((jnp.sin, 1), (jnp.cos, 1), (jnp.sin, -1), (jnp.cos, -1)),
    "cos": _cycle((jnp.cos, 1), (jnp.sin, -1), (jnp.cos, -1), (jnp.sin, 1)),
    "sinh": _cycle((jnp.sinh, 1), (jnp.cosh, 1)),
    "cosh": _cycle((jnp.cosh, 1), (jnp.sinh, 1)),
    "exp": lambda x, order: [jnp.exp(x)] * (order + 1),
    "exp2": _exp2,
    "expm1": lambda x, order: [jnp.expm1(x), *[jnp.exp(x)] * order],
    "log": lambda x, order: _reciprocals(jnp.log(x), x, order),
    "log1p": lambda x, order: _reciprocals(jnp.log1p(x), 1 + x, order),
    "log2": _log2,
    "pow": _power,
    "integer_pow": _integer_power,
    "square": lambda x, order: _integer_power(x, order, 2),
    "sqrt": _root(jnp.sqrt, lambda y: 0.5 / y, 0.5),
    "rsqrt": _root(lax.rsqrt, lambda y: -0.5 * y * y * y, -0.5),
    "cbrt": _root(jnp.cbrt, lambda y: 1 / (3 * y * y), 1 / 3),
    "abs": _abs,
}
"""Functions that return a function of this name and its derivatives, in closed form."""


@jax.tree_util.register_static
class _Number(float):
    """A constant derivative. It is static, so no transformation turns it into an array."""


def _held(derivatives: Derivatives) -> Derivatives:
    return [_Number(f) if type(f) is float else f for f in derivatives]


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _derivatives(name: str, order: int, parameter: Any, x: Array) -> Derivatives:
    return _held(_call(name, order, parameter, x))


@_derivatives.defjvp
def _derivatives_jvp(name, order, parameter, primals, tangents):
    (x,), (dx,) = primals, tangents
    every = _call(name, order + 1, parameter, x)
    along = lambda slope: jnp.zeros_like(x) if slope is None else slope * dx
    dots = [along(df) if isinstance(f, jax.Array) else f for f, df in itertools.pairwise(every)]
    return _held(every[:-1]), _held(dots)


def _call(name: str, order: int, parameter: Any, x: Array) -> Derivatives:
    parameters = () if parameter is None else (parameter,)
    return CLOSED[name](x, order, *parameters)


def closed_derivatives(name: str, order: int, x: Array, parameter: Any = None) -> Derivatives:
    """Returns a primitive and its derivatives in closed form.

    **Arguments:**

    - `parameter`: an exponent, or the constant operand of `logaddexp`. It is a hashable number, or
        an array. With an array, the result is differentiated line by line.
    """
    if isinstance(parameter, jax.Array):
        return _call(name, order, parameter, x)
    derivatives = _derivatives(name, order, parameter, x)
    return [float(f) if isinstance(f, _Number) else f for f in derivatives]


def nested_derivatives(fun: Callable[[Array], Array], order: int, x: Array) -> Derivatives:
    """Returns any elementwise function and its derivatives, by nested forward mode."""
    one = jnp.ones_like(x)

    def chain(k, v):
        if k == 0:
            return [fun(v)]
        values, slopes = jax.jvp(partial(chain, k - 1), (v,), (one,))
        return [*values, slopes[-1]]

    return chain(order, x)

"""Maps streams through primitives: by rules for linear operations, products, elementwise functions
and selections."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from ..._util._varying import match_varying_axes
from ..._util._wrapper import of_some
from ...program import _tables as tables
from ...program._jaxpr import aval_of, own_bind
from ._algebra import Algebra
from ._entrywise import is_logaddexp, is_pointwise
from ._jets import (
    Jet,
    Operand,
    Streams,
    added,
    bind,
    bind_primals,
    each,
    is_inexact,
    is_traced,
    primal_of,
    spread,
    summed,
    total,
)
from ._plan import Index
from ._together import broadcast_like, joined, sum_together
from ._univariate import CLOSED, atan_at_zero, closed_derivatives, nested_derivatives


@dataclasses.dataclass(frozen=True)
class Rules:
    """The rules of one evaluation.

    **Attributes:**

    - `algebra`: how streams are combined.
    - `own`: evaluates a function with a derivative of its own, an equation, on arrays.
    - `summed`: whether the gradients of an array that multiplies several streams are summed in one
        pass.
    """

    algebra: Algebra
    own: Callable[[JaxprEqn, Sequence[Any]], list] = own_bind
    summed: bool = True

    # Rules by primitive. Each takes an equation and its operands, and returns the results.

    def find(self, eqn: JaxprEqn, operands: Sequence[Operand]) -> "JetRule | None":
        """Returns the rule for an equation that is no product or container; `None` without one."""
        if not any(is_inexact(v.aval) for v in eqn.outvars):
            return JET_RULES["constant"]
        row = tables.TABLE.get(eqn.primitive.name)
        rule = None if row is None else JET_RULES.get(row.rule)
        while rule is not None and rule.fits is not None and not rule.fits(self, eqn, operands):
            rule = rule.otherwise
        return rule

    def _constant(self, eqn, operands):
        return list(map(Jet, bind_primals(eqn, operands)))

    def _convert(self, eqn, operands):
        # The evaluation decides where values are rounded, not the program.
        (x,) = operands
        real = jnp.issubdtype(eqn.params["new_dtype"], jnp.floating)
        if real and jnp.issubdtype(x.primal.dtype, jnp.floating):
            return [x]
        return self._linear(eqn, operands)

    def _linear(self, eqn, operands):
        primals = bind_primals(eqn, operands)
        along = lambda key: self._linear_stream(eqn, operands, key)
        return self._by_stream(primals, operands, along)

    def _each(self, eqn, operands):
        """Moves operands to other devices. Each result has the streams of its own operand."""
        own = [x.streams if isinstance(x, Jet) else () for x in operands]
        return [x.only(keys) for x, keys in zip(self._linear(eqn, operands), own, strict=True)]

    def solved(self, solve: Callable, operands: Sequence[Operand], held: int) -> list[Jet]:
        """Returns the results of `solve`, which is linear in all but the first `held` operands."""
        fixed = list(map(primal_of, operands[:held]))
        function = lambda args: solve(*fixed, *args)
        along = lambda key: self._mapped(function, operands[held:], key)
        out = self._by_stream(function(map(primal_of, operands[held:])), operands, along)
        # Results after the solution, such as a residual norm, have no derivative.
        return [x if i < len(operands) - held else x.only(()) for i, x in enumerate(out)]

    def _selection(self, eqn, operands):
        """Selects from the operands. Each stream depends on that stream of the operands alone."""
        at = [i for i, x in enumerate(operands) if isinstance(x, Jet) and is_inexact(x.primal)]
        values = match_varying_axes(*map(primal_of, operands))
        pick = of_some(lambda *args: own_bind(eqn, args), values, at)
        primals, pushed = jax.linearize(pick, *(values[i] for i in at))
        # Tangents must vary over devices as their values do.
        along = lambda args: pushed(*match_varying_axes(*args, *values)[: len(args)])
        jets = [operands[i] for i in at]
        return self._by_stream(primals, jets, lambda key: self._mapped(along, jets, key))

    def shift(self, eqn, operands):
        """Returns zeros with the streams of the largest entries.

        An entry that equals the largest need not exist in a compiled program, which may compute
        entries once for the comparison and again, with other roundings, for the largest. There is
        always a place of the largest.
        """
        (x,), axes = operands, eqn.params["axes"]
        largest = _at_largest(lax.stop_gradient(x.primal), axes)
        behind = [i - x.primal.ndim for i in axes]
        chosen = [jnp.where(largest, s, 0) for s in x.streams.values()]
        zeros = jnp.zeros(aval_of(eqn.outvars[0]).shape, x.primal.dtype)
        return [Jet(zeros, dict(zip(x.streams, sum_together(chosen, behind), strict=True)))]

    def _by_stream(self, primals, operands, along: Callable[[Index], Sequence[Any]]) -> list[Jet]:
        """Returns results, each stream of which depends on that stream of the operands alone."""
        moving = [x for x in operands if isinstance(x, Jet)]
        out: list[Streams] = [{} for _ in primals]
        for key in self.algebra.plan.keys:
            if any(key in x.streams for x in moving):
                pairs = zip(out, along(key), strict=True)
                out = [{**streams, key: x} if is_inexact(x) else streams for streams, x in pairs]
        return list(map(Jet, primals, out))

    def _together(self, eqn, operands):
        (x,), params = operands, eqn.params
        if params.get("sharding", params.get("out_sharding")) is not None:
            return self._linear(eqn, operands)
        if eqn.primitive.name in tables.LAYOUT:
            # The axes in a program may be NumPy integers.
            return [x.spread(params["shape"], tuple(map(int, params["broadcast_dimensions"])))]
        return summed([x], tuple(map(int, params["axes"])))

    def moments(self, eqn, operands):
        """Returns the sum of an array and the sum of its squared deviations from the mean, in one
        pass. The mean of the first few entries is subtracted before both sums. The results do not
        depend on it, so it has no derivative. If they are to stay `still`, the squares have none
        either (see `squares_about_mean`)."""
        (x,), axes = operands, eqn.params["axes"]
        shape = np.shape(x.primal)
        count, few = math.prod(shape[i] for i in axes), min(shape[axes[-1]], 8)
        stops = {**dict.fromkeys(axes, 1), axes[-1]: few}

        at = (..., *(slice(stops.get(i)) for i in range(len(shape))))
        first = lambda arrays: [lax.stop_gradient(jnp.asarray(s)[at] / few) for s in arrays]
        (start,) = summed(each([x], first), axes)
        others = [i for i in range(len(shape)) if i not in axes]
        y = added(x, start.spread(shape, others), -1)
        held = lambda jet: jax.tree.map(lax.stop_gradient, jet) if eqn.params["still"] else jet
        sums, squares = summed([y, self._square(held(y))], axes)
        squares = added(squares, self._square(held(sums)), -1 / count)
        # For equal entries, rounding may give a negative result, which has no square root.
        least = jnp.where(squares.primal < 0, 0, squares.primal)
        return [added(sums, start, count), dataclasses.replace(squares, primal=least)]

    def squares_about_mean(self, eqn, operands):
        """Gives the sum of squared deviations its derivative. The deviations from the mean add up
        to zero, so the derivative of the mean has no part in it."""
        squares, x, deviations = (x if isinstance(x, Jet) else Jet(x) for x in operands)
        axes = eqn.params["axes"]
        # A rule is evaluated after the trace that made these factors.
        traced, numbers = eqx.partition(self.algebra.factors, is_traced)

        @jax.custom_jvp
        def about_mean(squares, x, deviations, traced):
            return squares

        @about_mean.defjvp
        def _(primals, tangents):
            *_, deviations, traced = primals
            algebra = dataclasses.replace(self.algebra, factors=eqx.combine(traced, numbers))
            rules = dataclasses.replace(self, algebra=algebra)
            square_of = lambda y: summed([rules._square(y)], axes)[0]
            _, slope = jax.jvp(square_of, (deviations,), (tangents[1],))
            # The derivative of this rule takes the value by the rule again.
            return about_mean(*primals), slope

        return [about_mean(squares, x, deviations, traced)]

    def _square(self, x: Jet) -> Jet:
        return self._closed("integer_pow", x, 2)

    def _closed(self, name: str, x: Jet, parameter: Any) -> Jet:
        """Returns a function of one variable that has derivatives in closed form."""
        order = self.algebra.order(x)
        return self.algebra.compose(closed_derivatives(name, order, x.primal, parameter), x)

    def _linear_stream(self, eqn, operands, key) -> list:
        name = eqn.primitive.name
        if name in tables.ADDITIONS:
            x, y = (x.streams.get(key) if isinstance(x, Jet) else None for x in operands)
            if name in tables.SUBTRACTIONS and y is not None:
                y = -y
            return [total([x, y])]
        if name in tables.GATHERS:
            # An entry that is read out of bounds is a constant, so its derivative is zero.
            eqn = eqn.replace(params={**eqn.params, "fill_value": 0})
        place = lambda args: bind(eqn, args)
        if name in tables.JOINS:
            place = lambda args: [joined(args, eqn.params["dimension"])]
        return self._mapped(place, operands, key)

    def _mapped(self, function, operands, key) -> list:
        """Applies a function to the streams of its operands with one key. An operand without this
        stream is replaced by zeros, unless it is an index or a predicate."""
        args, keys = [], []
        for x in operands:
            moves, value = isinstance(x, Jet) and key in x.streams, primal_of(x)
            keys.append(key if moves else ())
            if moves:
                args.append(x.streams[key])
            else:
                args.append(jnp.zeros_like(value) if is_inexact(value) else value)
        return self.algebra.plan.each(lambda *args: function(args), keys)(*args)

    def _mul(self, eqn, operands):
        a, b = operands
        if isinstance(a, Jet) and isinstance(b, Jet):
            (primal,) = bind_primals(eqn, operands)
            return [Jet(primal, self.algebra.leibniz(lambda x, y, *_: x * y, a, b))]
        jet, factor = (a, b) if isinstance(a, Jet) else (b, a)
        if isinstance(factor, jax.Array) and jet.streams:
            (factor,) = broadcast_like([factor], jet.primal, summed=self.summed)
            primal = jet.primal * factor
        else:
            (primal,) = bind_primals(eqn, operands)
        return [Jet(primal, {k: x * factor for k, x in jet.streams.items()})]

    def _div(self, eqn, operands):
        a, b = operands
        if isinstance(b, Jet) and np.shape(b.primal) != aval_of(eqn.outvars[0]).shape:
            return self._div_by_shared(eqn, a, b)
        (primal,) = bind_primals(eqn, operands)
        if not isinstance(b, Jet):
            return [Jet(primal, {k: x / b for k, x in a.streams.items()})]
        a_streams = a.streams if isinstance(a, Jet) else {}
        return [Jet(primal, self.algebra.quotient(primal, a_streams, b.streams, 1 / b.primal))]

    def _atan2(self, eqn, operands):
        """Returns the angle of a vector (x, y). In axes of which the first has its direction and
        length, the vector is (1, 0), and its angle the arc tangent of a quotient that is zero."""
        y, x = (z if isinstance(z, Jet) else Jet(z) for z in operands)
        (primal,) = bind_primals(eqn, operands)
        if not (x.streams or y.streams):
            return [Jet(primal)]
        square = x.primal * x.primal + y.primal * y.primal
        a, b = x.primal / square, y.primal / square
        first = self.algebra.combination(a, x, b, y)
        second = self.algebra.combination(-b, x, a, y)
        slope = Jet(primal, self.algebra.quotient(None, second, first, 1))
        derivatives = [primal, *atan_at_zero(self.algebra.order(slope))]
        return [self.algebra.compose(derivatives, slope)]

    def _sqrt(self, eqn, operands):
        (x,) = operands
        (primal,) = bind_primals(eqn, operands)
        return [Jet(primal, self.algebra.root(primal, x.streams))]

    def _div_by_shared(self, eqn, a, b):
        """Divides by a value that is broadcast. For a real result, its inverse is broadcast."""
        shape = aval_of(eqn.outvars[0]).shape
        if _is_complex(eqn.outvars[0]):
            return self._div(eqn, [a, spread(b, shape)])
        inverse = spread(self._closed("integer_pow", b, -1), shape)
        if not isinstance(a, Jet):
            return [inverse.map(lambda x, _: a * x)]
        streams = self.algebra.leibniz(lambda x, y, *_: x * y, a, inverse)
        return [Jet(a.primal * inverse.primal, streams)]

    def _elementwise(self, eqn, operands):
        x, *exponent = operands
        parameter = _number(exponent[0]) if exponent else eqn.params.get("y")
        return [self._closed(eqn.primitive.name, x, parameter)]

    def _nested_elementwise(self, eqn, operands):
        """Takes derivatives of a function of one variable, which is constant in other operands, by
        nested forward mode."""
        (i,) = _moving(operands)
        x = operands[i]
        bind = self.own if eqn.primitive.name in tables.CUSTOM else own_bind
        whole = lambda *args: bind(eqn, match_varying_axes(*args))[0]
        function = of_some(whole, list(map(primal_of, operands)), [i])
        derivatives = nested_derivatives(function, self.algebra.order(x), x.primal)
        return [self.algebra.compose(derivatives, x)]

    # Functions with a custom derivative.

    def _is_elementwise(self, eqn, operands) -> bool:
        (out, *more) = eqn.outvars
        moving = _moving(operands)
        if more or len(moving) != 1 or any(map(_is_complex, (*eqn.invars, out))):
            return False
        x = operands[moving[0]]
        shape = jnp.shape(x.primal)
        fits = all(jnp.shape(y) in ((), shape) for y in operands if not isinstance(y, Jet))
        alike = fits and out.aval.shape == shape
        return alike and is_pointwise(eqn, moving, self.algebra.order(x))

    def _is_softplus(self, eqn, operands) -> bool:
        return is_logaddexp(eqn) and self._is_elementwise(eqn, operands)

    def _logaddexp(self, eqn, operands):
        (i,) = _moving(operands)
        x, other = operands[i], _number(operands[1 - i])
        return [self._closed("logaddexp", x, other)]


def _at_largest(x: Any, axes: Sequence[int]) -> Any:
    """Returns where the largest entries of an array over axes are, the first of equal ones."""
    rest = [n for i, n in enumerate(x.shape) if i not in axes]
    over = [x.shape[i] for i in axes]
    first = jnp.moveaxis(x, axes, range(len(axes))).reshape(math.prod(over), *rest)
    place = jnp.argmax(first, axis=0)
    places = np.arange(math.prod(over)).reshape(over)
    others = [i for i in range(x.ndim) if i not in axes]
    return np.expand_dims(places, others) == jnp.expand_dims(place, axes)


def _moving(operands: Sequence[Operand]) -> list[int]:
    """Returns the positions of the operands that depend on the point."""
    return [i for i, x in enumerate(operands) if isinstance(x, Jet)]


class JetRule(NamedTuple):
    """A rule for streams.

    **Attributes:**

    - `apply`: a method of `Rules` that takes an equation and its operands.
    - `fits`: returns whether the rule holds for an equation; `None` if it always does.
    - `otherwise`: the rule for equations that it does not hold for; by default they have none.
    """

    apply: Callable[[Rules, JaxprEqn, Sequence[Operand]], list[Jet]]
    fits: Callable[[Rules, JaxprEqn, Sequence[Operand]], bool] | None = None
    otherwise: "JetRule | None" = None

    @property
    def name(self) -> str:
        return self.apply.__name__.strip("_")


def _is_real(rules: Rules, eqn: JaxprEqn, operands: Sequence[Operand]) -> bool:
    return not any(map(_is_complex, eqn.invars))


def _is_of_one(rules: Rules, eqn: JaxprEqn, operands: Sequence[Operand]) -> bool:
    return _moving(operands) == [0] and _is_real(rules, eqn, operands)


def _is_closed(rules: Rules, eqn: JaxprEqn, operands: Sequence[Operand]) -> bool:
    return eqn.primitive.name in CLOSED and _is_of_one(rules, eqn, operands)


def _has_fixed_bounds(rules: Rules, eqn: JaxprEqn, operands: Sequence[Operand]) -> bool:
    return _moving(operands) == [1]


def _updates_once(rules: Rules, eqn: JaxprEqn, operands: Sequence[Operand]) -> bool:
    # Of several updates of one entry, all streams take the one that the value takes.
    return eqn.params["unique_indices"]


_LINEAR, _SELECTION = JetRule(Rules._linear), JetRule(Rules._selection)

JET_RULES: dict[str, JetRule] = {
    "constant": JetRule(Rules._constant),
    "cast": JetRule(Rules._convert),
    "layout": _LINEAR,
    "linear": _LINEAR,
    "each": JetRule(Rules._each),
    "together": JetRule(Rules._together, _is_real, _LINEAR),
    "scatter": JetRule(Rules._linear, _updates_once, _SELECTION),
    "selection": _SELECTION,
    "clamp": JetRule(Rules._selection, _has_fixed_bounds),
    "mul": JetRule(Rules._mul),
    "div": JetRule(Rules._div),
    "sqrt": JetRule(Rules._sqrt),
    "atan2": JetRule(Rules._atan2),
    "moments": JetRule(Rules.moments),
    "squares_about_mean": JetRule(Rules.squares_about_mean),
    "shift": JetRule(Rules.shift),
    "elementwise": JetRule(
        Rules._elementwise, _is_closed, JetRule(Rules._nested_elementwise, _is_of_one)
    ),
    "custom": JetRule(
        Rules._logaddexp,
        Rules._is_softplus,
        JetRule(Rules._nested_elementwise, Rules._is_elementwise),
    ),
}
"""Rules for streams, by their names in the table of primitives. What has none here is a product or
a container, or is differentiated by nested `jvp`, or not at all."""

_ELSEWHERE = {"product", "container", "nested", "opaque"}
assert {row.rule for row in tables.TABLE.values()} == {*JET_RULES} | _ELSEWHERE


def aligned(eqn: JaxprEqn, operands: Sequence[Operand]) -> list[Operand]:
    """Returns the operands of an equation. Those that depend on the point are broadcast to the
    shape of the result. JAX leaves numbers and axes of length one as they are, and the stacked
    streams of a number would be taken for an array."""
    name = eqn.primitive.name
    shape = aval_of(eqn.outvars[0]).shape if eqn.outvars else ()
    if name not in tables.BROADCASTS or not shape:
        return list(operands)
    # The rule for `div` spreads the divisor itself.
    places = (0,) if name in tables.DIVISIONS else range(len(operands))
    return [spread(x, shape) if i in places else x for i, x in enumerate(operands)]


def _number(x: Any) -> Any:
    """Returns a scalar that is known while tracing as a float, another value as an array."""
    if isinstance(x, np.ndarray | np.generic | int | float) and np.ndim(x) == 0:
        return float(x)
    return jnp.asarray(x)


def _is_complex(atom: Any) -> bool:
    return jnp.issubdtype(aval_of(atom).dtype, jnp.complexfloating)

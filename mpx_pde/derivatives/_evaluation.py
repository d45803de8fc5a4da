"""Evaluates terms and sums of derivatives of one function with the engine."""

import functools as ft
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CellType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jaxtyping import Array, Inexact

from .._util._calls import called, named
from ..engine import Equation, Index, make_plan, propagate, sum_key
from ..precision._cast import widen
from ..precision._dtypes import FLOAT16_MAX, matmul_precision
from ..precision._forward import Forward, present_forward
from ..program._warnings import tensorfloat32_by_default, warn_of_tensorfloat32, warn_user
from ..scaling._checks import Term, as_network, check_distinct, check_factor, check_point
from ..scaling._derivatives import DerivativeScaling
from ..scaling._marks import marked
from ..scaling._probe import tap
from ..scaling._seeds import power_of_two
from ..scaling._unscaled import note_coordinates, note_unscaled


_STACKED = 9
"""From this many summands of one kind on, as in a Laplacian, streams are stacked. One product of
many rows then replaces many products, and the program does not grow with the summands."""


def _full_forward() -> Forward | None:
    """Returns the `Forward` of the loss if its forward pass has another precision than its backward
    pass, and `None` otherwise.
    """
    forward = present_forward()
    return forward if forward is not None and forward.full else None


def _multiplies_tensorfloat32() -> bool:
    """Returns whether derivatives in float32 multiply in TF32. The engine takes the highest
    precision unless TF32 is requested.
    """
    forward = _full_forward()
    if forward is not None:
        return forward.precision == "tensorfloat32"
    return matmul_precision() is not None and tensorfloat32_by_default()


@dataclass(frozen=True)
class Summand:
    """A derivative in a sum.

    **Attributes:**

    - `dirs`: the coordinates to differentiate in, sorted.
    - `factor`: a number, an array, or a function of the point.
    """

    dirs: tuple[int, ...]
    factor: Any = 1.0


@dataclass(frozen=True)
class Sum:
    """A linear combination of derivatives, which is propagated as a whole.

    **Attributes:**

    - `name`: the part of the result's name before the name of the output.
    - `summands`: the derivatives to sum.
    - `rows`: the rows of the scaling that count the sum. It takes the smallest of their scales.
    - `directions`: vectors, shape `[samples, coords]`, and their factors. If given, a derivative of
        `order` is taken along each of them instead of along coordinates.
    """

    name: str
    summands: tuple[Summand, ...]
    rows: tuple[int, ...] = ()
    directions: tuple[Array, Array] | None = None
    order: int = 0


@dataclass(frozen=True)
class _Asked:
    """A result: its name, its stream (`()` for the value), its output, and its histogram rows."""

    name: str
    key: Index
    output: int
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Direction:
    """A coordinate, several stacked coordinates, or the drawn directions of a sum, given by its
    key. Seeds with a `row` are those of this row alone."""

    coords: tuple[int, ...]
    row: int | None = None


def _leads_to(index: Index, higher: Index) -> bool:
    """Returns whether `index` is a derivative on the way to `higher`, or is the same."""
    return not Counter(index) - Counter(higher)


_PIECEWISE = {"relu", "relu6", "leaky_relu", "hard_tanh", "hard_sigmoid"}
"""Activations of JAX without a second derivative."""


def _piecewise(fun: Callable) -> str | None:
    """Returns the name of an activation without a second derivative if a network, or one in the
    closure of `fun`, holds no other one by name."""
    cells = [c for c in getattr(fun, "__closure__", None) or () if c != CellType()]  # not empty
    held = jtu.tree_leaves((fun, [cell.cell_contents for cell in cells]))
    names = {getattr(x, "__name__", "<lambda>") for x in held if callable(x) and x is not fun}
    named = sorted(names - {"<lambda>"})
    return named[0] if named and _PIECEWISE.issuperset(named) else None


class Evaluation:
    """A function of one point that returns derivatives by name.

    [`mpx_pde.partials`][], [`mpx_pde.laplacian`][] and [`mpx_pde.linear_operator`][] return it.
    """

    def __init__(
        self,
        fun: Callable,
        coords: tuple[str, ...],
        outputs: tuple[str, ...],
        terms: Sequence[Term],
        sums: Sequence[Sum],
        scaling: DerivativeScaling | None,
        dtype: Any,
    ):
        self._call, self._fun, self._coords, self._outputs = called(), fun, coords, outputs
        self._sums = tuple(sums)
        self._scaling, self._dtype = scaling, dtype
        self._directions: list[Direction] = []
        of_sums = [
            _Asked(f"{s.name}_{name}", sum_key(k), i, tuple(s.rows))
            for k, s in enumerate(self._sums)
            for i, name in enumerate(outputs)
        ]
        of_terms = [
            _Asked(t.name, self._index(t.dirs, rows), t.output, rows)
            for t, rows in zip(terms, _rows_of(scaling, terms, coords), strict=True)
        ]
        self._asked = [*of_sums, *of_terms]
        check_distinct([asked.name for asked in self._asked])
        summed = [self._summed(k, s) for k, s in enumerate(self._sums)]
        sizes = tuple(None if len(d.coords) == 1 else len(d.coords) for d in self._directions)
        self._plan = make_plan([term.key for term in of_terms], summed, sizes)

    def __getitem__(self, name: str) -> Any:
        raise TypeError(
            f"`{self._call}` returns a function of one point, and no terms before that is called. "
            f"Write `jax.vmap(terms)(points)[{name!r}]`."
        )

    # Streams to be propagated.

    def _direction(self, direction: Direction) -> int:
        if direction not in self._directions:
            self._directions.append(direction)
        return self._directions.index(direction)

    def _index(self, dirs: Sequence[int], rows: Sequence[int]) -> Index:
        """Returns the stream of a derivative that these rows count. A derivative with a scaler of
        its own has seeds of its own.
        """
        own = self._own_row(rows)
        return tuple(sorted(self._direction(Direction((i,), own)) for i in dirs))

    def _own_row(self, rows: Sequence[int]) -> int | None:
        if self._scaling is None or not rows:
            return None
        return self._scaling.strategy.seeds_of(rows[0])

    def _summed(self, k: int, s: Sum) -> tuple[Index, ...]:
        own = self._own_row(s.rows)
        if s.directions is not None:
            i = self._direction(Direction(sum_key(k) * len(s.summands), own))
            return ((i,) * s.order,)
        powers = {(len(set(x.dirs)), len(x.dirs)) for x in s.summands}
        ((kinds, order),) = powers if len(powers) == 1 else ((0, 0),)
        if kinds == 1 and order > 1 and len(s.summands) >= _STACKED:
            i = self._direction(Direction(tuple(x.dirs[0] for x in s.summands), own))
            return ((i,) * order,)
        return tuple(self._index(x.dirs, s.rows) for x in s.summands)

    # Scales of streams.

    def _exponent(self, scaling: DerivativeScaling, index: Index) -> Any:
        """Returns the exponent of the scale at which a stream is stored: a scalar, or one for each
        stacked direction.
        """
        along = [self._directions[i] for i in index]
        order = min(n for asked, n in self._requested() if _leads_to(index, asked))
        if along[0].row is not None:
            (shift,) = scaling.strategy.shifts(scaling.exponents, [along[0].row])
            return jnp.floor_divide(shift * len(index), order)
        drawn = along[0].coords[0] < 0
        coords = [[] if drawn else [self._coords[c] for c in d.coords] for d in along]
        exponent = scaling.strategy.exponent(scaling.exponents, coords, order)
        return scaling.strategy.stored(exponent, scaling.rule.margin)

    def _requested(self) -> list[tuple[Index, int]]:
        """Returns the requested derivatives, each with the order in which it is counted. All
        summands of a sum count in its highest order.
        """
        sums = [(i, max(map(len, s))) for s in self._plan.sums for i in s]
        return [*((i, len(i)) for i in self._plan.asked if i), *sums]

    def _scales(self, dtype: np.dtype) -> dict[Index, tuple[Array, Array]]:
        scaling = self._scaling
        if scaling is None and dtype == jnp.float16 and not _full_forward():
            order = max((n for _, n in self._requested()), default=0)
            note_unscaled(order)
        if scaling is None or dtype != jnp.float16 or not scaling.active:
            return {}
        if _full_forward():
            return self._scales_of_seeds(scaling)
        strategy = scaling.strategy
        exponents = {i: self._exponent(scaling, i) for i in self._plan.indices}
        for k, s in enumerate(self._sums):
            if s.rows:
                smallest = ft.reduce(jnp.minimum, strategy.shifts(scaling.exponents, s.rows))
                exponents[sum_key(k)] = strategy.stored(smallest, scaling.rule.margin)
        return {i: (power_of_two(e), power_of_two(-e)) for i, e in exponents.items()}

    def _scales_of_seeds(self, scaling: DerivativeScaling) -> dict[Index, tuple[Array, Array]]:
        """Returns scales for streams that carry them: the scale of a derivative is the product of
        those of its directions, and that of a sum is the smallest of its summands."""
        seeds = [self._seed_exponent(scaling, i) for i in range(len(self._directions))]
        along = lambda index: ft.reduce(operator.add, (seeds[i] for i in index))
        exponents = {(i,): e for i, e in enumerate(seeds)}
        exponents |= {index: along(index) for index in self._plan.indices}
        for k, summands in enumerate(self._plan.sums):
            smallest = (jnp.min(along(index)) for index in summands)
            exponents[sum_key(k)] = ft.reduce(jnp.minimum, smallest)
        return {i: (power_of_two(e), power_of_two(-e)) for i, e in exponents.items()}

    def _seed_exponent(self, scaling: DerivativeScaling, i: int) -> Any:
        """Returns the exponent of the scale of a direction, or one for each stacked one."""
        direction = self._directions[i]
        if direction.row is not None:
            (shift,) = scaling.strategy.shifts(scaling.exponents, [direction.row])
            order = max(n for index, n in self._requested() if i in index)
            return jnp.floor_divide(shift, order)
        drawn = direction.coords[0] < 0
        named = [] if drawn else [self._coords[c] for c in direction.coords]
        orders = sorted({n for index, n in self._requested() if i in index})
        each = (
            jnp.floor_divide(scaling.strategy.exponent(scaling.exponents, [named] * n, n), n)
            for n in orders
        )
        return ft.reduce(jnp.minimum, each)

    # Evaluation.

    def _seeds(self, dtype: Any) -> list[Any]:
        eye = np.eye(len(self._coords), dtype=dtype)
        out = []
        for d in self._directions:
            k = -1 - d.coords[0]
            drawn = self._sums[k].directions if k >= 0 else None
            rows = eye[list(d.coords)] if drawn is None else drawn[0].astype(dtype)
            out.append(rows[0] if len(d.coords) == 1 else rows)
        return out

    def _weights(self, point: Array) -> list[list[Any]]:
        out, dtype = [], point.dtype
        for s, indices in zip(self._sums, self._plan.sums, strict=True):
            if s.directions is not None:
                drawn = s.directions[1].astype(dtype)
                out.append([drawn[0] if len(drawn) == 1 else drawn])
                continue
            factors = [x.factor(point) if callable(x.factor) else x.factor for x in s.summands]
            factors = [check_factor(factor, s.name) for factor in factors]
            if len(indices) < len(factors):
                same = all(isinstance(f, int | float) and f == 1 for f in factors)
                factors = [1 if same else jnp.stack([jnp.asarray(f, dtype) for f in factors])]
            out.append(factors)
        return out

    def _propagated(
        self, point: Any, others: tuple[Any, ...] = (), note: list[Equation] | None = None
    ) -> tuple[Any, dict, dict]:
        point = widen(check_point(point, others, self._coords, self._dtype))
        network = as_network(self._fun, self._outputs)
        seeds, weights = self._seeds(point.dtype), self._weights(point)
        return propagate(network, point, self._plan, seeds, weights, self._scales, note)

    def __call__(self, point: Any, *others: Any) -> dict[str, Inexact[Array, ""]]:
        """**Arguments:**

        - `point`: the coordinates, shape `[coords]`.

        **Returns:** a dict from names to scalars in float32 (float64 for a float64 network), or in
        complex64 (complex128) for a network with complex outputs.

        **Raises:** `TypeError` for coordinates that are passed one by one, as `others`.
        """
        note_coordinates(self._coords)
        with named(self._call):
            return self._evaluated(point, others)

    def _evaluated(self, point: Any, others: tuple[Any, ...]) -> dict[str, Inexact[Array, ""]]:
        value, streams, lost = self._propagated(point, others)
        if _multiplies_tensorfloat32() and value.dtype != jnp.float64:
            warn_of_tensorfloat32("derivative terms")
        blamed = self._blamed(lost)
        self._warn_of_no_curvature()
        zero, streams = jnp.zeros_like(value), {**streams, (): value}
        derivatives = {x.name: streams.get(x.key, zero)[x.output] for x in self._asked}
        beyond = {x.name: blamed[x.key] for x in self._asked if x.key in blamed}
        # Counts all of them at once, and those with several rows once more for each further row.
        for k in range(max((len(asked.rows) for asked in self._asked), default=0)):
            counted = {x.name: x.rows[k] for x in self._asked if len(x.rows) > k}
            derivatives |= self._counted(derivatives, counted, beyond)
        return marked(derivatives)

    def _warn_of_no_curvature(self) -> None:
        """Issues a warning if derivatives of order 2 or higher are asked of a network whose
        activation has none."""
        orders = {i: len(i) for i in self._plan.asked}
        orders |= {sum_key(k): max(map(len, s)) for k, s in enumerate(self._plan.sums)}
        higher = [x.name for x in self._asked if orders[x.key] > 1]
        name = _piecewise(self._fun) if higher else None
        if name is not None:
            warn_user(
                f"`{called()}`: {', '.join(higher)} of this network is zero, because its "
                f"activation `{name}` is piecewise linear and has no second derivative. Take a "
                "smooth one, such as `jnp.tanh`, `jax.nn.gelu` or `jnp.sin`.",
                UserWarning,
            )

    def _blamed(self, lost: dict[Index, Array]) -> dict[Index, Array]:
        """Returns for requested derivatives whether streams overflowed where they are kept for the
        backward pass. Each stream is assigned to the lowest derivatives that it leads to.
        """
        asked = {i: (i,) for i in self._plan.asked}
        asked |= {sum_key(k): (sum_key(k), *s) for k, s in enumerate(self._plan.sums)}
        out: dict[Index, Array] = {}
        for key, does in lost.items():
            above = {
                name: min((len(i) for i in indices if _leads_to(key, i)), default=0)
                for name, indices in asked.items()
            }
            lowest = min((n for n in above.values() if n), default=0)
            for name in (n for n, size in above.items() if lowest and size == lowest):
                out[name] = out[name] | does if name in out else does
        return out

    def _counted(
        self, derivatives: dict[str, Array], rows: dict[str, int], lost: dict[str, Array]
    ) -> dict[str, Array]:
        """Counts derivatives in one histogram, each at the scale of its row. A derivative counts as
        an overflow if a stream that leads to it is `lost`.
        """
        x = jnp.stack([derivatives[name] for name in rows])
        if jnp.iscomplexobj(x):
            # The larger part is counted, with the real part.
            real, larger = jnp.real(x), jnp.maximum(jnp.abs(jnp.real(x)), jnp.abs(jnp.imag(x)))
            out = lax.complex(self._tapped(real, larger, rows, lost), jnp.imag(x))
        else:
            out = self._tapped(x, x, rows, lost)
        return dict(zip(rows, jnp.unstack(out), strict=True))

    def _tapped(self, x: Array, size: Array, rows: dict[str, int], lost: dict[str, Array]) -> Array:
        """Returns `x`, and counts values of the same `size`, one for each of the `rows`."""
        scaling = self._scaling
        assert scaling is not None
        counts = jnp.stack([scaling.counts[row] for row in rows.values()])
        seen, forward = size, _full_forward()
        if scaling.active:
            shifts = scaling.strategy.shifts(scaling.exponents, [*rows.values()])
            seen = size * power_of_two(shifts).astype(x.dtype)
            if forward is not None and forward.dtype == jnp.float16:
                # The value does not overflow, but its copy for the backward pass does.
                beyond = jnp.abs(seen) > FLOAT16_MAX
                if not lost.keys().isdisjoint(rows):
                    no = jnp.zeros((), bool)
                    beyond = beyond | jnp.stack([lost.get(name, no) for name in rows])
                seen = jnp.where(beyond, jnp.inf, seen)
        return tap(counts, x, seen)

    def report(self, point: Any) -> "DerivativeReport":
        """Reports how the derivatives at a point are taken, by tracing without running anything."""
        note: list[Equation] = []
        point = jax.ShapeDtypeStruct(jnp.shape(point), jnp.result_type(point))
        with named(self._call):
            jax.eval_shape(lambda p: self._propagated(p, note=note)[0], point)
        return DerivativeReport(tuple(note), len(self._plan.keys) + 1)


def _rows_of(
    scales: DerivativeScaling | None, terms: Sequence[Term], coords: tuple[str, ...]
) -> list[tuple[int, ...]]:
    """Returns the row that counts and scales each term, as a tuple of one. The tuple is empty for a
    value and without a scaling. Raises a `ValueError` if the scaling does not know the term or a
    coordinate in it.
    """
    if scales is None:
        return [()] * len(terms)
    strategy = scales.strategy
    strategy.check_coords([coords[i] for i in sorted({i for t in terms for i in t.dirs})])
    row = lambda t: strategy.row_of(t.name, [coords[i] for i in t.dirs])
    return [(row(t),) if t.dirs else () for t in terms]


class DerivativeReport(NamedTuple):
    """A report on how the derivatives of a function are taken, equation by equation.

    **Attributes:**

    - `equations`: the equations that depend on the point: primitive, line, rule and precision. The
        rule `"nested"` is nested forward mode, for an equation that has no rule of its own, and
        `"nested_elementwise"` that of each entry alone, for a function of one variable whose
        derivatives are not known in closed form.
    - `streams`: the number of values that go through the function together, with the value itself.
        Stacked directions together count once.
    """

    equations: tuple[Equation, ...]
    streams: int

    @property
    def nested(self) -> tuple[Equation, ...]:
        """Returns the equations without a rule."""
        return tuple(e for e in self.equations if e.rule == "nested")

    @property
    def nested_elementwise(self) -> tuple[Equation, ...]:
        """Returns the functions of one variable without a closed form, such as `lax.lgamma`."""
        return tuple(e for e in self.equations if e.rule == "nested_elementwise")

    @property
    def products(self) -> tuple[Equation, ...]:
        """Returns the products, with the precision that each is multiplied in."""
        return tuple(e for e in self.equations if e.precision and e.rule == "product")

    def __str__(self) -> str:
        lines = [f"{self.streams} streams, {len(self.equations)} equations"]
        hows = {
            "nested": "no rule: nested forward mode",
            "nested_elementwise": "nested forward mode, entry by entry",
        }
        for e in (*self.products, *self.nested, *self.nested_elementwise):
            how = hows.get(e.rule, e.precision)
            lines.append(f"  {e.primitive:<28}{how:<36}{e.line}")
        return "\n".join(lines)

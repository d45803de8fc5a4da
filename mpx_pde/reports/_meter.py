"""Runs a jaxpr in float32, and sends every intermediate floating-point value to the host."""

import functools as ft
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, primitives

from ..precision._cast import widen
from ..precision._dtypes import is_narrow
from ..program import _tables as tables
from ..program._jaxpr import (
    aval_of,
    bodies_of,
    close,
    equations_in,
    in_context_of,
    inner_scope,
    is_container,
    own_bind,
    scopes_of,
    walk,
)
from ..program._lines import Site, cast_of, site_inside, site_of
from ..program._products import is_kept, product_shape
from ..program._rebind import rebind
from ._stats import Counts, is_finite, is_measured


# Containers whose bodies are measured per step, branch or device; the others are inlined.
_REBOUND = {*tables.LOOPS, "shard_map"}

# Operations that only move values show nothing new.
_MOVES = {*tables.LAYOUT, "stop_gradient", "name"}

# The number of bytes sent to the host at a time, since each batch is copied.
_BYTES = 1 << 28

# Several devices may send at the same time.
_ADDING = threading.Lock()

# Half types by the bits of their exponent and mantissa.
_BITS = {(5, 10): "float16", (8, 7): "bfloat16"}

_COARSENESS = {"": 0, "float16": 1, "bfloat16": 2}

OPERAND = "operand of "
"""The prefix of the primitive in rows for float32 operands that a product rounds to half."""


@dataclass(frozen=True)
class Measured:
    """A value in the program."""

    order: tuple[int, ...]
    primitive: str
    site: Site
    scope: str
    dtype: str
    shape: tuple[int, ...]
    product: tuple[int, ...] | None = None
    """The sizes of a matrix product (batch, rows, columns, contracted) or of a convolution (groups,
    positions, output channels, window times input channels)."""
    rounded: str = ""
    """The coarsest half type to which the value, or one that it was computed from, was rounded."""

    @property
    def half(self) -> bool:
        return is_narrow(jnp.dtype(self.dtype))


Marks = frozenset[int]
"""The numbers of those arrays of this trace from which a value may have inherited something that is
not finite."""

CLEAN: Marks = frozenset()
TAINTED: Marks = frozenset([-1])


@dataclass(frozen=True)
class Known:
    array: Any
    marks: Marks = CLEAN
    rounded: str = ""


@dataclass(frozen=True)
class Record:
    """An array on its way to the host."""

    number: int
    sources: Marks
    order: tuple[int, ...] | None
    """The place where it is counted. If `None`, it is only checked for values that are not finite.
    """


class Meter:
    """An evaluator of jaxprs that counts values on the host. It serves one trace: of a program, or
    of a body of one of its containers. The counts of a body are added to those of the program.
    """

    def __init__(self, around: "Meter | None" = None, silent: bool = False, body: tuple = ()):
        self.silent = silent
        self.measured: dict[tuple[int, ...], Measured] = around.measured if around else {}
        self.counts: dict[tuple[int, ...], Counts] = around.counts if around else {}
        # The number of executions of each container body, by its place, and the bodies around this
        # one, outermost first.
        self.executed: dict[tuple[int, ...], int] = around.executed if around else {}
        self.bodies: tuple[tuple[int, ...], ...] = (*around.bodies, body) if around else ()
        self.arrays: list[Any] = []
        self.squares: dict[int, Array] = {}
        self.pending: list[Record] = []
        self.bytes = 0

    # Counting.

    def visit(
        self, value: Measured, array: Any, sources: Marks, terms: Array | None = None
    ) -> Marks:
        """Measures an array. Returns its marks. `terms` are the squares of what was added up in
        each entry."""
        if self.silent:
            return CLEAN
        self.measured.setdefault(value.order, value)
        if terms is not None:
            self.squares[len(self.arrays)] = jnp.stack([jnp.sum(terms), jnp.sum(array * array)])
        return self._add(value.order, array, sources)

    def look(self, array: Any) -> Marks:
        """Checks an array for values that are not finite, without counting. Returns its marks."""
        if self.silent or not is_measured(array):
            return CLEAN
        if isinstance(array, np.ndarray | np.generic):
            return CLEAN if is_finite(array) else TAINTED
        return self._add(None, array, CLEAN)

    def _add(self, order: tuple[int, ...] | None, array: Any, sources: Marks) -> Marks:
        number = len(self.arrays)
        self.arrays.append(array)
        self.pending.append(Record(number, sources, order))
        self.bytes += array.size * array.dtype.itemsize
        if self.bytes > _BYTES:
            self.flush()
        return frozenset([number])

    def flush(self, ends: bool = False) -> None:
        """Sends all pending arrays to the host in one callback, which also counts an execution of
        the body if it `ends` here.
        """
        if not (self.pending or ends):
            return
        records, self.pending, self.bytes = tuple(self.pending), [], 0
        sources = frozenset().union(*(r.sources for r in records))
        earlier = sorted(sources - {r.number for r in records} - TAINTED)
        flags = [~jnp.all(jnp.isfinite(self.arrays[i])) for i in earlier]
        arrays = [self.arrays[r.number] for r in records]
        squares, self.squares = self.squares, {}
        collect = ft.partial(self._collect, records, earlier, ends)
        jax.debug.callback(collect, flags, arrays, squares)

    def _collect(
        self,
        records: Sequence,
        earlier: Sequence,
        ends: bool,
        flags: Any,
        arrays: Any,
        squares: Mapping[int, Any],
    ) -> None:
        bad = {-1: True, **dict(zip(earlier, map(bool, flags), strict=True))}
        for record, x in zip(records, map(np.asarray, arrays), strict=True):
            bad[record.number] = not is_finite(x)
            if record.order is not None:
                source = bad[record.number] and not any(bad[i] for i in record.sources)
                sums = squares.get(record.number)
                found = Counts.of(x, self._time_of(record.order), source, sums)
                with _ADDING:
                    before = self.counts.get(record.order, Counts())
                    self.counts[record.order] = before + found
        if ends:
            with _ADDING:
                self.executed[self.bodies[-1]] = self.executed.get(self.bodies[-1], 0) + 1

    def _time_of(self, order: tuple[int, ...]) -> tuple[int, ...]:
        """Returns a place in the program together with the present step of each loop around it."""
        time, start = (), 0
        for body in self.bodies:
            time, start = (*time, *order[start : len(body)], self.executed.get(body, 0)), len(body)
        return (*time, *order[start:])

    def body(
        self, closed: ClosedJaxpr, order: tuple, scopes: tuple, site: Site, rounded: str = ""
    ) -> Callable[..., list]:
        """Returns a jaxpr as a measured function, for a container that traces it separately.
        `rounded` is that of its operands."""

        def function(*arrays):
            inner = Meter(self, self.silent, order)
            known = [Known(x, inner.look(x), rounded) for x in arrays]
            out = [x.array for x in inner.jaxpr(closed, known, order, scopes, site)]
            inner.flush(ends=not self.silent)
            return out

        return function

    # Evaluation.

    def jaxpr(
        self, closed: ClosedJaxpr, values: Sequence[Known], order: tuple, scopes: tuple, site: Site
    ) -> list[Known]:
        jaxpr = closed.jaxpr
        consts = [
            self._constant(const, (*order, -1, i), _user_of(jaxpr, var, site))
            for i, (var, const) in enumerate(zip(jaxpr.constvars, closed.consts, strict=True))
        ]

        def known(atom):
            value = widen(np.asarray(atom.val, getattr(atom.aval, "dtype", None)))
            return Known(value, self.look(value))

        def evaluate(i, eqn, operands):
            with in_context_of(eqn):
                return self._equation(eqn, operands, (*order, i), scopes, site)

        return walk(jaxpr, consts, values, known, evaluate)

    def _constant(self, x: Any, order: tuple, site: Site) -> Known:
        if not is_measured(x):
            return Known(x)
        name, shape = jnp.dtype(x.dtype).name, tuple(np.shape(x))
        size = "×".join(map(str, shape)) or "scalar"
        line = f"closed-over {name} {size} in {site.line or 'the function'}"
        value = Measured(order, "constant", site._replace(line=line, layer=""), "", name, shape)
        x = widen(x)
        return Known(x, self.visit(value, jnp.asarray(x), TAINTED))

    def _equation(
        self, eqn: JaxprEqn, operands: list[Known], order: tuple, scopes: tuple, outer: Site
    ) -> list[Known]:
        site = outer if self.silent else site_of(eqn, outer)
        if is_container(eqn):
            return self._container(eqn, operands, order, scopes, site)
        name = eqn.primitive.name
        if name == "convert_element_type":
            site = site._replace(cast_of=cast_of(eqn))
        here = "/".join(scopes + scopes_of(eqn))
        sources = CLEAN.union(*(x.marks for x in operands))
        if name in tables.MIXED:
            self._rounded(eqn, operands, order, here, site)
        rounded = coarsest(*(x.rounded for x in operands), *_formats_of(eqn))
        looked_at = not (self.silent or site.backward)
        terms = _terms(eqn, [x.array for x in operands]) if looked_at else None
        out = []
        arrays = bind_wide(eqn, [x.array for x in operands])
        for j, (x, var) in enumerate(zip(arrays, eqn.outvars, strict=True)):
            if not is_measured(var.aval):
                out.append(Known(x))
            elif name in tables.BARRIERS:
                out.append(Known(x, operands[j].marks, operands[j].rounded))
            elif is_kept(eqn) and name != "convert_element_type":
                # It looks for overflows, which this run has none of.
                out.append(Known(x, sources, rounded))
            elif name in _MOVES:
                marks = self.look(x) if name in tables.PICKS and sources else sources
                out.append(Known(x, marks, rounded))
            else:
                dtype, shape = _format_of(eqn, var), tuple(aval_of(var).shape)
                product = product_shape(eqn) if name in tables.PRODUCTS else None
                value = Measured((*order, j), name, site, here, dtype, shape, product, rounded)
                out.append(Known(x, self.visit(value, x, sources, terms), rounded))
        return out

    def _rounded(self, eqn, operands, order, scope, site) -> None:
        """Counts the operands that a mixed product rounds to half precision itself."""
        dtype = np.dtype(eqn.params["dtype"])
        for j, (x, v) in enumerate(zip(operands, eqn.invars, strict=True)):
            if is_narrow(dtype) and not is_narrow_array(v.aval) and is_measured(v.aval):
                name, shape = OPERAND + eqn.primitive.name, tuple(aval_of(v).shape)
                value = Measured((*order, -1, j), name, site, scope, dtype.name, shape)
                self.visit(value, x.array, x.marks)

    def _container(self, eqn, operands, order, scopes, site) -> list[Known]:
        scopes, site = scopes + inner_scope(eqn), site_inside(eqn, site)
        bodies, name = bodies_of(eqn), eqn.primitive.name
        if name not in _REBOUND:
            return self.jaxpr(bodies[0], operands, order, scopes, site)
        # The condition of a `while` only decides when to stop.
        unseen = {0} if name == "while" else ()
        rounded = coarsest(*(x.rounded for x in operands))
        inside = (_formats_of(x) for body in bodies for x in equations_in(body))
        after = coarsest(rounded, *itertools.chain.from_iterable(inside))
        if name in tables.LOOPS:  # what one step rounds, the next one takes
            rounded = after
        functions = [
            evaluate_wide(closed)
            if i in unseen
            else self.body(closed, (*order, i), scopes, site, rounded)
            for i, closed in enumerate(bodies)
        ]
        out = rebind(eqn, [x.array for x in operands], functions)
        return [Known(x, self.look(x), after) for x in out]


def evaluate_wide(closed: ClosedJaxpr) -> Callable[..., list]:
    """Turns a jaxpr into a function in float32 that is not measured."""
    return Meter(silent=True).body(closed, (), (), Site())


def _format_of(eqn: JaxprEqn, var: Any) -> str:
    """Returns the name of the dtype of a result. For `reduce_precision`, returns the name of the
    half type to which it rounds within that dtype.
    """
    if eqn.primitive.name == "reduce_precision":
        bits = eqn.params["exponent_bits"], eqn.params["mantissa_bits"]
        if bits in _BITS:
            return _BITS[bits]
    return aval_of(var).dtype.name


def coarsest(*formats: str) -> str:
    """Returns the half type of fewest digits, where `""` stands for none."""
    return max(formats, key=_COARSENESS.__getitem__, default="")


def _formats_of(eqn: JaxprEqn) -> list[str]:
    """Returns the half types to which an equation rounds its results or operands."""
    found = [_format_of(eqn, v) for v in eqn.outvars if is_measured(v.aval)]
    if eqn.primitive.name in tables.MIXED:
        found.append(np.dtype(eqn.params["dtype"]).name)
    return [x for x in found if x in _BITS.values()]


def _terms(eqn: JaxprEqn, arrays: list) -> Array | None:
    """Returns the sum of the squares of what an addition or a product adds up in each entry. Its
    root is the size of the error if each term is rounded. Returns `None` for another equation, and
    for a single number, which may be near zero by chance.
    """
    name = eqn.primitive.name
    if name not in tables.ADDITIONS | tables.PRODUCTS or aval_of(eqn.outvars[0]).size < 2:
        return None
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in arrays):
        return None
    squares = [jnp.square(x) for x in arrays]
    return squares[0] + squares[1] if name in tables.ADDITIONS else bind_wide(eqn, squares)[0]


def _user_of(jaxpr: Jaxpr, var: Any, site: Site) -> Site:
    """Returns the site of the first equation that takes a constant."""
    eqn = next((e for e in jaxpr.eqns if any(v is var for v in e.invars)), None)
    return site if eqn is None else site_of(eqn, site)


FULL = np.dtype("float32")

_PRODUCTS = {*tables.JAX_PRODUCTS, "ragged_dot_general"}

# Operations known to take their dtype from operands and parameters: those of JAX, and ours. A
# kernel of another library may exist only in half precision.
_OF_JAX = {
    p.name
    for module in (lax, primitives)
    for attribute, p in vars(module).items()
    if attribute.endswith("_p") and hasattr(p, "name")
}
_KNOWN = {*_OF_JAX, *tables.TABLE, *_PRODUCTS} - tables.TYPED


def is_narrow_array(aval: Any) -> bool:
    # References have a dtype too, but no weak type.
    return hasattr(aval, "weak_type") and is_narrow(getattr(aval, "dtype", None))


def _narrow(x: Any, dtype: np.dtype) -> Any:
    # Values that float32 can hold and the dtype cannot must not become infinite.
    largest = float(jnp.finfo(dtype).max)
    x = jnp.where(jnp.isinf(x), x, jnp.clip(x, -largest, largest))
    return lax.convert_element_type(x, dtype)


def _wide_parameter(x: Any) -> Any:
    if isinstance(x, ClosedJaxpr | Jaxpr):
        closed = close(x)
        avals = [
            jax.ShapeDtypeStruct(a.shape, FULL) if is_narrow_array(a) else a
            for a in closed.in_avals
        ]
        out = jax.make_jaxpr(evaluate_wide(closed))(*avals)
        return out if isinstance(x, ClosedJaxpr) else out.jaxpr
    of_numpy = isinstance(x, np.dtype) or (type(x) is type and issubclass(x, np.generic))
    return FULL if of_numpy and is_narrow(np.dtype(x)) else x


def bind_wide(eqn: JaxprEqn, arrays: list) -> list:
    """Evaluates an equation on operands that are float32 where the program has half precision.

    Casts to half precision do nothing, `reduce_precision` and `tables.STORES` included.
    """
    name, params = eqn.primitive.name, dict(eqn.params)
    if name == "reduce_precision" or name in tables.STORES:
        return arrays
    if name in _PRODUCTS and any(jnp.issubdtype(x.dtype, jnp.inexact) for x in arrays):
        # By default a float32 product is TF32 on a GPU.
        params["precision"] = (lax.Precision.HIGHEST,) * 2
    narrow = any(is_narrow_array(v.aval) for v in (*eqn.invars, *eqn.outvars))
    if name in tables.MIXED or (narrow and name in _KNOWN):
        is_jaxpr = lambda x: isinstance(x, ClosedJaxpr | Jaxpr)
        params = jax.tree.map(_wide_parameter, params, is_leaf=is_jaxpr)
    elif narrow:
        arrays = [
            _narrow(x, aval_of(v).dtype) if is_narrow_array(v.aval) else x
            for x, v in zip(arrays, eqn.invars, strict=True)
        ]
    out = own_bind(eqn.replace(params=params), arrays)
    return widen(out) if narrow else out

"""Runs a jaxpr in float32, and measures every floating-point value on the way."""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from .._dtypes import is_half
from .._jaxpr import (
    aval_of,
    bodies_of,
    in_context_of,
    inner_scope,
    is_container,
    line_of,
    literal,
    own_bind,
    rebind,
    scopes_of,
)
from ..autocast import tables
from ._stats import Counts, any_nonfinite, is_measured, measure


# Containers that run on the host once per step, branch or device; the others are inlined.
_REBOUND = ("scan", "while", "cond", "shard_map")

_FULL = np.dtype("float32")

# Primitives that take their dtype from their operands.
_GENERIC = {
    *tables.FULL,
    *tables.FOLLOW,
    *tables.LAYOUT,
    *tables.PRODUCTS,
    *tables.MIXED,
    "optimization_barrier",
}


class Site(NamedTuple):
    """A place in the program."""

    order: tuple[int, ...]
    primitive: str
    line: str
    scope: str
    dtype: str
    shape: tuple[int, ...]
    product: tuple[int, ...] | None = None
    """Of a matrix product: batch, rows, columns and contracted size; of a convolution: groups,
    positions, output channels and window times input channels."""


class Known(NamedTuple):
    array: Any
    bad: Any
    """Whether it holds something that is not finite: a scalar bool, of the host or traced."""


class Meter:
    """Evaluates, and counts on the host."""

    def __init__(self, silent: bool = False):
        self.silent = silent
        self.sites: dict[tuple[int, ...], Site] = {}
        self.counts: dict[tuple[int, ...], Counts] = {}
        self.pending: list[tuple[tuple[int, ...], Any, Any]] = []

    # Counting.

    def visit(self, site: Site, array: Any, source: Any) -> Any:
        """Measures an array; returns whether it holds something that is not finite."""
        if self.silent:
            return False
        self.sites.setdefault(site.order, site)
        vector = measure(array)
        bad = any_nonfinite(array)
        self.pending.append((site.order, vector, bad & ~jnp.asarray(source)))
        return bad

    def flush(self) -> None:
        """One callback for all that was measured in this trace."""
        if not self.pending:
            return
        orders, vectors, sources = zip(*self.pending, strict=True)
        self.pending = []
        jax.debug.callback(
            ft.partial(self._collect, orders), jnp.stack(vectors), jnp.stack(sources)
        )

    def _collect(self, orders: Sequence, vectors: Any, sources: Any) -> None:
        for order, vector, source in zip(
            orders, np.asarray(vectors), np.asarray(sources), strict=True
        ):
            self.counts.setdefault(order, Counts()).add(vector, bool(source))

    def body(self, closed: ClosedJaxpr, order: tuple, scopes: tuple) -> Callable[..., list]:
        """A function to be traced by a container of its own."""

        def function(*arrays):
            outside, self.pending = self.pending, []
            known = [Known(x, _is_bad(x)) for x in arrays]
            out = [x.array for x in self.jaxpr(closed, known, order, scopes)]
            self.flush()
            self.pending = outside
            return out

        return function

    # Evaluation.

    def jaxpr(
        self, closed: ClosedJaxpr, values: Sequence[Known], order: tuple, scopes: tuple
    ) -> list[Known]:
        jaxpr = closed.jaxpr
        env: dict[Any, Known] = dict(zip(jaxpr.invars, values, strict=True))
        for var, const in zip(jaxpr.constvars, closed.consts, strict=True):
            const = _widen(const)
            env[var] = Known(const, _is_bad(const))

        def read(atom):
            if not literal(atom):
                return env[atom]
            value = np.asarray(atom.val, getattr(atom.aval, "dtype", None))
            value = value.astype(_FULL) if is_half(value.dtype) else value
            return Known(value, _is_bad(value))

        for i, eqn in enumerate(jaxpr.eqns):
            with in_context_of(eqn):
                out = self._equation(eqn, [read(v) for v in eqn.invars], (*order, i), scopes)
            env.update(zip(eqn.outvars, out, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _equation(
        self, eqn: JaxprEqn, operands: list[Known], order: tuple, scopes: tuple
    ) -> list[Known]:
        if is_container(eqn):
            inner = scopes + inner_scope(eqn)
            bodies = bodies_of(eqn)
            if eqn.primitive.name not in _REBOUND:
                return self.jaxpr(bodies[0], operands, order, inner)
            # The test of a `while` only says when to stop.
            functions = [
                _plain(closed)
                if eqn.primitive.name == "while" and i == 0
                else self.body(closed, (*order, i), inner)
                for i, closed in enumerate(bodies)
            ]
            out = rebind(eqn, [x.array for x in operands], functions)
            return [Known(x, _is_bad(x)) for x in out]
        arrays = _bind_wide(eqn, [x.array for x in operands])
        source_of = ft.reduce(_either, (x.bad for x in operands), False)
        out = []
        for j, (x, var) in enumerate(zip(arrays, eqn.outvars, strict=True)):
            # What only moves values shows nothing that was not there before.
            if not is_measured(var.aval) or eqn.primitive.name in tables.LAYOUT:
                out.append(Known(x, _is_bad(x)))
                continue
            site = Site(
                order=(*order, j),
                primitive=eqn.primitive.name,
                line=line_of(eqn),
                scope="/".join(scopes + scopes_of(eqn)),
                dtype=aval_of(var).dtype.name,
                shape=tuple(aval_of(var).shape),
                product=_product_shape(eqn),
            )
            out.append(Known(x, self.visit(site, x, source_of)))
        return out


def _either(a: Any, b: Any) -> Any:
    if isinstance(a, bool) and isinstance(b, bool):
        return a or b
    return jnp.asarray(a) | jnp.asarray(b)


def _is_bad(x: Any) -> Any:
    if not jnp.issubdtype(getattr(x, "dtype", np.int32), jnp.inexact):
        return False
    if isinstance(x, np.ndarray | np.generic):
        return not bool(np.all(np.isfinite(x)))
    return any_nonfinite(x)


def _widen(x: Any) -> Any:
    return lax.convert_element_type(x, _FULL) if is_half_array(x) else x


def is_half_array(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return isinstance(dtype, np.dtype) and is_half(dtype)


def _plain(closed: ClosedJaxpr) -> Callable[..., list]:
    """A jaxpr in float32, not measured."""

    def function(*arrays):
        meter = Meter(silent=True)
        known = [Known(x, False) for x in arrays]
        return [x.array for x in meter.jaxpr(closed, known, (), ())]

    return function


def _bind_wide(eqn: JaxprEqn, arrays: list) -> list:
    """Binds an equation with float32 in place of half."""
    name, params = eqn.primitive.name, dict(eqn.params)
    halves = any(is_half_array(v.aval) for v in (*eqn.invars, *eqn.outvars))
    if not halves and name not in tables.MIXED:
        return own_bind(eqn, arrays)
    if name == "convert_element_type":
        dtype = _FULL if is_half(params["new_dtype"]) else params["new_dtype"]
        return [lax.convert_element_type(arrays[0], dtype)]
    if name in tables.PRODUCTS:
        params["preferred_element_type"] = _FULL
    elif name in tables.MIXED:
        params.update(dtype=_FULL, out_dtype=_FULL)
    elif name not in _GENERIC:
        # Its parameters may speak of the dtypes of the program.
        arrays = [
            lax.convert_element_type(x, aval_of(v).dtype) if is_half_array(v.aval) else x
            for x, v in zip(arrays, eqn.invars, strict=True)
        ]
    return [_widen(x) for x in own_bind(eqn.replace(params=params), arrays)]


def _product_shape(eqn: JaxprEqn) -> tuple[int, ...] | None:
    name = eqn.primitive.name
    if name not in (*tables.PRODUCTS, *tables.MIXED):
        return None
    x, y = (tuple(int(n) for n in aval_of(v).shape) for v in eqn.invars[:2])
    if name in ("dot_general", "mixed_dot_general"):
        (x_contract, y_contract), (x_batch, y_batch) = eqn.params["dimension_numbers"]

        def size(shape, axes):
            return int(np.prod([shape[i] for i in axes], dtype=int))

        rows = [i for i in range(len(x)) if i not in (*x_contract, *x_batch)]
        columns = [i for i in range(len(y)) if i not in (*y_contract, *y_batch)]
        return size(x, x_batch), size(x, rows), size(y, columns), size(x, x_contract)
    spec = eqn.params["dimension_numbers"]
    groups = eqn.params["feature_group_count"] * eqn.params["batch_group_count"]
    channels_out, channels_in = y[spec.rhs_spec[0]], y[spec.rhs_spec[1]]
    window = int(np.prod([y[i] for i in spec.rhs_spec[2:]], dtype=int))
    positions = int(np.prod(aval_of(eqn.outvars[0]).shape, dtype=int)) // channels_out
    return groups, positions, channels_out // groups, channels_in * window

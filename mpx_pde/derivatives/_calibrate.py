"""First scales from a trial of the network as it is at the start."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float

from .._cast import cast_operands
from .._dtypes import half_precision_datatype
from .._tree import all_finite, with_fields
from ._checks import parse_terms, rows_of
from ._laplacian import laplacian
from ._names import names_of
from ._partials import partials
from ._scales import AbstractScales


_CALL = "DerivativeScaling.calibrate"
_HIGHEST = 15
"""No seed larger than this power of two is tried: it is a float16."""
_ROUNDING = 2.0**-12
"""Half of float16's unit roundoff: a derivative that is more accurate is so by luck."""


def first_exponents(
    scales: AbstractScales,
    fun: Callable,
    points: Float[Array, "points coords"],
    terms: Any,
    *,
    coords: Any,
    outputs: Any,
    over: Any = None,
    dtype: Any = None,
) -> np.ndarray:
    """See [`mpx_pde.DerivativeScaling.calibrate`][]."""
    strategy, rule = scales.strategy, scales.rule
    coords = names_of(coords, _CALL, "the coordinates")
    _check_points(points, coords)
    outputs = names_of(outputs, _CALL, "the outputs")
    over = coords if over is None else names_of(over, _CALL, "the coordinates of `over`")
    strategy.check_coords(coords, _CALL)
    terms = terms if isinstance(terms, str) else tuple(terms)
    named = terms if isinstance(terms, str) else [t for t in terms if t != "laplacian"]
    parsed = [t for t in parse_terms(named, coords, outputs, _CALL) if t.dirs]
    names = [t.name for t in parsed]
    rows = {name: [row] for name, row in rows_of(scales, parsed, coords, _CALL).items()}
    if "laplacian" in terms:
        of_sum = strategy.laplacian_rows(over, _CALL)
        rows |= dict.fromkeys((f"lap_{o}" for o in outputs), of_sum)

    if not rows:
        raise ValueError(
            f"`{_CALL}` finds scales for derivatives, but there is none in the terms {terms!r}."
        )

    def values(fun, scales, dtype):
        options = {"coords": coords, "outputs": outputs, "scaling": scales, "dtype": dtype}

        def at(point):
            out = partials(fun, names, **options)(point)
            if "laplacian" in terms:
                out |= laplacian(fun, over=over, **options)(point)
            return [out[name] for name in rows]

        return jax.vmap(at)(points)

    # Those of a coordinate, which a scaler of higher order takes as often as its derivatives carry
    # them: streams of lower orders, which it shares, are then in range as well.
    orders = np.array([strategy.order_of(i) for i in range(len(strategy.names))])
    first, last = (np.array(b) // orders for b in (rule.lowest, rule.highest))
    tried = range(min(first), min(max(last), _HIGHEST) + 1)
    table = _errors(values, fun, scales, [e * orders for e in tried], dtype)
    exponents = np.array(scales.exponents)
    for i in range(len(strategy.names)):
        mine = [(t, strategy.rows[r]) for t, all_of in enumerate(rows.values()) for r in all_of]
        mine = [(t, row) for t, row in mine if i in dict(row.weights)]
        if mine:
            steps = strategy.steps(rule.margin, [row for _, row in mine])
            steps = math.ceil(steps / orders[i])
            exponents[i] = orders[i] * _chosen(tried, table[[t for t, _ in mine]], steps)
    return exponents


def _check_points(points: Any, coords: tuple[str, ...]) -> None:
    if isinstance(points, Tracer):
        raise TypeError(
            f"`{_CALL}` runs the network and looks at its derivatives, so it cannot be called "
            "inside of `jax.jit`, `jax.grad` or `jax.vmap`. Call it before the first step."
        )
    shape = np.shape(points)
    if len(shape) != 2 or shape[1] != len(coords) or not shape[0]:
        raise ValueError(
            f"`{_CALL}` takes some points, an array of shape [points, {len(coords)}] of the "
            f"coordinates {', '.join(coords)}, but got shape {shape}."
        )


def _errors(
    values: Callable, fun: Any, scales: AbstractScales, tried: Sequence[np.ndarray], dtype: Any
) -> np.ndarray:
    """The relative error of each derivative in half precision at the scales of each trial."""

    @eqx.filter_jit
    def errors(fun, scales, want):
        got = values(cast_operands(fun, half_precision_datatype()), scales, dtype)
        error = lambda g, w: jnp.linalg.norm(g - w) / jnp.maximum(jnp.linalg.norm(w), 1e-30)
        return jnp.stack(list(map(error, got, want)))

    with jax.default_matmul_precision("highest"):
        want = eqx.filter_jit(lambda fun: values(fun, None, None))(fun)
    if not all_finite(want):
        raise ValueError(
            f"`{_CALL}`: derivatives are not finite in float32 either. Look at the points, or at "
            "the network by `mpx_pde.explain_nonfinite`."
        )
    at = lambda e: with_fields(scales, exponents=jnp.asarray(e, jnp.int32))
    table = np.stack([np.asarray(errors(fun, at(e), want)) for e in tried], axis=1)
    return np.where(np.isfinite(table), table, np.inf)


def _chosen(tried: Sequence[int], table: np.ndarray, steps: int) -> int:
    """Of the exponents that were tried the one for a scaler, by the errors of what it scales.

    As near to 1 as the middle of the window of scales and its upper end, `steps` below it, allow.
    """
    # How much worse than at its best scale each term is: flat inside the window. Below it a scale
    # may be right by luck: better than float16 can be is no better, and a gap ends the window.
    best = np.maximum(table.min(axis=1), _ROUNDING)
    if not np.isfinite(best).all():
        return tried[0]
    worst = np.max(table / best[:, None], axis=0)
    if not np.isfinite(worst).any():
        return tried[0]
    inside = worst <= max(2.0, 1.5 * worst.min())
    top = int(np.flatnonzero(inside)[-1])
    outside = np.flatnonzero(~inside[:top])
    bottom = int(outside[-1]) + 1 if outside.size else 0
    first, last = tried[bottom], tried[top]
    middle = (first + last) // 2
    return min(max(0, middle), max(middle, last - steps))

"""First scales from a trial of the network as it is at the start."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._cast import cast_operands
from .._dtypes import half_precision_datatype
from ._checks import check_coords, check_derivatives, parse_terms, row_of
from ._laplacian import laplacian, laplacian_rows
from ._names import names_of
from ._partials import partials
from ._state import DerivativeScaling


_HIGHEST = 15
"""No seed larger than this power of two is tried: it is a float16."""


def calibrated(
    scaling: DerivativeScaling,
    fun: Callable,
    points: Float[Array, "points coords"],
    terms: Any,
    *,
    coords: Any,
    outputs: Any,
    over: Any = None,
    dtype: Any = None,
) -> DerivativeScaling:
    """See [`mpx_pde.DerivativeScaling.calibrate`][]."""
    call = "DerivativeScaling.calibrate"
    check_derivatives(scaling, call)
    if not scaling.active:
        return scaling
    coords = names_of(coords, call, "the coordinates")
    outputs = names_of(outputs, call, "the outputs")
    over = coords if over is None else names_of(over, call, "the coordinates of `over`")
    check_coords(scaling, coords, call)
    terms = terms if isinstance(terms, str) else tuple(terms)
    named = terms if isinstance(terms, str) else [t for t in terms if t != "laplacian"]
    parsed = [t for t in parse_terms(named, coords, outputs, call) if t.dirs]
    names = [t.name for t in parsed]
    rows = {t.name: [row_of(scaling, t, coords, call)] for t in parsed}
    if "laplacian" in terms:
        rows |= dict.fromkeys((f"lap_{o}" for o in outputs), laplacian_rows(scaling, over, call))

    def values(fun, scaling, dtype):
        options = {"coords": coords, "outputs": outputs, "scaling": scaling, "dtype": dtype}

        def at(point):
            out = partials(fun, names, **options)(point)
            if "laplacian" in terms:
                out |= laplacian(fun, over=over, **options)(point)
            return out

        return jax.vmap(at)(points)

    @eqx.filter_jit
    def errors(fun, scaling, want):
        got = values(cast_operands(fun, half_precision_datatype()), scaling, dtype)
        error = lambda g, w: jnp.linalg.norm(g - w) / jnp.maximum(jnp.linalg.norm(w), 1e-30)
        return jnp.stack([error(got[name], want[name]) for name in rows])

    with jax.default_matmul_precision("highest"):
        want = eqx.filter_jit(lambda fun: values(fun, None, None))(fun)
    low, high = min(scaling.rule.lowest), min(max(scaling.rule.highest), _HIGHEST)
    tried = list(range(low, high + 1))
    at = lambda e: eqx.tree_at(lambda s: s.exponents, scaling, jnp.full_like(scaling.exponents, e))
    table = np.stack([np.asarray(errors(fun, at(e), want)) for e in tried], axis=1)
    table = np.where(np.isfinite(table), table, np.inf)

    exponents = np.array(scaling.exponents)
    for i in range(len(scaling.names)):
        mine = [(t, scaling.rows[r]) for t, all_of in enumerate(rows.values()) for r in all_of]
        mine = [(t, row) for t, row in mine if i in dict(row.weights)]
        if not mine:
            continue
        # How much worse than at its best scale each term is: flat inside the window of scales.
        best = [max(float(table[t].min()), 2.0**-24) for t, _ in mine]
        ratios = [table[t] / b for (t, _), b in zip(mine, best, strict=True) if np.isfinite(b)]
        worst = np.max(ratios, axis=0) if len(ratios) == len(best) else np.full(len(tried), np.inf)
        if not np.isfinite(worst).any():
            exponents[i] = low
            continue
        inside = [e for e, w in zip(tried, worst, strict=True) if w <= max(2.0, 1.5 * worst.min())]
        steps = math.ceil(scaling.rule.margin / max(row.order for _, row in mine))
        if scaling.kind != "direction":
            steps = scaling.rule.margin
        middle = (inside[0] + inside[-1]) // 2
        # As near to 1 as these allow.
        exponents[i] = min(max(0, middle), max(middle, inside[-1] - steps))
    return scaling.with_exponents(exponents)

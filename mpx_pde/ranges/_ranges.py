"""The public functions."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu

from .._cast import widen
from .._dtypes import half_precision_datatype, is_half
from .._jaxpr import trace_arrays
from .._types import DTypeLike
from ..autocast import tables
from ._evaluate import Known, Meter, Site
from ._report import RangeReport, Row, idle_product, make_row
from ._stats import is_measured


def _trace(fun: Callable, args: tuple, kwargs: dict) -> tuple:
    """The function as a jaxpr of its float32 arrays, the arrays with their places, and how to put
    the output together."""
    # A plain float32 product is TF32 on a GPU.
    with jax.default_matmul_precision("highest"):
        closed, leaves, assemble = trace_arrays(*widen((fun, args, kwargs)))
    return closed, [(_place(path), x) for path, x in leaves], assemble


def _place(path: tuple) -> str:
    which, *inside = path
    name = ("function", "argument ", "keyword ")[which.idx]
    return name + jtu.keystr(tuple(inside))


class _RangeReport(eqx.Module):
    _fun: Any

    @property
    def __wrapped__(self):
        return self._fun

    def __call__(self, /, *args, **kwargs) -> RangeReport:
        traced = [
            x for x in jtu.tree_leaves((self._fun, args, kwargs)) if isinstance(x, jax.core.Tracer)
        ]
        if traced:
            raise TypeError(
                "`range_report` runs the function and looks at its values, so it cannot be called "
                f"inside of `jax.jit`, `jax.grad` or `jax.vmap`, but got {traced[0]}. Call "
                "`range_report(jax.jit(...))(...)` on arrays."
            )
        closed, inputs, assemble = _trace(self._fun, args, kwargs)
        meter = Meter()

        def run(*arrays):
            known = []
            for i, ((place, _), x) in enumerate(zip(inputs, arrays, strict=True)):
                bad = False
                if is_measured(x.aval):
                    site = Site((-1, i), "input", place, "", x.dtype.name, x.shape)
                    bad = meter.visit(site, x, False)
                known.append(Known(x, bad))
            out = meter.jaxpr(closed, known, (), ())
            meter.flush()
            return [x.array for x in out]

        out = jax.jit(run)(*(x for _, x in inputs))
        jax.effects_barrier()
        sites = sorted(meter.sites.values(), key=lambda site: site.order)
        rows = [make_row(s, meter.counts[s.order]) for s in sites if s.order in meter.counts]
        idle = [x for site in sites if (x := idle_product(site))]
        return RangeReport(tuple(rows), tuple(idle), assemble(out))


def range_report(fun: Callable[..., Any]) -> Callable[..., RangeReport]:
    """Runs a function once in float32, and tells what half precision would make of its values.

    Every floating-point value on the way is looked at, also inside of `jax.jit`, loops, branches,
    `jax.checkpoint`, custom derivatives and `jax.shard_map`, and under any nesting of transforms:
    a whole training step with its gradients and derivative terms will do. Each equation's row has
    the user's `file:line`, its name scopes, the range of its exponents, and the fractions that
    float16 and bfloat16 lose to overflow, to subnormals and to zero. Casts to half in the
    function are ignored.

    It measures, so it costs a compilation and a slow run.

    **Arguments:**

    - `fun`: a function, method or callable module. Not inside of a transform itself, but
        `range_report(jax.grad(fun))` is meant.

    **Returns:**

    A function of the arguments of `fun` that returns a [`mpx_pde.RangeReport`][].

    **Raises:** `TypeError` if `fun` cannot be called, or if it is called while being traced.

    ```python
    report = mpx.range_report(eqx.filter_grad(loss))(model, x, y)
    print(report)  # worst first
    report.plot("ranges.png")
    ```
    """
    if not callable(fun):
        raise TypeError(f"`range_report` takes a function or a callable module, but got {fun!r}.")
    return eqx.module_update_wrapper(_RangeReport(fun))


def _size(row: Row) -> str:
    return "only zeros" if row.exponents is None else f"largest 2^{row.exponents[1]:.1f}"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2g}% of values"


def _mend(row: Row, name: str) -> str:
    """What to do about a row that overflows, in the words of this library."""
    primitive = row.primitive
    scope = row.scope.rsplit("/", 1)[-1]
    if primitive == "input":
        return (
            "Keep that argument in float32: mark it in `keep_full` of `mpx.filter_grad`, or pass "
            "`autocast=True`, which casts no arguments."
        )
    pattern = f"full={scope!r}" if scope else f"full={primitive!r}"
    if primitive in tables.FULL:
        return (
            "`mpx.autocast` keeps it in float32 by itself (`mpx.filter_grad(..., "
            "autocast=True)`). When whole models are cast, keep it in float32 with "
            "`mpx.force_full_precision` around the function that calls it, or `mpx.FullPrecision` "
            "around its layer."
        )
    return (
        f"Keep it in float32 with `mpx.autocast(..., {pattern})` (or `autocast="
        f"{{'full': {scope or primitive!r}}}` in `mpx.filter_grad`). When whole models are cast, "
        "use `mpx.FullPrecision` around its layer. Or make its operands smaller by a power of two, "
        "or use bfloat16."
    )


def _explain(report: RangeReport, name: str) -> str:
    row = report.first_nonfinite
    if row is not None:
        return (
            f"float32 itself is not finite first at {row.where} ({_percent(row.nonfinite)}, out "
            "of finite operands). More precision does not help: look for a division by zero, the "
            "logarithm or root of something negative, or a step size that is too large."
        )
    bad = next((row for row in report.rows if row.primitive == "input" and row.nonfinite), None)
    if bad is not None:
        return f"The input at {bad.line} is not finite ({_percent(bad.nonfinite)})."
    row = report.first_overflow(name)
    if row is not None:
        return (
            f"{name} overflows first at {row.where}: {_percent(row.loss(name).overflow)}, "
            f"{_size(row)}. {_mend(row, name)}"
        )
    [worst] = sorted(report.rows, key=lambda row: -row.loss(name).zero)[:1] or [None]
    if worst is not None and worst.loss(name).zero > 0:
        return (
            f"Nothing overflows {name}. Most is lost to zero at {worst.where}: "
            f"{_percent(worst.loss(name).zero)}, {_size(worst)}. If it belongs to the backward "
            "pass, raise the loss scale (`mpx.DynamicLossScaling`); else use bfloat16 or float32 "
            "there."
        )
    return f"Everything is finite, and nothing overflows {name} or is lost to zero in it."


class _Explain(eqx.Module):
    _fun: Any
    _dtype: str | None = eqx.field(static=True)

    @property
    def __wrapped__(self):
        return self._fun

    def __call__(self, /, *args, **kwargs) -> str:
        name = self._dtype or half_precision_datatype().name
        return _explain(range_report(self._fun)(*args, **kwargs), name)


def explain_nonfinite(
    fun: Callable[..., Any], dtype: DTypeLike | None = None
) -> Callable[..., str]:
    """Says in which line half precision first overflows, by how much, and what to do about it.

    Runs the function once in float32, as [`mpx_pde.range_report`][] does.

    **Arguments:**

    - `fun`: a function, method or callable module; usually the gradient of a loss.
    - `dtype`: float16 or bfloat16, by default [`mpx_pde.half_precision_datatype`][].

    **Returns:**

    A function of the arguments of `fun` that returns a text.

    **Raises:** as [`mpx_pde.range_report`][], and `ValueError` for another `dtype`.

    ```python
    print(mpx.explain_nonfinite(eqx.filter_grad(loss))(model, x, y))
    ```
    """
    if dtype is not None and not is_half(dtype):
        raise ValueError(
            f"`explain_nonfinite` takes float16 or bfloat16 as `dtype`, but got {dtype!r}."
        )
    if not callable(fun):
        raise TypeError(
            f"`explain_nonfinite` takes a function or a callable module, but got {fun!r}."
        )
    name = None if dtype is None else jnp.dtype(dtype).name
    return eqx.module_update_wrapper(_Explain(fun, name))

"""The public functions `range_report` and `explain_nonfinite`."""

import contextlib
import functools as ft
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer

from .._util._calls import public
from .._util._types import DTypeLike
from .._util._wrapper import check_callable, says_how
from ..precision._cast import widen
from ..precision._dtypes import as_half_dtype, half_precision_datatype
from ..program._jaxpr import trace_arrays
from ..program._lines import Site, definition_of
from ..program._warnings import PrecisionWarning
from ..scaling._loss import AbstractLossScaling
from ..scaling._watched import watch
from ._explain import explain
from ._meter import CLEAN, TAINTED, Known, Measured, Meter
from ._range_report import RangeReport, fold, idle_product, make_row
from ._stats import Counts, is_measured
from ._sums import long_sums
from ._survey import Survey


# When XLA fuses, it writes an operation again into each of its uses. Here each has two uses, the
# host and the next operation, so the code would grow with the square of the program. Fusion gains
# nothing here anyway, because all values are written to memory.
_GPU_FUSIONS = "fusion,priority-fusion,multi_output_fusion,horizontal_loop_fusion"
_UNFUSED = {
    "cpu": {"xla_disable_hlo_passes": "fusion"},
    "gpu": {"xla_disable_hlo_passes": _GPU_FUSIONS},
}


# The place of inputs in the program: before the arrays that it closes over.
_INPUTS = (-2,)


def _place(path: tuple) -> str:
    which, *inside = path
    name = ("function", "argument ", "keyword ")[which.idx]
    return name + jtu.keystr(tuple(inside))


def _report(fun: Callable, args: tuple, kwargs: dict) -> RangeReport:
    with warnings.catch_warnings():
        # The report says the same.
        warnings.simplefilter("ignore", PrecisionWarning)
        closed, leaves, assemble = trace_arrays(fun, args, kwargs)
    meter, inputs = Meter(), [x for _, x in leaves]

    def run(*arrays):
        known = []
        for i, ((path, _), x) in enumerate(zip(leaves, arrays, strict=True)):
            site = Site(_place(path))
            value = Measured((*_INPUTS, i), "input", site, "", x.dtype.name, x.shape)
            x = widen(x)
            # Non-finite arguments do not originate here.
            marks = meter.visit(value, x, TAINTED) if is_measured(x) else CLEAN
            known.append(Known(x, marks))
        out = meter.jaxpr(closed, known, (), (), definition_of(fun))
        meter.flush()
        return [x.array for x in out]

    compiled = jax.jit(run, compiler_options=_UNFUSED.get(jax.default_backend()))
    out = compiled(*map(_without_overflow, inputs))
    jax.effects_barrier()
    for i, x in enumerate(inputs):
        if _without_overflow(x) is not x:
            meter.counts[*_INPUTS, i] = Counts.of(x, (*_INPUTS, i))
    measured = [
        (value, meter.counts[order])
        for order, value in sorted(meter.measured.items())
        if order in meter.counts
    ]
    with watch.pause():  # its steps are not those of a training
        result = assemble(out)
    mixed = bool(_said(fun, "is_mixed_precision")) or any(x.half for x, _ in measured)
    return RangeReport(
        rows=tuple(make_row(*item) for item in measured),
        folded=fold(measured),
        mixed=mixed,
        idle=tuple(x for value, _ in measured if (x := idle_product(value))),
        result=result,
        scaled=_said(fun, "scales_its_loss"),
        room=next(iter(_declared(fun, "room_of_scale")), None),
        autocast=bool(_said(fun, "is_autocast")),
        sums=tuple(long_sums(Survey(closed), wide=not mixed)),
    )


def _without_overflow(x: Any) -> Any:
    """Casts a float64 array on the host as JAX does, without a warning of overflow."""
    if isinstance(x, np.ndarray) and x.dtype != jax.dtypes.canonicalize_dtype(x.dtype):
        with np.errstate(over="ignore"):
            return x.astype(jax.dtypes.canonicalize_dtype(x.dtype))
    return x


def _said(fun: Any, name: str) -> bool | None:
    """Returns whether the attribute `name`, by which a transformation to mixed precision declares
    itself, is true for the function or one that it wraps. Returns `None` if none of them has it.
    """
    said = [x for x in _declared(fun, name) if isinstance(x, bool)]
    return any(said) if said else None


def _declared(fun: Any, name: str) -> list[Any]:
    """Returns the attributes `name` of the function and of those that it wraps, from outside in."""
    found = []
    while fun is not None:
        found.append(getattr(fun, name, None))
        fun = getattr(fun, "__wrapped__", None)
    return [x for x in found if x is not None]


@public
@says_how(
    "`mpx_pde.range_report(mpx_pde.filter_grad(loss, scaling))(model, batch)`: the arguments "
    "of the gradient belong to what it returns."
)
def range_report(fun: Callable[..., Any]) -> Callable[..., RangeReport]:
    """Runs a function once in float32, and reports the effect of half precision on its values.

    It measures every intermediate floating-point value, also inside of `jax.jit`, loops, branches,
    `jax.checkpoint`, custom derivatives and `jax.shard_map`, and under any nesting of transforms.
    So you can pass a whole training step with its gradients and derivative terms. The row of each
    equation has the user's `file:line`, its name scopes, the range of its exponents, and the
    fractions that float16 and bfloat16 lose to overflow, to subnormals and to zero. All operations
    that one function or layer of this library does for one line of the user share a row, which
    names it.

    Some functions declare what is in half precision, such as [`mpx_pde.filter_grad`][] of a loss or
    [`mpx_pde.autocast`][] of any function. For these, values that the function casts, or rounds
    inside of a product, are at risk; values that it keeps in float32 are not. Its casts do nothing
    in this run, so one value that overflows does not hide the next. For a float32 function, every
    value is treated as if it were half precision.

    It also measures where rounded values cancel, such as data around 300 less their mean, which
    no step tells, because only values show it.

    Compilation takes about as long as that of the function itself. The run is slow, because nothing
    is fused and all values are copied to the host.

    **Arguments:**

    - `fun`: a function, method or callable module, usually a gradient or a step. It must not be
        called inside of another transform. For a loss, pass `mpx.filter_grad(loss, scaling)` with
        the options of the training, which includes the loss scale and the casts.
        `eqx.filter_grad(loss)` includes neither.

    **Returns:**

    A function of the arguments of `fun` that returns a [`mpx_pde.RangeReport`][].

    **Raises:** `TypeError` if `fun` cannot be called, or if it is called while being traced.

    ```python
    report = mpx.range_report(mpx.filter_grad(loss, scaling))(model, x, y)
    print(report)  # worst first
    report.plot("ranges.png")
    ```
    """
    check_callable(fun)

    @ft.wraps(fun, updated=())
    def report(*args: Any, **kwargs: Any) -> RangeReport:
        traced = [x for x in jtu.tree_leaves((fun, args, kwargs)) if isinstance(x, Tracer)]
        if traced:
            raise TypeError(
                "`range_report` runs the function and looks at its values, so it cannot be called "
                f"inside of `jax.jit`, `jax.grad` or `jax.vmap`, but got {traced[0]}. Call "
                "`range_report(jax.jit(...))(...)` on arrays."
            )
        return _report(fun, args, kwargs)

    return report


@public
@says_how(
    "`mpx_pde.explain_nonfinite(mpx_pde.filter_grad(loss, scaling))(model, batch)`: the arguments "
    "of the gradient belong to what it returns."
)
def explain_nonfinite(
    fun: Callable[..., Any], dtype: DTypeLike | None = None
) -> Callable[..., str]:
    """Explains in which line half precision first overflows, by how much, and how to fix it. Also
    names a sum that is so long that it stands still in half precision, and one in which rounded
    values cancel.

    Runs the function once in float32, as [`mpx_pde.range_report`][] does.

    **Arguments:**

    - `fun`: a function, method or callable module; usually `mpx.filter_grad(loss, scaling)` with
        the options of the training.
    - `dtype`: float16 or bfloat16, by default [`mpx_pde.half_precision_datatype`][].

    **Returns:**

    A function of the arguments of `fun` that returns a text.

    **Raises:** as [`mpx_pde.range_report`][], `ValueError` for another `dtype` and `TypeError` for
    a loss scaling passed as `dtype`.

    ```python
    print(mpx.explain_nonfinite(mpx.filter_grad(loss, scaling))(model, x, y))
    ```
    """
    check_callable(fun)
    if isinstance(dtype, AbstractLossScaling):
        raise TypeError(
            "`explain_nonfinite` takes a gradient that has its scaling, and a dtype, but got a "
            f"{type(dtype).__name__} as the dtype. Write "
            "`explain_nonfinite(mpx_pde.filter_grad(loss, scaling))(model, batch)`."
        )
    name = None if dtype is None else as_half_dtype(dtype).name

    @ft.wraps(fun, updated=())
    def explained(*args: Any, **kwargs: Any) -> str:
        report = range_report(fun)(*args, **kwargs)
        full = None
        if report.first_nonfinite is not None and (gradient := _in_full(fun)) is not None:
            # Without halves a loss may accept less: a loop that begins with a half, a `jmp` policy.
            with contextlib.suppress(TypeError, ValueError):
                full = range_report(gradient)(*args, **kwargs)
        return explain(report, name or half_precision_datatype().name, full)

    return explained


def _in_full(fun: Any) -> Any:
    """Returns the gradient transformation that `fun` is or wraps, without mixed precision, or
    `None` if there is none."""
    while fun is not None and not hasattr(fun, "in_full"):
        fun = getattr(fun, "__wrapped__", None)
    return fun.in_full() if fun is not None and _said(fun, "is_mixed_precision") else None

"""Advice on the precision of a loss."""

import contextlib
import dataclasses
import inspect
import itertools
import json
import sys
import warnings
from collections.abc import Callable
from textwrap import indent
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax

from .._util._calls import named, public
from .._util._repr import table
from .._util._types import PyTree
from ..precision._dtypes import half_precision_datatype
from ..precision._tree import all_finite
from ..program._warnings import PrecisionWarning
from ..reports._precision import arrays_closed_over, precision_report
from ..reports._stats import percent
from ..scaling._derivatives import Scaling
from ..scaling._loss import AbstractLossScaling, DynamicLossScaling, NoOpLossScaling
from ..scaling._unscaled import noting_coordinates
from ._accumulate import is_old_key, is_state
from ._floor import in_float64
from ._grad import filter_value_and_grad
from ._gradient import Gradient, check_eager
from ._initial_scaling import NoScaleError, initial_scaling
from ._norms import relative_distance
from ._options import refuses_argnums


_FULL = {"use_mixed_precision": False}
_TOLERANCE = 0.01
"""The largest error of a recommended loss and gradient. The noise between batches is nearly always
larger."""
_GAIN = 0.9
"""The fraction of float32's memory above which another precision is not worth using."""
_FAR_OFF = 0.1
"""The error of a loss or gradient from which on it is worth to ask which values cancel."""
_WIDE = 128
"""Products with a smaller dimension leave the tensor cores of a GPU waiting for memory."""


@dataclasses.dataclass(frozen=True)
class Advised:
    """One precision for the gradient of a loss.

    **Attributes:**

    - `name`: the name of the precision, such as `"forward float32, backward bfloat16"`.
    - `options`: the options that select it in the gradient transformations, in addition to those
        that were given.
    - `memory`: bytes that the compiled gradient needs in addition to its arguments, on this
        machine.
    - `memory_per_example`: the bytes that each example of the batch adds; `None` if the arrays of
        the batch share no axis.
    - `error`: the relative error of the gradient; NaN if the gradient is not finite.
    - `value_error`: the relative error of the loss; NaN if the gradient is not finite.
    - `vanished`: the fraction of the gradient's entries that are 0 and should not be.
    - `finite`: whether the loss is finite and any loss scale makes the gradient finite.
    - `half_share`: the fraction of the work of all products that is done in half precision.
    - `scaling`: the scaling to start with.
    - `failed`: the error that was raised, or `None`. After an error nothing else is known.
    """

    name: str
    options: dict[str, Any]
    memory: int = 0
    memory_per_example: float | None = None
    error: float = float("nan")
    vanished: float = 0.0
    finite: bool = False
    half_share: float = 0.0
    scaling: Any = None
    failed: str | None = None
    value_error: float = float("nan")


@dataclasses.dataclass(frozen=True)
class Advice:
    """Several precisions for the gradient of a loss, and the recommended one. Prints as a table.

    **Attributes:**

    - `rows`: one row for each precision. float32 comes first (float64 for such parameters), then a
        float32 forward pass with a half-precision backward pass, then half precision throughout, by
        casts and, for a loss that takes no `derivatives`, by `autocast`.
    - `choice`: the recommended row: among those whose loss and gradient are accurate to 1 %, the
        one that needs the least memory. It is float32 if no other row saves a tenth of float32's
        memory.
    - `call`: the code to write for it.
    - `width`: the smallest dimension of the largest product.
    - `reference`: the precision that errors are measured against, `"float32"` or `"float64"`.
    - `examples`: the number of examples in the batch, if that is known.
    - `closed_over`: the floating-point arrays that the loss closes over, such as
        `"float32[256, 2]"`. No cast reaches them.
    - `call_on_gpu`: on a CPU that recommends float32, the code of the first precision that is
        accurate enough, to try on a GPU; else empty.
    """

    rows: tuple[Advised, ...]
    choice: Advised
    call: str
    width: int
    reference: str
    examples: int | None
    closed_over: tuple[str, ...] = ()
    call_on_gpu: str = ""

    def __str__(self) -> str:
        head = ("", "memory", "an example more", "loss off by", "gradient off by")
        head += ("vanished", "half products")
        lines = table([head, *map(_cells, self.rows)])
        lines += [f"{row.name} fails: {row.failed}" for row in self.rows if row.failed is not None]
        lines.append(f"Losses and gradients are compared with those in {self.reference}.")
        if self.closed_over:
            lines.append(
                f"The loss closes over {', '.join(self.closed_over)}, which no cast reaches: pass "
                "such data as arguments, or products with them stay in that precision."
            )
        errors = (x for row in self.rows if row.finite for x in (row.value_error, row.error))
        if max(errors) > _FAR_OFF:
            lines.append(
                "`mpx_pde.explain_nonfinite` of such a gradient names a line in which rounded "
                "values cancel, if there is one."
            )
        if jax.default_backend() == "cpu":
            lines.append("A CPU computes halves in float32, so a GPU needs less memory for them.")
        if 0 < self.width < _WIDE:
            lines.append(
                f"The smallest dimension of the largest product is {self.width}: half precision "
                "saves memory, hardly time."
            )
        lines += [f"Take {self.choice.name}:", indent(self.call, "    ")]
        if self.call_on_gpu:
            lines += ["On a GPU, where it saves memory:", indent(self.call_on_gpu, "    ")]
        return "\n".join(lines)


def _cells(row: Advised) -> tuple[str, ...]:
    each = row.memory_per_example
    cells = (
        f"{row.memory / 2**20:#.3g} MiB",
        "" if each is None else f"{each / 2**10:#.3g} KiB",
        f"{row.value_error:.1e}" if row.finite else "",
        f"{row.error:.1e}" if row.finite else "overflows",
        percent(row.vanished),
        f"{100 * row.half_share:.0f} %",
    )
    return (row.name, *(cells if row.failed is None else ["fails"] * 6))


@public
@refuses_argnums
def advise(
    func: Callable[..., Any],
    scaling: AbstractLossScaling | None = None,
    has_aux: bool = False,
    *,
    keep_full: PyTree = False,
    autocast: bool | dict[str, Any] = False,
) -> Callable[..., Advice]:
    """Recommends a precision to train in, by trying several on the gradient of a loss.

    Compiles and evaluates the gradient in float32, with a float32 forward pass and a half-precision
    backward pass, and in half precision throughout; the latter two in float16 and in bfloat16. If
    the loss takes no `derivatives`, as that of an operator, `autocast` in both is tried, too.
    Reports how much memory each needs and how large the errors of its loss and gradient are. Call
    it once, before training:

    ```python
    print(mpx.advise(loss)(model, batch))
    ```

    Each precision is compiled twice, for the batch and for half of it, and once more while the
    scales of float16 are looked for. So it takes as long as compiling ten to twenty gradients:
    about twenty seconds of one core for a network of four layers with second derivatives.

    **Arguments:**

    - `func`, `has_aux`: as for [`mpx_pde.filter_value_and_grad`][].
    - `scaling`: the scaling from which [`mpx_pde.initial_scaling`][] starts to find the scales of
        float16; by default [`mpx_pde.DynamicLossScaling`][]. A loss that takes `derivatives` gets
        `None` for them unless this is a [`mpx_pde.Scaling`][]: pass one, to measure float16 with
        scaled derivatives.
    - `keep_full`, `autocast`: as for [`mpx_pde.filter_value_and_grad`][]; used for half precision
        throughout.

    **Returns:**

    A function of the arguments of `func` that returns an [`mpx_pde.Advice`][]. Errors are relative
    to float64 if 64-bit types are enabled, and to float32 otherwise. Its progress goes to
    `stderr`.

    **Raises:** as [`mpx_pde.filter_value_and_grad`][] does in float32; `TypeError` inside of
    `jax.jit`.
    """
    start = DynamicLossScaling() if scaling is None else scaling
    # Checks the arguments.
    Gradient.of(func, start, has_aux=has_aux, keep_full=keep_full, autocast=autocast)
    overrides = {"keep_full": keep_full, "autocast": autocast}
    overrides = {name: option for name, option in overrides.items() if option is not False}
    parameter = inspect.signature(func).parameters.get("derivatives")
    takes = parameter is not None and parameter.default in (None, parameter.empty)
    alone = scaling is None and takes
    ways = [
        ("forward float32, backward {}", {"forward": "float32"}),
        ("{} throughout", overrides),
    ]
    if parameter is None and "autocast" not in overrides:
        ways.append(("{} throughout, autocast", {**overrides, "autocast": True}))

    def advice(*args: Any, **kwargs: Any) -> Advice:
        with named("advise"):
            check_eager((args, kwargs))
        kwargs = {"derivatives": None, **kwargs} if alone else kwargs
        with warnings.catch_warnings():
            # The advice says the same, and more.
            warnings.simplefilter("ignore", PrecisionWarning)
            task = func, start, has_aux
            closed_over, coords = _traced(task, args, kwargs)
            begin = _start(scaling, alone, coords)
            return _advice(task, ways, args, kwargs, begin, closed_over)

    return advice


def _traced(task: tuple, args: tuple, kwargs: dict) -> tuple[tuple[str, ...], list[str]]:
    """Describes the arrays that a loss closes over, and names the coordinates of derivatives that
    it takes by their names."""
    func, scaling, has_aux = task

    # The arrays of the scaling are none of them.
    def gradient(scaling, args, kwargs):
        return filter_value_and_grad(func, scaling, has_aux, False)(*args, **kwargs)

    with noting_coordinates() as coords:
        closed = eqx.filter_make_jaxpr(gradient)(scaling, args, kwargs)[0]
    return tuple(arrays_closed_over(closed)), list(coords)


def _start(scaling: AbstractLossScaling | None, alone: bool, coords: list[str]) -> str:
    """Returns the line of code that builds the scaling to train with in float16; empty if the user
    has built one. `alone` says that the loss takes derivatives, whose scales were not given."""
    if alone:
        names = "".join(coords) if all(len(name) == 1 for name in coords) else coords
        shown = json.dumps(names) if coords else "..."
        return (
            "scaling = mpx_pde.Scaling("
            f"derivatives=mpx_pde.DerivativeScaling.per_direction({shown}))"
        )
    return "scaling = mpx_pde.DynamicLossScaling()" if scaling is None else ""


def _advice(
    task: tuple,
    ways: list[tuple[str, dict[str, Any]]],
    args: tuple,
    kwargs: dict,
    start: str,
    closed_over: tuple[str, ...],
) -> Advice:
    """Tries the precisions on `task`, which is a loss, its scaling, and whether it has auxiliary
    output. `ways` are names and options of half precision, and `start` is the line of code that
    builds the scaling."""
    _say(f"advise: compiles and runs the gradient in {1 + 2 * len(ways)} precisions", "\n")
    wide, reference = None, jnp.zeros((), float).dtype.name
    if reference == "float64":
        positional, keyword = in_float64((args, kwargs))
        wide = _gradient(task, _FULL)(*positional, **keyword)
    dtypes = [x.dtype for x in jtu.tree_leaves(args[:1]) if eqx.is_inexact_array(x)]
    name = "float64" if "float64" in dtypes else "float32"
    first, wide, width = _measured(name, _FULL, task, args, kwargs, wide)
    rows, trial = [first], (task, args, kwargs, wide)
    for (name, options), half in itertools.product(ways, ("float16", "bfloat16")):
        policy, name = f"params=float32,compute={half},output=float32", name.format(half)
        if all(row.name != name for row in rows):  # it is one if casts failed
            rows.append(_advised(name, {"policy": policy, **options}, *trial))
    _say("")
    good = [r for r in rows if r.finite and max(r.error, r.value_error, r.vanished) <= _TOLERANCE]
    least = min(good, key=lambda row: row.memory, default=rows[0])
    choice = least if least.memory <= _GAIN * rows[0].memory else rows[0]
    call = _written(choice, task[2], start)
    on_cpu = jax.default_backend() == "cpu" and choice is rows[0]
    other = next((row for row in good if row is not rows[0]), None) if on_cpu else None
    on_gpu = "" if other is None else _written(other, task[2], start)
    details = width, reference, _examples(args), closed_over, on_gpu
    return Advice(tuple(rows), choice, call, *details)


def _say(text: str, end: str = "") -> None:
    """Shows progress: on a terminal one line that changes, elsewhere only what has an `end`."""
    if sys.stderr.isatty():
        print(f"\r{text:70}\r", end="", file=sys.stderr, flush=True)
    elif end:
        print(text, end=end, file=sys.stderr, flush=True)


def _advised(name: str, options: dict[str, Any], *trial: Any) -> Advised:
    try:
        return _measured(name, options, *trial)[0]
    except Exception as error:
        if "throughout" in name and "autocast" not in options:
            # Casts fail on operations without half precision; autocast leaves those as they are.
            options = {"policy": options["policy"], "autocast": True}
            return _advised(f"{name}, autocast", options, *trial)
        return Advised(name, options, failed=f"{type(error).__name__}: {error}")


def _measured(
    name: str, options: dict[str, Any], task: tuple, args: tuple, kwargs: dict, wide: PyTree
) -> tuple[Advised, PyTree, int]:
    """Compares a precision with the loss and gradient `wide`, by default with its own.

    **Returns:** the row, the loss and gradient that it was compared with, and the width of the
    largest product.
    """
    _say(f"advise: {name}")
    func, scaling, has_aux = task
    if "compute=bfloat16" in options.get("policy", "") and not isinstance(scaling, Scaling):
        scaling = NoOpLossScaling()
    with contextlib.suppress(NoScaleError):  # the row says that it overflows
        scaling = initial_scaling(func, scaling, has_aux, **options)(*args, **kwargs)
    gradient = _gradient((func, scaling, has_aux), options)
    compiled = gradient.lower(*args, **kwargs).compile()
    memory, each, count = _memory(compiled), None, _examples(args) or 0
    if count > 1:

        def first(x):
            return lax.slice_in_dim(x, 0, count // 2) if _is_batch(x) else x

        # A loss may accept only the whole batch, such as a grid, or one with targets of its own.
        with contextlib.suppress(Exception):
            fewer = jtu.tree_map(first, args[1:], is_leaf=is_state)
            less = gradient.lower(args[0], *fewer, **kwargs).compile()
            each = (memory - _memory(less)) / (count - count // 2)
    report = precision_report(gradient)(*args, **kwargs)
    result = compiled(*args, **kwargs)
    wide, grads = result if wide is None else wide, result[1]
    pairs = list(zip(jtu.tree_leaves(grads), jtu.tree_leaves(wide[1]), strict=True))
    gone = sum(int(jnp.sum((g == 0) & (w != 0))) for g, w in pairs)
    vanished = gone / max(1, sum(int(jnp.sum(w != 0)) for _, w in pairs))
    finite = bool(all_finite(result))
    pairs = zip(result, wide, strict=True)
    off, error = (
        (float(relative_distance(x, y)) for x, y in pairs) if finite else [float("nan")] * 2
    )
    numbers = memory, each, error, vanished, finite, report.half_share
    row = Advised(name, options, *numbers, scaling, value_error=off)
    return row, wide, report.width


def _gradient(task: tuple, options: dict[str, Any]) -> Any:
    gradient = filter_value_and_grad(*task, **options)

    def value_and_gradient(*args, **kwargs):
        out, *_, grads = gradient(*args, **kwargs)
        return out[0] if task[2] else out, grads

    return eqx.filter_jit(value_and_gradient)


def _memory(compiled: Any) -> int:
    return int(getattr(compiled.compiled.memory_analysis(), "temp_size_in_bytes", 0))


def _examples(args: tuple) -> int | None:
    """Returns the length of the leading axis that all arrays of the batch share, or `None`."""
    leaves = jtu.tree_leaves(args[1:], is_leaf=is_state)
    lengths = {len(x) for x in leaves if _is_batch(x)}
    return lengths.pop() if len(lengths) == 1 else None


def _is_batch(x: Any) -> bool:
    """Returns whether an argument may have an axis of examples, unlike numbers, keys and states."""
    return eqx.is_array(x) and x.ndim > 0 and not is_old_key(x)


def _written(row: Advised, has_aux: bool, start: str) -> str:
    """Returns the code to write for a row: the scaling that it needs, and the gradient."""
    options = {**({"has_aux": True} if has_aux else {}), **row.options}
    if f"compute={half_precision_datatype().name}" in options.get("policy", ""):
        del options["policy"]  # the default
    shown = "".join(f", {name}={value!r}" for name, value in options.items())
    if options.get("use_mixed_precision") is False:
        return f"mpx_pde.filter_value_and_grad(loss, None{shown})"
    if isinstance(row.scaling, NoOpLossScaling) and "derivatives=" not in start:
        start = "scaling = mpx_pde.NoOpLossScaling()"
    lines = [start] if start else []
    return "\n".join([*lines, f"mpx_pde.filter_value_and_grad(loss, scaling{shown})"])

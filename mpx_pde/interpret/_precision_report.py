"""Reports the precisions that a function multiplies in."""

import dataclasses
import functools as ft
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from .._dtypes import matmul_precision
from .._repr import table
from .._wrapper import check_callable, says_how
from ._jaxpr import aval_of, trace_arrays
from ._lines import INSIDE, installed
from ._products import Counter, ProductRow


_FEW = 20
_MARK = " (TF32)"


class PrecisionWarning(UserWarning):
    """A warning that a call for half precision multiplies (mostly) in full precision.

    To silence it, filter it like any warning:
    `warnings.simplefilter("ignore", mpx.PrecisionWarning)`.
    """


def _half_share(rows: Iterable[ProductRow]) -> float:
    rows = list(rows)
    total = sum(row.flops for row in rows)
    return sum(row.flops for row in rows if row.half) / total if total else 1.0


@dataclasses.dataclass(frozen=True)
class PrecisionReport:
    """The matrix products and convolutions of a function. Prints as a table.

    **Attributes:**

    - `rows`: a `ProductRow` for each kind of product on each line, most work first.
    - `loops`: the lines of `while` loops. Their products are counted once, because the number of
        steps is not known.
    - `width`: the smallest of the rows, columns and contracted size of the largest product.
    - `kept_in_half`: the bytes that losses with a full forward pass round to half and keep for
        their backward pass.
    """

    rows: tuple[ProductRow, ...]
    loops: tuple[str, ...]
    width: int
    kept_in_half: int = 0

    @property
    def flops(self) -> int:
        """Returns the work of all products, in floating-point operations."""
        return sum(row.flops for row in self.rows)

    @property
    def half_share(self) -> float:
        """Returns the share of the floating-point work, from 0 to 1, that is done in half
        precision; 1 without any work.

        A product of complex numbers counts as four real ones, none of which is half."""
        return _half_share(row for row in self.rows if not row.of_integers)

    @property
    def backward_half_share(self) -> float:
        """Returns the share of the work of backward passes, from 0 to 1, that is done in half
        precision; 1 without any. Operations are those that JAX transposed: in a loss that takes
        gradients itself, these count too."""
        return _half_share(row for row in self.rows if row.backward and not row.of_integers)

    @property
    def tensorfloat32_share(self) -> float:
        """Returns the share of the work, from 0 to 1, that is done in float32 on a CPU and in TF32
        on a GPU.
        """
        work = sum(row.flops for row in self.rows if row.tensorfloat32)
        return work / self.flops if work else 0.0

    def by_dtype(self) -> dict[str, tuple[int, int]]:
        """Returns the number of products and their work, by the dtype that is multiplied in."""
        out: dict[str, tuple[int, int]] = {}
        for row in self.rows:
            count, flops = out.get(row.dtype, (0, 0))
            out[row.dtype] = count + row.count, flops + row.flops
        return out

    def count(self, dtype: Any) -> int:
        """Returns the number of products that are multiplied in a dtype."""
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
        return self.by_dtype().get(name, (0, 0))[0]

    def __str__(self) -> str:
        if not self.rows:
            return "no products"
        total = max(1, self.flops)

        def cells(dtype: str, out_dtype: str, count: int, flops: int, at: str) -> tuple[str, ...]:
            return dtype, out_dtype, str(count), f"{flops:.2e}", f"{100 * flops / total:.0f}%", at

        rows: list[tuple[str, ...]] = [
            ("multiplied in", "result", "products", "flops", "work", "at")
        ]
        for row in self.rows[:_FEW]:
            dtype = row.dtype + _MARK * row.tensorfloat32
            where = row.line + f" in {INSIDE}" * row.inside
            rows.append(cells(dtype, row.out_dtype, row.count, row.flops, where))
        rows += [cells(dtype, "", *work, "in total") for dtype, work in self.by_dtype().items()]
        lines = table(rows, left=(0, 1, 5))
        if len(self.rows) > _FEW:
            lines.insert(1 + _FEW, f"and {len(self.rows) - _FEW} more")
        if self.kept_in_half:
            lines.append(
                f"backward pass: {100 * self.backward_half_share:.0f}% of its work in half, "
                f"{self.kept_in_half / 2**20:.3g} MiB kept in half"
            )
        if any(row.tensorfloat32 for row in self.rows):
            lines.append(
                f"{_MARK.strip()} for {100 * self.tensorfloat32_share:.0f}% of the work: a GPU "
                "multiplies it in TF32, a TPU in bfloat16. "
                '`jax.default_matmul_precision("highest")` around it makes it float32.'
            )
        lines += [f"{line}: a loop of unknown length, counted once" for line in self.loops]
        return "\n".join(lines)


def report_of(closed: ClosedJaxpr) -> PrecisionReport:
    """Reports the products of a jaxpr."""
    counter = Counter()
    products = counter.products(closed.jaxpr)
    rows = [dataclasses.replace(row, **work._asdict()) for row, work in products.items()]
    rows.sort(key=lambda row: (-row.flops, row.line, row.dtype))
    width = min(counter.largest[1:])
    return PrecisionReport(tuple(rows), tuple(counter.loops), width, counter.kept)


@says_how(
    "`mpx_pde.precision_report(mpx_pde.filter_grad(loss, scaling))(model, batch)`: the arguments "
    "of the gradient belong to what it returns."
)
def precision_report(fun: Callable) -> Callable[..., PrecisionReport]:
    """Reports the products of a function by dtype, by work and by line.

    The function is traced and not run. All products that its results depend on are counted, so the
    report of a gradient has the products of the backward pass. Inner functions, branches (the one
    with most work) and loops are entered. The steps of a `scan` count as often as they run, and a
    `shard_map` as often as it has devices. Products of float32 arrays that a GPU would multiply in
    TF32 are marked.

    ```python
    print(mpx.precision_report(mpx.filter_grad(loss, scaling))(model, batch))
    ```

    **Arguments:**

    - `fun`: any function of arrays and other values, such as a training step.

    **Returns:**

    A function of the arguments of `fun` that returns an [`mpx_pde.PrecisionReport`][]. It accepts
    [`jax.ShapeDtypeStruct`][]s in place of arrays.

    **Raises:** `TypeError` if `fun` cannot be called.
    """
    check_callable(fun, "precision_report")

    @ft.wraps(fun, updated=())
    def report(*args: Any, **kwargs: Any) -> PrecisionReport:
        with warnings.catch_warnings():
            # The report says the same.
            warnings.simplefilter("ignore", PrecisionWarning)
            closed = eqx.filter_make_jaxpr(fun)(*args, **kwargs)[0]
        return report_of(closed)

    return report


def traced(tree: Any) -> bool:
    """Returns whether a program is being traced, which is so if a leaf of `tree` is a tracer."""
    return any(isinstance(x, Tracer) for x in jtu.tree_leaves(tree))


def _castable(report: PrecisionReport) -> float:
    """Returns the share of the work that is done in half precision, among the work that has a
    half-precision form, if any has.
    """
    return _half_share(_of_numbers(report))


def _of_numbers(report: PrecisionReport) -> list[ProductRow]:
    """Returns the products of real numbers, or those of complex numbers if there are none."""
    real = [row for row in report.rows if row.real]
    return real or [row for row in report.rows if not row.of_integers]


def checked(
    fun: Callable,
    args: tuple,
    call: str,
    dtype: np.dtype,
    advice: str,
    without: tuple | None = None,
    least: float = 0.5,
    instead: str = "use_mixed_precision=False",
    look: Callable[[ClosedJaxpr, list, Callable], None] | None = None,
) -> Any:
    """Evaluates `fun(*args)`, and issues a [`mpx_pde.PrecisionWarning`][] with `advice` if less
    than `least` of the work of its products is done in half precision. It does not warn if
    `fun(*without)`, without the user's exceptions by name, does enough. `instead` requests float32.

    Traces `fun` once, as a call does, unless it warns or is in a `shard_map`. `look` is called with
    the results of [`trace_arrays`][].
    """
    try:
        closed, leaves, assemble = trace_arrays(fun, args, {})
    except jax.errors.JAXTypeError:
        # The function needs values. Some are known in a call: those that a `jit` closes over, and
        # those outside of the batch in a `vmap` that is run eagerly.
        return fun(*args)
    report = report_of(closed)
    if _castable(report) < least and (
        without is None or _castable(report_of(trace_arrays(fun, without, {})[0])) < least
    ):
        if advice is OF_CASTS and (arrays := arrays_closed_over(closed)):
            advice = f"{advice} {_OF_CLOSED_OVER.format(', '.join(arrays))}"
        warn_user(_warning(report, call, dtype, advice, instead))
    if look is not None:
        look(closed, leaves, assemble)
    # In a `shard_map`, JAX checks what varies over devices, and does not accept all that it has
    # traced itself. So the function is traced again there.
    if jax.sharding.get_abstract_mesh().manual_axes:
        return fun(*args)
    # Derivatives of layers leave values that nothing reads.
    jaxpr, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    values = jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))(*(x for _, x in leaves))
    # Values that are known during tracing are returned as numbers.
    return assemble(
        [
            x if isinstance(x, jax.Array) else jnp.asarray(x, aval_of(v).dtype)
            for x, v in zip(values, closed.jaxpr.outvars, strict=True)
        ]
    )


def arrays_closed_over(closed: ClosedJaxpr) -> list[str]:
    """Describes the arrays in float32 or wider that a program closes over. Numbers do not count."""
    arrays = [x for x in closed.consts if jnp.issubdtype(x.dtype, jnp.floating) and x.size > 1]
    wide = [x for x in arrays if x.dtype.itemsize >= 4]
    return list(dict.fromkeys(f"{x.dtype.name}{[*x.shape]}" for x in wide))


_LOW = ("DEFAULT", "TF32_TF32_F32", "BF16_BF16_F32", "BF16_BF16_BF16")
"""Names of JAX's presets that are not more precise than TF32, for float32 arrays."""


def tensorfloat32_by_default() -> bool:
    """Returns whether products of float32 arrays without a precision are taken in TF32 (on a GPU)
    or bfloat16 (on a TPU).
    """
    low = matmul_precision() in (None, "default", "high", "bfloat16", "tensorfloat32", *_LOW)
    return low and jax.default_backend() in ("gpu", "tpu")


def warn_of_tensorfloat32(call: str, what: str) -> None:
    """Issues a [`mpx_pde.PrecisionWarning`][] at the user's line that `what` is not computed in
    float32.
    """
    number = "bfloat16" if jax.default_backend() == "tpu" else "TF32"
    warn_user(
        f"`{call}`: {what} in float32 are multiplied in {number} here, which keeps 3 of float32's "
        "7 digits, or fewer. It has ruined trainings that end in small differences of large terms. "
        'Put `with jax.default_matmul_precision("highest"):` around it, or pass '
        "`forward='float32'`. If it is meant, filter `mpx.PrecisionWarning`."
    )


OF_CASTS = (
    "A product with one float32 operand is float32, and so is all that follows it. Wrap a layer "
    "that returns float32 (in `FullPrecision`, or because it gets float32 points) as "
    '`FullPrecision(layer, out_dtype="half")`. Or pass `autocast=True`, which decides by operation,'
    ' or `forward="float32"`: a network that takes no such wrapper, as in Flax, needs one of them.'
)

_OF_CLOSED_OVER = (
    "No cast reaches arrays that the loss closes over, here {}: pass data as arguments."
)

OF_FORWARDS = (
    "With `forward=` the forward pass stays in full, and of the backward pass the products of "
    "complex numbers, those for which the loss asks for a precision (as `FullPrecision` does), "
    "those with arrays of `keep_full`, and the product in which derivatives by `partials` and its "
    "kin meet the point."
)

OF_AUTOCAST = (
    "`autocast` leaves float64 as it is, and what is kept in float32 by `FullPrecision` or by a "
    "`precision` or `dtype` of its own."
)


LEAST_IN_FULL = 1 / 4
"""The share of the work that should be half if values are evaluated in full: three eighths of the
backward pass, which is two thirds of the work. Small networks also have their first layer in
float32."""

OF_JACOBIANS = (
    "The first layer, what meets a network's one output, and what `FullPrecision` holds stay in "
    "float32: a network of one hidden layer has nothing else, and gains nothing by it."
)


def _warning(report: PrecisionReport, call: str, dtype: np.dtype, advice: str, instead: str) -> str:
    full = next(row for row in _of_numbers(report) if not row.half)
    count = sum(row.count for row in _of_numbers(report))
    return (
        f"`{call}` was asked for {dtype.name}, but {100 * _castable(report):.0f}% of the work of "
        f"its {count} products is done in half precision. Most of the rest is {full.dtype}, at "
        f"{full.line}. {advice} `mpx.precision_report` lists all products. "
        f"If float32 is meant, pass `{instead}` or filter `mpx.PrecisionWarning`."
    )


def warn_user(text: str, category: type[Warning] = PrecisionWarning) -> None:
    """Issues a warning at the line of the user's code, from any depth below it."""
    frame = sys._getframe(1)
    while frame.f_back is not None and installed(frame.f_code.co_filename):
        frame = frame.f_back
    warnings.warn_explicit(
        text,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )

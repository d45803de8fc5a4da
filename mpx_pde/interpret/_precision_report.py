"""What a function multiplies in."""

import dataclasses
import re
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

from .._dtypes import matmul_precision
from ._jaxpr import aval_of, trace_arrays
from ._lines import INSIDE, installed
from ._products import Counter


_FEW = 20
_MARK = " (TF32)"


class PrecisionWarning(UserWarning):
    """A call that was asked for half precision multiplies (mostly) in full precision.

    To silence it, filter it as any warning:
    `warnings.simplefilter("ignore", mpx.PrecisionWarning)`.
    """


@dataclasses.dataclass(frozen=True)
class ProductRow:
    """Products of one line, one primitive and one pair of dtypes.

    **Attributes:**

    - `line`: `file:line` in the user's code.
    - `primitive`: `"dot_general"`, `"mixed_dot_general"`, `"conv_general_dilated"`, ….
    - `dtype`: what is multiplied in, such as `"float16"`; of split products the algorithm.
    - `out_dtype`: the dtype of the result.
    - `half`: whether halves are multiplied.
    - `count`: how often these products run.
    - `flops`: their floating-point operations.
    - `tensorfloat32`: whether they are products of float32 (or complex64) arrays that a GPU
        multiplies in TF32 and a TPU in bfloat16, since the program does not ask for the highest
        precision. A CPU multiplies them in float32.
    - `inside`: whether they are inside of a `jax.custom_vjp` that is called on the line: JAX does
        not know the lines of a backward rule.
    """

    line: str
    primitive: str
    dtype: str
    out_dtype: str
    half: bool
    count: int
    flops: int
    tensorfloat32: bool = False
    inside: bool = False

    @property
    def of_integers(self) -> bool:
        """Whether they are products of integers or bools."""
        return bool(re.search(r"int|bool", self.dtype))

    @property
    def real(self) -> bool:
        """Whether there is a half-precision form of them: neither of complex numbers nor of
        integers."""
        return not self.of_integers and "complex" not in self.dtype


def _half_share(rows: Iterable[ProductRow]) -> float:
    rows = list(rows)
    total = sum(row.flops for row in rows)
    return sum(row.flops for row in rows if row.half) / total if total else 1.0


@dataclasses.dataclass(frozen=True)
class PrecisionReport:
    """The matrix products and convolutions of a function. Prints as a table.

    **Attributes:**

    - `rows`: a `ProductRow` for each kind of product on each line, most work first.
    - `loops`: the lines of `while` loops, whose number of steps is not known: their products are
        counted once.
    """

    rows: tuple[ProductRow, ...]
    loops: tuple[str, ...]

    @property
    def flops(self) -> int:
        """The work of all products, in floating-point operations."""
        return sum(row.flops for row in self.rows)

    @property
    def half_share(self) -> float:
        """The part of the floating-point work, from 0 to 1, that is done in half precision; 1
        without any work.

        A product of complex numbers is four real ones, none of which is half."""
        return _half_share(row for row in self.rows if not row.of_integers)

    @property
    def tensorfloat32_share(self) -> float:
        """The part of the work, from 0 to 1, that is float32 on a CPU and TF32 on a GPU."""
        work = sum(row.flops for row in self.rows if row.tensorfloat32)
        return work / self.flops if work else 0.0

    def by_dtype(self) -> dict[str, tuple[int, int]]:
        """For each dtype that is multiplied in how many products there are, and their work."""
        out: dict[str, tuple[int, int]] = {}
        for row in self.rows:
            count, flops = out.get(row.dtype, (0, 0))
            out[row.dtype] = count + row.count, flops + row.flops
        return out

    def count(self, dtype: Any) -> int:
        """How many products are multiplied in a dtype."""
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
        return self.by_dtype().get(name, (0, 0))[0]

    def __str__(self) -> str:
        if not self.rows:
            return "no products"
        total = max(1, self.flops)
        lines = [f"{'multiplied in':18} {'result':10} {'products':>8} {'flops':>9} {'work':>5}  at"]
        for row in self.rows[:_FEW]:
            share = f"{100 * row.flops / total:.0f}%"
            dtype = row.dtype + _MARK * row.tensorfloat32
            lines.append(
                f"{dtype:18} {row.out_dtype:10} {row.count:8} {row.flops:9.2e} {share:>5}  "
                f"{row.line}{f' in {INSIDE}' * row.inside}"
            )
        if len(self.rows) > _FEW:
            lines.append(f"and {len(self.rows) - _FEW} more")
        for dtype, (count, flops) in self.by_dtype().items():
            share = f"{100 * flops / total:.0f}%"
            lines.append(f"{dtype:18} {'':10} {count:8} {flops:9.2e} {share:>5}  in total")
        if any(row.tensorfloat32 for row in self.rows):
            lines.append(
                f"{_MARK.strip()} for {100 * self.tensorfloat32_share:.0f}% of the work: a GPU "
                "multiplies it in TF32, a TPU in bfloat16. Float32 is what "
                '`jax.default_matmul_precision("highest")` around it makes of it.'
            )
        lines += [f"{line}: a loop of unknown length, counted once" for line in self.loops]
        return "\n".join(lines)


def report_of(closed: ClosedJaxpr) -> PrecisionReport:
    """The products of a jaxpr."""
    counter = Counter()
    products = counter.products(closed.jaxpr)
    rows = [
        ProductRow(
            p.line, p.primitive, p.dtype, p.out_dtype, p.half, *work, p.tensorfloat32, p.inside
        )
        for p, work in products.items()
    ]
    rows.sort(key=lambda row: (-row.flops, row.line, row.dtype))
    return PrecisionReport(tuple(rows), tuple(counter.loops))


class _Reporting(eqx.Module):
    _fun: Callable

    @property
    def __wrapped__(self):
        return self._fun

    def __call__(self, /, *args, **kwargs) -> PrecisionReport:
        with warnings.catch_warnings():
            # It says the same.
            warnings.simplefilter("ignore", PrecisionWarning)
            closed = eqx.filter_make_jaxpr(self._fun)(*args, **kwargs)[0]
        return report_of(closed)


def precision_report(fun: Callable) -> Callable[..., PrecisionReport]:
    """Tells what a function multiplies in: its products by dtype, by work and by line.

    The function is traced and not run. Whatever leads to its results is counted: give it a
    gradient, and the products of the backward pass are among them. Inner functions, branches (the
    one with most work) and loops are entered; the steps of a `scan` count as often as they run, and
    a `shard_map` as often as it has devices. Products of float32 arrays that a GPU would multiply
    in TF32 are marked.

    ```python
    print(mpx.precision_report(mpx.filter_grad(loss, scaling))(model, batch))
    ```

    **Arguments:**

    - `fun`: any function of arrays and whatever else, such as a training step.

    **Returns:**

    A function of the arguments of `fun` ([`jax.ShapeDtypeStruct`][] will do for arrays) that
    returns an [`mpx_pde.PrecisionReport`][].

    **Raises:** `TypeError` if `fun` cannot be called.
    """
    if not callable(fun):
        raise TypeError(
            f"`precision_report` takes a function or a callable module, but got {fun!r}. Pass the "
            "arguments to what it returns: `precision_report(fun)(*args)`."
        )
    return eqx.module_update_wrapper(_Reporting(fun))


def traced(tree: Any) -> bool:
    """Whether a program is being traced, whose values these are."""
    return any(isinstance(x, Tracer) for x in jtu.tree_leaves(tree))


def _castable(report: PrecisionReport) -> float:
    """The part of the work in half precision, of that which has a half-precision form."""
    return _half_share(row for row in report.rows if row.real)


def checked(
    fun: Callable,
    args: tuple,
    call: str,
    dtype: np.dtype,
    advice: str,
    without: tuple | None = None,
    least: float = 0.5,
    instead: str = "use_mixed_precision=False",
    look: Callable[[ClosedJaxpr], None] | None = None,
) -> Any:
    """`fun(*args)`, with a [`mpx_pde.PrecisionWarning`][] that ends in `advice` if it does less
    than `least` of its products' work in half precision, and `fun(*without)` does as well, the same
    without what the user excepts by name. `instead` is what asks for float32.

    Traces `fun` once, as calling it would; `look` is called with what was traced.
    """
    try:
        closed, leaves, assemble = trace_arrays(fun, args, {})
    except jax.errors.JAXTypeError:
        # It asks for values. Some are known here all the same: of what a `jit` closes over, or
        # outside of the batch in a `vmap` that is run eagerly.
        return fun(*args)
    report = report_of(closed)
    if _castable(report) < least and (
        without is None or _castable(report_of(trace_arrays(fun, without, {})[0])) < least
    ):
        warn_user(_warning(report, call, dtype, advice, instead))
    if look is not None:
        look(closed)
    # JAX checks in a `shard_map` what varies over devices, and does not take back all that it has
    # traced: there it is traced again.
    if jax.sharding.get_abstract_mesh().manual_axes:
        return fun(*args)
    values = jaxpr_as_fun(closed)(*(x for _, x in leaves))
    # What is known while tracing comes back as a number.
    return assemble(
        [
            x if isinstance(x, jax.Array) else jnp.asarray(x, aval_of(v).dtype)
            for x, v in zip(values, closed.jaxpr.outvars, strict=True)
        ]
    )


def tensorfloat32_by_default() -> bool:
    """Whether products of float32 arrays that name no precision are TF32 (on a GPU) or bfloat16 (on
    a TPU) here."""
    low = matmul_precision() in (None, "default", "high", "bfloat16", "tensorfloat32")
    return low and jax.default_backend() in ("gpu", "tpu")


def warn_of_tensorfloat32(call: str, what: str) -> None:
    """A [`mpx_pde.PrecisionWarning`][] that float32 is none in `what`, at the user's line."""
    number = "bfloat16" if jax.default_backend() == "tpu" else "TF32"
    warn_user(
        f"`{call}`: {what} in float32 are multiplied in {number} here, which keeps 3 of float32's "
        "7 digits, or fewer. Trainings that end in small differences of large terms have failed of "
        'that. Take `with jax.default_matmul_precision("highest"):` around it, or '
        "`forward='float32'`; if this is meant, filter `mpx.PrecisionWarning`."
    )


OF_CASTS = (
    "One float32 operand makes a product, and all that follows it, float32: where a layer in "
    "`FullPrecision` (or one that gets float32 points) hands its float32 result on, wrap it as "
    '`FullPrecision(layer, out_dtype="half")`; or pass `autocast=True`, which decides by operation.'
)

OF_FORWARDS = (
    "With `forward=` that is the forward pass, the loss, the first layer, and what `FullPrecision` "
    "holds: a small network has little else, and gains nothing by half precision."
)

OF_AUTOCAST = (
    "`autocast` leaves float64 as it is, and what is kept in float32 by `FullPrecision` or by a "
    "`precision` or `dtype` of its own."
)


LEAST_IN_FULL = 1 / 4
"""Of the work that should be half where values are evaluated in full: three eighths of the backward
pass, which is two thirds of it. Small networks have their first layer, in float32, beside that."""

OF_JACOBIANS = (
    "The first layer, what meets a network's one output, and what `FullPrecision` holds stay in "
    "float32: a network of one hidden layer has nothing else, and gains nothing by it."
)


def _warning(report: PrecisionReport, call: str, dtype: np.dtype, advice: str, instead: str) -> str:
    full = next(row for row in report.rows if not row.half and row.real)
    count = sum(row.count for row in report.rows if row.real)
    return (
        f"`{call}` was asked for {dtype.name}, but {100 * _castable(report):.0f}% of the work of "
        f"its {count} products is done in half precision. Most of the rest is {full.dtype}, at "
        f"{full.line}. {advice} `mpx.precision_report` lists all products. "
        f"If float32 is meant, pass `{instead}` or filter `mpx.PrecisionWarning`."
    )


def warn_user(text: str) -> None:
    """A warning with the line of the user's code, however deep below it this is called."""
    frame = sys._getframe(1)
    while frame.f_back is not None and installed(frame.f_code.co_filename):
        frame = frame.f_back
    warnings.warn_explicit(
        text,
        PrecisionWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )

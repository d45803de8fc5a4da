"""Reports the precisions that a function multiplies in."""

import dataclasses
import functools as ft
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from .._util._calls import public
from .._util._repr import table
from .._util._wrapper import check_callable, says_how
from ..program._lines import INSIDE
from ..program._products import Counter, ProductRow
from ..program._warnings import PrecisionWarning


_FEW = 20
_MARK = " (TF32)"


def half_share_of(rows: Iterable[ProductRow]) -> float:
    """Returns the share of the work of products that is done in half precision; 1 without any."""
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
        return half_share_of(row for row in self.rows if not row.of_integers)

    @property
    def backward_half_share(self) -> float:
        """Returns the share of the work of backward passes, from 0 to 1, that is done in half
        precision; 1 without any. Operations are those that JAX transposed: in a loss that takes
        gradients itself, these count too."""
        return half_share_of(row for row in self.rows if row.backward and not row.of_integers)

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

        def cells(dtype: str, out: str, count: int, flops: int, *place: str) -> tuple[str, ...]:
            work = f"{flops:.2e}", f"{100 * flops / total:.0f}%"
            return dtype, out, str(count), *work, *place

        rows: list[tuple[str, ...]] = [
            ("multiplied in", "result", "products", "flops", "work", "pass", "at")
        ]
        for row in self.rows[:_FEW]:
            dtype = row.dtype + _MARK * row.tensorfloat32
            where = row.line + f" in {INSIDE}" * row.inside
            direction = "backward" if row.backward else "forward"
            rows.append(cells(dtype, row.out_dtype, row.count, row.flops, direction, where))
        rows += [cells(dtype, "", *work, "", "in total") for dtype, work in self.by_dtype().items()]
        if not any(row.backward for row in self.rows):
            rows = [(*row[:5], row[6]) for row in rows]
        lines = table(rows, left=(0, 1, 5, 6))
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
    return PrecisionReport(tuple(rows), tuple(counter.loops), width, counter.kept_bytes)


@public
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
    check_callable(fun)

    @ft.wraps(fun, updated=())
    def report(*args: Any, **kwargs: Any) -> PrecisionReport:
        with warnings.catch_warnings():
            # The report says the same.
            warnings.simplefilter("ignore", PrecisionWarning)
            closed = eqx.filter_make_jaxpr(fun)(*args, **kwargs)[0]
        return report_of(closed)

    return report


def arrays_closed_over(closed: ClosedJaxpr) -> list[str]:
    """Describes the arrays in float32 or wider that a program closes over. Numbers do not count."""
    arrays = [x for x in closed.consts if jnp.issubdtype(x.dtype, jnp.floating) and x.size > 1]
    wide = [x for x in arrays if x.dtype.itemsize >= 4]
    return list(dict.fromkeys(f"{x.dtype.name}{[*x.shape]}" for x in wide))

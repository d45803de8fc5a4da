"""What was measured, in words, as a table, as a picture, and as data."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from ._evaluate import Site
from ._stats import EDGES, Counts, Loss


FORMATS = ("float16", "bfloat16")

_TILE = 8
_SHOWN = 30


@dataclasses.dataclass(frozen=True)
class Row:
    """What one equation computed, over all of its executions.

    **Attributes:**

    - `primitive`: the name of its primitive, or `"input"` for an argument of the function.
    - `line`: `file:line` in the user's code; for an input its place among the arguments.
    - `scope`: the `jax.named_scope`s and jitted functions around it, joined by slashes.
    - `dtype`, `shape`: as in the program.
    - `size`: how many values there were.
    - `exponents`: base-2 logarithms of the smallest and the largest magnitude, without zeros and
        infinities; `None` if there is nothing else.
    - `zeros`, `nonfinite`: fractions of the values.
    - `creates_nonfinite`: whether something that is not finite came out of finite operands.
    - `float16`, `bfloat16`: the fractions that the format loses: `overflow`, `subnormal`, `zero`.
    - `histogram`: fractions of the values by exponent, in the intervals between
        `RangeReport.edges`; what lies outside comes first and last.
    - `order`: its place in the program.
    """

    primitive: str
    line: str
    scope: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    exponents: tuple[float, float] | None
    zeros: float
    nonfinite: float
    creates_nonfinite: bool
    float16: Loss
    bfloat16: Loss
    histogram: tuple[float, ...]
    order: tuple[int, ...]

    def loss(self, name: str) -> Loss:
        return getattr(self, name)

    @property
    def where(self) -> str:
        """The line, and the scope in which autocast finds the operation."""
        return f"{self.line} `{self.primitive}`"


def make_row(site: Site, counts: Counts) -> Row:
    return Row(
        primitive=site.primitive,
        line=site.line,
        scope=site.scope,
        dtype=site.dtype,
        shape=site.shape,
        size=counts.size,
        exponents=counts.exponents(),
        zeros=counts.zeros,
        nonfinite=counts.nonfinite,
        creates_nonfinite=counts.sources > 0,
        float16=counts.loss("float16"),
        bfloat16=counts.loss("bfloat16"),
        histogram=tuple(float(x) for x in counts.histogram()),
        order=site.order,
    )


@dataclasses.dataclass(frozen=True)
class IdleProduct:
    """A product with a dimension that leaves a part of the tensor cores idle.

    **Attributes:**

    - `primitive`, `line`, `scope`: which one, and where.
    - `batch`, `rows`, `columns`, `contracted`: its sizes as a matrix product; of a convolution,
        positions, output channels, and window times input channels.
    """

    primitive: str
    line: str
    scope: str
    batch: int
    rows: int
    columns: int
    contracted: int

    def __str__(self) -> str:
        off = [
            f"{name} {size} → {-(-size // _TILE) * _TILE}"
            for name, size in (
                ("rows", self.rows),
                ("columns", self.columns),
                ("contracted", self.contracted),
            )
            if size % _TILE
        ]
        return f"{self.line} `{self.primitive}`: {', '.join(off)}"


def idle_product(site: Site) -> IdleProduct | None:
    if site.product is None or all(n % _TILE == 0 for n in site.product[1:]):
        return None
    return IdleProduct(site.primitive, site.line, site.scope, *site.product)


def _percent(fraction: float) -> str:
    if fraction == 0:
        return "·"
    return "<0.1%" if fraction < 1e-3 else f"{100 * fraction:.1f}%"


def _span(row: Row) -> str:
    if row.exponents is None:
        return "zero"
    low, high = row.exponents
    return f"2^{low:.1f} … 2^{high:.1f}"


_COLUMNS = (
    "where",
    "operation",
    "shape",
    "range",
    "float16 overflow",
    "subnormal",
    "to zero",
    "bfloat16 lost",
    "not finite",
)


def _cells(row: Row) -> tuple[str, ...]:
    nonfinite = _percent(row.nonfinite) + (" (first here)" if row.creates_nonfinite else "")
    half = row.float16
    return (
        row.line,
        row.primitive,
        "×".join(map(str, row.shape)) or "scalar",
        _span(row),
        _percent(half.overflow),
        _percent(half.subnormal),
        _percent(half.zero),
        _percent(row.bfloat16.total),
        nonfinite,
    )


@dataclasses.dataclass(frozen=True)
class RangeReport:
    """The ranges of a function's values in one float32 run. Prints as a table, worst first.

    **Attributes:**

    - `rows`: a `Row` for each input and each floating-point result of an equation, in program
        order. Equations that only move values are left out.
    - `idle`: matrix products and convolutions with sizes that are no multiples of 8.
    - `result`: what the function returned in float32.
    - `edges`: the exponents between the intervals of the histograms.
    """

    rows: tuple[Row, ...]
    idle: tuple[IdleProduct, ...]
    result: Any = dataclasses.field(repr=False, compare=False)
    edges: tuple[int, ...] = EDGES

    @property
    def first_nonfinite(self) -> Row | None:
        """The first equation that made something not finite out of finite operands."""
        return next((row for row in self.rows if row.creates_nonfinite), None)

    def first_overflow(self, dtype: str = "float16") -> Row | None:
        """The first row with values that are finite in float32 and infinite in `dtype`."""
        return next((row for row in self.rows if row.loss(dtype).overflow), None)

    def worst(self, n: int | None = None, dtype: str = "float16") -> tuple[Row, ...]:
        """The `n` rows that suffer most in `dtype`: what is not finite, then what overflows, then
        what is lost to zero and to subnormals; all rows without an `n`."""

        def badness(row: Row):
            loss = row.loss(dtype)
            lost = loss.zero + loss.subnormal
            return -row.creates_nonfinite, -loss.overflow, -lost, row.order

        return tuple(sorted(self.rows, key=badness)[:n])

    def to_dict(self) -> dict[str, Any]:
        """The report without `result`, in plain types that `json` takes."""
        out = {
            "edges": self.edges,
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "idle": [dataclasses.asdict(x) for x in self.idle],
        }
        return json.loads(json.dumps(out))

    def _notes(self) -> list[str]:
        if not self.idle:
            return []
        lines = [
            f"{len(self.idle)} products have sizes that are no multiples of {_TILE}, which leaves "
            "a part of the tensor cores idle:"
        ]
        lines += [f"  {x}" for x in self.idle[:_SHOWN]]
        return lines

    def __str__(self) -> str:
        table = [_COLUMNS, *(_cells(row) for row in self.worst(_SHOWN))]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(cells, widths, strict=True)).rstrip()
            for cells in table
        ]
        if len(self.rows) > _SHOWN:
            lines.append(f"… and {len(self.rows) - _SHOWN} more, none worse")
        return "\n".join([*lines, *self._notes()])

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table

        table = Table(title="Ranges, worst first", title_justify="left")
        for i, name in enumerate(_COLUMNS):
            table.add_column(name, justify="right" if i > 3 else "left", overflow="fold")
        for row in self.worst(_SHOWN):
            bad = row.creates_nonfinite or row.float16.overflow > 0
            table.add_row(*_cells(row), style="red" if bad else None)
        return Group(table, *self._notes())

    def plot(self, path: Any, n: int = 40) -> None:
        """Draws the range of each of the `n` worst rows, in program order, beside those of the
        formats. Needs matplotlib.

        **Arguments:**

        - `path`: where to; the ending says in which format.
        - `n`: how many rows at most.
        """
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        rows = sorted(self.worst(n), key=lambda row: row.order)
        figure = Figure(figsize=(10, 1.5 + 0.22 * len(rows)), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        axes.axvspan(-14, 16, color="tab:green", alpha=0.15, label="float16, normal")
        axes.axvspan(-24, -14, color="tab:orange", alpha=0.15, label="float16, subnormal")
        densest = max((max(row.histogram) for row in rows), default=1.0) or 1.0
        edges = np.array([-150, *self.edges, 128])
        for y, row in enumerate(rows):
            if row.exponents is None:
                continue
            low, high = row.exponents
            axes.plot([low, high], [y, y], color="0.6", lw=1)
            for left, right, share in zip(edges[:-1], edges[1:], row.histogram, strict=True):
                left, right = max(left, low), min(right, high)
                if share and left < right:
                    opacity = 0.15 + 0.85 * min(share / densest, 1.0)
                    axes.plot([left, right], [y, y], color="tab:blue", lw=6, alpha=opacity)
            if row.creates_nonfinite or row.float16.overflow:
                axes.plot(high, y, ">", color="tab:red")
        axes.set_yticks(range(len(rows)), [f"{row.line}  {row.primitive}" for row in rows])
        axes.tick_params(axis="y", labelsize=7)
        axes.invert_yaxis()
        axes.set_xlabel("exponent (base 2)")
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.1), ncols=2, fontsize=7)
        figure.savefig(Path(path))

"""Reports of measured ranges: a table, a picture, and data."""

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .._util._calls import named
from .._util._repr import table
from ..precision._dtypes import check_choice
from ..program._lines import INSIDE, is_ours
from ._meter import Measured
from ._stats import EDGES, Counts, Lost, percent
from ._sums import UNITS, LongSum


_TILE = 8
_SHOWN = 30

_KEPT = 1 / 16
"""The error of a result, in units of its own size, from which on cancellation is told."""


@dataclasses.dataclass(frozen=True)
class Row:
    """Statistics of the values that one equation computed, over all of its executions.

    **Attributes:**

    - `primitive`: the name of its primitive; `"input"` for an argument of the function,
        `"constant"` for an array that it closes over, `"operand of …"` for an operand that a
        product rounds to half precision itself, and the name of the layer in a row that stands for
        many operations.
    - `line`: `file:line` in the user's code; for an input its place among the arguments.
    - `layer`: the function or class of this library that the user's line calls, such as
        `"CoordinateMLP"`; empty for the user's own operations.
    - `scope`: the `jax.named_scope`s and jitted functions around it, joined by slashes.
    - `dtype`, `shape`: as in the program.
    - `half`: whether the program has it in half precision.
    - `backward`: whether it belongs to the backward pass of a derivative.
    - `inside`: whether it is inside of a `jax.custom_vjp` that is called on the line. JAX does not
        know the lines of a backward rule.
    - `operations`: the number of operations that the row stands for.
    - `size`: the number of values.
    - `exponents`: base-2 logarithms of the smallest and the largest magnitude, without zeros and
        infinities; `None` if there are no other values.
    - `zeros`, `nonfinite`, `nans`: fractions of the values; infinities and NaNs are not finite.
    - `creates_nonfinite`: whether finite operands gave a result that is not finite.
    - `float16`, `bfloat16`: the fractions that the format loses: `overflow`, `subnormal`, `zero`.
        Where the program uses float32 on purpose, they are not actually lost.
    - `histogram`: fractions of the values by exponent, in the intervals between
        `RangeReport.edges`. The first and the last entry count the values outside.
    - `order`: its place in the program.
    - `first`: the time at which it first created something not finite (`"nonfinite"`) or would have
        overflowed (`"float16"`, `"bfloat16"`): its place with the steps of the loops around it.
    - `rounded`: the half type to which the program rounds it, or what it is computed from; the
        coarser of two, and empty if there is none.
    - `cancels`: for a sum, difference or product, by how many powers of two the terms are larger
        than what is left of them (root mean squares). Roundings of the terms are so much larger
        relative to the result.
    """

    primitive: str
    line: str
    layer: str
    scope: str
    dtype: str
    shape: tuple[int, ...]
    half: bool
    backward: bool
    size: int
    exponents: tuple[float, float] | None
    zeros: float
    nonfinite: float
    nans: float
    creates_nonfinite: bool
    float16: Lost
    bfloat16: Lost
    histogram: tuple[float, ...]
    order: tuple[int, ...]
    first: Mapping[str, tuple[int, ...]] = dataclasses.field(hash=False)
    operations: int = 1
    inside: bool = False
    cast_of: str = ""
    rounded: str = ""
    cancels: float = 0.0

    def loss(self, name: str) -> Lost:
        with named("RangeReport"):
            return getattr(self, check_choice(name, ("float16", "bfloat16"), "dtype"))

    @property
    def where(self) -> str:
        """Describes the line, the operation, and the part of this library around it."""
        inside = f" in `{self.layer}`" if self.layer and self.layer != self.primitive else ""
        which = "in the backward rule of" if self.backward else "in"
        rule = f" {which} {INSIDE}" if self.inside else ""
        return f"{self.line} `{self.primitive}`{inside}{rule}"


def cancellation(row: Row) -> str:
    """Describes a sum in which rounded values cancel."""
    rounded = row.rounded or "half precision"
    return (
        f"{row.where}: values that were rounded to {rounded} cancel, and are "
        f"{2**row.cancels:,.0f} times as large as what is left of them"
    )


_OF_VALUE = ("primitive", "scope", "dtype", "shape", "half", "order", "rounded")
_OF_SITE = ("line", "layer", "inside", "cast_of")


def make_row(value: Measured, counts: Counts) -> Row:
    place = {name: getattr(value, name) for name in _OF_VALUE}
    site = {name: getattr(value.site, name) for name in _OF_SITE}
    return Row(**place, **site, backward=bool(value.site.backward), **counts.summary())


def _first(rows: Iterable[Row], what: str) -> Row | None:
    """Returns the row in which the event `what` happened first, in the order of loop steps."""
    return min((x for x in rows if what in x.first), key=lambda x: x.first[what], default=None)


def fold(measured: Iterable[tuple[Measured, Counts]]) -> tuple[Row, ...]:
    """Makes a row for each operation of the user. All operations that a function or layer of this
    library does for one of the user's lines share a row, for each dtype and pass.
    """

    def group(item):
        value, site = item[0], item[0].site
        alone = () if is_ours(site.layer) else value.order
        return site.line, site.layer, bool(site.backward), value.dtype, alone

    measured = sorted(measured, key=group)
    rows = []
    for _, items in itertools.groupby(measured, group):
        items = list(items)
        if len(items) == 1:
            rows.append(make_row(*items[0]))
            continue
        first = min((x for x, _ in items), key=lambda x: x.order)
        total = sum((counts for _, counts in items), Counts())
        value = dataclasses.replace(first, primitive=first.site.layer, scope="", shape=())
        rows.append(dataclasses.replace(make_row(value, total), operations=len(items)))
    return tuple(sorted(rows, key=lambda row: row.order))


@dataclasses.dataclass(frozen=True)
class IdleProduct:
    """A product with a dimension that leaves a part of the tensor cores idle.

    **Attributes:**

    - `primitive`, `line`, `layer`, `scope`: the operation and its place, as in a `Row`.
    - `batch`, `rows`, `columns`, `contracted`: its sizes as a matrix product. For a convolution,
        rows are positions, columns output channels, and the contracted size is window times input
        channels.
    """

    primitive: str
    line: str
    layer: str
    scope: str
    batch: int
    rows: int
    columns: int
    contracted: int

    def __str__(self) -> str:
        sizes = {"rows": self.rows, "columns": self.columns, "contracted": self.contracted}
        off = [f"{k} {n} → {-(-n // _TILE) * _TILE}" for k, n in sizes.items() if n % _TILE]
        inside = f" in `{self.layer}`" if self.layer else ""
        return f"{self.line} `{self.primitive}`{inside}: {', '.join(off)}"


def idle_product(value: Measured) -> IdleProduct | None:
    if value.product is None or all(n % _TILE == 0 for n in value.product[1:]):
        return None
    site = value.site
    return IdleProduct(value.primitive, site.line, site.layer, value.scope, *value.product)


def _cell(fraction: float) -> str:
    return "·" if fraction == 0 else percent(fraction)


def _cells(row: Row, at_risk: bool) -> dict[str, str]:
    """Returns the cells of a row by the names of their columns."""
    alone, low_high = row.operations == 1, row.exponents
    named = f"{row.primitive} in {row.layer}" if row.layer and alone else row.primitive
    shape = "×".join(map(str, row.shape)) or "scalar"
    lost = lambda fraction: _cell(fraction) if at_risk else ""
    nothing = "zero" if row.zeros == 1 else "not finite"
    return {
        "where": row.line,
        "operation": f"{named} in a custom_vjp" if row.inside else named,
        "shape": shape if alone else f"{row.operations} operations",
        "held in": row.dtype,
        "range": "2^{:.1f} … 2^{:.1f}".format(*low_high) if low_high else nothing,
        "float16 overflow": lost(row.float16.overflow),
        "subnormal": lost(row.float16.subnormal),
        "to zero": lost(row.float16.zero),
        "bfloat16 lost": lost(row.bfloat16.total),
        "not finite": _cell(row.nonfinite) + " (first here)" * row.creates_nonfinite,
    }


@dataclasses.dataclass(frozen=True)
class RangeReport:
    """The ranges of a function's values in one float32 run. Prints as a table, worst first.

    **Attributes:**

    - `rows`: a `Row` for each input, each array that the function closes over, and each
        floating-point result of an equation, in program order. Equations that only move values
        are left out.
    - `folded`: the same rows, with all operations that a function or layer of this library does for
        one line of the user in one row. These are the rows that are printed.
    - `mixed`: whether the function itself declares what is in half precision. Then only those
        values can overflow. Otherwise it is a float32 function, and every value is treated as if it
        were half precision.
    - `scaled`: whether the function multiplies its loss by a scale; `None` if that is not known.
    - `room`: by how many powers of two that scale can fall; `None` if that is not known.
    - `autocast`: whether [`mpx_pde.autocast`][] chose what is in half precision.
    - `idle`: matrix products and convolutions with sizes that are not multiples of 8.
    - `sums`: sums that are added up term by term in half precision, as a `LongSum` each, longest
        first. From 2,048 equal terms on they stand still in float16, and from 256 on in bfloat16.
    - `result`: the result of the function in float32.
    - `edges`: the exponents between the intervals of the histograms.
    """

    rows: tuple[Row, ...]
    folded: tuple[Row, ...]
    mixed: bool
    idle: tuple[IdleProduct, ...]
    result: Any = dataclasses.field(repr=False, compare=False)
    edges: tuple[int, ...] = EDGES
    scaled: bool | None = None
    room: int | None = None
    autocast: bool = False
    sums: tuple[LongSum, ...] = ()

    def at_risk(self, row: Row) -> bool:
        """Returns whether a row is, or would be, in half precision."""
        return row.half or not self.mixed

    @property
    def first_nonfinite(self) -> Row | None:
        """Returns the first equation with finite operands and a result that is not finite."""
        return _first(self.rows, "nonfinite")

    def first_overflow(self, dtype: str = "float16") -> Row | None:
        """Returns the first row with values that are finite in float32 and infinite in `dtype`,
        among those that are at risk.
        """
        rows = filter(self.at_risk, self.rows)
        return _first((row for row in rows if row.loss(dtype).overflow), dtype)

    def stagnating(self, dtype: str = "float16") -> tuple[LongSum, ...]:
        """Returns the sums with so many terms that they may stand still in `dtype`."""
        with named("RangeReport"):
            check_choice(dtype, UNITS, "dtype")
        return tuple(x for x in self.sums if x.stagnates(dtype))

    def cancelling(self, dtype: str | None = None) -> tuple[Row, ...]:
        """Returns the sums, differences and products of the forward pass in which values that were
        rounded cancel, such as 300.2 - 300, worst first. What is left of them is off by a sixteenth
        and more.

        **Arguments:**

        - `dtype`: the half type to which they are rounded, by default that of the program, or
            float16 if nothing in it is half.
        """
        with named("RangeReport"):
            if dtype is not None:
                check_choice(dtype, UNITS, "dtype")

        def cancels(row: Row) -> bool:
            at_risk = row.rounded or not self.mixed
            units = UNITS[dtype or row.rounded or "float16"]
            return bool(at_risk) and not row.backward and 2**row.cancels >= units * _KEPT

        return tuple(sorted(filter(cancels, self.rows), key=lambda row: -row.cancels))

    def worst(self, n: int | None = None, dtype: str = "float16") -> tuple[Row, ...]:
        """Returns the `n` folded rows that suffer most in `dtype`, or all of them if `n` is `None`.
        Rows that are not finite come first. The others are sorted by overflow, then by loss to zero
        and to subnormals. Rows that are not at risk come last.
        """

        def badness(row: Row):
            at_risk = self.at_risk(row)
            loss = row.loss(dtype) if at_risk else Lost(0.0, 0.0, 0.0)
            lost = loss.zero + loss.subnormal
            return -row.creates_nonfinite, -loss.overflow, -lost, not at_risk, row.order

        return tuple(sorted(self.folded, key=badness)[:n])

    def to_dict(self) -> dict[str, Any]:
        """Returns the report without `result`, in plain types that `json` takes."""
        out = dataclasses.asdict(dataclasses.replace(self, result=None))
        del out["result"]
        return json.loads(json.dumps(out))

    def _notes(self) -> list[str]:
        lines = [
            f"may stand still: {x}" for x in self.sums if x.stagnates(None if x.half else "float16")
        ]
        lines += [f"loses digits: {cancellation(x)}" for x in self.cancelling()][:_SHOWN]
        if not self.idle:
            return lines
        lines += [
            f"{len(self.idle)} products have sizes that are no multiples of {_TILE}, which leaves "
            "a part of the tensor cores idle:"
        ]
        times = Counter(map(str, self.idle))
        lines += [f"  {x}" + (f" ({n} times)" if n > 1 else "") for x, n in times.items()][:_SHOWN]
        return lines

    def __str__(self) -> str:
        if not self.rows:
            return "no floating-point values"
        cells = [_cells(row, self.at_risk(row)) for row in self.worst(_SHOWN)]
        lines = table([[*cells[0]], *([*x.values()] for x in cells)], left=range(len(cells[0])))
        if len(self.folded) > _SHOWN:
            lines.append(f"… and {len(self.folded) - _SHOWN} more, none worse")
        return "\n".join([*lines, *self._notes()])

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table

        ranges = Table(title="Ranges, worst first", title_justify="left")
        shown = [(row, _cells(row, self.at_risk(row))) for row in self.worst(_SHOWN)]
        for i, name in enumerate(shown[0][1] if shown else ()):
            ranges.add_column(name, justify="right" if i > 4 else "left", overflow="fold")
        for row, cells in shown:
            bad = row.creates_nonfinite or (self.at_risk(row) and row.float16.overflow > 0)
            ranges.add_row(*cells.values(), style="red" if bad else None)
        return Group(ranges, *self._notes())

    def plot(self, path: Any, n: int = 40) -> None:
        """Draws the range of each of the `n` worst rows, in program order, next to the ranges of
        the formats. Needs matplotlib.

        **Arguments:**

        - `path`: the file to write; its suffix selects the format.
        - `n`: the largest number of rows to draw.
        """
        from matplotlib.figure import Figure

        rows = sorted(self.worst(n), key=lambda row: row.order)
        figure = Figure(figsize=(10, 1.5 + 0.22 * len(rows)), layout="constrained")
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
            if row.creates_nonfinite or (self.at_risk(row) and row.float16.overflow):
                axes.plot(high, y, ">", color="tab:red")
        axes.set_yticks(range(len(rows)), [f"{row.line}  {row.primitive}" for row in rows])
        axes.tick_params(axis="y", labelsize=7)
        axes.invert_yaxis()
        axes.set_xlabel("exponent (base 2)")
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.1), ncols=2, fontsize=7)
        figure.savefig(Path(path))

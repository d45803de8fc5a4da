"""Formats the JSON file of a benchmark as Markdown."""

import csv
import io
import json
import re
import statistics
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
NOT_RUN = "compiled for an H100, not run"
NONE = "–"

Record = dict[str, Any]


Result = dict[str, Any]
"""The content of a results file."""


def path_of(name: str) -> Path:
    """Returns the file with this name; if the name has no device, the file of a CPU."""
    path = RESULTS / f"{name}.json"
    return path if path.exists() else RESULTS / f"{name}-cpu.json"


def load(name: str) -> Result:
    return json.loads(path_of(name).read_text(encoding="utf-8"))


_NUMBER = re.compile(r"[\d–].*|not measured.*|never|none")


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table whose columns of numbers are aligned to the right."""
    cells = list(rows)
    right = [cells and all(map(_NUMBER.fullmatch, column)) for column in zip(*cells, strict=True)]
    lines = [columns, ["--:" if r else "---" for r in right or [False] * len(columns)], *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def source(data: Mapping[str, Any]) -> str:
    """Describes where a result comes from."""
    env = data["environment"]
    return (
        f"{env['device']}, {env['cpu_count']} cores, JAX {env['jax']}, Python {env['python']}, "
        f"{taken(data)}; `{env['command']}`."
    )


def taken(data: Mapping[str, Any]) -> str:
    """Returns the commit of the code, or the first and the last of several."""
    first, *others = data["environment"]["commits"]
    return f"commits {first} to {others[-1]}" if others else f"commit {first}"


# --- Declared tables -------------------------------------------------------------------------

UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "ms": 1e-3, "MB": 1e6, "GB": 1e9, "G": 1e9}


class _Unknown(Exception):
    """A field that exists but is empty."""


class _Cells(string.Formatter):
    """Formats a record's fields. Dots reach nested fields, and `a/b` is a ratio. A unit may precede
    a number's format, as in `{temp_bytes:GiB.2f}`."""

    def get_field(self, field_name: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
        values = []
        for name in field_name.split("/"):
            value: Any = kwargs
            for key in name.split("."):
                if value is None:
                    raise _Unknown
                value = value[key]
            values.append(value)
        if None in values or (len(values) > 1 and not all(values)):
            raise _Unknown
        return values[0] if len(values) == 1 else values[0] / values[1], field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        for unit, size in UNITS.items():
            if format_spec.startswith(unit):
                return format(value / size, format_spec.removeprefix(unit))
        return format(value, format_spec)


def cell(record: Mapping[str, Any], spec: str) -> str:
    """Formats fields by the first of the options between ` || ` that applies.

    After an empty field any option may follow, after a missing field only one that has fields.
    """
    gone = False
    for option in spec.split(" || "):
        try:
            if "{" in option or not gone:
                return _Cells().vformat(option, (), record)
        except KeyError:
            gone = True
        except _Unknown:
            pass
    return NONE


def text(value: Any) -> str:
    """Returns a value of a record as text; of a series, the last entry."""
    if value is None:
        return NONE
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {text(x)}" for key, x in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(value) if all(isinstance(x, str) for x in value) else text(value[-1])
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Table:
    """A table on a page.

    **Attributes:**

    - `file`: the name of the results, without their platform.
    - `rows`: the section whose records are the rows, or a function of the results.
    - `columns`: one line per column, with its title and, after two spaces, its `cell`; a list of
        such lines; or a function of the results that returns one. By default each field is a
        column.
    - `note`: the text below the table: a `cell` of the first row.
    - `told`: whether the text says where the results come from.
    """

    file: str
    rows: str | Callable[[Result], Iterable[Record]]
    columns: str | Sequence[str] | Callable[[Result], Iterable[str]] = ()
    note: str = ""
    told: bool = True

    def __call__(self, data: Result | None = None) -> str:
        """Returns the table and the text below it, for the recorded results or for `data`."""
        data = load(self.file) if data is None else data
        rows, titles, cells = self._cells(data)
        table = markdown(titles, cells)
        note = cell(rows[0], self.note) if rows else ""
        below = " ".join(filter(None, (note, source(data) if self.told else "")))
        return f"{table}\n\n{below}\n" if below else f"{table}\n"

    def csv(self) -> str:
        """Returns the table of the recorded results as the text of a CSV file."""
        _, titles, cells = self._cells(load(self.file))
        out = io.StringIO()
        plain = ([re.sub(r"\*\*|`", "", text) for text in line] for line in (titles, *cells))
        csv.writer(out, lineterminator="\n").writerows(plain)
        return out.getvalue()

    def _cells(self, data: Result) -> tuple[list[Record], list[str], list[list[str]]]:
        """Returns the records, the titles of the columns, and the cells row by row."""
        given = self.columns(data) if callable(self.columns) else self.columns
        lines = given.splitlines() if isinstance(given, str) else given
        columns = [re.split(r"  +", line.strip(" "), maxsplit=1) for line in lines if line.strip()]
        rows = list(self.rows(data) if callable(self.rows) else data[self.rows])
        if not columns:
            names = list(dict.fromkeys(name for row in rows for name in row))
            return rows, names, [[text(row.get(name)) for name in names] for row in rows]
        cells = [[cell(row, column[-1]) for column in columns] for row in rows]
        return rows, [column[0].strip() for column in columns], cells


def groups(records: Iterable[Record], *keys: str) -> dict[Any, list[Record]]:
    """Groups the records by their value at one key, or at several."""
    out: dict[Any, list[Record]] = {}
    for record in records:
        found = tuple(record[key] for key in keys)
        out.setdefault(found if len(keys) > 1 else found[0], []).append(record)
    return out


def median(records: Iterable[Record], key: str) -> float:
    return statistics.median(record[key] for record in records)


def listed(records: Iterable[Record], key: str) -> str:
    """Lists the distinct values that the records have at a key."""
    return ", ".join(dict.fromkeys(str(record[key]) for record in records))

"""The table of gradients, memory and skipped steps of other people's programs, by mode."""

import statistics
from collections.abc import Iterator

from ._format import Record, Result, Table, groups


NAMES = {"forward": '`forward="float32"`', "autocast": "`autocast=True`", "cast": "cast"}


def _modes(data: Result) -> Iterator[Record]:
    programs = len({row["program"] for row in data["programs"]})
    for (mode, half), rows in groups(data["programs"], "mode", "half").items():
        taken = [row for row in rows if row["gradient"] is not None]
        worst = max(taken, key=lambda row: row["gradient"])
        kept = [row["kept"] for row in rows if row["kept"] is not None]
        yield {
            "mode": f"{NAMES[mode]}, {half}",
            "median": statistics.median(row["gradient"] for row in taken),
            "worst": worst,
            "share": statistics.median(row["share"] for row in rows if row["share"] is not None),
            "kept": statistics.median(kept) if kept else None,
            "programs": programs,
            "skipped": sum(row["skipped"] for row in rows) / len(rows),
        }


modes = Table(
    "clients",
    _modes,
    """
    mode  {mode}
    gradient error, median  {median:.1e}
    worst  {worst.gradient:.1e} ({worst.program})
    backward products in half, median  {share:.0%}
    kept, relative to float32, median  {kept:.2f}
    skipped of six first steps  {skipped:.1f}
    """,
    note="{programs} of 34 programs so far.",
)

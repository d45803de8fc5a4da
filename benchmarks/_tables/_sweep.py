"""The tables of the sweep over JAX's functions: outcomes by mode and format, and what is silent."""

from collections import Counter
from collections.abc import Iterator

from ._format import Record, Result, Table


NAMES = {
    "cast": "cast",
    "autocast": "`autocast=True`",
    "forward": '`forward="float32"`',
    "partials": "`partials`",
}


def _counts(data: Result) -> Iterator[Record]:
    before = Counter((r["mode"], r["half"]) for r in data["before"] if r["status"] == "silent")
    known = {key for row in data["functions"] for key in row} - {"function", "names"}
    for mode, name in NAMES.items():
        for half in ("float16", "bfloat16"):
            if (key := f"{mode} {half}") not in known:
                continue
            found = Counter("".join(row.get(key, "") for row in data["functions"]))
            yield {
                "mode": f"{name}, {half}",
                "calls": sum(found.values()) - found["-"],
                "right": found["r"],
                "told": found["t"] + found["i"] + found["e"],
                "silent": found["s"],
                "before": found["s"] + before[mode, half],
                "functions": len(data["functions"]),
                "all": data["programs"][0]["all"],
            }


counts = Table(
    "sweep",
    _counts,
    """
    mode  {mode}
    calls  {calls}
    right  {right}
    told  {told}
    silently wrong  {silent}
    silently wrong before these warnings  {before}
    """,
    note="{functions} of {all} programs so far, each in up to six sizes.",
)


def _silent(data: Result) -> Iterator[Record]:
    for now, rows in (("silent", data["found"]), ("told", data["before"])):
        for row in rows:
            if row["status"] == "silent":
                yield {**row, "now": now}


silent = Table(
    "sweep",
    _silent,
    """
    function  {function}
    mode  {mode}
    format  {half}
    size  {size}
    off  {what}
    error in roundings  {error:.2g}
    now  {now}
    """,
)

"""The table of outcomes of the sweep, by mode and format."""

from collections.abc import Iterator

from ._format import Record, Result, Table


NAMES = {
    "cast": "cast",
    "autocast": "`autocast=True`",
    "forward": '`forward="float32"`',
    "partials": "`partials`",
}


def _counts(data: Result) -> Iterator[Record]:
    for row in data["counts"]:
        told = row["told"] + row["infinite"] + row["raised"]
        named = {"named": f"{NAMES[row['mode']]}, {row['half']}", "said": told}
        yield {**row, **named}


counts = Table(
    "sweep",
    _counts,
    """
    mode  {named}
    calls  {calls}
    right  {right}
    told  {said}
    silently wrong  {silent}
    """,
)

"""How long each rival trains until an error is reached."""

import statistics
from collections.abc import Iterator

from .._trainings import first_below
from ._format import Record, Result, Table, groups, listed, median


def _reached(curves: list[Record], levels: dict[int, float]) -> str:
    """Median seconds and steps to the level of each seed; "never" if a seed did not get there."""
    found = [
        [first_below(c["errors"], c[x], levels[c["seed"]]) for x in ("seconds", "steps")]
        for c in curves
    ]
    if any(None in pair for pair in found):
        return "never"
    seconds, steps = (statistics.median(x) for x in zip(*found, strict=True))
    told = f"{seconds:.1f} s" if curves[0]["time_measured"] else "not measured"
    return f"{told} ({steps:,.0f})"


def _rows(data: Result) -> Iterator[Record]:
    size = dict(data["size"][0])
    factors = size.pop("factors")  # errors to be reached, over the final one of float32
    rivals = groups(data["curves"], "rival")
    float32 = next(curves for name, curves in rivals.items() if name.startswith("float32"))
    final = {c["seed"]: c["errors"][-1] for c in float32}
    note = {
        "seeds": listed(float32, "seed"),
        "size": ", ".join(f"{k} {v:,}" for k, v in size.items() if k != "name"),
    }
    for name, curves in rivals.items():
        row = {"rival": name, **note}
        if "failed" not in curves[0]:
            ms = statistics.median(1000 * c["seconds"][-1] / c["steps"][-1] for c in curves)
            row |= {
                "error": statistics.median(c["errors"][-1] for c in curves),
                "ms": ms if curves[0]["time_measured"] else None,
                "start": median(curves, "start_seconds"),
            }
            for i, f in enumerate(factors):
                row[f"level {i}"] = _reached(curves, {s: f * e for s, e in final.items()})
        yield {**curves[0], **row}


def _columns(data: Result) -> list[str]:
    factors = data["size"][0]["factors"]
    return [
        "training     {rival}",
        "final error  {error:.2e} || fails: {failed}",
        "ms a step    {ms:.2f} || not measured",
        "start, s     {start:.1f}",
        *(f"to {f:g} × float32's error  {{level {i}}}" for i, f in enumerate(factors)),
    ]


def time_to_error(problem: str) -> Table:
    return Table(f"time_to_error-{problem}", _rows, _columns, "Seeds {seeds}; {size}.")

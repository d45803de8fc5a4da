"""How long each rival trains until an error is reached."""

import statistics
from typing import Any

from .._trainings import first_below
from ._format import load, markdown, source


BASELINE = "float32"  # what its name begins with


def _by_rival(data: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    out: dict[str, list[dict[str, Any]]] = {}
    for curve in data["curves"]:
        out.setdefault(curve["rival"], []).append(curve)
    return out


def _reached(curves: list[dict[str, Any]], levels: dict[int, float]) -> str:
    """Median seconds and steps to the level of each seed; "never" if a seed did not get there."""
    found = []
    for c in curves:
        steps, seconds = (
            first_below(c["errors"], c[x], levels[c["seed"]]) for x in ("steps", "seconds")
        )
        if steps is None or seconds is None:
            return "never"
        found.append((seconds, steps))
    seconds, steps = (statistics.median(x) for x in zip(*found, strict=True))
    told = f"{seconds:.1f} s" if curves[0]["time_measured"] else "not measured"
    return f"{told} ({steps:,.0f})"


def time_to_error(problem: str):
    def table() -> str:
        data = load(f"time_to_error-{problem}-cpu")
        size = dict(data["size"][0])
        factors = size.pop("factors")  # errors to be reached, over the final one of float32
        rivals = _by_rival(data)
        float32 = next(curves for name, curves in rivals.items() if name.startswith(BASELINE))
        final = {c["seed"]: c["errors"][-1] for c in float32}
        rows = []
        for name, curves in rivals.items():
            if "failed" in curves[0]:
                rows.append([name, f"fails: {curves[0]['failed']}", *["–"] * (2 + len(factors))])
                continue
            ms = statistics.median(1000 * c["seconds"][-1] / c["steps"][-1] for c in curves)
            rows.append(
                [
                    name,
                    f"{statistics.median(c['errors'][-1] for c in curves):.2e}",
                    f"{ms:.2f}" if curves[0]["time_measured"] else "not measured",
                    f"{statistics.median(c['start_seconds'] for c in curves):.1f}",
                    *(_reached(curves, {s: f * e for s, e in final.items()}) for f in factors),
                ]
            )
        columns = ["training", "final error", "ms a step", "start, s"]
        columns += [f"to {f:g} × float32's error" for f in factors]
        of_size = ", ".join(f"{k} {v:,}" for k, v in size.items() if k != "name")
        seeds = ", ".join(str(seed) for seed in final)
        return f"{markdown(columns, rows)}\n\nSeeds {seeds}; {of_size}. {source(data)}\n"

    return table

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


def _steps(curves: list[dict[str, Any]], levels: dict[int, float]) -> float | None:
    """The median of the steps to the level of each seed; `None` if a seed did not get there."""
    found = [first_below(c["errors"], c["steps"], levels[c["seed"]]) for c in curves]
    return None if None in found else statistics.median(found)


def time_to_error(problem: str):
    def table() -> str:
        data = load(f"time_to_error-{problem}-cpu")
        size = dict(data["size"][0])
        factors = size.pop("factors")  # errors to be reached, over the final one of float32
        rivals = _by_rival(data)
        times = {t["rival"]: t for t in data.get("times", [])}
        float32 = next(curves for name, curves in rivals.items() if name.startswith(BASELINE))
        final = {c["seed"]: c["errors"][-1] for c in float32}
        rows = []
        for name, curves in rivals.items():
            if "failed" in curves[0]:
                rows.append([name, f"fails: {curves[0]['failed']}", *["–"] * (3 + len(factors))])
                continue
            step, start = (times.get(name, {}).get(x) for x in ("step", "start_seconds"))
            ends = [c["errors"][-1] for c in curves]
            over = [c["errors"][-1] / final[c["seed"]] for c in curves]
            spread = f" ({min(over):.2f}–{max(over):.2f})" if len(over) > 1 else ""
            cells = []
            for factor in factors:
                steps = _steps(curves, {s: factor * e for s, e in final.items()})
                if steps is None:
                    cells.append("never")
                    continue
                seconds = "not measured" if step is None else f"{steps * step['median']:.1f} s"
                cells.append(f"{seconds} ({steps:,.0f})")
            rows.append(
                [
                    name,
                    f"{statistics.median(ends):.2e}",
                    f"{statistics.median(over):.2f}{spread}",
                    "not measured" if step is None else f"{1000 * step['median']:.2f}",
                    "–" if start is None else f"{start:.1f}",
                    *cells,
                ]
            )
        columns = ["training", "final error", "over float32's", "ms a step", "start, s"]
        columns += [f"to {f:g} × float32's error" for f in factors]
        of_size = ", ".join(f"{k} {v:,}" for k, v in size.items() if k != "name")
        seeds = {c["seed"] for curves in rivals.values() for c in curves if "seed" in c}
        few = [n for n, c in rivals.items() if len(c) < len(seeds)]
        but = f" ({', '.join(few)}: {len(rivals[few[0]])})" if few else ""
        told = ", ".join(map(str, sorted(seeds)))
        return f"{markdown(columns, rows)}\n\nSeeds {told}{but}; {of_size}. {source(data)}\n"

    return table

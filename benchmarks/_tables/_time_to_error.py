"""How long each rival trains until an error is reached."""

import statistics
from collections.abc import Callable, Iterator

from .._trainings import first_below
from ._format import Record, Result, Table, groups, listed


def _steps(curves: list[Record], levels: dict[int, float]) -> float | None:
    """The median of the steps to the level of each seed; `None` if a seed did not get there."""
    found = [first_below(c["errors"], c["steps"], levels[c["seed"]]) for c in curves]
    known = [steps for steps in found if steps is not None]
    return statistics.median(known) if len(known) == len(found) else None


def _reached(steps: float | None, time: Record) -> str:
    if steps is None:
        return "never"
    step = time.get("step")
    told = f"{steps * step['median']:.1f} s" if step else "not measured"
    return f"{told} ({steps:,.0f})"


def _rows(data: Result) -> Iterator[Record]:
    size = dict(data["size"][0])
    factors = size.pop("factors")  # errors to be reached, over the final one of float32
    rivals = groups(data["curves"], "rival")
    times = {t["rival"]: t for t in data.get("times", [])}
    float32 = next(curves for name, curves in rivals.items() if name.startswith("float32"))
    final = {c["seed"]: c["errors"][-1] for c in float32}
    few = [name for name, curves in rivals.items() if len(curves) < len(final)]
    note = {
        "seeds": listed(float32, "seed") + (f" (of {', '.join(few)} the first)" if few else ""),
        "size": ", ".join(f"{k} {v:,}" for k, v in size.items() if k != "name"),
    }
    for name, curves in rivals.items():
        row = {"rival": name, **times.get(name, {}), **note}
        if "failed" not in curves[0]:
            over = [c["errors"][-1] / final[c["seed"]] for c in curves]
            spread = f" ({min(over):.2f}–{max(over):.2f})" if len(over) > 1 else ""
            row["error"] = statistics.median(c["errors"][-1] for c in curves)
            row["over"] = f"{statistics.median(over):.2f}{spread}"
            for i, f in enumerate(factors):
                steps = _steps(curves, {s: f * e for s, e in final.items()})
                row[f"level {i}"] = _reached(steps, times.get(name, {}))
        yield {**curves[0], **row}


def _factors(data: Result) -> list[str]:
    factors = data["size"][0]["factors"]
    return [f"to {f:g} × float32's error  {{level {i}}}" for i, f in enumerate(factors)]


_FIRST = [
    "training     {rival}",
    "final error  {error:.2e} || fails: {failed}",
    "relative to float32  {over}",
    "ms a step    {step.median:ms.2f} || not measured",
]


def _of(problem: str, columns: Callable[[Result], list[str]]) -> Table:
    return Table(f"time_to_error-{problem}", _rows, columns, "Seeds {seeds}; {size}.")


def _everything(data: Result) -> list[str]:
    return [*_FIRST, "start, s     {start_seconds:.1f}", *_factors(data)]


def _open(data: Result) -> list[str]:
    """With the second of three levels."""
    return [*_FIRST, _factors(data)[1]]


cavity = _of("cavity", _open)
cavity_all, burgers_all, navier_stokes_all = (
    _of(problem, _everything) for problem in ("cavity", "burgers", "navier_stokes")
)

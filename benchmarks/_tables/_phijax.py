"""The table of trainings by PhiJAX, and by this library on PhiJAX's networks."""

import statistics
from collections.abc import Iterator

from ._format import Record, Result, Table, groups, listed


def _by_training(data: Result) -> Iterator[Record]:
    """Yields the medians and ranges over the seeds of each training, problem by problem."""
    runs_of = groups(data["trainings"], "training")
    for name, runs in runs_of.items():
        row = {"name": name, "seeds": listed(runs, "seed"), "steps": runs[0]["steps"]}
        row["phijax"] = data["environment"]["phijax"]
        skipped, times = [], []
        for problem, own in groups(runs, "problem").items():
            found = [run["error"] for run in own]
            spread = f" ({min(found):.1e}–{max(found):.1e})" if len(found) > 1 else ""
            row[problem] = f"{statistics.median(found):.1e}{spread}"
            skipped.append(f"{statistics.median(run['skipped'] for run in own):.0f}")
            times.append(f"{statistics.median(run['cpu_ms'] for run in own):.1f}")
        yield {**row, "skipped": ", ".join(skipped), "times": ", ".join(times)}


compared = Table(
    "phijax",
    _by_training,
    """
    training                       {name}
    Burgers' equation              {burgers_1d} || –
    two solitons                   {kdv} || –
    cavity                         {cavity} || –
    skipped steps                  {skipped}
    processor ms a step            {times}
    """,
    "Relative errors after {steps:,} steps, seed {seeds}; the last columns give the problems in "
    "turn. PhiJAX {phijax}. Processor time on a machine that other work shared.",
)

"""Trainings of the physics-informed examples."""

import math
import statistics
from typing import Any

from ._format import ROOT, load, markdown, source


def _runs(data: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The trainings of an example by what was run, an entry for each seed."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for training in data["trainings"]:
        runs.setdefault(training["run"], []).append(training)
    return runs


def _training_row(run: list[dict[str, Any]]) -> list[str]:
    """Median error, median ratio to float32's, the ratios by seed, steps skipped after the warm-up
    over all seeds, and the last derivative scales."""
    error, ratio = (statistics.median(t[x] for t in run) for x in ("error", "error_over_float32"))
    late = sum(t["skipped_after_warm_up"] for t in run) / sum(t["steps"] for t in run)
    scaled = run[0]["precision"] == "float16"
    scales = {
        name: round(math.log2(statistics.median(t["derivative_scales"][name] for t in run)))
        for name in (run[0]["derivative_scales"] if scaled else ())
    }
    return [
        f"{error:.2e}",
        f"{ratio:.2f}",
        " ".join(f"{t['error_over_float32']:.2f}" for t in run),
        "–" if run[0]["precision"] == "float32" else f"{100 * late:.2g} %",
        " ".join(f"{name} 2^{e}" for name, e in scales.items()) or "–",
    ]


_TRAINING_COLUMNS = ["error", "over float32", "by seed", "skipped", "derivative scales"]


def _training_note(data: dict[str, Any]) -> str:
    [float32, *_] = _runs(data).values()
    seeds = ", ".join(str(t["seed"]) for t in float32)
    return f"{float32[0]['steps']:,} steps, medians over seeds {seeds}. {source(data)}"


def burgers() -> str:
    data = load("pinns-burgers-cpu")
    runs = _runs(data)
    rows = []
    for name in ("float32", "float16", "bfloat16"):  # what the example runs by default
        run = runs[name]
        memory = statistics.median(t["temp_bytes"] for t in run) / 2**20
        rows.append([name, *_training_row(run), f"{memory:.2f}"])
    columns = ["precision", "relative L2 error", *_TRAINING_COLUMNS[1:], "temp memory, MiB"]
    return f"{markdown(columns, rows)}\n\n{_training_note(data)}\n"


def pinns() -> str:
    rows, notes = [], []
    for path in sorted((ROOT / "benchmarks" / "results").glob("pinns-*-cpu.json")):
        data = load(path.stem)
        runs = _runs(data)
        for i, (name, run) in enumerate(runs.items()):
            example = f"`{data['trainings'][0]['example']}`" if i == 0 else ""
            rows.append([example, name, *_training_row(run)])
        notes.append(f"- `{data['trainings'][0]['example']}`: {_training_note(data)}")
    columns = ["example", "run", *_TRAINING_COLUMNS]
    return f"{markdown(columns, rows)}\n\n" + "\n".join(notes) + "\n"

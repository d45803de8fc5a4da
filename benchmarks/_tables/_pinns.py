"""Trainings of the physics-informed examples."""

import math
from typing import Any

from ._format import NONE, ROOT, Record, Result, groups, listed, load, markdown, median, source


def _row(run: list[Record]) -> list[str]:
    """Median error, median ratio to float32's, the ratios by seed, steps skipped after the warm-up
    over all seeds, and the last derivative scales."""
    error, ratio = (median(run, x) for x in ("error", "error_over_float32"))
    late = sum(t["skipped_after_warm_up"] for t in run) / sum(t["steps"] for t in run)
    scaled = run[0]["derivative_scales"] if run[0]["precision"] == "float16" else ()
    scales = [t["derivative_scales"] for t in run]
    exponents = {name: round(math.log2(median(scales, name))) for name in scaled}
    return [
        f"{error:.2e}",
        f"{ratio:.2f}",
        " ".join(f"{t['error_over_float32']:.2f}" for t in run),
        NONE if run[0]["precision"] == "float32" else f"{100 * late:.2g} %",
        " ".join(f"{name} 2^{e}" for name, e in exponents.items()) or NONE,
    ]


def pinns_results() -> list[Result]:
    paths = sorted((ROOT / "benchmarks" / "results").glob("pinns-*-cpu.json"))
    return [load(path.stem) for path in paths]


def pinns(_: Any = None) -> str:
    rows, notes = [], []
    for data in pinns_results():
        example = f"`{data['trainings'][0]['example']}`"
        runs = groups(data["trainings"], "run")
        for i, (name, run) in enumerate(runs.items()):
            rows.append(["" if i else example, name, *_row(run)])
        [float32, *_] = runs.values()
        notes.append(
            f"- {example}: {float32[0]['steps']:,} steps, medians over seeds "
            f"{listed(float32, 'seed')}. {source(data)}"
        )
    columns = ["example", "run", "error", "over float32", "by seed", "skipped", "derivative scales"]
    return f"{markdown(columns, rows)}\n\n" + "\n".join(notes) + "\n"

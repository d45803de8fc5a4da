"""All of it at a glance: what half precision costs in accuracy, and what it saves."""

import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

from ._format import ROOT, load, markdown
from ._operators import variants


class Accuracy(NamedTuple):
    """Of one training in one precision: for each seed the figure, and that of float32."""

    task: str
    measure: str
    run: str
    values: list[float]
    float32: list[float]

    @property
    def ratio(self) -> float:
        """The median over the seeds of the ratio to float32 from the same seed."""
        return statistics.median(v / f for v, f in zip(self.values, self.float32, strict=True))


def accuracies() -> Iterator[Accuracy]:
    for path in sorted((ROOT / "benchmarks" / "results").glob("pinns-*-cpu.json")):
        trainings = load(path.stem)["trainings"]
        runs: dict[str, dict[int, float]] = {}
        for t in trainings:
            runs.setdefault(t["run"], {})[t["seed"]] = t["error"]
        task = f"`{trainings[0]['example']}`"
        for run, errors in runs.items():
            float32 = [runs["float32"][seed] for seed in errors]
            yield Accuracy(task, "relative L2 error", run, list(errors.values()), float32)
    data = load("operators-cpu")
    for problem in dict.fromkeys(t["problem"] for t in data["trainings"]):
        groups = variants(data, problem)
        float32 = groups["float32", None].errors("l2")
        for (precision, stabilizer), group in groups.items():
            if stabilizer is None:
                errors = group.errors("l2")
                yield Accuracy(f"`{problem}`", "relative L2 test error", precision, errors, float32)
    scores: dict[str, dict[int, float]] = {}
    for t in load("vit-cpu")["trainings"]:
        scores.setdefault(t["precision"], {})[t["seed"]] = 1 - t["accuracy"]
    for run, values in scores.items():
        float32 = [scores["float32"][seed] for seed in values]
        yield Accuracy("`vit`", "test images misjudged", run, list(values.values()), float32)


# The columns of the table, and what the trainings call them.
RUNS = {
    "float16": ("float16", "autocast-float16"),
    "float16, predictive": ("float16, predictive",),
    "float16, finished in full": ("float16, finished in full",),
    "bfloat16": ("bfloat16", "autocast-bfloat16"),
    "float16 by hand": ("naive-float16", "cast-float16"),
}


def accuracy() -> str:
    rows: dict[str, dict[str, Any]] = {}
    for a in accuracies():
        row = rows.setdefault(a.task, {"measure": a.measure, "seeds": len(a.float32)})
        if a.run == "float32":
            row["float32"] = f"{statistics.median(a.values):.2e}"
        for column, names in RUNS.items():
            if a.run in names:
                row[column] = f"{a.ratio:.2f}"
    columns = ["training", "measure", "seeds", "float32", *RUNS]
    cells = [[task, *(str(row.get(c, "–")) for c in columns[1:])] for task, row in rows.items()]
    return f"{markdown(columns, cells)}\n"


def _memory(name: str, section: str, **wanted: Any) -> int:
    [record] = [r for r in load(name)[section] if wanted.items() <= r.items()]
    return record["temp_bytes"]


def headline() -> str:
    """What is promised, and the figure for it."""
    half = [a for a in accuracies() if a.run == "float16"]
    pinns = [a.ratio for a in half if a.measure == "relative L2 error"]
    operators = [a.ratio for a in half if a.measure == "relative L2 test error"]

    def saved(name, section, full, half):
        return _memory(name, section, **half) / _memory(name, section, **full)

    propagated = {"derivatives": "propagated"}
    memory = {
        "physics-informed step": saved(
            "cavity_memory-cpu",
            "memory",
            {"precision": "float32", **propagated},
            {"precision": "float16", **propagated},
        ),
        "neural operator": saved(
            "spectral-cpu",
            "models",
            {"dtype": "float32", "method": "fft"},
            {"dtype": "float16", "method": "dft"},
        ),
        "ViT-Base": saved(
            "vit_memory-cpu",
            "memory",
            {"precision": "float32"},
            {"precision": "autocast-float16"},
        ),
    }
    extra = max(r["operations"] for r in load("overhead-cpu")["ratios"])
    rows = [
        [
            "Error of physics-informed networks, float16 over float32",
            f"{min(pinns):.2f} to {max(pinns):.2f}, {len(pinns)} problems",
        ],
        [
            "Test error of neural operators, float16 over float32",
            f"{min(operators):.3f} to {max(operators):.3f}, {len(operators)} problems",
        ],
        *(
            [f"Memory of a {name} on an H100, half over float32", f"{ratio:.2f}"]
            for name, ratio in memory.items()
        ),
        ["Operations of a step, over the same step by hand", f"at most {extra:.4f}"],
        ["Speed on a GPU", "not measured"],
    ]
    return f"{markdown(['what', 'measured'], rows)}\n"

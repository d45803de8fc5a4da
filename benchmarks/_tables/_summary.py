"""All of it at a glance: what half precision costs in accuracy, and what it saves."""

import statistics
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ._breadth import Ratios
from ._format import NOT_RUN, Result, load, markdown, older
from ._operators import l2, variants
from ._pinns import pinns_results
from ._predicted import speedups


PINN, OPERATOR = "relative L2 error", "relative L2 test error"
ALIKE = 1.05  # times the error of float32 is as good: seeds differ by more


class Accuracy(NamedTuple):
    """Of one training in one precision: for each seed the figure, and that of float32."""

    task: str
    measure: str
    run: str
    values: dict[int, float]  # by seed
    float32: dict[int, float]

    @property
    def ratios(self) -> list[float]:
        """To float32 from the same seed."""
        return [value / self.float32[seed] for seed, value in self.values.items()]

    @property
    def ratio(self) -> float:
        """The median over the seeds."""
        return statistics.median(self.ratios)


def accuracies() -> Iterator[Accuracy]:
    for data in pinns_results():
        runs: dict[str, dict[int, float]] = {}
        for t in data["trainings"]:
            runs.setdefault(t["run"], {})[t["seed"]] = t["error"]
        task = f"`{data['trainings'][0]['example']}`"
        for run, errors in runs.items():
            yield Accuracy(task, PINN, run, errors, runs["float32"])
    data = load("operators-cpu")
    for problem in dict.fromkeys(t["problem"] for t in data["trainings"]):
        plain = {
            g["precision"]: {run["seed"]: l2(run) for run in g["runs"]}
            for g in variants(data, problem)
            if g["stabilizer"] is None
        }
        for precision, errors in plain.items():
            yield Accuracy(f"`{problem}`", OPERATOR, precision, errors, plain["float32"])
    scores: dict[str, dict[int, float]] = {}
    for t in load("vit-cpu")["trainings"]:
        scores.setdefault(t["precision"], {})[t["seed"]] = 1 - t["accuracy"]
    for run, values in scores.items():
        yield Accuracy("`vit`", "test images misjudged", run, values, scores["float32"])


# The columns of the table, and what the trainings call them.
RUNS = {
    "float16": ("float16", "autocast-float16"),
    "float16, predictive": ("float16, predictive",),
    "float16, finished in full": ("float16, finished in full", "float16, climbing"),
    "bfloat16": ("bfloat16", "autocast-bfloat16"),
    "float16 by hand": ("naive-float16", "cast-float16"),
}


def accuracy() -> str:
    rows: dict[str, dict[str, Any]] = {}
    for a in accuracies():
        row = rows.setdefault(a.task, {"measure": a.measure})
        if a.run == "float32":
            row["seeds"] = " ".join(str(seed) for seed in a.values)
            row["float32"] = f"{statistics.median(a.values.values()):.2e}"
        for column, names in RUNS.items():
            if a.run in names:
                row[column] = f"{a.ratio:.2f} ({min(a.ratios):.2f}–{max(a.ratios):.2f})"
    columns = ["training", "measure", "seeds", "float32", *RUNS]
    cells = [[task, *(str(row.get(c, "–")) for c in columns[1:])] for task, row in rows.items()]
    read = [*pinns_results(), load("operators-cpu"), load("vit-cpu")]
    return f"{markdown(columns, cells)}\n{_ages(read)}"


def _ages(read: Iterable[Result]) -> str:
    """Which of the results are older than the code, a line for each reason."""
    reasons: dict[str, list[str]] = {}
    for data in read:
        if reason := older(data):
            reasons.setdefault(reason, []).append(f"`{data.name}`")
    told = [f"- {', '.join(names)}:{reason}\n" for reason, names in reasons.items()]
    return "".join(["\n", *told]) if told else ""


def _memory(data: Result, section: str, **wanted: Any) -> int:
    [record] = [r for r in data[section] if wanted.items() <= r.items()]
    return record["temp_bytes"]


def _ratios(found: list[Accuracy]) -> str:
    """The medians from problem to problem, and from which seeds."""
    medians, single = [a.ratio for a in found], [r for a in found for r in a.ratios]
    seeds = " or ".join(map(str, sorted({len(a.values) for a in found})))
    return (
        f"{min(medians):.2f} to {max(medians):.2f}, medians of {seeds} seeds in {len(found)} "
        f"problems; single seeds {min(single):.2f} to {max(single):.2f}"
    )


def headline() -> str:
    """What is promised, and the figure for it."""
    found = list(accuracies())
    rows = []
    for precision in ("float16", "bfloat16"):
        pinns = [a for a in found if a.measure == PINN and a.run == precision]
        what = f"Error of physics-informed networks, {precision} over float32"
        rows.append([what, _ratios(pinns)])
    breadth = load("breadth-cpu")
    rows.append(['The same with `forward="float32"`', _in_full(breadth)])
    naive = [a for a in found if a.run == "naive-float16"]
    alike = [a for a in naive if a.ratio <= ALIKE]
    others = ", ".join(f"{a.ratio:.2f} in {a.task}" for a in naive if a not in alike)
    rows.append(
        [
            "The same, everything cast to float16 by hand, with a loss scale",
            f"at most {max(a.ratio for a in alike):.2f} in {len(alike)} of {len(naive)} problems "
            f"({', '.join(a.task for a in alike)}); {others}",
        ]
    )
    operators = [a for a in found if a.measure == OPERATOR and a.run == "float16"]
    seeds = " or ".join(map(str, sorted({len(a.values) for a in operators})))
    errors = (
        f"{statistics.median(a.values.values()):.4f} and "
        f"{statistics.median(a.float32.values()):.4f} ({a.task})"
        for a in operators
    )
    rows.append(
        [
            "Relative test error of neural operators, float16 and float32",
            f"{', '.join(errors)}, medians of {seeds} seeds",
        ]
    )
    cavity, spectral, vit = (load(f"{n}-cpu") for n in ("cavity_memory", "spectral", "vit_memory"))

    def saved(data, section, full, half):
        return _memory(data, section, **half) / _memory(data, section, **full)

    propagated = {"derivatives": "propagated"}
    memory = {
        "physics-informed step": saved(
            cavity,
            "memory",
            {"precision": "float32", **propagated},
            {"precision": "float16", **propagated},
        ),
        "neural operator": saved(
            spectral,
            "models",
            {"dtype": "float32", "method": "fft"},
            {"dtype": "float16", "method": "dft"},
        ),
        "ViT-Base": saved(
            vit, "memory", {"precision": "float32"}, {"precision": "autocast-float16"}
        ),
    }
    rows += [
        [f"Memory of a {name}, float16 over float32, {NOT_RUN}", f"{ratio:.2f}"]
        for name, ratio in memory.items()
    ]
    overhead = load("overhead-cpu")
    extra = max(r["operations"] for r in overhead["ratios"])
    rows += [
        ["Operations of a step, over the same step by hand", f"at most {extra:.4f}"],
        ["Speed on a GPU", _speed(predicted := load("predicted-h100-cpu"))],
    ]
    read = [*pinns_results(), breadth, load("operators-cpu"), cavity, spectral, vit, overhead]
    read.append(predicted)
    return f"{markdown(['what', 'measured'], rows)}\n{_ages(read)}"


def _in_full(data: Result) -> str:
    """Over the problems of the collection that float32 solves, beside what chance makes of it."""
    ratios = Ratios(data)

    def told(name: str) -> str:
        found = ratios.medians(name)
        return f"{statistics.median(found):.2f} (worst {max(found):.2f})"

    seeds = len({t["seed"] for t in data["trainings"]})
    halves = (f"{told(f'forward-float32-{half}')} with {half}" for half in ("float16", "bfloat16"))
    return (
        f"median {' and '.join(halves)} in the backward pass, over {len(ratios.solved)} problems, "
        f"{seeds} seed{'s' if seeds > 1 else ''}; float32 with its weights rounded once "
        f"{told('float32-rounded')}"
    )


def _speed(data: Result) -> str:
    spans = (
        f"{min(found):.1f} to {max(found):.1f} times {name}"
        for name, found in ((n, speedups(data, n)) for n in ("float32", "TF32"))
    )
    return f"not measured; predicted of steps compiled for an H100, not run: {' and '.join(spans)}"

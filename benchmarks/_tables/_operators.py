"""The tables of the neural operators: ours beside those of Tu et al., Speeding up Fourier Neural
Operators via Mixed Precision (V100, 128² points, Navier–Stokes, 100 epochs)."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from ._format import load, markdown, source


PROBLEMS = {"darcy": "Darcy", "navier_stokes": "Navier–Stokes"}

PAPER = "paper, V100"
# Table 1: seconds per epoch and training loss, by precision of the transforms and pre-activation.
PAPER_PREACTIVATIONS = {
    ("float32", None): ("44.4", 0.0471),
    ("float16", None): ("NaN", None),
    ("float16", "hard_clip"): ("37.1", 0.0478),
    ("float16", "sigma_clip"): ("40.0", 0.0473),
    ("float16", "tanh"): ("36.5", 0.0489),
}
# Table 2: seconds per epoch, training and test loss, by precision and modes; mixed is with tanh.
PAPER_MODES = {
    ("float32", 64): (44.4, 0.0451, 0.0432),
    ("float32", 32): (35.8, 0.0460, 0.0447),
    ("float32", 16): (34.3, 0.0670, 0.0690),
    ("float16", 64): (36.5, 0.0489, 0.0505),
    ("float16", 32): (29.7, 0.0486, 0.0474),
    ("float16", 16): (28.3, 0.0682, 0.0689),
}


class Runs:
    """The trainings of one variant, one for each seed."""

    def __init__(self, runs: Sequence[dict[str, Any]]):
        self.runs = sorted(runs, key=lambda run: run["seed"])

    def values(self, field: str | Callable[[dict[str, Any]], float]) -> list[float]:
        get = field if callable(field) else lambda run: run[field]
        return [get(run) for run in self.runs]

    def errors(self, norm: str, resolution: int | None = None) -> list[float]:
        return self.values(lambda run: run["errors"][str(resolution or run["resolution"])][norm])


def variants(data: dict[str, Any], problem: str, modes: int | None = None) -> dict[Any, Runs]:
    """Of one problem, by precision and stabilizer; with the most modes, unless told how many."""
    trainings = [t for t in data["trainings"] if t["problem"] == problem]
    modes = modes or max(t["modes"] for t in trainings)
    groups: dict[Any, list[dict[str, Any]]] = {}
    for t in trainings:
        if t["modes"] == modes:
            groups.setdefault((t["precision"], t["stabilizer"]), []).append(t)
    return {key: Runs(runs) for key, runs in groups.items()}


def over(values: list[float], baseline: list[float]) -> str:
    """The quotient of the medians, and that of each seed."""
    by_seed = " ".join(f"{v / b:.3f}" for v, b in zip(values, baseline, strict=False))
    return f"**{statistics.median(values) / statistics.median(baseline):.3f}** ({by_seed})"


def number(values: list[float]) -> str:
    return f"{statistics.median(values):.4f}"


def name(precision: str, stabilizer: str | None) -> str:
    return f"{precision}, {stabilizer}" if stabilizer else precision


def setting(data: dict[str, Any]) -> str:
    runs = data["trainings"]
    t, seeds = runs[0], sorted({run["seed"] for run in runs})
    return (
        f"{t['samples']} training samples on {t['resolution']}² points, {t['channels']} channels, "
        f"{t['steps']} steps; medians over seeds {', '.join(map(str, seeds))}."
    )


Table = tuple[list[str], list[list[str]]]


def precisions(data: dict[str, Any]) -> Table:
    rows = []
    for problem, title in PROBLEMS.items():
        groups = variants(data, problem)
        full = groups["float32", None]
        for (precision, stabilizer), runs in groups.items():
            paper = "–"
            if (precision, stabilizer) == ("float16", "tanh"):
                paper = "1.06–1.11" if problem == "navier_stokes" else "no increase"
            rows.append(
                [
                    title,
                    name(precision, stabilizer),
                    number(runs.errors("h1")),
                    over(runs.errors("h1"), full.errors("h1")),
                    number(runs.errors("l2")),
                    over(runs.errors("l2"), full.errors("l2")),
                    f"{statistics.median(runs.values('skipped_steps')):.0f}"
                    if precision != "float32"
                    else "–",
                    paper,
                ]
            )
    columns = [
        "problem",
        "variant",
        "test H1 error",
        "over float32 (by seed)",
        "test L2 error",
        "over float32 (by seed)",
        "skipped steps",
        "paper, over float32",
    ]
    return columns, rows


def preactivations(data: dict[str, Any]) -> Table:
    rows = []
    groups = variants(data, "navier_stokes")
    full = groups["float32", None]
    for key, runs in groups.items():
        seconds, loss = PAPER_PREACTIVATIONS.get(key, ("–", None))
        reference = PAPER_PREACTIVATIONS["float32", None][1]
        rows.append(
            [
                key[0],
                key[1] or "none",
                number(runs.values("train_loss")),
                over(runs.values("train_loss"), full.values("train_loss")),
                "–" if loss is None else f"{loss:.4f}",
                "–" if loss is None else f"{loss / reference:.3f}",
                seconds,
            ]
        )
    columns = [
        "precision",
        "pre-activation",
        "training loss",
        "over float32 (by seed)",
        f"{PAPER}: training loss",
        "over float32",
        "seconds per epoch",
    ]
    return columns, rows


def modes(data: dict[str, Any]) -> Table:
    kept = sorted({t["modes"] for t in data["trainings"]}, reverse=True)
    papers = sorted({m for _, m in PAPER_MODES}, reverse=True)
    rows = []
    for key in (("float32", None), ("float16", None), ("float16", "tanh")):
        for m, paper_modes in zip(kept, papers, strict=False):
            groups = variants(data, "navier_stokes", m)
            if key not in groups:
                continue
            runs, full = groups[key], groups["float32", None]
            paper = ["–"] * 4
            # Their mixed precision has the hyperbolic tangent in it.
            if key != ("float16", None):
                seconds, train, test = PAPER_MODES[key[0], paper_modes]
                baseline = PAPER_MODES["float32", paper_modes][2]
                paper = [f"{train:.4f}", f"{test:.4f}", f"{test / baseline:.3f}", f"{seconds}"]
            rows.append(
                [
                    name(*key),
                    str(m),
                    number(runs.values("train_loss")),
                    number(runs.errors("h1")),
                    over(runs.errors("h1"), full.errors("h1")),
                    str(paper_modes),
                    *paper,
                ]
            )
    columns = [
        "precision",
        "modes",
        "training loss",
        "test H1 error",
        "over float32 (by seed)",
        f"{PAPER}: modes",
        "training loss",
        "test loss",
        "over float32",
        "seconds per epoch",
    ]
    return columns, rows


def resolutions(data: dict[str, Any]) -> Table:
    grids = sorted(int(n) for n in data["trainings"][0]["errors"])
    rows = []
    for problem, title in PROBLEMS.items():
        groups = variants(data, problem)
        full = groups["float32", None]
        for key, runs in groups.items():
            row = [title, name(*key)]
            for n in grids:
                errors = runs.errors("l2", n)
                quotient = statistics.median(errors) / statistics.median(full.errors("l2", n))
                row.append(f"{number(errors)} ({quotient:.3f})")
            rows.append(row)
    return ["problem", "variant", *(f"L2 at {n}² (over float32)" for n in grids)], rows


def table(of: Callable[[dict[str, Any]], Table]) -> Callable[[], str]:
    def text() -> str:
        data = load("operators-cpu")
        return f"{markdown(*of(data))}\n\n{setting(data)} {source(data)}\n"

    return text


def frequencies() -> str:
    data = load("frequencies-cpu")
    methods = data["methods"]
    rows = [
        [m["method"], *(f"{100 * error:.2g}%" for error in m["error"].values())] for m in methods
    ]
    return f"{markdown(['', *methods[0]['error']], rows)}\n\n{source(data)}\n"

"""Many problems in each precision: tables and the figure."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from ._format import load, markdown, source


LABELS = {
    "forward-float32-float16": "forward float32, backward float16",
    "forward-float32-bfloat16": "forward float32, backward bfloat16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float16-predictive": "float16, predictive scales",
    "autocast-float16": "autocast, float16",
    "autocast-bfloat16": "autocast, bfloat16",
    "naive-float16": "float16 by hand",
    "tensorfloat32-emulated": "TF32, emulated",
    "forward-bfloat16_x3-float16-emulated": "forward bfloat16_x3 (emulated), backward float16",
    "forward-bfloat16_x3-bfloat16-emulated": "forward bfloat16_x3 (emulated), backward bfloat16",
    "float64": "float64",
    "float32-rounded": "control: float32, weights rounded once",
    "float32-dropped": "control: float32, three steps dropped",
}
UNSOLVED = 0.3  # the error of float32 above which a ratio says nothing
FAR = 2.0  # times the error of float32: told one by one


class Ratios:
    """What the trainings of a file come to: errors over those of float32 from the same seed."""

    def __init__(self, data: dict[str, Any], optimizer: str | None = None):
        kept = [t for t in data["trainings"] if optimizer in (None, t["optimizer"])]
        self.full = {_key(t): t for t in kept if t["precision"] == "float32"}
        self.rest = [t for t in kept if t["precision"] != "float32" and _key(t) in self.full]
        self.problems = list(dict.fromkeys(t["problem"] for t in self.full.values()))
        self.solved = [p for p in self.problems if (self.error(p) or 1.0) <= UNSOLVED]

    def error(self, problem: str) -> float | None:
        """Of float32, the median over the seeds."""
        found = [t["error"] for t in self.full.values() if t["problem"] == problem]
        known = [e for e in found if e is not None]
        return statistics.median(known) if known else None

    def of(self, problem: str, precision: str) -> list[float]:
        """By seed; infinite for a training that came to nothing."""
        trainings = [t for t in self.rest if (t["problem"], t["precision"]) == (problem, precision)]
        return [self.ratio(t) for t in trainings if self.full[_key(t)]["error"] is not None]

    def ratio(self, training: dict[str, Any]) -> float:
        full = self.full[_key(training)]["error"]
        return float("inf") if training["error"] is None else training["error"] / full

    def errors(self, problem: str, precision: str) -> list[float]:
        """By seed, of those that came to something."""
        trainings = [t for t in self.rest if (t["problem"], t["precision"]) == (problem, precision)]
        return [t["error"] for t in trainings if t["error"] is not None]

    def skipped(self, problem: str, precision: str) -> float:
        """The share of the steps."""
        trainings = [
            t
            for t in self.rest
            if (t["problem"], t["precision"]) == (problem, precision) and "skipped" in t
        ]
        steps = sum(t["steps"] for t in trainings)
        return sum(t["skipped"] for t in trainings) / steps if steps else 0.0

    def precisions(self) -> list[str]:
        there = {t["precision"] for t in self.rest}
        return [name for name in LABELS if name in there]


def _key(training: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(training[k] for k in ("problem", "optimizer", "seed", "steps"))


def number(ratio: float) -> str:
    return "none" if ratio == float("inf") else f"{ratio:.2f}"


def summary(data: dict[str, Any], optimizer: str | None = None) -> str:
    """Over all problems that float32 solves."""
    ratios = Ratios(data, optimizer)
    rows = []
    for name in ratios.precisions():
        by_problem = [statistics.median(r) for p in ratios.solved if (r := ratios.of(p, name))]
        every = [r for p in ratios.solved for r in ratios.of(p, name)]
        if not every:
            continue
        near = sum(r <= 1.05 for r in by_problem) / len(by_problem)
        skips = statistics.median(ratios.skipped(p, name) for p in ratios.solved)
        rows.append(
            [
                LABELS[name],
                str(len(by_problem)),
                str(len(every)),
                number(statistics.median(by_problem)),
                f"{100 * near:.0f} %",
                number(max(by_problem)),
                number(max(every)),
                f"{100 * skips:.2g} %",
            ]
        )
    columns = ["precision", "problems", "trainings", "median", "problems at most 1.05"]
    columns += ["worst problem", "worst training", "steps skipped"]
    return markdown(columns, rows)


def by_problem(data: dict[str, Any], optimizer: str | None = None) -> str:
    """The median ratio of each problem, and the worst over its seeds."""
    ratios = Ratios(data, optimizer)
    names = ratios.precisions()
    titles = {t["problem"]: t["title"] for t in data["trainings"]}
    rows = []
    for problem in sorted(ratios.problems, key=lambda p: worst(ratios, p)):
        error = ratios.error(problem)
        row = [titles[problem], "none" if error is None else f"{error:.1e}"]
        for name in names:
            found = ratios.of(problem, name)
            told = f"{number(statistics.median(found))}" if found else "–"
            row.append(f"{told} ({number(max(found))})" if len(found) > 1 else told)
        rows.append(row)
    return markdown(["problem", "float32", *(LABELS[n] for n in names)], rows)


def worst(ratios: Ratios, problem: str) -> float:
    """Of the ways that promise full accuracy."""
    names = ("forward-float32-float16", "forward-float32-bfloat16")
    return max((r for name in names for r in ratios.of(problem, name)), default=0.0)


def failures(data: dict[str, Any], optimizer: str | None = None) -> str:
    """What float32 does not solve, and every training far from it."""
    ratios = Ratios(data, optimizer)
    lines = []
    for problem in ratios.problems:
        if problem not in ratios.solved:
            error = ratios.error(problem)
            told = "is not finite" if error is None else f"errs by {error:.1e}"
            lines.append(f"- `{problem}`: float32 itself {told}.")
    for t in ratios.rest:
        far = t["problem"] in ratios.solved and ratios.ratio(t) > FAR
        if "failed" in t:
            lines.append(f"- `{t['problem']}`, {LABELS[t['precision']]}: {t['failed']}")
        elif far and t["precision"] != "naive-float16":
            told = number(ratios.ratio(t))
            skips = f"{t['skipped']:,} of {t['steps']:,} steps skipped"
            label = LABELS[t["precision"]]
            lines.append(f"- `{t['problem']}`, {label}, seed {t['seed']}: {told}; {skips}.")
    return "\n".join(lines) or "None."


PAPER = {
    "lid-driven cavity": ("cavity", "similar accuracy"),
    "lid-driven cavity, zero-equation model": ("cavity_zero_equation", "similar accuracy"),
    "FPGA heat sink, laminar": (
        "fpga_laminar",
        "similar accuracy; 2.2 times faster on a V100, 2.1 on an A100, 1.3 than TF32",
    ),
    "FPGA heat sink, turbulent": ("fpga_zero_equation", "similar accuracy"),
    "heat sink with three fins, in the plane": ("heat_sink", "similar accuracy"),
}
"""The examples of Xue et al. (section 4), here, and what is told there of float16."""


def paper(data: dict[str, Any], optimizer: str | None = None) -> str:
    """The paper's examples, its words and our figures."""
    ratios = Ratios(data, optimizer)
    names = ("float16", "forward-float32-float16")
    rows = []
    for example, (problem, told) in PAPER.items():
        error = ratios.error(problem)
        found = [ratios.of(problem, name) for name in names]
        cells = [number(statistics.median(r)) if r else "–" for r in found]
        rows.append([example, told, f"`{problem}`", f"{error:.1e}" if error else "–", *cells])
    columns = ["example", "there, in float16", "here", "float32", *(LABELS[n] for n in names)]
    return markdown(columns, rows)


def block(
    table: Callable[..., str], name: str = "breadth-cpu", optimizer: str | None = None
) -> Callable[[], str]:
    """A table, by default of the trainings of each problem's own optimizer."""

    def text():
        data = load(name)
        return f"{table(data, optimizer)}\n\n{source(data)}\n"

    return text


# --- The figure ------------------------------------------------------------------------------


COLORS = {
    "forward-float32-float16": "tab:blue",
    "forward-float32-bfloat16": "tab:purple",
    "float16": "tab:cyan",
    "bfloat16": "tab:orange",
    "naive-float16": "tab:red",
    "float32-rounded": "black",
    "float32-dropped": "tab:gray",
}
LARGEST = 30.0


def draw(figure: Any, data: dict[str, Any]) -> None:
    """A dot for each seed, the problems in the order of their worst ratio."""
    ratios = Ratios(data)
    problems = sorted(ratios.problems, key=lambda p: worst(ratios, p))
    titles = {t["problem"]: t["title"] for t in data["trainings"]}
    axes = figure.subplots()
    names: Sequence[str] = [name for name in COLORS if name in ratios.precisions()]
    for i, name in enumerate(names):
        shift = 0.7 * (i / max(1, len(names) - 1) - 0.5)
        dots = [
            (min(r, LARGEST), j - shift)
            for j, problem in enumerate(problems)
            for r in ratios.of(problem, name)
        ]
        x, y = zip(*dots, strict=True) if dots else ((), ())
        axes.plot(x, y, ".", color=COLORS[name], label=LABELS[name], markersize=4)
    axes.axvline(1, color="black", linewidth=0.6)
    axes.axvline(1.15, color="black", linewidth=0.6, linestyle=":")
    axes.set(xscale="log", xlabel=f"error over float32's from the same seed (at most {LARGEST:g})")
    axes.set_yticks(range(len(problems)), [titles[p] for p in problems], fontsize="x-small")
    axes.set_xticks([0.5, 1, 2, 5, 10, LARGEST], ["0.5", "1", "2", "5", "10", f"{LARGEST:g}"])
    axes.minorticks_off()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)

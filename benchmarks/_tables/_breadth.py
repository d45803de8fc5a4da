"""Many problems in each precision: tables and the figure."""

import re
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from ._format import Record, Result, Table, groups


LABELS = {
    "forward-float32-float16": "forward float32, backward float16",
    "forward-float32-bfloat16": "forward float32, backward bfloat16",
    "refined-bfloat16": "two evaluations, backward bfloat16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "autocast-float16": "autocast, float16",
    "autocast-bfloat16": "autocast, bfloat16",
    "naive-float16": "float16 by hand",
    "tensorfloat32-emulated": "TF32, emulated",
    "forward-bfloat16_x3-float16-emulated": "forward bfloat16_x3 (emulated), backward float16",
    "forward-bfloat16_x3-bfloat16-emulated": "forward bfloat16_x3 (emulated), backward bfloat16",
    "float64": "float64",
    "forward-float64-float32": "forward float64, backward float32",
    "float32-rounded": "control: float32, weights rounded once",
    "float32-dropped": "control: float32, three steps dropped",
}
SEEDS = (0, 1, 2)  # of every summary; some problems have more
UNSOLVED = 0.3  # the error of float32 above which a ratio says nothing
NEAR = 1.05  # times the error of float32 counts as equal: seeds differ by more
FAR = 2.0  # times the error of float32: told one by one


class Ratios:
    """The errors of the trainings of a file relative to float32 from the same seed and the same
    code. `earlier` ones count where a precision of a problem was not trained since.

    **Arguments:**

    - `data`: the results.
    - `optimizer`: only trainings by this one.
    - `seeds`: only trainings from these.
    """

    def __init__(
        self,
        data: dict[str, Any],
        optimizer: str | None = None,
        seeds: Sequence[int] | None = None,
    ):
        since = {(t["problem"], t["precision"]) for t in data["trainings"]}
        earlier = [
            {**t, "earlier": True}
            for t in data.get("earlier", [])
            if t["precision"] == "float32" or (t["problem"], t["precision"]) not in since
        ]
        kept = [
            t
            for t in (*data["trainings"], *earlier)
            if optimizer in (None, t["optimizer"])
            and (seeds is None or t["seed"] in seeds)
            and t["precision"] in ("float32", *LABELS)
        ]
        self.full = {_key(t): t for t in kept if t["precision"] == "float32"}
        self.rest = [t for t in kept if t["precision"] != "float32" and _key(t) in self.full]
        self.by_problem = groups(self.rest, "problem", "precision")
        self.titles = {t["problem"]: t["title"] for t in self.full.values()}
        self.solved = [p for p in self.titles if (self.error(p) or 1.0) <= UNSOLVED]
        there = {t["precision"] for t in self.rest}
        self.precisions = [name for name in LABELS if name in there]

    def error(self, problem: str) -> float | None:
        """Of float32, the median over the seeds."""
        runs = [t for t in self.full.values() if t["problem"] == problem]
        newest = [t for t in runs if "earlier" not in t] or runs
        known = [t["error"] for t in newest if t["error"] is not None]
        return statistics.median(known) if known else None

    def runs(self, problem: str, precision: str) -> list[Record]:
        """By seed."""
        return self.by_problem.get((problem, precision), [])

    def of(self, problem: str, precision: str) -> list[float]:
        """By seed; infinite for a training that came to nothing."""
        trainings = self.runs(problem, precision)
        return [self.ratio(t) for t in trainings if self.full[_key(t)]["error"] is not None]

    def ratio(self, training: Record) -> float:
        full = self.full[_key(training)]["error"]
        return float("inf") if training["error"] is None else training["error"] / full

    def medians(self, precision: str) -> list[float]:
        """Of the problems that float32 solves."""
        found = (self.of(problem, precision) for problem in self.solved)
        return [statistics.median(ratios) for ratios in found if ratios]

    def earlier(self, precision: str) -> int:
        """How many trainings of the problems that float32 solves are by earlier code."""
        return sum("earlier" in t for p in self.solved for t in self.runs(p, precision))

    def skipped(self, problem: str, precision: str) -> float:
        """The share of the steps."""
        counted = [t for t in self.runs(problem, precision) if "skipped" in t]
        steps = sum(t["steps"] for t in counted)
        return sum(t["skipped"] for t in counted) / steps if steps else 0.0

    def worst_last(self) -> list[str]:
        """The problems by the worst ratio of the ways that promise full accuracy."""
        worst = lambda p: max((r for name in FULL for r in self.of(p, name)), default=0.0)
        return sorted(self.titles, key=worst)


def _key(training: Record) -> tuple[Any, ...]:
    names = ("problem", "optimizer", "seed", "steps")
    return ("earlier" in training, *(training[name] for name in names))


def number(ratio: float) -> str:
    return "none" if ratio == float("inf") else f"{ratio:.2f}"


def spread(ratios: Sequence[float]) -> str:
    """Returns where nine in ten of the ratios are."""
    twentieths = statistics.quantiles(ratios, n=20, method="inclusive")
    return f"{number(twentieths[0])}–{number(twentieths[-1])}"


def overall(data: Result) -> Iterator[Record]:
    """Yields a record for each precision, over all problems that float32 solves and the same three
    seeds."""
    ratios = Ratios(data, seeds=SEEDS)
    for name in ratios.precisions:
        medians = ratios.medians(name)
        every = [r for p in ratios.solved for r in ratios.of(p, name)]
        if every:
            yield {
                "name": name,
                "precision": LABELS[name],
                "trainings": len(every),
                "median": number(statistics.median(every)),
                "spread": spread(every),
                "near": sum(r <= NEAR for r in medians),
                "problems": len(medians),
                "worst": number(max(medians)),
                "worst_training": number(max(every)),
                "earlier": ratios.earlier(name),
                "skips": 100 * statistics.median(ratios.skipped(p, name) for p in ratios.solved),
            }


summary = Table(
    "breadth",
    overall,
    """
    error relative to float32  {precision}
    trainings                 {trainings}
    median                    {median}
    nine in ten within        {spread}
    problems at most 1.05     {near} of {problems}
    worst problem (training)  {worst} ({worst_training})
    """,
)


def _by_problem(optimizer: str | None, data: Result) -> Iterator[Record]:
    """The median ratio of each problem, and the worst over its seeds."""
    ratios = Ratios(data, optimizer)
    for problem in ratios.worst_last():
        error = ratios.error(problem)
        row = {"title": ratios.titles[problem]}
        row["float32"] = "none" if error is None else f"{error:.1e}"
        for name in ratios.precisions:
            if found := ratios.of(problem, name):
                worst = f" ({number(max(found))})" if len(found) > 1 else ""
                row[name] = f"{number(statistics.median(found))}{worst}"
        yield row


def _of_problems(
    file: str,
    optimizer: str | None = None,
    shown: Sequence[str] | None = None,
    rows: slice = slice(None),
) -> Table:
    """Builds a table with a row for each problem, by default of its own optimizer, and a column for
    each precision, by default all."""

    def columns(data: Result) -> list[str]:
        names = shown or Ratios(data, optimizer).precisions
        return ["problem  {title}", "float32  {float32}", *(f"{LABELS[n]}  {{{n}}}" for n in names)]

    return Table(file, lambda data: list(_by_problem(optimizer, data))[rows], columns)


problems = _of_problems("breadth")
# The twelve on which the full forward pass was furthest from float32, the furthest first.
hardest = _of_problems(
    "breadth",
    shown=("forward-float32-float16", "float16", "naive-float16", "float32-rounded"),
    rows=slice(None, -13, -1),
)
FULL = ("forward-float32-float16", "forward-float32-bfloat16")
by_adam = _of_problems("breadth-precisions", "adam")
lbfgs = _of_problems(
    "breadth-precisions", "adam+lbfgs", (*FULL, "float16", "tensorfloat32-emulated")
)
by_lbfgs = _of_problems("breadth-precisions", "adam+lbfgs")
by_muon_lbfgs = _of_problems("breadth-precisions", "muon+lbfgs")


def _resolutions(data: Result) -> Iterator[Record]:
    """Errors of operators on the grid of the training, and on finer ones: of one seed each."""
    ratios, grids = Ratios(data), re.compile(r"rel\. L2 error at (\d+)²")
    for problem, title in ratios.titles.items():
        full = [t for t in ratios.full.values() if t["problem"] == problem]
        found = [t for t in ratios.rest if t["problem"] == problem]
        for t in (*full, *sorted(found, key=lambda t: list(LABELS).index(t["precision"]))):
            errors = {m[1]: e for n, e in t.get("errors", {}).items() if (m := grids.fullmatch(n))}
            if errors:
                label = LABELS.get(t["precision"], t["precision"])
                yield {"title": title, "precision": label, "seed": t["seed"], **errors}


def _grids(data: Result) -> list[str]:
    rows = list(_resolutions(data))
    grids = dict.fromkeys(name for row in rows for name in row if name.isdigit())
    heads = ["problem  {title}", "precision  {precision}", "seed  {seed}"]
    return [*heads, *(f"{n}²  {{{n}:.4f}}" for n in grids)]


resolutions = Table("breadth", _resolutions, _grids)


def _failures(data: Result) -> Iterator[Record]:
    """Yields what float32 does not solve, and every training far from it."""
    ratios = Ratios(data)
    for problem in ratios.titles:
        if problem not in ratios.solved:
            yield {"problem": problem, "precision": "float32", "error": ratios.error(problem)}
    for t in ratios.rest:
        if t["precision"] == "naive-float16" or t["problem"] not in ratios.solved:
            continue
        if "failed" in t or ratios.ratio(t) > FAR:
            ratio = None if "failed" in t else number(ratios.ratio(t))
            yield {**t, "precision": LABELS[t["precision"]], "ratio": ratio, "error": None}


failures = Table(
    "breadth",
    _failures,
    """
    problem            {problem}
    precision          {precision}
    seed               {seed}
    relative error     {ratio} || {failed} || float32 itself errs by {error:.1e}
    steps skipped      {skipped:,} of {steps:,}
    """,
)


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


def _paper(data: Result) -> Iterator[Record]:
    ratios = Ratios(data)
    for example, (problem, told) in PAPER.items():
        row: Record = {"example": example, "told": told, "problem": problem}
        row["float32"] = ratios.error(problem)
        for name in ("float16", "forward-float32-float16"):
            if found := ratios.of(problem, name):
                row[name] = statistics.median(found)
        yield row


paper = Table(
    "breadth",
    _paper,
    """
    example                            {example}
    there, in float16                  {told}
    here                               `{problem}`
    float32                            {float32:.1e}
    float16                            {float16:.2f}
    forward float32, backward float16  {forward-float32-float16:.2f}
    """,
)


# --- Compiled for an H100 ----------------------------------------------------------------------


def _steps(data: Result) -> Iterator[Record]:
    """A problem and its programs, by precision."""
    names = {"full": "float32", "half": "float16", "both": "forward-float32-float16"}
    for programs in groups(data["programs"], "problem").values():
        known = {p["precision"]: p for p in programs if "failed" not in p}
        yield {**programs[0], **{short: known.get(name, {}) for short, name in names.items()}}


step = Table(
    "breadth_step",
    _steps,
    """
    problem                           {title}
    memory of float32, MiB            {full.temp_bytes:MiB.2f}
    float16 over it                   {half.temp_bytes/full.temp_bytes:.2f}
    forward float32 over it           {both.temp_bytes/full.temp_bytes:.2f}
    moved by float32, MB              {full.bytes:MB.3g}
    by float16, over it               {half.bytes/full.bytes:.2f}
    by forward float32, over it       {both.bytes/full.bytes:.2f}
    predicted, not run: float32, ms   {full.seconds_with_arithmetic:ms.2f}
    kernels: float32, float16, forward float32  {full.kernels}, {half.kernels}, {both.kernels}
    """,
    "Memory beyond state, points and workspace. Compiled for an H100, not run.",
)


def _timed(data: Result) -> Iterator[Record]:
    for runs in groups(data["steps"], "problem").values():
        yield {**runs[0], **{r["precision"]: r["seconds"]["median"] / r["steps"] for r in runs}}


float64_time = Table(
    "breadth_step-time",
    _timed,
    """
    problem                                    {title}
    a step in float64, ms                      {float64:ms.2f}
    forward float64, backward float32 over it  {forward-float64-float32/float64:.2f}
    float32 over it                            {float32/float64:.2f}
    """,
)


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
    problems = ratios.worst_last()
    axes = figure.subplots()
    names: Sequence[str] = [name for name in COLORS if name in ratios.precisions]
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
    axes.set_yticks(range(len(problems)), [ratios.titles[p] for p in problems], fontsize="x-small")
    axes.set_xticks([0.5, 1, 2, 5, 10, LARGEST], ["0.5", "1", "2", "5", "10", f"{LARGEST:g}"])
    axes.minorticks_off()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)

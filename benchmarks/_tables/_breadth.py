"""Tables and the figure of many problems, each trained in each precision."""

import itertools
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from ._format import Record, Result, Table, groups
from ._outside import beside, judged_by, own_error


LABELS = {
    "forward-float32-float16": "forward float32, backward float16",
    "forward-float32-bfloat16": "forward float32, backward bfloat16",
    "refined-bfloat16": "two evaluations, backward bfloat16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "autocast-float16": "autocast, float16",
    "autocast-bfloat16": "autocast, bfloat16",
    "naive-float16": "float16 by hand",
    "tensorfloat32": "TF32, emulated",
    "forward-bfloat16_x3-float16": "forward bfloat16_x3 (emulated), backward float16",
    "forward-bfloat16_x3-bfloat16": "forward bfloat16_x3 (emulated), backward bfloat16",
    "float64": "float64",
    "forward-float64-float32": "forward float64, backward float32",
    "float32-rounded": "control: float32, weights rounded once",
    "float32-dropped": "control: float32, three steps dropped",
}
SEEDS = (0, 1, 2)  # of every summary; some problems have more
UNSOLVED = 0.3  # above this error of float32, a ratio means nothing
NEAR = 1.05  # times float32's error counts as equal: seeds differ by more


class Ratios:
    """The errors of a file's trainings relative to float32 from the same seed and the same code.
    `earlier` trainings count if a problem was not trained in that precision since.

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
        """Returns the error of float32, the median over the seeds."""
        runs = [t for t in self.full.values() if t["problem"] == problem]
        newest = [t for t in runs if "earlier" not in t] or runs
        known = [t["error"] for t in newest if t["error"] is not None]
        return statistics.median(known) if known else None

    def of(self, problem: str, precision: str) -> list[float]:
        """Returns the ratio of each seed; infinite for a training that failed."""
        trainings = self.by_problem.get((problem, precision), [])
        return [self.ratio(t) for t in trainings if self.full[_key(t)]["error"] is not None]

    def reference(self, problem: str) -> str:
        """Returns the name of the reference that judged a problem."""
        return judged_by(next(t for t in self.full.values() if t["problem"] == problem))

    def ratio(self, training: Record) -> float:
        full = self.full[_key(training)]["error"]
        return float("inf") if training["error"] is None else training["error"] / full

    def worst_last(self) -> list[str]:
        """Returns the problems, sorted by the worst ratio of the modes that promise full
        accuracy."""
        worst = lambda p: max((r for name in FULL for r in self.of(p, name)), default=0.0)
        return sorted(self.titles, key=worst)


def _key(training: Record) -> tuple[Any, ...]:
    names = ("problem", "optimizer", "seed", "steps")
    return ("earlier" in training, *(training[name] for name in names))


def number(ratio: float) -> str:
    return "none" if ratio == float("inf") else f"{ratio:.2f}"


def spread(ratios: Sequence[float]) -> str:
    """Returns the range of 90 % of the ratios."""
    twentieths = statistics.quantiles(ratios, n=20, method="inclusive")
    return f"{number(twentieths[0])}–{number(twentieths[-1])}"


def medians(data: Result, precision: str) -> dict[str, float]:
    """Returns the median error relative to float32 of each problem that float32 solves and that has
    trainings in this precision from the same three seeds."""
    ratios = Ratios(data, seeds=SEEDS)
    found = {p: ratios.of(p, precision) for p in ratios.solved}
    return {p: statistics.median(of) for p, of in found.items() if len(of) == len(SEEDS)}


def overall(data: Result) -> Iterator[Record]:
    """Yields a record for each precision. It counts the problems that float32 solves and that have
    trainings in this precision from the same three seeds."""
    ratios = Ratios(data, seeds=SEEDS)
    for name in ratios.precisions:
        found = [ratios.of(p, name) for p in ratios.solved]
        found = [of for of in found if len(of) == len(SEEDS)]
        medians, every = list(map(statistics.median, found)), list(itertools.chain(*found))
        if every:
            about = {"name": name, "precision": LABELS[name], "trainings": len(every)}
            worst = {"worst": number(max(medians)), "worst_training": number(max(every))}
            near = {"near": sum(r <= NEAR for r in medians), "problems": len(medians)}
            median = number(statistics.median(every))
            yield {**about, "median": median, "spread": spread(every), **near, **worst}


summary = Table(
    "breadth",
    overall,
    """
    error relative to float32  {precision}
    trainings                 {trainings}
    median                    {median}
    90 % within               {spread}
    problems at most 1.05     {near} of {problems}
    worst problem (training)  {worst} ({worst_training})
    """,
)


def _by_problem(optimizer: str | None, data: Result) -> Iterator[Record]:
    """Yields the median ratio of each problem, and the worst over its seeds."""
    ratios = Ratios(data, optimizer)
    for problem in ratios.worst_last():
        error = ratios.error(problem)
        row = {"title": ratios.titles[problem] + beside(ratios.reference(problem))}
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
    """Builds a table with a row for each problem and a column for each precision.

    By default it takes the problems' own optimizers and all precisions.
    """

    def columns(data: Result) -> list[str]:
        names = shown or Ratios(data, optimizer).precisions
        return ["problem  {title}", "float32  {float32}", *(f"{LABELS[n]}  {{{n}}}" for n in names)]

    return Table(file, lambda data: list(_by_problem(optimizer, data))[rows], columns)


problems = _of_problems("breadth")
# The twelve problems whose full forward pass was furthest from float32, the furthest first.
hardest = _of_problems(
    "breadth",
    shown=("forward-float32-float16", "float16", "naive-float16", "float32-rounded"),
    rows=slice(None, -13, -1),
)
FULL = ("forward-float32-float16", "forward-float32-bfloat16")
by_adam = _of_problems("breadth-precisions", "adam")
lbfgs = _of_problems("breadth-precisions", "adam+lbfgs", (*FULL, "float16", "tensorfloat32"))
by_lbfgs = _of_problems("breadth-precisions", "adam+lbfgs")
by_muon_lbfgs = _of_problems("breadth-precisions", "muon+lbfgs")


PAPER = {
    "cavity": "lid-driven cavity",
    "cavity_zero_equation": "lid-driven cavity, zero-equation model",
    "fpga_laminar": "FPGA heat sink, laminar",
    "fpga_zero_equation": "FPGA heat sink, turbulent",
    "heat_sink": "heat sink with three fins, in the plane",
}
"""The examples of Xue et al. (section 4)."""
FASTER = {"fpga_laminar": "; 2.2 times faster on a V100, 2.1 on an A100 (1.3 over TF32)"}


def _paper(data: Result) -> Iterator[Record]:
    ratios = Ratios(data)
    for problem, example in PAPER.items():
        told = {"example": example, "problem": problem, "told": FASTER.get(problem, "")}
        over = {n: ratios.of(problem, n) for n in ("float16", "forward-float32-float16")}
        medians = {name: statistics.median(found) for name, found in over.items() if found}
        yield {
            **told,
            "own": own_error(ratios.reference(problem)),
            "float32": ratios.error(problem),
            **medians,
        }


paper = Table(
    "breadth",
    _paper,
    """
    example                            {example}
    the paper, in float16              similar accuracy{told}
    problem here                       `{problem}`
    float32 (its reference)            {float32:.1e} ({own:.0e}) || {float32:.1e}
    float16                            {float16:.2f}
    forward float32, backward float16  {forward-float32-float16:.2f}
    """,
)


def _timed(lowest: str, data: Result) -> Iterator[Record]:
    """Yields a step's times by precision for each problem that was timed in `lowest`."""
    for runs in groups(data["steps"], "problem").values():
        times = {r["precision"]: r["seconds"]["median"] / r["steps"] for r in runs}
        if lowest in times:
            yield {**runs[0], **times}


float64_time = Table(
    "breadth-time",
    partial(_timed, "float64"),
    """
    problem                                    {title}
    float64, ms a step                         {float64:ms.2f}
    forward float64, backward float32, relative to float64  {forward-float64-float32/float64:.2f}
    float32, relative to float64               {float32/float64:.2f}
    """,
)
half_time = Table(
    "breadth-time",
    partial(_timed, "float16"),
    """
    step on a CPU                    {title}
    float32, ms                      {float32:ms.2f}
    forward float32, backward float16, relative to float32  {forward-float32-float16/float32:.2f}
    float16, relative to float32     {float16/float32:.2f}
    bfloat16, relative to float32    {bfloat16/float32:.2f}
    """,
)


# --- Casting a network, or autocast ------------------------------------------------------------


WAYS = {
    "cast, the default": "{half}",
    "`autocast=True`": "autocast-{half}",
    '`forward="float32"`': "forward-float32-{half}",
}


def _by_way(data: Result) -> Iterator[Record]:
    """Yields a record for each way, over the problems and seeds that were trained in all ways."""
    ratios = Ratios(data)
    halves = itertools.product(("float16", "bfloat16"), WAYS.items())
    names = [(way, half, name.format(half=half)) for half, (way, name) in halves]
    runs = lambda p, name: {
        t["seed"]: ratios.ratio(t) for t in ratios.by_problem.get((p, name), [])
    }
    of = {p: {name: runs(p, name) for _, _, name in names} for p in ratios.solved}
    seeds = {p: set.intersection(*map(set, found.values())) for p, found in of.items()}
    for way, half, name in names:
        medians = {p: statistics.median(of[p][name][s] for s in seeds[p]) for p in of if seeds[p]}
        worst = max(medians, key=medians.__getitem__)
        yield {
            "way": f"{half}, {way}",
            "median": statistics.median(medians.values()),
            "within": f"{sum(x <= 1.05 for x in medians.values())} of {len(medians)}",
            "worst": f"{medians[worst]:.2f} ({ratios.titles[worst]})",
        }


casting = Table(
    "breadth",
    _by_way,
    """
    error relative to float32  {way}
    median                {median:.2f}
    at most 1.05          {within}
    worst                 {worst}
    """,
)


# --- The figure ------------------------------------------------------------------------------


COLORS = (
    {"forward-float32-float16": "tab:blue", "forward-float32-bfloat16": "tab:purple"}
    | {"float16": "tab:cyan", "bfloat16": "tab:orange", "naive-float16": "tab:red"}
    | {"float32-rounded": "black", "float32-dropped": "tab:gray"}
)
LARGEST = 30.0


def draw(figure: Any, data: dict[str, Any]) -> None:
    """Draws a dot for each seed; the problems are sorted by their worst ratio."""
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
    axes.set(xscale="log", xlabel=f"error relative to float32, same seed (at most {LARGEST:g})")
    axes.set_yticks(range(len(problems)), [ratios.titles[p] for p in problems], fontsize="x-small")
    axes.set_xticks([0.5, 1, 2, 5, 10, LARGEST], ["0.5", "1", "2", "5", "10", f"{LARGEST:g}"])
    axes.minorticks_off()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)

"""The tables of the neural operators: ours beside those of Tu et al., Speeding up Fourier Neural
Operators via Mixed Precision (V100, 128² points, Navier–Stokes, 100 epochs)."""

import statistics
from collections.abc import Callable, Iterator
from functools import partial

from ._format import NONE, Record, Result, Table, groups, median


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
# In the text, over float32.
PAPER_RATIOS = {"darcy": "no increase", "navier_stokes": "1.06–1.11"}


def l2(run: Record, norm: str = "l2") -> float:
    """The error on the grid of the training."""
    return run["errors"][str(run["resolution"])][norm]


def variants(data: Result, problem: str, modes: int | None = None) -> list[Record]:
    """Of one problem, with the most modes, unless told how many: the trainings of each variant by
    seed, and their figures beside those of float32."""
    trainings = [t for t in data["trainings"] if t["problem"] == problem]
    modes = modes or max(t["modes"] for t in trainings)
    kept = [t for t in trainings if t["modes"] == modes]
    found = {
        key: sorted(runs, key=lambda t: t["seed"])
        for key, runs in groups(kept, "precision", "stabilizer").items()
    }
    return [_variant(runs, found["float32", None]) for runs in found.values()]


def _variant(runs: list[Record], full: list[Record]) -> Record:
    figures = {"train_loss": lambda t: t["train_loss"], "l2": l2, "h1": partial(l2, norm="h1")}
    told: Record = {name: _figure(runs, full, figure) for name, figure in figures.items()}
    for n in runs[0]["errors"]:
        found = _figure(runs, full, lambda t, n=n: t["errors"][n]["l2"])
        told[n] = f"{found['median']} ({found['ratio']})"
    first = runs[0]
    skipped = NONE if first["precision"] == "float32" else f"{median(runs, 'skipped_steps'):.0f}"
    name = ", ".join(filter(None, (first["precision"], first["stabilizer"])))
    problem = PROBLEMS[first["problem"]]
    return {**first, "title": problem, "name": name, "runs": runs, "skipped": skipped, **told}


def _figure(
    runs: list[Record], full: list[Record], figure: Callable[[Record], float]
) -> dict[str, str]:
    """The median, and over float32 the quotient of the medians, with and without that of each
    seed."""
    ours, theirs = ([figure(t) for t in trainings] for trainings in (runs, full))
    ratio = f"{statistics.median(ours) / statistics.median(theirs):.3f}"
    by_seed = " ".join(f"{v / b:.3f}" for v, b in zip(ours, theirs, strict=False))
    over = f"**{ratio}** ({by_seed})"
    return {"median": f"{statistics.median(ours):.4f}", "ratio": ratio, "over": over}


def _of_all(data: Result) -> Iterator[Record]:
    seeds = ", ".join(map(str, sorted({run["seed"] for run in data["trainings"]})))
    for problem in PROBLEMS:
        for row in variants(data, problem):
            mixed = (row["precision"], row["stabilizer"]) == ("float16", "tanh")
            yield {**row, "paper": PAPER_RATIOS[problem] if mixed else NONE, "seeds": seeds}


def _preactivations(data: Result) -> Iterator[Record]:
    for row in _of_all(data):
        if row["problem"] == "navier_stokes":
            key = row["precision"], row["stabilizer"]
            seconds, loss = PAPER_PREACTIVATIONS.get(key, (NONE, None))
            base = PAPER_PREACTIVATIONS["float32", None][1]
            yield {**row, "paper": {"seconds": seconds, "loss": loss, "base": base}}


def _by_modes(data: Result) -> Iterator[Record]:
    """Each variant with each number of modes, and that of the paper beside it."""
    seeds = next(_of_all(data))["seeds"]
    kept = sorted({t["modes"] for t in data["trainings"]}, reverse=True)
    pairs = list(zip(kept, sorted({m for _, m in PAPER_MODES}, reverse=True), strict=False))
    for key in (("float32", None), ("float16", None), ("float16", "tanh")):
        for m, paper_m in pairs:
            for row in variants(data, "navier_stokes", m):
                if (row["precision"], row["stabilizer"]) == key:
                    seconds, train, test = PAPER_MODES[key[0], paper_m]
                    base = PAPER_MODES["float32", paper_m][2]
                    paper = {"seconds": seconds, "train": train, "test": test, "base": base}
                    # Their mixed precision has the hyperbolic tangent in it.
                    beside = {} if key == ("float16", None) else paper
                    yield {**row, "paper": {"modes": paper_m, **beside}, "seeds": seeds}


_table = partial(
    Table,
    "operators",
    note="{samples} training samples on {resolution}² points, {channels} channels, {steps} steps; "
    "medians over seeds {seeds}.",
)

everything = _table(
    _of_all,
    """
    problem  {title}
    variant  {name}
    test H1 error           {h1.median}
    over float32 (by seed)  {h1.over}
    test L2 error           {l2.median}
    over float32 (by seed)  {l2.over}
    skipped steps           {skipped}
    paper, over float32     {paper}
    """,
)

precisions = _table(
    lambda data: [r for r in _of_all(data) if r["stabilizer"] in (None, "tanh")],
    """
    problem  {title}
    variant  {name}
    test H1 error        {h1.median}
    relative to float32  {h1.ratio}
    test L2 error, relative to float32  {l2.ratio}
    paper                {paper}
    """,
)

preactivations = _table(
    _preactivations,
    f"""
    precision       {{precision}}
    pre-activation  {{stabilizer}} || none
    training loss   {{train_loss.median}}
    over float32 (by seed)   {{train_loss.over}}
    {PAPER}: training loss  {{paper.loss:.4f}}
    over float32             {{paper.loss/paper.base:.3f}}
    seconds per epoch        {{paper.seconds}}
    """,
)

modes = _table(
    _by_modes,
    f"""
    precision      {{name}}
    modes          {{modes}}
    training loss  {{train_loss.median}}
    test H1 error  {{h1.median}}
    over float32 (by seed)  {{h1.over}}
    {PAPER}: modes  {{paper.modes}}
    training loss      {{paper.train:.4f}}
    test loss          {{paper.test:.4f}}
    over float32       {{paper.test/paper.base:.3f}}
    seconds per epoch  {{paper.seconds}}
    """,
)

resolutions = _table(
    _of_all,
    lambda data: [
        *("problem  {title}", "variant  {name}"),
        *(
            f"L2 at {n}² (over float32)  {{{n}}}"
            for n in sorted(map(int, data["trainings"][0]["errors"]))
        ),
    ],
)

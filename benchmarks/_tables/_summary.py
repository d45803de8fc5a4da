"""All of it at a glance: what half precision costs in accuracy, and what it saves."""

import statistics

from ._breadth import Ratios, number
from ._format import NOT_RUN, Result, load, markdown, median, taken
from ._predicted import saved, speedups
from ._programs import over_by_hand


NEAR = 1.05  # times the error of float32 is as good: seeds differ by more
RUNS = {
    "forward-float32-float16": '`forward="float32"` with float16 behind it',
    "forward-float32-bfloat16": '`forward="float32"` with bfloat16 behind it',
    "float16": "float16 throughout",
    "bfloat16": "bfloat16 throughout",
    "naive-float16": "everything cast to float16 by hand",
    "float32-rounded": "float32 with its first weights rounded once: chance",
}

READ = ("breadth", "predicted-h100", "overhead")
COMPILED = {
    "physics-informed step": "cavity-512",
    "neural operator": "fno-128",
    "ViT-Base": "vit-base",
}


def _errors(ratios: Ratios, name: str) -> str:
    """Of one precision, over the problems that float32 solves."""
    found = ratios.medians(name)
    near = sum(r <= NEAR for r in found) / len(found)
    return (
        f"median {number(statistics.median(found))}, at most {NEAR} in {100 * near:.0f} % of "
        f"{len(found)} problems, worst {number(max(found))}"
    )


def headline() -> str:
    """What is promised, and the figure for it."""
    read = [load(f"{name}-cpu") for name in READ]
    breadth, predicted, overhead = read
    ratios = Ratios(breadth)
    counts = {p: len(ratios.of(p, "forward-float32-float16")) for p in ratios.solved}
    seeds = " or ".join(map(str, sorted(set(counts.values()) - {0})))
    rows = [
        *([f"Error over float32's, {what}", _errors(ratios, name)] for name, what in RUNS.items()),
        ["Seeds of these trainings", f"{seeds} a problem, most where they scatter; its median"],
        ["Relative test error of neural operators, float16 and float32", _operators(ratios)],
    ]
    rows += [
        [f"Memory of a {name}, float16 over float32, {NOT_RUN}", f"{saved(predicted, problem):.2f}"]
        for name, problem in COMPILED.items()
    ]
    ours = (r for r in over_by_hand(overhead) if r["step"] == "mpx_pde" and r["flops"])
    extra = max(r["flops"] / r["hand"]["flops"] for r in ours)
    rows += [
        ["Operations of a step, over the same step by hand, on a CPU", f"at most {extra:.2f}"],
        ["Speed on a GPU", _speed(predicted)],
    ]
    ages = (f"- `{name}`: {taken(data)}\n" for name, data in zip(READ, read, strict=True))
    return "".join([markdown(["what", "measured"], rows), "\n\n", *ages])


def _operators(ratios: Ratios) -> str:
    return ", ".join(
        f"{median(ratios.runs(problem, 'float16'), 'error'):.4f} and "
        f"{ratios.error(problem):.4f} (`{problem}`)"
        for problem in ("operator_darcy", "operator_navier_stokes")
    )


def _speed(data: Result) -> str:
    spans = (
        f"{min(found):.1f} to {max(found):.1f} times {name}"
        for name, found in ((n, speedups(data, n)) for n in ("float32", "TF32"))
    )
    return f"not measured; predicted of steps compiled for an H100, not run: {' and '.join(spans)}"

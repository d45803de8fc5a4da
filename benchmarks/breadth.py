"""Does half precision cost accuracy? The problems of `examples/problems`, in each precision.

Each problem is trained from each seed in each precision, from the same weights on the same points,
with the defaults of the library: no problem is tuned for a precision. Two controls measure chance:
float32 with its initial weights rounded once, and float32 without its first three steps. A
difference between precisions that is no larger than theirs means nothing.

With `--resume` a run may be stopped at any time, and continued whenever the machine is idle:

    nice -n 19 python -m benchmarks breadth --resume --seeds 0
    nice -n 19 python -m benchmarks breadth --resume --seeds 0 1 2

`--page precisions` trains what *Choosing a precision* compares: further precisions, and L-BFGS
after Adam. `--time` instead times the steps of some problems, in float64 and lower precisions or in
float32 and lower precisions; the precisions take turns.
"""

import argparse
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax

from ._problems import problems, trainer
from ._report import Report, interleave


class Page(NamedTuple):
    """The precisions and problems that a page compares, in the order of the trainings; by default
    all problems."""

    precisions: str
    optimizer: str | None = None  # None for the problem's own
    problems: str = ""


FORWARD = "forward-float32-float16 forward-float32-bfloat16 forward-bfloat16_x3-bfloat16"
PAGES = {
    "breadth": Page(
        f"float32 {FORWARD} float16 bfloat16 float32-rounded "
        "float32-dropped naive-float16 autocast-float16 autocast-bfloat16"
    ),
    "precisions": Page(
        "float32 forward-float32-float16 forward-float32-bfloat16 refined-bfloat16 tensorfloat32 "
        "forward-bfloat16_x3-float16 forward-bfloat16_x3-bfloat16 float16 bfloat16 float64 "
        "forward-float64-float32 float32-rounded float32-dropped",
        "adam+lbfgs",  # which includes a training by Adam
        # The problems of PINN_FP64, and others.
        "convection reaction wave_1d allen_cahn burgers_1d helmholtz cavity heat_sink "
        "poisson_1000d kovasznay klein_gordon taylor_green fisher",
    ),
}
TIMED = {
    "float64 forward-float64-float32 float32": "helmholtz kovasznay klein_gordon cavity",
    "float32 forward-float32-float16 float16 bfloat16": "burgers_1d emulate_fisher operator_darcy",
}
"""Precisions, and the problems whose steps are timed in them."""
STEPS, ROUNDS = 20, 20  # steps in a timed call, and timed rounds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--page", choices=PAGES, default="breadth", help="what to compare")
    parser.add_argument("--problems", nargs="+", help="by default those of the page")
    parser.add_argument("--precision", nargs="+", help="by default those of the page")
    parser.add_argument("--optimizer", help="by default that of the page")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="by default those of the problem")
    parser.add_argument("--minutes", type=float, help="start no training after that many")
    parser.add_argument("--time", action="store_true", help="time steps, and train nothing")
    parser.add_argument("--resume", action="store_true", help="keep the trainings in the file")


def steps(problem: str, precision: str) -> Callable[[], Any]:
    """Compiles a call that takes some steps of a problem."""
    training = trainer(problem, precision, optimizer=None, steps=STEPS)
    with training.types():
        state, key = training.initial(0)
        points = training.next_points(state.model, key)
        operands = eqx.filter(state, eqx.is_array), points
        run = training.steps_of(state).lower(*operands).compile()

    def call():
        with training.types():
            return run(*operands)

    return call


def timed(report: Report, name: str, precisions: list[str], rounds: int) -> None:
    """Records the times of the steps of a problem."""
    calls = {precision: steps(name, precision) for precision in precisions}
    for precision, seconds in interleave(calls, rounds=rounds).items():
        where = {"problem": name, "title": problems.load(name).title}
        report.record("steps", **where, precision=precision, steps=STEPS, seconds=seconds)


def run(report: Report, args: argparse.Namespace) -> None:
    if args.time:
        report.name = "breadth-time"
        for precisions, names in list(TIMED.items())[: 1 if args.quick else None]:
            for name in (args.problems or names.split())[: 1 if args.quick else None]:
                timed(report, name, precisions.split(), rounds=2 if args.quick else ROUNDS)
        return
    if args.page != "breadth":
        report.name = f"breadth-{args.page}"
    page = PAGES[args.page]
    if args.resume:
        report.resume("trainings", "earlier")
    names = args.problems or page.problems.split() or problems.names()
    optimizer = args.optimizer or page.optimizer
    given = {"optimizer": optimizer, "steps": args.steps, "quick": args.quick}
    wanted = itertools.product(names, args.precision or page.precisions.split())
    for name, precision in report.within(args.minutes, wanted):
        training = trainer(name, precision, **given)
        about = {"problem": name, "precision": precision, "steps": training.steps}
        keys = ({**about, "optimizer": training.optimizer_name, "seed": s} for s in args.seeds)
        for key in report.missing("trainings", keys):
            trained(report, training, key)


def trained(report: Report, training: Any, key: dict[str, Any]) -> None:
    """Records a training; if L-BFGS follows another optimizer, records both stages."""
    about = {"title": training.problem.title, "family": training.problem.family}
    try:
        found = [outcome.record() for outcome in training.stages(key["seed"])]
    except Exception as error:  # a problem's failure is its result
        found = [{"error": None, "failed": f"{type(error).__name__}: {error}"[:500]}]
    for stage in found:
        record = {**key, **about, **stage, "precision": key["precision"]}
        if not report.has("trainings", **{name: record[name] for name in key}):
            report.record("trainings", **record)
    jax.clear_caches()  # some dozens of compiled trainings exhaust a process's resources
    last = report.sections["trainings"][-1]
    print(f"{key}: {last.get('failed', last['error'])}", flush=True)

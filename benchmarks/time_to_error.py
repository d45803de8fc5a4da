"""How long does it take to reach an error? Every rival trains the same problem: error against time.

`cavity`, `burgers` and `navier_stokes` are problems of `examples/problems`: `cavity`, `burgers_1d`
and `operator_navier_stokes`. Network, initial weights, points or batches, optimizer and steps are
the same for all rivals; the error is the problem's, against its reference: on the center lines of
the cavity, on a grid for Burgers' equation, of the test samples of the operator.

Errors by step are the same on a busy machine, times are not. So trainings and times are taken apart
and add up in one file: a run trains from each seed what is not there yet, and `--time`, where
nothing else runs, times the steps of all rivals in turn. Seconds to an error are steps times the
median time of one; compilation stands beside them.

On a CPU, `TF32, emulated` rounds the operands of all products as a GPU does: its errors are those
of TF32, but the time it takes says nothing.
"""

import argparse
import time
from itertools import islice
from typing import Any

import jax

from . import _operator_trainings, _pinn_trainings
from ._report import Report, Timing
from ._rivals import RivalMissing, failure
from ._trainings import Moment, Training, take_turns


PROBLEMS: dict[str, tuple[Any, Any, Any]] = {
    "cavity": (_pinn_trainings, _pinn_trainings.cavity, _pinn_trainings.cavity_rivals),
    "burgers": (_pinn_trainings, _pinn_trainings.burgers, _pinn_trainings.burgers_rivals),
    "navier_stokes": (
        _operator_trainings,
        _operator_trainings.make_problem,
        _operator_trainings.rivals,
    ),
}
"""Where its sizes and factors are, what makes it of a size, and its rivals."""
ROUNDS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--problem", choices=PROBLEMS, required=True)
    parser.add_argument(
        "--size", choices=("small", "full"), help="by default small, and full on a GPU"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rivals", nargs="+", help="by default all")
    parser.add_argument("--time", action="store_true", help="time steps, and train nothing")


def compiled(report: Report, trainings: dict[str, Training]) -> dict[str, tuple[Moment, float]]:
    """Of each rival the moment before the first step, and the seconds that it took to get there.
    What fails or is not installed is left out, and the reason recorded or printed."""
    out = {}
    for name, training in trainings.items():
        start = time.perf_counter()
        try:
            first = next(training)
        except RivalMissing as e:
            report.note(f"{name}: {e}")
        except Exception as e:
            report.record("curves", rival=name, failed=failure(e))
        else:
            out[name] = first, time.perf_counter() - start
    return out


def follow(report: Report, problem: Any, seed: int, rivals: dict[str, Any]) -> None:
    """Trains rivals from one seed."""
    trainings = {name: train(problem, seed) for name, train in rivals.items()}
    records = {
        name: report.record(
            "curves", rival=name, seed=seed, steps=[first.steps], errors=[first.error()]
        )
        for name, (first, _) in compiled(report, trainings).items()
    }
    for name, moment in take_turns({name: trainings[name] for name in records}):
        records[name]["steps"].append(moment.steps)
        records[name]["errors"].append(moment.error())


def clock(report: Report, problem: Any, rivals: dict[str, Any]) -> None:
    """Times the steps of rivals in turn; what is emulated does not take the time that it would."""
    trainings = {name: train(problem, 0) for name, train in rivals.items()}
    started = compiled(report, trainings)
    before = {name: first for name, (first, _) in started.items()}
    seconds: dict[str, list[float]] = {name: [] for name in started}
    turns = take_turns({name: trainings[name] for name in started})
    # The first round warms up.
    for name, moment in islice(turns, (1 + ROUNDS) * len(started)):
        past, before[name] = before[name], moment
        seconds[name].append((moment.seconds - past.seconds) / (moment.steps - past.steps))
    for name, (_, start) in started.items():
        timing = None if "emulated" in name else Timing.of(seconds[name][1:])
        report.record("times", rival=name, start_seconds=start, step=timing)


def run(report: Report, args: argparse.Namespace) -> None:
    module, make_problem, make_rivals = PROBLEMS[args.problem]
    report.name = f"time_to_error-{args.problem}"
    on_gpu = jax.default_backend() == "gpu"
    size = "quick" if args.quick else args.size or ("full" if on_gpu else "small")
    problem, rivals = make_problem(module.SIZES[size]), make_rivals(on_gpu)
    chosen = {name: rivals[name] for name in args.rivals or rivals}
    if not args.quick:  # times are taken anew
        report.resume(*(["curves"] if args.time else ["curves", "times"]), same_code=True)
    report.record("size", name=size, factors=module.FACTORS, **module.SIZES[size]._asdict())
    if args.time or args.quick:
        clock(report, problem, chosen)
    for seed in () if args.time else args.seeds:
        there = {c["rival"] for c in report.sections.get("curves", []) if c.get("seed") == seed}
        follow(report, problem, seed, {n: t for n, t in chosen.items() if n not in there})
        report.save()
    if any(name.startswith("float32") for name in chosen) and "curves" in report.sections:
        report.page(f"time_to_error.{args.problem}_all")

"""How long does it take to reach an error? Every rival trains the same problem: error against time.

`cavity` is the physics-informed network of `examples/lid_driven_cavity.py`, `navier_stokes` the
operator of `examples/navier_stokes.py`. Network, initial weights, points or batches, optimizer and
steps are the same for all rivals; the error is the example's, against its reference: on the centre
lines of the cavity, of the test samples of the operator. The rivals take turns. Seconds are those
of the steps alone: compilation stands beside them, the evaluation of errors is not counted.

On a CPU, `TF32, emulated` rounds the operands of all products as a GPU does: its errors are those
of TF32, but the time it takes says nothing. Nor is half precision any faster there than float32,
in which XLA computes it.
"""

import argparse
import time
from typing import Any

import jax

from . import _cavity_trainings, _operator_trainings
from ._report import Report
from ._rivals import RivalMissing, failure
from ._trainings import Moment, Training, take_turns


PROBLEMS: dict[str, Any] = {"cavity": _cavity_trainings, "navier_stokes": _operator_trainings}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--problem", choices=PROBLEMS, required=True)
    parser.add_argument(
        "--size", choices=("small", "full"), help="by default small, and full on a GPU"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rivals", nargs="+", help="by default all")


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
    """Trains all rivals from one seed."""
    trainings = {name: train(problem, seed) for name, train in rivals.items()}
    started = compiled(report, trainings)
    records = {}
    for name, (first, seconds) in started.items():
        records[name] = report.record(
            "curves",
            rival=name,
            seed=seed,
            start_seconds=seconds,
            time_measured="emulated" not in name,
            steps=[first.steps],
            seconds=[first.seconds],
            errors=[first.error()],
        )
    for name, moment in take_turns({name: trainings[name] for name in started}):
        records[name]["steps"].append(moment.steps)
        records[name]["seconds"].append(moment.seconds)
        records[name]["errors"].append(moment.error())


def run(report: Report, args: argparse.Namespace) -> int:
    module = PROBLEMS[args.problem]
    report.name = f"time_to_error-{args.problem}"
    on_gpu = jax.default_backend() == "gpu"
    size = "quick" if args.quick else args.size or ("full" if on_gpu else "small")
    problem = module.make_problem(module.SIZES[size])
    rivals = module.rivals(on_gpu)
    chosen = {name: rivals[name] for name in args.rivals or rivals}
    report.record("size", name=size, factors=module.FACTORS, **module.SIZES[size]._asdict())
    for seed in args.seeds:
        follow(report, problem, seed, chosen)
        report.save(args.out)
    if any(name.startswith("float32") for name in chosen):
        report.page(f"time-to-error-{args.problem.replace('_', '-')}")
    return 0

"""What would a step of each problem take on an H100? Memory and time, compiled and predicted.

The steps that `breadth` trains with, optimizer included, are compiled for a device that need not be
here; seconds are predicted as `predicted` does. Most of these problems are of a size for two cores:
their steps are some hundreds of kernels that take no longer than it takes to launch them, and half
precision then saves memory and no time. `pinn_step` and `predicted` have steps of a size for a GPU.
Memory is that beyond state, points and the workspace of cuBLAS.

With `--time` steps run on this machine, in float64 too.
"""

import argparse
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax

from ._chips import CHIPS
from ._deviceless import CUBLAS, compile_for
from ._problems import problems, trainer
from ._report import Report, interleave
from ._roofline import Roofline, summary


PRECISIONS = ("float32", "float16", "forward-float32-float16")
TIMED = ("float64", "forward-float64-float32", "float32")
TIMED_PROBLEMS = ("helmholtz", "kovasznay", "klein_gordon", "cavity")
STEPS = 20  # in a timed call
TOLD = ("kernels", "bytes", "seconds_with_arithmetic")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", choices=CHIPS, default="h100")
    parser.add_argument("--problems", nargs="+", help="by default all, where they are timed four")
    parser.add_argument("--time", action="store_true", help="of steps in float64, on this machine")
    parser.add_argument("--rounds", type=int, default=20, help="of the clock")
    parser.add_argument("--resume", action="store_true", help="keep the programs in the file")


def costs(target: str, problem: str, precision: str) -> dict[str, Any]:
    """Of one step of a problem."""
    training = trainer(problem, precision, optimizer=None, steps=None)
    state, key = training.initial(0)
    several = eqx.filter_eval_shape(training.choose, state.model, key)
    points = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), several)
    parts = training.step, state, points
    program = compile_for(target, *parts, donate=(0,), compiler_options=CUBLAS)
    whole = summary(Roofline(program.module).kernels(), CHIPS[target])
    # What cuBLAS is given to work in, which every program has.
    workspace = max(map(int, re.findall(r"s8\[(\d+)\]", program.text)), default=0)
    return {"temp_bytes": program.temp_bytes - workspace, **{name: whole[name] for name in TOLD}}


def timed(problem: str, rounds: int) -> dict[str, Any]:
    """Seconds of some steps of a problem in each of the precisions, which take turns."""

    def steps(precision: str) -> Callable[[], Any]:
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

    times = interleave({precision: steps(precision) for precision in TIMED}, rounds=rounds)
    return {p: {"steps": STEPS, "seconds": seconds} for p, seconds in times.items()}


def run(report: Report, args: argparse.Namespace) -> None:
    if args.time:
        report.name += "-time"
        for name in args.problems or TIMED_PROBLEMS[: 1 if args.quick else None]:
            title = problems().load(name).title
            for precision, told in timed(name, 2 if args.quick else args.rounds).items():
                report.record("steps", problem=name, title=title, precision=precision, **told)
            jax.clear_caches()
        return
    if args.resume:
        report.resume("programs")
    names = args.problems or (["kovasznay"] if args.quick else problems().names())
    keys = ({"problem": name, "precision": p} for name in names for p in PRECISIONS)
    for key in report.missing("programs", keys):
        where = {"title": problems().load(key["problem"]).title, **key}
        told = partial(costs, args.target, **key)
        print(report.attempt("programs", where, told), flush=True)
        jax.clear_caches()

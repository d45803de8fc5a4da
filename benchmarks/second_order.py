"""How far do second-order steps get? Levenberg–Marquardt on a Poisson equation, by precision.

The training is that of `examples/second_order.py`. A training is written as soon as it is there,
and `--resume` goes on from the file.
"""

import argparse
from typing import Any

import jax

from ._examples import load_example
from ._report import Report


PRECISIONS = ("float64", "float64-float16", "float32", "float32-float16", "float32-bfloat16")
"""Of the residual and, behind a hyphen, of the Jacobian where that is another."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--precision", nargs="+", default=list(PRECISIONS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, help="by default those of the example")
    parser.add_argument("--resume", action="store_true", help="keep the trainings in the file")


def run(report: Report, args: argparse.Namespace) -> int:
    example: Any = load_example("second_order")
    steps = 4 if args.quick else args.steps or example.STEPS["lm"]
    if args.resume:
        report.resume(args.out, "trainings")
    for precision in args.precision:
        forward, _, jacobian = precision.partition("-")
        for seed in args.seeds:
            key = {"forward": forward, "jacobian": jacobian or forward, "seed": seed}
            if report.has("trainings", **key, total=steps):
                continue
            with jax.enable_x64(forward == "float64"):
                found = example.train("lm", **key, steps=steps)
            at, errors = zip(*found.curve, strict=True)
            report.record("trainings", **key, total=steps, steps=at, errors=errors)
            report.save(args.out)
    return 0

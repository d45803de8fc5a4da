"""How far do second-order steps get? Levenberg–Marquardt on a Poisson equation, by precision.

The training is that of `examples/second_order.py`.
"""

import argparse
import itertools
from typing import Any

import jax

from ._examples import load_example
from ._report import Report


PRECISIONS = (
    *("float64", "float64-float32", "float64-bfloat16_x3", "float64-float16"),
    *("float32", "float32-bfloat16_x3", "float32-float16", "float32-bfloat16"),
)
"""Of the residual and, behind a hyphen, of the Jacobian where that is another."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--precision", nargs="+", default=list(PRECISIONS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="by default those of the example")
    parser.add_argument("--resume", action="store_true", help="keep the trainings in the file")


def run(report: Report, args: argparse.Namespace) -> None:
    example: Any = load_example("second_order")
    steps = 4 if args.quick else args.steps or example.PROBLEMS["poisson"].steps["lm"]
    if args.resume:
        report.resume("trainings")
    keys = []
    for precision, seed in itertools.product(args.precision, args.seeds):
        forward, _, jacobian = precision.partition("-")
        names = {"forward": forward, "jacobian": jacobian or forward}
        keys.append({**names, "seed": seed, "total": steps})
    for key in report.missing("trainings", keys):
        with jax.enable_x64(key["forward"] == "float64"):
            found = example.train("poisson", "lm", *key.values())
        at, errors = zip(*found.curve, strict=True)
        report.record("trainings", **key, steps=at, errors=errors)

"""How far do second-order steps get? Levenberg–Marquardt on the collection, by precision.

The recipe is that of `python -m examples.problems run NAME --recipe deep`.
"""

import argparse
import importlib
import itertools

from ._problems import problems
from ._report import Report


PRECISIONS = ("float64", "float64-float32", "float32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--problems", nargs="+", help="by default all that have the recipe")
    parser.add_argument("--precision", nargs="+", default=list(PRECISIONS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="by default those of the recipe")
    parser.add_argument("--resume", action="store_true", help="keep the trainings in the file")


def run(report: Report, args: argparse.Namespace) -> None:
    package = problems()
    deep = importlib.import_module("examples.problems._deep")
    steps = 4 if args.quick else args.steps or deep.STEPS
    names = args.problems or [n for n in package.names() if package.load(n).deep is not None]
    names = names[:1] if args.quick else names
    if args.resume:
        report.resume("trainings")
    keys = [
        {"problem": name, "precision": precision, "seed": seed, "steps": steps}
        for seed, name, precision in itertools.product(args.seeds, names, args.precision)
    ]
    for key in report.missing("trainings", keys):
        problem = package.load(key["problem"])
        outcome = deep.DeepTrainer(problem, key["precision"], steps=steps)(key["seed"])
        found = {"title": problem.title, **outcome.record()}
        report.record("trainings", **key, **{n: x for n, x in found.items() if n not in key})

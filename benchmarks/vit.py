"""Does autocast train a transformer as well as float32? Accuracy on handwritten digits.

The trainings are those of `examples/vit.py`, with the same network, images and optimizer. For each
seed they run one after another in float32, by autocast, and by casting the whole model.
"""

import argparse

from ._problems import load_example
from ._report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="by default those of the example")


def run(report: Report, args: argparse.Namespace) -> None:
    vit = load_example("vit")

    for seed in args.seeds:
        results = vit.main(steps=args.steps, seed=seed, out=None, quick=args.quick)
        for result in results.values():
            names = ("precision", "accuracy", "test_loss", "skipped_steps", "temp_bytes")
            told = {name: getattr(result, name) for name in names}
            loss = {"steps": len(result.loss), "loss": float(result.loss[-20:].mean())}
            report.record("trainings", seed=seed, **told, **loss)

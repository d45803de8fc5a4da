"""What do solutions look like? Pictures of problems, trained by the defaults of the library.

Each problem is trained once with the forward pass in float32 and the backward pass in bfloat16, and
drawn beside its reference:

    python -m benchmarks gallery --resume

writes `docs/figures/gallery/*.webp` and the errors, from which the page is made.
"""

import argparse
import dataclasses
import importlib
from pathlib import Path
from typing import Any

from ._gallery import PICTURES, save
from ._problems import problems
from ._report import Report


PRECISION = "forward-float32-bfloat16"
FOLDER = Path(__file__).parent.parent / "docs" / "figures" / "gallery"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--problems", nargs="+", choices=PICTURES, help="by default all")
    parser.add_argument("--pictures", type=Path, default=FOLDER, help="folder of the pictures")
    parser.add_argument("--resume", action="store_true", help="keep what is there")


def run(report: Report, args: argparse.Namespace) -> None:
    chosen = args.problems or list(PICTURES)
    report.resume("trainings")
    if not args.resume:
        before = report.sections.get("trainings", [])
        report.sections["trainings"] = [r for r in before if r["problem"] not in chosen]
    for key in report.missing("trainings", ({"problem": name} for name in chosen)):
        record, shown = trained(key["problem"], quick=args.quick)
        save(shown, args.pictures / f"{key['problem']}.webp")
        report.record("trainings", **key, **record)
        print(f"{key['problem']}: {record['error']:.2e}", flush=True)
    report.sections["trainings"].sort(key=lambda r: list(PICTURES).index(r["problem"]))


def trained(name: str, *, quick: bool = False) -> tuple[dict[str, Any], Any]:
    """The record of a training from seed 0, and what is drawn of the network."""
    package = problems()
    runner = importlib.import_module("examples.problems._runner")
    problem = package.load(name)
    module = importlib.import_module(f"examples.problems.{name}")
    kept = []

    def errors(model: Any) -> Any:
        kept.append(model)
        return runner.errors_of(problem, model)

    steps = runner.QUICK_STEPS if quick else None
    watched = dataclasses.replace(problem, errors=errors)
    record = runner.Trainer(watched, PRECISION, steps=steps)(0).record()
    about = {"title": problem.title, "family": problem.family}
    return {**about, **record}, PICTURES[name](module, kept[-1])

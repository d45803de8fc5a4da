"""How accurate are half-precision FNOs? Test errors per precision, stabilizer, modes, resolution.

The data are those of `operator_darcy` and `operator_navier_stokes` among the problems, on coarser
grids: the same operator, data, batches and optimizer for each seed, and nothing else tuned. Each
variant of the paper's tables (Tu et al., Speeding up Fourier Neural Operators via Mixed Precision)
is one of them; errors are those of the test samples, computed in the precision of the training.

`--size small` is meant for one CPU core (some seconds for each training, and as many to compile
it), `--size full` for a GPU: the grid and the modes of the paper.
"""

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from examples.problems._runner import Trainer

from ._operator_trainings import Operator
from ._report import Report


@dataclass(frozen=True)
class Size:
    samples: int
    finest: int  # grid of the data
    strides: tuple[int, ...]  # from there to the grid of the training, and to others of the test
    modes: tuple[int, ...]  # the first for all trainings, the others for the table of modes
    channels: int
    steps: int


SIZES = {
    "quick": Size(16, 32, (2, 1), (8, 4), 8, 10),
    "small": Size(400, 64, (4, 2), (12, 8, 4), 16, 400),
    "full": Size(2000, 256, (2, 4, 1), (64, 32, 16), 64, 10_000),
}


class Variant(NamedTuple):
    precision: str
    stabilizer: str | None = None


PROBLEMS = ("darcy", "navier_stokes")
COMPARED = (
    Variant("float32"),
    Variant("bfloat16"),
    Variant("float16"),
    Variant("float32", "tanh"),
    Variant("float16", "tanh"),
    Variant("float16", "soft_clip"),
)
CLIPPED = (Variant("float16", "hard_clip"), Variant("float16", "sigma_clip"))
TRUNCATED = (Variant("float32"), Variant("float16"), Variant("float16", "tanh"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--size", choices=("small", "full"), default="small")
    parser.add_argument("--steps", type=int, help="by default those of the size")
    parser.add_argument("--resume", action="store_true", help="keep the trainings in the file")


def trainings(modes: tuple[int, ...]) -> Iterator[tuple[str, Variant, int]]:
    """Problem, variant and modes: first what is compared with float32, then the paper's tables."""
    for problem, variant in itertools.product(PROBLEMS, COMPARED):
        yield problem, variant, modes[0]
    for variant in CLIPPED:
        yield "navier_stokes", variant, modes[0]
    for m, variant in itertools.product(modes[1:], TRUNCATED):
        yield "navier_stokes", variant, m


def run(report: Report, args: argparse.Namespace) -> None:
    size = SIZES["quick" if args.quick else args.size]
    if args.resume:
        report.resume("trainings", same_code=True)
    make = partial(Operator, samples=size.samples, strides=size.strides, finest=size.finest)
    operators = {name: make(name) for name in PROBLEMS}
    for name, (precision, stabilizer), modes in trainings(size.modes):
        problem = operators[name].problem(size.channels, modes, stabilizer=stabilizer)
        trainer = Trainer(problem, precision, steps=args.steps or size.steps)
        about = {"problem": name, "precision": precision, "stabilizer": stabilizer}
        about |= {"modes": modes, "steps": trainer.steps, "samples": size.samples}
        for key in report.missing("trainings", ({**about, "seed": s} for s in args.seeds)):
            outcome = trainer(key["seed"])
            errors: dict[str, dict[str, Any]] = {}
            for told, error in outcome.errors.items():
                norm, resolution = told.split()
                errors.setdefault(resolution, {})[norm] = error
            report.record(
                "trainings",
                **key,
                resolution=size.finest // size.strides[0],
                channels=size.channels,
                train_loss=outcome.loss,
                errors=errors,
                skipped_steps=outcome.skipped,
            )
            print(f"{key}: {outcome.error}", flush=True)

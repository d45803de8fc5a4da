"""How accurate are half-precision FNOs? Test errors per precision, stabilizer, modes, resolution.

The trainings are those of `examples/darcy.py` and `examples/navier_stokes.py`: the same
operator, data, batches and optimizer for each seed, and nothing else tuned. Each variant of the
paper's tables (Tu et al., Speeding up Fourier Neural Operators via Mixed Precision) is one of
them; errors are those of the test samples, computed in the precision of the training.

`--size small` is meant for one CPU core (some seconds for each training, and as many to compile
it), `--size full` for a GPU: the grid and the modes of the paper.
"""

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.console import Console

from ._examples import load_example
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
    shared: Any = load_example("_neural_operator")
    progress_bar = load_example("_progress").progress_bar
    size = SIZES["quick" if args.quick else args.size]
    if args.resume:
        report.resume("trainings", same_code=True)
    problems = {
        name: load_example(name).problem(size.samples, size.strides, finest=size.finest)
        for name in PROBLEMS
    }
    with progress_bar(Console(stderr=True), 9) as progress:
        for name, variant, modes in trainings(size.modes):
            training = shared.Training(
                problems[name],
                variant.precision,
                stabilizer=variant.stabilizer,
                modes=modes,
                hidden_channels=size.channels,
                steps=args.steps or size.steps,
            )
            about = {"problem": name, **variant._asdict(), "modes": modes}
            about |= {"steps": training.steps, "samples": size.samples}
            for key in report.missing("trainings", ({**about, "seed": s} for s in args.seeds)):
                result = training(key["seed"], progress, label=" ".join(map(str, key.values())))
                report.record(
                    "trainings",
                    **key,
                    resolution=size.finest // size.strides[0],
                    channels=size.channels,
                    # Over the last tenth of the steps, since each is of one batch.
                    train_loss=float(result.loss[-max(training.steps // 10, 1) :].mean()),
                    errors={str(n): norms for n, norms in result.errors.items()},
                    skipped_steps=result.skipped_steps,
                )

"""Trains problems from the command line: `python -m examples.problems list|run NAME ...|all`."""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import SIZES, __doc__ as description, load, names
from ._deep import PRECISIONS as DEEP_PRECISIONS, DeepTrainer
from ._kept import Kept
from ._problem import Problem
from ._runner import FINISHES, OPTIMIZERS, PRECISIONS, QUICK_STEPS, Trainer


UNFINISHED = ".unfinished.npz"


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="python -m examples.problems",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = out.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="list the problems")
    run = commands.add_parser("run", help="train some or all of them")
    run.add_argument("names", nargs="+", metavar="NAME", help="a problem, or `all`")
    run.add_argument(
        "--recipe",
        choices=("plain", "deep"),
        default="plain",
        help="deep: Levenberg–Marquardt, for errors of 1e-5 and less",
    )
    run.add_argument(
        "--precision",
        nargs="+",
        choices=dict.fromkeys((*PRECISIONS, *DEEP_PRECISIONS)),
        metavar="PRECISION",
        help=f"by default float32. Plain: {', '.join(PRECISIONS)}. Deep, that of the residual and "
        f"after a hyphen that of its Jacobian: {', '.join(DEEP_PRECISIONS)}",
    )
    run.add_argument("--seeds", type=int, nargs="+", default=[0])
    optimizers = [name + finish for name in OPTIMIZERS for finish in FINISHES]
    run.add_argument("--optimizer", choices=optimizers, help="by default that of the problem")
    run.add_argument("--steps", type=int, help="by default those of the problem")
    run.add_argument(
        "--size", choices=SIZES, default="small", help="that of the paper, for a GPU, if it has one"
    )
    run.add_argument(
        "--quick", action="store_true", help=f"{QUICK_STEPS} steps, by default in float16"
    )
    run.add_argument("--out", type=Path, default=Path("outputs/problems"), help="for NAME.json")
    run.add_argument("--resume", action="store_true", help="keep the trainings in the files")
    return out


def write(path: Path, content: Any) -> None:
    """Writes a JSON file, completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
        file.write(json.dumps(content, indent=1) + "\n")
    os.replace(file.name, path)


def train(name: str, problem: Problem, args: argparse.Namespace) -> None:
    """Trains in each precision from each seed, and writes each result as soon as it exists."""
    path = args.out / f"{name}.json"
    found = json.loads(path.read_text()) if args.resume and path.exists() else []
    steps = args.steps or (QUICK_STEPS if args.quick else None)
    deep = args.recipe == "deep"
    for precision in args.precision or (["float16"] if args.quick and not deep else ["float32"]):
        if deep:
            trainer = DeepTrainer(problem, precision, steps=steps)
        else:
            trainer = Trainer(problem, precision, steps=steps, optimizer=args.optimizer)
        for seed in args.seeds:
            wanted = {"precision": precision, "optimizer": trainer.optimizer_name}
            wanted |= {"seed": seed, "steps": trainer.steps}
            label = f"{name:<24} {precision:<26} seed {seed}"
            known = next((x for x in found if wanted.items() <= x.items()), None)
            if known is not None:
                print(f"{label}  already finished: error {_error(known['error'])}", flush=True)
                continue
            kept = kept_of(args, name, wanted)
            with Progress(label, trainer.steps) as progress:
                if isinstance(trainer, DeepTrainer):
                    outcome = trainer(seed, follow=progress.deep, kept=kept)
                else:
                    outcome = trainer(seed, follow=progress.plain, kept=kept)
            found.append(outcome.record())
            write(path, found)
            kept.remove()
            told = f"{label}  error {_error(outcome.error)}"
            print(f"{told}  skipped {outcome.skipped} of {outcome.steps}", flush=True)


def kept_of(args: argparse.Namespace, name: str, wanted: dict[str, Any]) -> Kept:
    """Returns where a training is kept if it is stopped."""
    told = (name, *map(str, wanted.values()), args.size, *["quick"] * args.quick)
    return Kept(args.out / f"{'-'.join(told)}{UNFINISHED}", resume=args.resume)


def _error(error: float | None) -> str:
    return "none" if error is None else f"{error:.2e}"


class Progress:
    """A line on a terminal with the steps, the loss and the time left of a training."""

    def __init__(self, label: str, steps: int):
        self.label, self.steps, self.done, self.first, self.started = label, steps, 0, 0, 0.0

    def __enter__(self) -> "Progress":
        self._show("compiling")
        return self

    def __exit__(self, *_: Any) -> None:
        self._show("")

    def _show(self, text: str) -> None:
        if sys.stderr.isatty():
            told = f"{self.label}  {text}" if text else ""
            print(f"\r{told:<110}\r", end="", file=sys.stderr, flush=True)

    def _told(self, loss: float) -> None:
        now = time.monotonic()
        if self.started == 0.0:
            self.started, self.first = now, self.done  # the first steps include compilation
        taken = self.done - self.first
        left = (self.steps - self.done) * (now - self.started) / taken if taken else None
        told = "" if left is None else f", {left:.0f} s left"
        self._show(f"step {self.done} of {self.steps}, loss {loss:.1e}{told}")

    def plain(self, steps: int, loss: float, scaling: Any) -> bool:
        """Follows a `Trainer`, which gives the steps since the last call. Never ends a training."""
        self.done += steps
        self._told(loss)
        return False

    def deep(self, step: int, state: Any) -> bool:
        """Follows a `DeepTrainer`, which gives the number of the step."""
        self.done = step
        self._told(float(state.loss))
        return False


def _stopped(args: argparse.Namespace) -> int:
    """Tells what an interrupted run leaves, and how to go on."""
    kept = sorted(path.name for path in args.out.glob(f"*{UNFINISHED}"))
    told = f"the running one is in {', '.join(kept)}" if kept else "the running one had not begun"
    print(
        f"\nStopped. Finished trainings are in {args.out}; {told}. To go on, repeat the command "
        "with --resume.",
        file=sys.stderr,
    )
    return 128 + signal.SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser()
    args = arguments.parse_args(argv)
    if args.command == "list":
        for name in names():
            problem = load(name)
            print(f"{name:<24} {problem.family:<9} {problem.title}")
        return 0
    unknown = sorted({*args.names} - {*names(), "all"})
    if unknown:
        arguments.error(f"there is no problem {', '.join(unknown)}; see `list`.")
    chosen = names() if "all" in args.names else args.names
    failed = []
    for name in chosen:
        try:
            problem = load(name, args.size)
            train(name, (problem.quick if args.quick else None) or problem, args)
        except KeyboardInterrupt:
            return _stopped(args)
        except Exception as error:
            if len(chosen) == 1:
                raise
            failed.append(name)
            print(f"{name:<24} failed: {type(error).__name__}: {error}", file=sys.stderr)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

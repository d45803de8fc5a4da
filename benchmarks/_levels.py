"""All benchmarks that a machine can run in turn: `python -m benchmarks level LEVEL`."""

import argparse
import os
import subprocess
import sys
from typing import NamedTuple


PIECE_MINUTES = 10


class Run(NamedTuple):
    """A command after `python -m benchmarks`, and about how long it takes there."""

    minutes: float
    command: str


_CURVES = ("cavity", "burgers", "navier_stokes")
_TRAINED = ("burgers_1d", "allen_cahn", "helmholtz", "cavity", "cavity_zero_equation", "heat_sink")

# A CPU measures ratios that hold there, and accuracy. The trainings of `breadth`, `time_to_error`,
# `operators` and `vit`, which take hours, are left to their own commands.
CPU = (
    Run(2, "compile_time"),
    Run(4, "pinn_step"),
    Run(4, "fno_step"),
    Run(4, "vit_step"),
    *(Run(3, f"time_to_error --problem {name} --time") for name in _CURVES),
    Run(3, "spectral"),
    Run(1, "products"),
    Run(1, "frequencies"),
    Run(1, "float8"),
    Run(6, "second_order"),
)

# What compilers tell of hardware that is not there: memory, products, collectives.
DEVICELESS = (
    Run(2, "overhead"),
    Run(4, "growth"),
    Run(8, "weak_scaling --platform h100"),
    Run(60, "weak_scaling --platform v5e"),
    Run(10, "fno_step --target h100"),
    Run(20, "vit_step --target h100"),
    Run(10, "predicted"),
)

GPU = (
    Run(3, "products"),
    Run(3, "compile_time"),
    Run(9, "pinn_step"),
    Run(9, "fno_step"),
    Run(9, "vit_step"),
    *(Run(3, f"time_to_error --problem {name} --time") for name in _CURVES),
    *(Run(9, f"time_to_error --problem {name} --seeds 0") for name in _CURVES),
    Run(5, "spectral"),
    *(Run(5, f"breadth --resume --problems {name} --seeds 0") for name in _TRAINED),
    Run(9, "operators --size full --seeds 0"),
)

LEVELS = {"cpu": CPU, "deviceless": DEVICELESS, "gpu": GPU}


def pieces(runs: tuple[Run, ...]) -> list[list[Run]]:
    """The runs in their order, in pieces that fit into `PIECE_MINUTES`."""
    out: list[list[Run]] = []
    left = 0.0
    for run in runs:
        if not out or run.minutes > left:
            out.append([])
            left = PIECE_MINUTES
        out[-1].append(run)
        left -= run.minutes
    return out


def run_level(argv: list[str]) -> int:
    """Runs a level or one piece of it, each benchmark in a process of its own.

    A benchmark that fails does not keep the others from running; the exit status then is 1.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks level", description=__doc__)
    parser.add_argument("level", choices=LEVELS)
    parser.add_argument("--piece", type=int, help="only this one, from 1 on")
    parser.add_argument("--list", action="store_true", help="say what would run")
    args, rest = parser.parse_known_args(argv)  # the rest goes to each benchmark
    chosen = pieces(LEVELS[args.level])
    if args.piece is not None and args.piece not in range(1, len(chosen) + 1):
        parser.error(f"`--piece` must be from 1 to {len(chosen)}, but got {args.piece}.")
    environment = dict(os.environ)
    if args.level != "gpu":
        environment["JAX_PLATFORMS"] = "cpu"
    failed = []
    for number, piece in enumerate(chosen, 1):
        if args.piece not in (None, number):
            continue
        print(f"piece {number}: about {sum(run.minutes for run in piece):g} minutes", flush=True)
        for run in piece:
            command = [sys.executable, "-m", "benchmarks", *run.command.split(), *rest]
            print(f"  {run.command}", flush=True)
            if not args.list and subprocess.run(command, env=environment).returncode:
                failed.append(run.command)
    for command in failed:
        print(f"failed: {command}", file=sys.stderr)
    return int(bool(failed))

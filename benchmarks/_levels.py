"""All benchmarks that a machine can run in turn: `python -m benchmarks level LEVEL`."""

import argparse
import os
import subprocess
import sys


_PROBLEMS = ("cavity", "burgers")
_TRAINED = "burgers_1d allen_cahn helmholtz cavity cavity_zero_equation heat_sink"
_TIMES = tuple(f"time_to_error --problem {name} --time" for name in _PROBLEMS)

LEVELS = {
    # Ratios that hold on a CPU, and accuracy. The trainings of `breadth`, `time_to_error`,
    # `operators` and `vit`, which take hours there, are left to their own commands.
    "cpu": (
        *("compile_time", "pinn_step", "foreign_step", "fno_step", "vit_step", *_TIMES),
        *("spectral", "second_order"),
    ),
    # What compilers tell of hardware that is not there: memory, products, collectives.
    "deviceless": (
        *("overhead", "weak_scaling --platform h100", "weak_scaling --platform v5e"),
        "predicted",
    ),
    "gpu": (
        *("compile_time", "pinn_step", "foreign_step", "fno_step", "vit_step", *_TIMES),
        *(f"time_to_error --problem {name} --seeds 0" for name in _PROBLEMS),
        *("spectral", f"breadth --resume --seeds 0 --problems {_TRAINED}"),
        "operators --size full --seeds 0",
    ),
}
"""The commands after `python -m benchmarks`."""


def run_level(argv: list[str]) -> int:
    """Runs a level, each benchmark in a process of its own.

    A benchmark that fails does not keep the others from running; the exit status then is 1.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks level", description=__doc__)
    parser.add_argument("level", choices=LEVELS)
    parser.add_argument("--list", action="store_true", help="say what would run")
    args, rest = parser.parse_known_args(argv)  # the rest goes to each benchmark
    environment = dict(os.environ)
    if args.level != "gpu":
        environment["JAX_PLATFORMS"] = "cpu"
    failed = []
    for name in LEVELS[args.level]:
        print(f"  {name}", flush=True)
        command = [sys.executable, "-m", "benchmarks", *name.split(), *rest]
        if not args.list and subprocess.run(command, env=environment).returncode:
            failed.append(name)
    for name in failed:
        print(f"failed: {name}", file=sys.stderr)
    return int(bool(failed))

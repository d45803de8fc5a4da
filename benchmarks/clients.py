"""Do other people's programs train as they are? Gradients, memory and skipped steps in each mode.

The programs of `tests/clients` have the shapes of public trainings, written anew. Each takes its
first steps in each mode and both formats, and is compared with itself in float64.
"""

import argparse
import dataclasses
from typing import Any

import jax
import numpy as np

from tests.clients.measure import CLIENTS, GROUPS, MODES, measured

from ._report import Report
from ._tables._format import ROOT


HALVES = ("float16", "bfloat16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--programs", nargs="+", choices=list(CLIENTS), default=list(CLIENTS))
    parser.add_argument("--halves", nargs="+", choices=HALVES, default=HALVES)
    parser.add_argument("--resume", action="store_true", help="keep the rows of earlier runs")


def _short(x: Any) -> Any:
    """Rounds a number to three digits. What is not finite is unknown."""
    if not isinstance(x, float):
        return x
    return float(f"{x:.3g}") if np.isfinite(x) else None


def run(report: Report, args: argparse.Namespace) -> None:
    if args.resume:
        report.resume("programs")
    keys = (
        {"group": group, "program": name, "mode": mode, "half": half}
        for group, names in GROUPS.items()
        for name in names
        if name in args.programs[: 2 if args.quick else None]
        for mode in MODES
        for half in args.halves
    )
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for key in report.missing("programs", keys):
            found = dataclasses.asdict(measured(key["program"], key["mode"], key["half"]))
            found["told"] = [line.replace(f"{ROOT}/", "") for line in found["told"]]
            shown = {k: _short(x) for k, x in found.items()}
            report.record("programs", **key, **shown)
            print(*key.values(), *shown.values(), flush=True)

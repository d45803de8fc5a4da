"""How accurate is half precision? Burgers' equation against its exact solution, per precision.

The trainings are those of `examples/burgers.py`: the same network, points and optimizer in
float32, float16 and bfloat16, one after another, for each seed.
"""

import argparse
import importlib
import sys
from pathlib import Path

from ._report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="by default those of the example")


def run(report: Report, args: argparse.Namespace) -> int:
    sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
    burgers = importlib.import_module("burgers")  # the example, no module of this package

    rows = []
    for seed in args.seeds:
        results = burgers.main(steps=args.steps, seed=seed, out=None, quick=args.quick)
        float32 = results["float32"].error
        for result in results.values():
            rows.append(
                report.record(
                    "trainings",
                    seed=seed,
                    precision=result.precision,
                    steps=len(result.loss),
                    error=result.error,
                    error_over_float32=result.error / float32,
                    skipped_steps=result.skipped_steps,
                    final_scale=result.final_scale,
                    ms_per_step=result.ms_per_step,
                    temp_bytes=result.temp_bytes,
                )
            )
    columns = list(rows[0])
    report.table("Relative L2 error", columns, [[row[c] for c in columns] for row in rows])
    return 0

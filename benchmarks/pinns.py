"""How accurate is half precision on each example? Every PINN against its reference, per precision.

The trainings are those of `examples/`: for each seed the same network, points and optimizer in
float32; in float16 with derivative scaling by the paper's rule and by the predictive one; in
bfloat16; and in float16 as one would do it by hand (`naive-float16`: coordinates and first layer
cast too, loss scaling alone). If plain float16 has more than 1.1 times the error of float32 from
the same seed, in the median, float16 runs once more and may climb to a loss in float32.

One example at a time: its results go to `results/pinns-EXAMPLE-PLATFORM.json`.
"""

import argparse
import statistics
from typing import Any

from ._examples import load_example
from ._report import Report


# By name: the module in `examples/`, and options of its `main`.
EXAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "burgers": ("burgers", {}),
    "allen_cahn": ("allen_cahn", {}),
    "helmholtz": ("helmholtz", {}),
    "cavity": ("lid_driven_cavity", {}),
    "cavity_zero_equation": ("lid_driven_cavity", {"turbulence": "zero-equation"}),
    "cavity_flattened": ("lid_driven_cavity", {"turbulence": "zero-equation-flattened"}),
    "heat_sink": ("heat_sink", {}),
}
VARIANTS: tuple[dict[str, Any], ...] = (
    {"precision": "float32"},
    {"precision": "float16"},
    {"precision": "float16", "mode": "predictive"},
    {"precision": "bfloat16"},
    {"precision": "naive-float16"},
)
SCHEDULE = {"precision": "float16", "rungs": ["half", "float32"]}
ALLOWED = 1.1  # times the error of float32, before the schedule is tried


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--example", choices=EXAMPLES, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="by default those of the example")
    parser.add_argument("--precision", nargs="+", help="by default all")
    parser.add_argument("--mode", help="of the derivative scaling; by default both")
    parser.add_argument("--resume", action="store_true", help="keep the trainings in the file")


def run(report: Report, args: argparse.Namespace) -> int:
    name, options = EXAMPLES[args.example]
    example = load_example(name)
    report.name = f"pinns-{args.example}"
    before = report.before(args.out) if args.resume else {}
    trainings = report.sections["trainings"] = before.get("trainings", [])
    float32: dict[int, float] = {
        r["seed"]: r["error"] for r in trainings if r["precision"] == "float32"
    }

    def known(seed: int, variant: dict[str, Any]) -> list[dict[str, Any]]:
        wanted = {"mode": "paper", "rungs": [], **variant, "seed": seed}
        # Files from before there were rungs have a fraction of last steps in float32.
        trained = (r for r in trainings if not r.get("finish"))
        return [r for r in trained if wanted.items() <= {"rungs": [], **r}.items()]

    def train(seed: int, variant: dict[str, Any]) -> dict[str, Any]:
        if before := known(seed, variant):
            return before[0]
        given = {k: v for k, v in variant.items() if k != "precision"}
        given |= {"seed": seed, "steps": args.steps, "quick": args.quick, "out": None}
        [result] = example.main([variant["precision"]], **given, **options).values()
        if result.precision == "float32":
            float32[seed] = result.error
        record = report.record(
            "trainings",
            example=args.example,
            run=result.label,
            seed=seed,
            precision=result.precision,
            mode=result.mode,
            rungs=list(result.rungs),
            climbs=dict(result.climbs),
            steps=len(result.loss),
            error=result.error,
            error_over_float32=result.error / float32[seed],
            errors=dict(result.errors),
            loss=float(result.loss[-100:].mean()),
            skipped=int(result.skipped.sum()),
            skipped_after_warm_up=result.skipped_late,
            loss_scale=float(result.scale[-1]),
            derivative_scales=dict(result.derivative_scales),
            ms_per_step=result.ms_per_step,
            temp_bytes=result.temp_bytes,
        )
        report.save(args.out)  # a run of hours that is cut short has shown something
        return record

    variants = [
        v
        for v in VARIANTS
        if (args.precision is None or v["precision"] in args.precision)
        and args.mode in (None, v.get("mode", "paper"))
    ]
    rows = [train(seed, variant) for seed in args.seeds for variant in variants]
    plain = [r for r in rows if (r["precision"], r["mode"]) == ("float16", "paper")]
    if plain and statistics.median(r["error_over_float32"] for r in plain) > ALLOWED:
        for seed in args.seeds:
            train(seed, SCHEDULE)
    return 0

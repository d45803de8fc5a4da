"""How far do second-order steps get? Levenberg–Marquardt on the collection, by precision.

The recipe is that of `python -m examples.problems run NAME --recipe deep`.

    python -m benchmarks second_order --problems kovasznay --seeds 0
    python -m benchmarks second_order --target h100     # predicts the time of a step, and runs none
"""

import argparse
import dataclasses
import importlib
import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import mpx_pde as mpx

from ._chips import CHIPS
from ._deviceless import CUBLAS, compile_for
from ._problems import problems
from ._report import Report
from ._roofline import Roofline, summary


PRECISIONS = ("float64", "float64-float32", "float32")
COMPILED = ("float64", "float32", *(f"float64-{j}" for j in ("float32", "bfloat16_x3", "bfloat16")))
WIDTH, POINTS = 99, 32_768  # 20,197 parameters


class _Untold(mpx.LevenbergMarquardt):
    """Calls nothing on the host, which a program for a device that is not here cannot."""

    def __init__(self, *residuals: Any, **options: Any):
        super().__init__(*residuals, **options)

    def _tell(self, iterations: Any) -> None: ...


def predict(report: Report, target: str, quick: bool) -> None:
    """Predicts the time of a step on Burgers' equation. Of the conjugate gradients, whose number is
    not known before, one iteration is counted for each solve."""
    deep = importlib.import_module("examples.problems._deep")
    width, points = (16, 256) if quick else (WIDTH, POINTS)
    problem = dataclasses.replace(problems.load("burgers_1d").deep, width=width)
    for precision in COMPILED:
        forward, jacobian = deep.PRECISIONS[precision]
        with jax.enable_x64(forward == "float64"):
            dtype = jnp.dtype(forward)
            optimizer = _Untold(problem.residual, forward=forward, jacobian=jacobian)
            network = lambda dtype=dtype: deep.Network(problem, dtype, key=jax.random.key(0))
            model = eqx.filter_eval_shape(network)
            state = model, eqx.filter_eval_shape(optimizer.init, model)

            def step(state, batch, optimizer=optimizer):
                new = optimizer.update(state[0], state[1], batch)
                return new, new[1].loss

            batch = jax.ShapeDtypeStruct((points, 2), dtype)
            options = {} if "_x3" in jacobian else CUBLAS
            program = compile_for(target, step, state, batch, donate=(0,), compiler_options=options)
        arrays = jax.tree.leaves(eqx.filter(model, lambda x: isinstance(x, jax.ShapeDtypeStruct)))
        size = {"parameters": sum(x.size for x in arrays), "points": points}
        told = summary(Roofline(program.module).kernels(), CHIPS[target])
        told["temp_bytes"] = program.temp_bytes
        report.record("steps", precision=precision, **size, **told)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--problems", nargs="+", help="by default all that have the recipe")
    parser.add_argument("--precision", nargs="+", default=list(PRECISIONS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="by default those of the recipe")
    parser.add_argument("--target", choices=CHIPS, help="compile for this, and predict")
    parser.add_argument("--resume", action="store_true", help="keep the trainings in the file")


def run(report: Report, args: argparse.Namespace) -> None:
    if args.target:
        report.name = f"second_order-{args.target}"
        predict(report, args.target, args.quick)
        return
    deep = importlib.import_module("examples.problems._deep")
    steps, points = 4 if args.quick else args.steps or deep.STEPS, deep.POINTS
    names = args.problems or [n for n in problems.names() if problems.load(n).deep is not None]
    names = names[:1] if args.quick else names
    if args.resume:
        report.resume("trainings")
    keys = [
        {"problem": name, "precision": precision, "seed": seed, "steps": steps, "points": points}
        for seed, name, precision in itertools.product(args.seeds, names, args.precision)
    ]
    for key in report.missing("trainings", keys):
        problem = problems.load(key["problem"])
        outcome = deep.DeepTrainer(problem, key["precision"], steps=steps)(key["seed"])
        found = {"title": problem.title, **outcome.record()}
        report.record("trainings", **key, **{n: x for n, x in found.items() if n not in key})

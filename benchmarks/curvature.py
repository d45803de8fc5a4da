"""Do half gradients spoil the curvature pairs of L-BFGS?

L-BFGS learns curvature from differences of gradients. Here it goes on from 1,000 steps of Adam in
float32, with a forward pass in float32 and a backward pass in half precision, on fixed points. At
each iterate the gradient is evaluated in float32 as well, and the two pairs are compared.
"""

import argparse
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

import mpx_pde as mpx

from ._problems import trainer
from ._report import Report


PROBLEMS = ("burgers_1d", "helmholtz")
PRECISIONS = ("forward-float32-float16", "forward-float32-bfloat16")
STEPS, ITERATIONS, PARTS, BATCHES = 1000, 300, 3, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--problem", nargs="+", default=list(PROBLEMS))
    parser.add_argument("--resume", action="store_true", help="keep the runs in the file")


def _pairs(training: Any, precision: str, iterations: int) -> dict[str, np.ndarray]:
    """Relative errors of the gradient, of the differences and of the curvature, by iteration."""
    finish = importlib.import_module("examples.problems._lbfgs")
    state, key, _ = training.trained(0)
    half = type(training)(training.problem, precision, optimizer="adam", steps=training.steps)
    points = jax.tree.map(lambda x: x[:BATCHES], training.next_points(state.model, key))
    scaling = half.initial(0)[0].scaling
    loss = finish.mean_loss(training.problem)
    scaling = mpx.initial_scaling(loss, scaling, **half.options)(state.model, points)
    arrays, value, of_half = finish.gradient_of(half, state.model, scaling, points)
    of_full = finish.gradient_of(training, state.model, state.scaling, points)[2]
    step = finish.iteration(value)
    flat = lambda gradient, x: ravel_pytree(gradient(x)[1])[0]

    def body(carry, _):
        new, value = step(carry)
        moved = ravel_pytree(new[0])[0] - ravel_pytree(carry[0])[0]
        (a, b), (c, d) = ([flat(g, x[0]) for x in (carry, new)] for g in (of_full, of_half))
        pair, noisy, size = b - a, d - c, jnp.linalg.norm
        error = jnp.abs(jnp.vdot(moved, noisy - pair) / jnp.vdot(moved, pair))
        told = size(c - a) / size(a), size(noisy - pair) / size(pair), error
        return new, (value, *told, jnp.vdot(moved, noisy) > 0)

    start = arrays, optax.lbfgs().init(arrays)
    found = jax.jit(lambda carry: jax.lax.scan(body, carry, length=iterations)[1])(start)
    names = ("loss", "gradient", "pair", "curvature", "positive")
    return dict(zip(names, map(np.asarray, found), strict=True))


def run(report: Report, args: argparse.Namespace) -> None:
    steps, iterations = (4, PARTS) if args.quick else (STEPS, ITERATIONS)
    if args.resume:
        report.resume("pairs")
    keys = [{"problem": p, "precision": q} for p in args.problem for q in PRECISIONS]
    for key in report.missing("pairs", keys):
        training = trainer(key["problem"], "float32", optimizer="adam", steps=steps)
        found = _pairs(training, key["precision"], iterations)
        count = iterations // PARTS
        for last in range(count, iterations + 1, count):
            rows = slice(last - count, last)
            medians = {n: float(np.median(x[rows])) for n, x in found.items() if n != "positive"}
            worst, negative = found["pair"][rows].max(), int((~found["positive"][rows]).sum())
            where = {"title": training.problem.title, "last": last}
            told = {"worst_pair": float(worst), "negative": negative}
            report.record("pairs", **key, **where, **medians, **told)

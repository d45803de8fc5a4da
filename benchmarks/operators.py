"""How accurate are half-precision FNOs? Test errors per precision, stabilizer, modes, resolution.

The data are those of the problems `operator_darcy` and `operator_navier_stokes`, on coarser grids.
For each seed, all variants share the operator, data, batches and optimizer; nothing else is tuned.
The variants include those of the paper's tables (Tu et al., Speeding up Fourier Neural Operators
via Mixed Precision). Errors are those of the test samples, computed in the precision of the
training.

`--size small` suits one CPU core (some seconds for each training, and as many to compile it).
`--size full` is for a GPU and has the grid and the modes of the paper.
"""

import argparse
import importlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

import mpx_pde as mpx
from examples.problems._operators import Pairs, relative
from examples.problems._problem import Problem
from examples.problems._runner import Trainer

from ._report import Report


TESTS, BATCH = 100, 16
PADDING = 0.25  # share by which a domain that is not periodic is extended


# --- Errors of fields on the unit square ----------------------------------------------------------


def slopes(u: Float32[Array, "*batch n m"], *, periodic: bool) -> Float32[Array, "2 *batch n m"]:
    """Returns both derivatives by central differences; one-sided at a boundary that is not
    periodic."""
    n, m = u.shape[-2:]
    if periodic:
        u = jnp.pad(u, [(0, 0)] * (u.ndim - 2) + [(1, 1)] * 2, mode="wrap")
    x, y = jnp.gradient(u, axis=(-2, -1))
    if periodic:
        x, y = x[..., 1:-1, 1:-1], y[..., 1:-1, 1:-1]
    return jnp.stack([n * x, m * y])


def relative_errors(
    got: Float[Array, "batch c n m"], want: Float[Array, "batch c n m"], *, periodic: bool
) -> dict[str, Float32[Array, ""]]:
    """Returns mean relative errors over the batch, in float32 for any dtype of `got`: `"l2"`, and
    `"h1"` with the norm ‖u‖² + ‖∇u‖²."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)

    def with_slopes(u):
        return jnp.moveaxis(jnp.concatenate([u[None], slopes(u, periodic=periodic)]), 0, 1)

    return {
        "l2": jnp.mean(relative(got, want)),
        "h1": jnp.mean(relative(with_slopes(got), with_slopes(want))),
    }


# --- Problems -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    samples: int
    finest: int  # grid of the data
    strides: tuple[int, ...]  # from there to the grid of training, then to further grids for tests
    modes: tuple[int, ...]  # the first in all trainings, the others in fewer
    channels: int
    steps: int


SIZES = {
    "quick": Size(16, 32, (2, 1), (8, 4), 8, 10),
    "small": Size(400, 64, (4, 2), (12, 8, 4), 16, 400),
    "full": Size(2000, 256, (2, 4, 1), (64, 32, 16), 64, 10_000),
}


class Operator:
    """The problem `"darcy"` or `"navier_stokes"` at a size, on data that are made once."""

    def __init__(self, name: str, size: Size):
        pairs = importlib.import_module(f"examples.problems.operator_{name}").pairs
        data = pairs(size.samples + TESTS, size.finest, 0)
        self.name, self.size, self.periodic = name, size, name == "navier_stokes"
        grids = [Pairs(*(x[..., ::stride, ::stride] for x in data)) for stride in size.strides]
        self.training = Pairs(*(x[: size.samples] for x in grids[0]))
        self.tests = [Pairs(*(x[size.samples :] for x in pairs)) for pairs in grids]

    def problem(self, modes: int, stabilizer: str | None) -> Problem:
        """Builds the problem for the runner."""
        given = {"domain_padding": 0.0 if self.periodic else PADDING, "stabilizer": stabilizer}
        make = partial(mpx.nn.FNO, 1, 1, self.size.channels, 4, (modes, modes), **given)
        run = eqx.filter_jit(lambda model, x: jax.lax.map(model, x, batch_size=BATCH))
        errors = lambda model: self.errors(partial(run, model))
        own = {"title": self.name, "loss": self.loss, "sample": self.sample, "errors": errors}
        given = {"as_trained": True, "optimizer": "adam", "learning_rate": 3e-3}
        return Problem(network=lambda key: make(key=key), **own, **given)

    def loss(self, model: Any, pairs: Any, *, derivatives: Any = None) -> Float32[Array, ""]:
        del derivatives
        inputs, outputs = pairs
        got = jax.vmap(model)(inputs)
        return relative_errors(got, outputs, periodic=self.periodic)["h1"]

    def sample(self, key: Array) -> tuple[Array, ...]:
        count = len(self.training.inputs)
        at = jax.random.choice(key, count, (min(BATCH, count),), replace=False)
        return tuple(jnp.asarray(x)[at] for x in self.training)

    def errors(self, predict: Callable[[Any], Any]) -> dict[str, float]:
        """Returns the errors of the test samples, by norm and number of points along an axis."""
        out = {}
        for inputs, outputs in self.tests:
            got = jnp.asarray(predict(inputs))
            errors = relative_errors(got, jnp.asarray(outputs), periodic=self.periodic)
            out |= {f"{norm} {inputs.shape[-1]}": float(e) for norm, e in errors.items()}
        return out


# --- Trainings -----------------------------------------------------------------------------------


PROBLEMS = ("darcy", "navier_stokes")
# Precision and, after a hyphen, stabilizer.
COMPARED = ("float32", "bfloat16", "float16", "float32-tanh", "float16-tanh", "float16-soft_clip")
CLIPPED = ("float16-hard_clip", "float16-sigma_clip")
TRUNCATED = ("float32", "float16", "float16-tanh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--size", choices=("small", "full"), default="small")
    parser.add_argument("--steps", type=int, help="by default those of the size")
    parser.add_argument("--resume", action="store_true", help="keep the trainings in the file")


def trainings(modes: tuple[int, ...]) -> Iterator[tuple[str, str, int]]:
    """Yields problem, variant and modes: first comparisons with float32, then the paper's
    tables."""
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
    operators = {name: Operator(name, size) for name in PROBLEMS}
    for name, variant, modes in trainings(size.modes):
        precision, _, stabilizer = variant.partition("-")
        problem = operators[name].problem(modes, stabilizer or None)
        trainer = Trainer(problem, precision, steps=args.steps or size.steps)
        about = {"problem": name, "precision": precision, "stabilizer": stabilizer or None}
        about |= {"modes": modes, "steps": trainer.steps, "samples": size.samples}
        for key in report.missing("trainings", ({**about, "seed": s} for s in args.seeds)):
            outcome = trainer(key["seed"])
            errors: dict[str, dict[str, Any]] = {}
            for of, error in outcome.errors.items():
                norm, resolution = of.split()
                errors.setdefault(resolution, {})[norm] = error
            where = {"resolution": size.finest // size.strides[0], "channels": size.channels}
            told = {"train_loss": outcome.loss, "errors": errors, "skipped_steps": outcome.skipped}
            report.record("trainings", **key, **where, **told)
            print(f"{key}: {outcome.error}", flush=True)

"""How accurate are FNOs on other people's data? neuraloperator's Darcy files, and its own FNO.

The data are the 1,000 fields of 16² points that neuraloperator's examples train on, and their tests
of 16² and 32² points (50 each). neuraloperator 2.0.0 is trained by its own `Trainer` with the
settings of its example `plot_FNO_darcy.py` (commit 02782c87): 24 channels, 8 × 8 modes, four
blocks, batches of 64 in the order of the file, AdamW with a learning rate of 1e-2 and a weight
decay of 1e-4, half of a cosine of 30 epochs, the H1 loss on normalized outputs, 15 epochs; in
float32, and by its AMP (bfloat16 on a CPU, without a gradient scaler). `mpx_pde.nn.FNO` has the
same sizes and settings. One function computes the errors of both.

    python -m benchmarks darcy --data DIR --resume        # trains
    taskset -c 0 python -m benchmarks darcy --data DIR --time 20 --resume

`--time` takes the processor time of steps, all in turn on one core, which other programs on the
machine disturb less than they do the time on a clock. Memory of a step is what XLA reports, and for
PyTorch the largest sum of allocations that its profiler sees.
"""

import argparse
import itertools
import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpx_pde as mpx

from . import _outside
from ._problems import load_example
from ._report import Report, timing


EPOCHS, BATCH, CHANNELS, MODES, BLOCKS = 15, 64, 24, 8, 4
RATE, DECAY, EPSILON, HALF_TURN = 1e-2, 1e-4, 1e-6, 30  # AdamW, and epochs of half a cosine
FILES = {"train": "darcy_train_16.pt", "16": "darcy_test_16.pt", "32": "darcy_test_32.pt"}

Fields = tuple[np.ndarray, np.ndarray]


def relative_h1(got: Any, want: Any, xp: Any = jnp) -> Any:
    """Returns the relative H1 error of each field, as `neuralop.losses.H1Loss` defines it: by
    central differences, as if the fields were periodic."""

    def squares(u):
        n = u.shape[-1]
        slope = lambda axis: (xp.roll(u, -1, axis) - xp.roll(u, 1, axis)) * n / 2
        return sum(xp.sum(x**2, axis=(-2, -1)) for x in (u, slope(-1), slope(-2)))

    return xp.sqrt(squares(got - want)) / (xp.sqrt(squares(want)) + 1e-8)


def relative_l2(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    norm = lambda x: np.sqrt(np.sum(x**2, axis=(-2, -1)))
    return norm(got - want) / norm(want)


def errors(predict: Callable[[np.ndarray], np.ndarray], data: Mapping[str, Fields]) -> dict:
    """Returns the mean L2 and H1 errors on each test grid."""
    out = {}
    for grid in ("16", "32"):
        inputs, want = data[grid]
        got, want = np.asarray(predict(inputs), np.float64), want.astype(np.float64)
        out[grid] = {
            "l2": float(relative_l2(got, want).mean()),
            "h1": float(relative_h1(got, want, np).mean()),
        }
    return out


class Ours:
    """A training of `mpx_pde.nn.FNO`."""

    def __init__(self, data: Mapping[str, Fields], precision: str, seed: int):
        inputs, outputs = data["train"]
        self.inputs, self.mean, self.size = inputs[:, None], outputs.mean(), outputs.std(ddof=1)
        self.outputs = (outputs - self.mean) / self.size
        self.precision = precision
        self.epoch_steps = -(-len(inputs) // BATCH)
        model = mpx.nn.FNO(1, 1, CHANNELS, BLOCKS, (MODES, MODES), key=jax.random.key(seed))

        def rate(step):
            return RATE * (1 + jnp.cos(jnp.pi * (step // self.epoch_steps) / HALF_TURN)) / 2

        self.optimizer = optax.adamw(rate, eps=EPSILON, weight_decay=DECAY)
        first = self.optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        half = precision != "float32"
        self.options = {"use_mixed_precision": half, "keep_full": (False, True, True)}
        scaling = mpx.DynamicLossScaling()
        if half:
            with mpx.half_precision(precision):
                scales = mpx.initial_scaling(self.loss, scaling, keep_full=(False, True, True))
                scaling = scales(model, *self.batch(0))
        self.state = model, first, scaling
        self.step = eqx.filter_jit(self._step)
        self.compiled: Any = None

    def _step(self, state, inputs, outputs):
        model, optimizer_state, scaling = state
        half = self.options["use_mixed_precision"]
        with mpx.half_precision(self.precision if half else "float16"):
            grad = mpx.filter_grad(self.loss, scaling, **self.options)
            scaling, finite, grads = grad(model, inputs, outputs)
        updated = mpx.optimizer_update(model, self.optimizer, optimizer_state, grads, finite)
        return *updated, scaling

    @staticmethod
    def loss(model, inputs, outputs):
        return jnp.sum(relative_h1(jax.vmap(model)(inputs)[:, 0], outputs))

    def batch(self, i: int) -> Fields:
        part = slice(i * BATCH, (i + 1) * BATCH)
        return self.inputs[part], self.outputs[part]

    def __call__(self, i: int) -> None:
        """Takes a step on the batch `i`."""
        self.state = jax.block_until_ready(self.step(self.state, *self.batch(i)))

    def predict(self, inputs: np.ndarray) -> np.ndarray:
        """Returns fields on any grid, with the weights in the precision of the training."""
        model = self.state[0]
        model = model if self.precision == "float32" else mpx.cast_tree(model, self.precision)
        out = eqx.filter_jit(jax.vmap(model))(jnp.asarray(inputs[:, None]))[:, 0]
        return np.asarray(out, np.float64) * self.size + self.mean

    @property
    def skipped(self) -> int:
        return int(self.state[2].skipped_steps)

    def memory(self) -> int:
        arrays, static = eqx.partition(self.state, eqx.is_array)
        step = lambda arrays, *batch: eqx.filter(
            self._step(eqx.combine(arrays, static), *batch), eqx.is_array
        )
        program = jax.jit(step).lower(arrays, *self.batch(0)).compile()
        memory: Any = program.memory_analysis()
        return memory.temp_size_in_bytes


def trainings(report: Report, folder: Path) -> dict[tuple[str, str], Callable[..., Any]]:
    """Returns the trainings by library and precision, as functions of data and seed."""
    found: dict[tuple[str, str], Callable[..., Any]] = {}
    if report.installed("torch", "neuralop"):
        from ._torch.darcy import Theirs

        for precision in ("float32", "bfloat16"):
            found["neuraloperator", precision] = partial(Theirs, folder, precision)
    for precision in ("float32", "float16", "bfloat16"):
        found["mpx_pde", precision] = lambda data, seed, p=precision: Ours(data, p, seed)
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _outside.add_arguments(parser)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--time", type=int, help="time so many rounds of steps, and train nothing")
    parser.add_argument("--resume", action="store_true", help="keep the records in the file")


def timed(report: Report, rivals: Mapping[tuple[str, str], Any], rounds: int) -> None:
    """Records processor seconds of a step, the rivals in turn, and memory."""
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in rivals}
    for training in rivals.values():
        for i in range(3):
            training(i)
    order = random.Random(0)
    for _ in range(rounds):
        for key in order.sample(list(rivals), len(rivals)):
            rivals[key](0)
            begin = time.process_time()
            for i in range(4):
                rivals[key](i)
            seconds[key].append((time.process_time() - begin) / 4)
    report.sections.pop("steps", None)
    for (library, precision), training in rivals.items():
        told = {"seconds": timing(seconds[library, precision]), "temp_bytes": training.memory()}
        report.record("steps", library=library, precision=precision, **told)


def run(report: Report, args: argparse.Namespace) -> None:
    paths = {name: _outside.outside_file(report, args.data, file) for name, file in FILES.items()}
    if None in paths.values():
        return
    load = load_example("_torch_files").load_tensors
    tensors = {name: load(path) for name, path in paths.items()}
    data = {name: (t["x"].astype(np.float32), t["y"]) for name, t in tensors.items()}
    rivals = trainings(report, args.data)
    if args.resume:
        report.resume("trainings", "steps")
    if args.time:
        timed(report, {key: make(data, 0) for key, make in rivals.items()}, args.time)
        return
    epochs = 1 if args.quick else EPOCHS
    for seed, (library, precision) in itertools.product(args.seeds, rivals):
        key = {"library": library, "precision": precision, "seed": seed, "epochs": epochs}
        for _ in report.missing("trainings", [key]):
            training = rivals[library, precision](data, seed)
            for i in range(epochs * 16):
                training(i % 16)
            told = {"errors": errors(training.predict, data), "skipped": training.skipped}
            report.record("trainings", **key, **told)
            print(f"{key}: {told}", flush=True)

"""Operators of `examples/problems` in other sizes; every rival trains that of Navier–Stokes."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

import mpx_pde as mpx
from examples.problems._operators import Pairs, relative
from examples.problems._problem import Problem
from examples.problems._runner import Trainer

from ._rivals import require
from ._trainings import Moment, Training, by_runner, points_by_call


HALVES = ("float16", "bfloat16")
TESTS, BATCH = 100, 16
PADDING = 0.25  # by which a domain that is not periodic is extended
FACTORS = (3.0, 1.2, 1.05)
"""Errors to be reached, in units of the final error of float32."""


# --- Errors of fields on the unit square ----------------------------------------------------------


def slopes(u: Float32[Array, "*batch n m"], *, periodic: bool) -> Float32[Array, "2 *batch n m"]:
    """Both derivatives by central differences; one-sided at the boundary, unless that is
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
    """Means over the batch, in float32 whatever `got` is in: `"l2"`, and `"h1"` with the norm
    ‖u‖² + ‖∇u‖²."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)

    def with_slopes(u):
        return jnp.moveaxis(jnp.concatenate([u[None], slopes(u, periodic=periodic)]), 0, 1)

    return {
        "l2": jnp.mean(relative(got, want)),
        "h1": jnp.mean(relative(with_slopes(got), with_slopes(want))),
    }


# --- Problems -------------------------------------------------------------------------------------


class Operator:
    """A problem in a size of its own, on data that are made once.

    **Arguments:**

    - `name`: `"darcy"` or `"navier_stokes"`.
    - `samples`: to train with.
    - `strides`: subsamplings of the grid of `finest`² points that are tested; the first of them is
        trained on.
    - `norm`: to train with.
    """

    def __init__(
        self, name: str, samples: int, strides: Sequence[int], *, finest: int, norm: str = "h1"
    ):
        pairs = importlib.import_module(f"examples.problems.operator_{name}").pairs
        data = pairs(samples + TESTS, finest, 0)
        self.name, self.norm, self.periodic = name, norm, name == "navier_stokes"
        grids = [Pairs(*(x[..., ::stride, ::stride] for x in data)) for stride in strides]
        self.training = Pairs(*(x[:samples] for x in grids[0]))
        self.tests = [Pairs(*(x[samples:] for x in pairs)) for pairs in grids]

    def problem(self, channels: int, modes: int, **network: Any) -> Problem:
        """For the runner; `network` are options of the `FNO`."""
        padding = 0.0 if self.periodic else PADDING
        make = partial(mpx.nn.FNO, 1, 1, channels, 4, (modes, modes), domain_padding=padding)
        run = eqx.filter_jit(lambda model, x: jax.lax.map(model, x, batch_size=BATCH))
        return Problem(
            title=self.name,
            network=lambda key: make(key=key, **network),
            loss=self.loss,
            sample=self.sample,
            errors=lambda model: self.errors(partial(run, model)),
            as_trained=True,
            optimizer="adam",
            learning_rate=3e-3,
        )

    def loss(self, model: Any, pairs: Any, *, derivatives: Any = None) -> Float32[Array, ""]:
        del derivatives
        inputs, outputs = pairs
        got = jax.vmap(model)(inputs)
        return relative_errors(got, outputs, periodic=self.periodic)[self.norm]

    def sample(self, key: Array) -> tuple[Array, ...]:
        count = len(self.training.inputs)
        at = jax.random.choice(key, count, (min(BATCH, count),), replace=False)
        return tuple(jnp.asarray(x)[at] for x in self.training)

    def errors(self, predict: Callable[[Any], Any]) -> dict[str, float]:
        """Errors of the test samples, by norm and number of points along an axis."""
        out = {}
        for inputs, outputs in self.tests:
            got = jnp.asarray(predict(inputs))
            errors = relative_errors(got, jnp.asarray(outputs), periodic=self.periodic)
            out |= {f"{norm} {inputs.shape[-1]}": float(e) for norm, e in errors.items()}
        return out


# --- Rivals ---------------------------------------------------------------------------------------


class Size(NamedTuple):
    """Data, network and steps."""

    samples: int
    finest: int  # grid of the data; that of the training is half as fine
    modes: int
    channels: int
    steps: int
    every: int  # steps between two moments


SIZES = {
    "quick": Size(16, 32, 8, 8, 20, 10),
    "small": Size(400, 64, 12, 16, 600, 20),
    "full": Size(2000, 256, 32, 64, 3000, 50),
}


class Task(NamedTuple):
    """An operator and its size."""

    operator: Operator
    size: Size

    def trainer(self, method: str, precision: str) -> Trainer:
        size, gelu = self.size, partial(jax.nn.gelu, approximate=False)  # that of neuraloperator
        problem = self.operator.problem(size.channels, size.modes, method=method, activation=gelu)
        return Trainer(problem, precision, steps=size.steps, per_call=size.every)


def make_problem(size: Size) -> Task:
    return Task(Operator("navier_stokes", size.samples, (2,), finest=size.finest, norm="l2"), size)


def in_jax(
    task: Task, seed: int, *, precision: str, method: str = "dft", matmul: str = "highest"
) -> Training:
    """The training of the runner in one precision, by FFT or by matrices."""
    make = partial(task.trainer, method, precision)
    return by_runner(make, seed, matmul=matmul, averaged=False)


def by_neuraloperator(task: Task, seed: int, **options: Any) -> Training:
    """neuraloperator's FNO from the same weights, with the same batches: see `_torch/fno.py`."""
    require("neuralop")
    from ._torch.fno import train

    trainer = task.trainer("fft", "float32")
    state, key = trainer.initial(seed)

    def batches() -> Iterator[Any]:
        for points in points_by_call(trainer, state.model, key):
            yield from zip(*map(np.asarray, points), strict=True)

    moments = train(
        jax.tree.leaves(eqx.filter(state.model, eqx.is_array)),
        batches(),
        np.asarray(trainer.rates(np.arange(trainer.steps))).tolist(),
        every=trainer.per_call,
        **options,
    )
    for i, (seconds, predict) in enumerate(moments):
        error = lambda predict=predict: next(iter(task.operator.errors(predict).values()))
        yield Moment(i * trainer.per_call, seconds, error)


def rivals(on_gpu: bool) -> dict[str, Callable[[Task, int], Training]]:
    """By name, what trains a problem from a seed."""
    plain = partial(in_jax, precision="float32", method="fft")
    # On a CPU neuraloperator refuses float16: its FFT there knows float32 alone, and its own
    # casts around it are for bfloat16.
    halves = HALVES if on_gpu else ("bfloat16",)
    return {
        "float32, FFT": plain,
        **({"TF32, FFT": partial(plain, matmul="tensorfloat32")} if on_gpu else {}),
        "mpx_pde, float32": partial(in_jax, precision="float32"),
        **{f"mpx_pde, {h}": partial(in_jax, precision=h) for h in HALVES},
        **{
            f"mpx_pde, forward float32, {h}": partial(in_jax, precision=f"forward-float32-{h}")
            for h in HALVES
        },
        "neuraloperator, float32": by_neuraloperator,
        **{f"neuraloperator, amp {h}": partial(by_neuraloperator, precision=h) for h in halves},
    }

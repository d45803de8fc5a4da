"""What do the wrappers cost? The step of each library against the same step written by hand.

The rivals of `_steps.py` train the same network with Adam. The comparison looks at the compiled
programs (kernels, flops, bytes, memory), on this CPU and, where the compilers are installed, for an
H100 and a TPU v5e that need not be present; these numbers repeat exactly. The programs of jmp and
MPX differ by design: neither caps the scale nor counts skipped steps, and MPX casts outside the
differentiated function.
"""

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from ._deviceless import add_targets, there
from ._report import Report
from ._steps import Task, alone, rivals


def regression(model, x, y):
    """Returns the mean squared error of a regression."""
    prediction = jax.vmap(model)(x)
    return jnp.mean((prediction - y).astype(jnp.float32) ** 2)


def heat(model, points, source):
    """Returns the mean squared residual of the heat equation u_t - 0.1 u_xx = source."""

    def residual(point, value):
        dt, dx = jnp.eye(2, dtype=point.dtype)
        u_t = jax.jvp(model, (point,), (dt,))[1]
        u_x = lambda p: jax.jvp(model, (p,), (dx,))[1]
        u_xx = jax.jvp(u_x, (point,), (dx,))[1]
        u_t, u_xx, value = (z.astype(jnp.float32) for z in (u_t, u_xx, value))
        return u_t - 0.1 * u_xx - value

    return jnp.mean(jax.vmap(residual)(points, source) ** 2)


class Problem(NamedTuple):
    """A network, its loss and the shapes of a batch."""

    name: str
    size: str
    loss: Callable
    in_size: int
    out_size: Any
    width: int
    points: int

    def task(self) -> Task:
        """Builds the task with all rivals."""
        key, x_key, y_key = jax.random.split(jax.random.key(0), 3)
        outs = 1 if self.out_size == "scalar" else self.out_size
        x = jax.random.uniform(x_key, (self.points, self.in_size))
        y = jnp.sin(x @ jax.random.normal(y_key, (self.in_size, outs)))
        batch = x, y[:, 0] if self.out_size == "scalar" else y
        network = partial(eqx.nn.MLP, self.in_size, self.out_size, self.width, 4, jnp.tanh)
        loss = alone(lambda model, batch: self.loss(model, *batch))
        where = {"problem": self.name, "size": self.size, "dtype": "float16"}
        return Task(where, partial(network, key=key), loss, lambda: [batch], batch, rivals(loss))


PROBLEMS = (
    Problem("MLP", "64 × 4, 1024 points", regression, 8, 8, 64, 1024),
    Problem("PINN", "64 × 4, 1024 points", heat, 2, "scalar", 64, 1024),
    Problem("MLP", "512 × 4, 4096 points", regression, 8, 8, 512, 4096),
    Problem("PINN", "256 × 4, 4096 points", heat, 2, "scalar", 256, 4096),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_targets(parser, "cpu,h100,v5e")


def run(report: Report, args: argparse.Namespace) -> None:
    tasks = [problem.task() for problem in (PROBLEMS[:2] if args.quick else PROBLEMS)]
    for target, task in itertools.product(there(report, args.targets.split(",")), tasks):
        for name, rival in task.there(report).items():
            costs = task.compiled(target, rival).costs()
            report.record("programs", **task.where, target=target, step=name, **costs)

"""How long does a step with `forward="float32"` take on a CPU? Programs in plain JAX and Equinox.

The networks have the shapes that people train, and know nothing of this library: an MLP, PINNs by
`partials`, by `jax.hessian` and by nested `jax.grad`, a DeepONet, a transformer, a neural ODE, an
LSTM, messages in a graph, and convolutions. Each step takes a gradient and updates with Adam, in
float32, and with a backward pass in float16 and in bfloat16. Besides time and memory, the errors of
the outputs and of the first gradient against float64 are recorded.

    python -m benchmarks programs_step --programs MLP LSTM
"""

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from . import _steps, foreign_step
from ._report import Report
from ._steps import Loss, Rival, Task, by_library, in_float32, policy_of


HALVES = ("float16", "bfloat16")


class Block(eqx.Module):
    """A block of a transformer."""

    attention: eqx.nn.MultiheadAttention
    norms: list[eqx.nn.LayerNorm]
    network: eqx.nn.MLP

    def __init__(self, width: int, key: Any):
        keys = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(4, width, key=keys[0])
        self.norms = [eqx.nn.LayerNorm(width) for _ in range(2)]
        self.network = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=keys[1])

    def __call__(self, x: Any) -> Any:
        h = jax.vmap(self.norms[0])(x)
        x = x + self.attention(h, h, h)
        return x + jax.vmap(self.network)(jax.vmap(self.norms[1])(x))


def mlp(inputs: int, outputs: Any, width: int, activation: Callable = jnp.tanh) -> Any:
    return eqx.nn.MLP(inputs, outputs, width, 3, activation, key=jax.random.key(0))


def fitted(predict: Callable[[Any, Any], Any], target: Callable[[Any], Any]) -> Loss:
    """Returns the mean squared error of predictions, and the predictions."""

    def loss(model, x):
        out = predict(model, x)
        return jnp.mean((out - target(x)) ** 2), out

    return loss


def solved(terms: Callable[..., Any]) -> Loss:
    """Returns the mean squared residual of u_tt - u_xx - u_yy + sin u = 0, and the residuals."""

    def loss(model, points, *, derivatives=None):
        return foreign_step.loss(model, points, terms=partial(terms, derivatives=derivatives))

    return loss


def by_partials(model, point, derivatives):
    named = {"coords": "txy", "outputs": "u", "scaling": derivatives}
    return mpx.partials(model, foreign_step.TERMS, **named)(point)


def by_nested_grad(model, point):
    """Takes the terms as they are written by hand, a function of numbers for each."""
    u = lambda *p: model(jnp.stack(p))
    second = (jax.grad(jax.grad(u, i), i)(*point) for i in range(3))
    return dict(zip(foreign_step.TERMS, (u(*point), *second), strict=True))


def of_rows(model, x):
    return jax.vmap(model)(x)


def of_functions(model, functions):
    branch, trunk, points = model
    return jax.vmap(branch)(functions) @ jax.vmap(trunk)(jax.lax.stop_gradient(points)).T


def of_tokens(blocks, x):
    for block in blocks:
        x = jax.vmap(block)(x)
    return x


def over_time(model, x):
    step = lambda u, _: (u + 0.05 * jax.vmap(model)(u), None)
    return jax.lax.scan(step, x, None, length=20)[0]


def of_sequences(cell, x):
    def last(sequence):
        start = (jnp.zeros(cell.hidden_size, x.dtype),) * 2
        return jax.lax.scan(lambda s, v: (cell(v, s), None), start, sequence)[0][0]

    return jax.vmap(last)(x)


def of_a_graph(model, x):
    messages, update = model
    ends = np.random.default_rng(1).integers(len(x), size=(2, 8 * len(x)))
    for _ in range(3):
        sent = jax.vmap(messages)(jnp.concatenate([x[ends[0]], x[ends[1]]], axis=1))
        received = jnp.zeros((len(x), sent.shape[1]), x.dtype).at[ends[1]].add(sent) / 8
        x = x + jax.vmap(update)(jnp.concatenate([x, received], axis=1))
    return x


def of_images(layers, x):
    for i, layer in enumerate(layers):
        x = jax.vmap(layer)(jax.nn.gelu(x) if i else x)
    return x


def blocks() -> list[Block]:
    return [Block(64, key) for key in jax.random.split(jax.random.key(0), 3)]


def deeponet() -> Any:
    return mlp(100, 128, 128), mlp(2, 128, 128), jax.random.uniform(jax.random.key(1), (128, 2))


def convolutions() -> list[eqx.nn.Conv2d]:
    sizes, keys = (3, 32, 32, 3), jax.random.split(jax.random.key(0), 3)
    pairs = zip(sizes, sizes[1:], keys, strict=False)
    return [eqx.nn.Conv2d(i, o, 3, padding=1, key=key) for i, o, key in pairs]


def lstm() -> eqx.nn.LSTMCell:
    return eqx.nn.LSTMCell(16, 64, key=jax.random.key(0))


def messages() -> Any:
    return mlp(64, 64, 64, jax.nn.relu), mlp(96, 32, 64, jax.nn.relu)


def first_wave(x):
    return jnp.sin(x[:, :1])


def halved(x):
    return 0.5 * x


PROGRAMS: Mapping[str, tuple[Callable[[], Any], Loss, tuple[int, ...]]] = {
    "MLP": (partial(mlp, 8, 1, 256, jax.nn.gelu), fitted(of_rows, first_wave), (1024, 8)),
    "PINN by `partials`": (partial(mlp, 3, "scalar", 64), solved(by_partials), (1024, 3)),
    "PINN by `jax.hessian`": (
        partial(mlp, 3, "scalar", 64),
        solved(lambda model, point, derivatives: foreign_step.by_hessian(model, point)),
        (512, 3),
    ),
    "PINN by nested `jax.grad`": (
        partial(mlp, 3, "scalar", 64),
        solved(lambda model, point, derivatives: by_nested_grad(model, point)),
        (512, 3),
    ),
    "DeepONet": (deeponet, fitted(of_functions, first_wave), (64, 100)),
    "transformer": (blocks, fitted(of_tokens, halved), (16, 64, 64)),
    "neural ODE": (partial(mlp, 8, 8, 128), fitted(over_time, halved), (256, 8)),
    "LSTM": (lstm, fitted(of_sequences, lambda x: 0.3), (64, 50, 16)),
    "graph": (messages, fitted(of_a_graph, lambda x: 1.0), (256, 32)),
    "convolutions": (convolutions, fitted(of_images, halved), (16, 3, 32, 32)),
}
"""For each program its network, its loss and the shape of a batch."""


def rivals(name: str, loss: Loss) -> dict[str, Rival]:
    found = {"float32": in_float32(loss)}
    for half in HALVES:
        options = {"policy": policy_of(half), "keep_full": (False, True), "forward": "float32"}
        step = by_library(loss, **options)
        if name == "PINN by `partials`" and half == "float16":
            step = foreign_step.by_library(half, forward="float32")
        found[half] = step
    return found


def task(name: str) -> Task:
    model, loss, shape = PROGRAMS[name]
    batch = np.random.default_rng(0).uniform(-1, 1, size=shape).astype(np.float32)
    of_shape = jax.ShapeDtypeStruct(shape, jnp.float32)
    where = {"program": name}
    return Task(where, model, loss, lambda: [batch], of_shape, rivals(name, loss), chunk=1024)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _steps.add_arguments(parser, rounds=20, minutes=None)
    parser.add_argument("--programs", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS))


def run(report: Report, args: argparse.Namespace) -> bool:
    args.rounds = 2 if args.quick else args.rounds
    return _steps.run_sizes(report, args, map(task, args.programs))

"""How long does a ViT step take, and how much memory? By library and batch size.

The question is that of figures 2 and 3 of Gräfe & Trimpe, *MPX: Mixed Precision Training for JAX*
(2025). The rivals train the network of `examples/vit.py` from the same weights on the same batches
with AdamW, at the learning rates of the example. On a CPU they train the small network on
handwritten digits, on a GPU ViT-Base on synthetic images.

- `mpx_pde`: float32, by autocast, and by casting the whole model;
- `MPX`: softmax, layer norms and the mean in full precision by its `force_full_precision`, as
  documented;
- `jmp`: casts, loss scale and skipped steps by its functions, as documented;
- `torch`: float32, and `torch.amp` in bfloat16 and in float16 with a `GradScaler`; attention is its
  fused `scaled_dot_product_attention`, the rest is eager.

Errors are relative to the network in float64.
"""

import argparse
import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpx_pde as mpx

from . import _steps
from ._problems import load_example
from ._report import Report, require
from ._steps import HIGHEST, TF32, Rival, Task


vit = load_example("vit")

CPU_BATCHES = [16, 64, 256]
GPU_BATCHES = [64, 256, 16]  # in order of importance: sizes that exceed the time are left out
EXACT_CHUNK = 16  # samples at a time in float64
STEPS = 40  # in the schedule of learning rates
WEIGHT_DECAY = 0.05  # as in the example
HALVES = ("float16", "bfloat16")


def of_logits(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def loss(model: Any, batch: Any, cast: Callable = lambda x: x) -> tuple[jax.Array, jax.Array]:
    """Returns the loss of the example and the logits."""
    logits = cast(jax.vmap(model)(batch.images))
    return of_logits(logits, batch.labels), logits


# --- The rivals ------------------------------------------------------------------------------


def forward_for_mpx(in_full: Callable, model: Any, image: jax.Array) -> jax.Array:
    """Evaluates the network, with delicate operations in full precision."""
    full = lambda f, x, **options: in_full(f, x.dtype)(x, **options)
    norm = lambda layer, x: full(jax.vmap(layer), x)

    def attention(layer, x):
        tokens, features = x.shape
        h = norm(layer.norm, x)
        q, k, v = (
            jax.vmap(f)(h).reshape(tokens, layer.heads, -1)
            for f in (layer.queries, layer.keys, layer.values)
        )
        scores = jnp.einsum("shd,thd->hst", q, k) / math.sqrt(features // layer.heads)
        mixed = jnp.einsum("hst,thd->shd", full(jax.nn.softmax, scores, axis=-1), v)
        return x + jax.vmap(layer.out)(mixed.reshape(tokens, features))

    def dense(layer, x):
        h = jax.nn.gelu(jax.vmap(layer.first)(norm(layer.norm, x)))
        return x + jax.vmap(layer.second)(h)

    c, n, p = image.shape[0], image.shape[1] // model.patch, model.patch
    patches = image.reshape(c, n, p, n, p).transpose(1, 3, 0, 2, 4).reshape(n * n, -1)
    x = jax.vmap(model.embedding)(patches) + model.positions
    for first, second in model.blocks:
        x = dense(second, attention(first, x))
    return model.head(full(partial(jnp.mean, axis=0), norm(model.norm, x)))


def by_mpx(dtype: str) -> Rival:
    def function(model, batch):
        in_full = require("mpx").force_full_precision
        logits = jax.vmap(partial(forward_for_mpx, in_full, model))(batch.images)
        return in_full(of_logits, jnp.float32)(logits, batch.labels), logits

    return _steps.by_mpx(function, dtype, mpx.FLOAT16_MAX)


def by_jmp(dtype: str) -> Rival:
    in_full = lambda policy: partial(loss, cast=policy.cast_to_output)
    return _steps.by_jmp(in_full, dtype, scaled=dtype == "float16")


def by_library(precision: str, **options: Any) -> Rival:
    ours = _steps.by_library(loss, **vit.gradient_options(precision), **options)
    return ours._replace(products=HIGHEST if precision == "float32" else None)


def jax_rivals(gpu: bool) -> dict[str, Rival]:
    rivals = {f"mpx_pde {name}": by_library(name) for name in vit.PRECISIONS}
    if gpu:
        rivals["mpx_pde TF32"] = by_library("float32")._replace(products=TF32)
    rivals |= {f"MPX {half}": by_mpx(half) for half in HALVES}
    return rivals | {f"jmp {half}": by_jmp(half) for half in HALVES}


def task(size: Any, gpu: bool = False) -> Task:
    shape = size.batch, size.channels, size.image, size.image
    images = jax.ShapeDtypeStruct(shape, jnp.float32)
    batch = vit.Batch(images, jax.ShapeDtypeStruct((size.batch,), jnp.int32))
    return Task(
        {"blocks": size.blocks, "batch": size.batch},
        lambda: vit.ViT(size, key=jax.random.key(0)),
        *(loss, partial(some_batches, size, gpu), batch, jax_rivals(gpu)),
        vit.make_optimizer(size, STEPS),
        EXACT_CHUNK,
    )


def torch_rivals(size: Any, gpu: bool, task: Task) -> dict[str, Any]:
    from ._torch.vit import step

    precisions = {"torch float32": "float32"} | {f"torch amp {half}": half for half in HALVES}
    if gpu:
        precisions["torch TF32"] = "TF32"
    leaves = jax.tree.leaves(eqx.filter(task.model(), eqx.is_array))
    rate = optax.warmup_cosine_decay_schedule(0.0, size.learning_rate, STEPS // 10, STEPS)
    arguments = size, leaves, task.batches(), rate, WEIGHT_DECAY
    return {name: partial(step, *arguments, p) for name, p in precisions.items()}


# --- Runs ------------------------------------------------------------------------------------


def some_batches(size: Any, gpu: bool) -> list[Any]:
    (images, labels), _ = vit.synthetic_images(size, 0) if gpu else vit.digits(0)
    count = len(labels) // size.batch
    cut = lambda x: np.split(x[: count * size.batch], count)
    return [vit.Batch(*pair) for pair in zip(cut(images), cut(labels), strict=True)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _steps.add_arguments(parser, rounds=20)
    parser.add_argument("--batches", type=int, nargs="+", help="batch sizes")


def run(report: Report, args: argparse.Namespace) -> bool:
    gpu = jax.default_backend() == "gpu"
    size = vit.SIZES["base" if gpu else "small"]
    if args.quick:
        size = dataclasses.replace(size, blocks=1)
    batches = args.batches or ([16] if args.quick else GPU_BATCHES if gpu else CPU_BATCHES)
    tasks = (task(dataclasses.replace(size, batch=batch), gpu) for batch in batches)
    others = partial(torch_rivals, size, gpu), ("torch",)
    return _steps.run_sizes(report, args, tasks, *others)

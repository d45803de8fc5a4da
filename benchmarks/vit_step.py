"""How long does a ViT step take, and how much memory? By library and batch size.

The question is that of figures 2 and 3 of Gräfe & Trimpe, *MPX: Mixed Precision Training for JAX*
(2025). The rivals train the network of `examples/vit.py` from the same weights on the same batches
with AdamW, at the rates of the example: the small one on handwritten digits on a CPU, ViT-Base on
synthetic images on a GPU.

- `mpx_pde`: float32, by autocast, and by casting the whole model;
- `MPX`: version 0.1.8, with softmax, layer norms and the mean in full precision by its
  `force_full_precision`, as its documentation has it;
- `jmp`: casts, loss scale and skipped steps by its functions, as its documentation has it;
- `torch`: float32, and `torch.amp` in bfloat16 and in float16 with a `GradScaler`; attention is its
  fused `scaled_dot_product_attention`, the rest is eager.

Errors are those of the first step, of the logits and of the gradient of all parameters, relative
to the network in float64. Losses are those after the same number of steps. Memory is what a step
needs beyond state and batch: of JAX what XLA says, of PyTorch the peak that its allocator saw,
which a CPU does not tell.

A CPU has no arithmetic in half precision: XLA emulates it, and it takes longer than float32. On a
GPU rows without a remark compute float32 products in float32; `TF32` says otherwise.

With `--target h100` nothing runs; steps in JAX of ViT-Base are compiled for it, a minute each.

    python -m benchmarks vit_step
    python -m benchmarks vit_step --target h100
    XLA_PYTHON_CLIENT_PREALLOCATE=false python -m benchmarks vit_step     # on a GPU
"""

import argparse
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpx_pde as mpx

from ._deviceless import TARGETS, TargetUnavailable, title
from ._examples import load_example
from ._measured import (
    BEFORE,
    JaxStep,
    Step,
    compiled,
    float64_first,
    measure,
    report_measured,
    within,
)
from ._report import Report
from ._rivals import RivalMissing, require
from .vit_memory import abstract_step, products_by_kind


vit = load_example("vit")

CPU_BATCHES = [16, 64, 256]
GPU_BATCHES = [64, 256, 16]  # in order of importance: what the time does not allow is left out
TARGET_BATCHES = [16, 64, 256]
TARGET_RIVALS = [*(f"mpx_pde {name}" for name in vit.PRECISIONS), "MPX float16"]
EXACT_CHUNK = 16  # samples at a time in float64
STEPS = 40  # of the schedule of learning rates
WEIGHT_DECAY = 0.05  # of the example


def loss(model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """The loss of the example, and the logits."""
    logits = jax.vmap(model)(batch.images)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    return jnp.mean(losses), logits


# --- The steps: (state, batch) to (state, loss, logits) --------------------------------------


def our_step(precision: str, optimizer: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
    model, opt_state, scaling = state
    (value, logits), scaling, finite, grads = mpx.filter_value_and_grad(
        loss, scaling, has_aux=True, **vit.gradient_options(precision)
    )(model, batch)
    model, opt_state = mpx.optimizer_update(model, optimizer, opt_state, grads, finite)
    return vit.State(model, opt_state, scaling), value, logits


def forward_for_mpx(library: Any, model: Any, image: jax.Array) -> jax.Array:
    """The network, with what is delicate in full precision."""
    full = lambda f, x, **options: library.force_full_precision(f, x.dtype)(x, **options)
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


def step_by_mpx(
    library: Any, dtype: Any, optimizer: Any, state: Any, batch: Any
) -> tuple[Any, Any, Any]:
    library.set_half_precision_datatype(dtype)

    def function(model, batch):
        logits = jax.vmap(partial(forward_for_mpx, library, model))(batch.images)
        losses = library.force_full_precision(
            optax.softmax_cross_entropy_with_integer_labels, jnp.float32
        )(logits, batch.labels)
        return jnp.mean(losses), logits

    model, opt_state, scaling = state
    (value, logits), scaling, finite, grads = library.filter_value_and_grad(
        function, scaling, has_aux=True
    )(model, batch)
    model, opt_state = library.optimizer_update(model, optimizer, opt_state, grads, finite)
    return vit.State(model, opt_state, scaling), value, logits


def step_by_jmp(
    library: Any, dtype: Any, optimizer: Any, state: Any, batch: Any
) -> tuple[Any, Any, Any]:
    policy = library.Policy(jnp.float32, dtype, jnp.float32)
    model, opt_state, scaling = state
    params, static = eqx.partition(model, eqx.is_array)
    # jmp's scale cannot go through Equinox's filters: its arrays do, and make it anew.
    scaler = library.DynamicLossScale(*scaling) if scaling else library.NoOpLossScale()

    def function(params):
        half, images = policy.cast_to_compute((params, batch.images))
        logits = policy.cast_to_output(jax.vmap(eqx.combine(half, static))(images))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
        value = jnp.mean(losses)
        return scaler.scale(value), (value, logits)

    grads, (value, logits) = jax.grad(function, has_aux=True)(params)
    grads = scaler.unscale(grads)
    finite = library.all_finite(grads)
    updates, new_opt_state = optimizer.update(grads, opt_state, params)
    new = (optax.apply_updates(params, updates), new_opt_state)
    params, opt_state = library.select_tree(finite, new, (params, opt_state))
    if scaling:
        scaler = scaler.adjust(finite)
        scaling = (scaler.loss_scale, scaler.counter)
    return vit.State(eqx.combine(params, static), opt_state, scaling), value, logits


class Rival(NamedTuple):
    """A step in JAX, what its float32 products may become, and how its loss is scaled."""

    step: Callable
    products: str | None = None
    scaling: Callable[[], Any] = partial(mpx.DynamicLossScaling, 2**15)


def jax_rivals(report: Report, gpu: bool) -> dict[str, Rival]:
    rivals = {
        f"mpx_pde {name}": Rival(partial(our_step, name), "highest" if name == "float32" else None)
        for name in vit.PRECISIONS
    }
    if gpu:
        rivals["mpx_pde TF32"] = Rival(partial(our_step, "float32"), "tensorfloat32")
    halves = {"float16": jnp.float16, "bfloat16": jnp.bfloat16}
    try:
        library = require("mpx")
        scaling = lambda: library.DynamicLossScaling(library.FLOAT16_MAX, jnp.ones((), jnp.float32))
        for name, dtype in halves.items():
            step = partial(step_by_mpx, library, dtype)
            rivals[f"MPX {name}"] = Rival(step, scaling=scaling)
    except RivalMissing as e:
        report.note(str(e))
    try:
        jmp = require("jmp")
        scales = {"float16": lambda: (jnp.float32(2**15), jnp.int32(0)), "bfloat16": tuple}
        for name, dtype in halves.items():
            rivals[f"jmp {name}"] = Rival(partial(step_by_jmp, jmp, dtype), scaling=scales[name])
    except RivalMissing as e:
        report.note(str(e))
    return rivals


def torch_rivals(
    report: Report, size: Any, batches: Sequence[Any], gpu: bool, steps: int
) -> dict[str, Any]:
    try:
        require("torch")
    except RivalMissing as e:
        report.note(str(e))
        return {}
    from ._torch import vit as rival

    options: dict[str, dict[str, Any]] = {
        "torch float32": {},
        "torch amp float16": {"half": "float16"},
        "torch amp bfloat16": {"half": "bfloat16"},
    }
    if gpu:
        options["torch TF32"] = {"tf32": True}
    leaves = jax.tree.leaves(eqx.filter(vit.ViT(size, key=jax.random.key(0)), eqx.is_array))
    schedule = learning_rates(size, steps)
    return {
        name: partial(rival.step, size, leaves, batches, schedule, WEIGHT_DECAY, **chosen)
        for name, chosen in options.items()
    }


def learning_rates(size: Any, steps: int) -> list[float]:
    """Those of the example, of the first steps."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, size.learning_rate, STEPS // 10, STEPS)
    return [float(np.asarray(schedule(i))) for i in range(steps)]


# --- What runs, and what is compiled ---------------------------------------------------------


def some_batches(size: Any, gpu: bool) -> list[Any]:
    (images, labels), _ = vit.synthetic_images(size, 0) if gpu else vit.digits(0)
    count = len(labels) // size.batch
    cut = lambda x: np.split(x[: count * size.batch], count)
    return [vit.Batch(*pair) for pair in zip(cut(images), cut(labels), strict=True)]


def run_steps(report: Report, size: Any, gpu: bool, chosen: Sequence[str] | None, rounds: int):
    batches = some_batches(size, gpu)
    optimizer = vit.make_optimizer(size, STEPS)
    model = vit.ViT(size, key=jax.random.key(0))
    exact = float64_first(loss, model, batches[0], EXACT_CHUNK)
    on_device = jax.tree.map(jnp.asarray, batches)

    def make(rival: Rival) -> Step:
        opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        state = vit.State(model, opt_state, rival.scaling())
        return JaxStep(partial(rival.step, optimizer), state, on_device, rival.products)

    rivals = {name: partial(make, rival) for name, rival in jax_rivals(report, gpu).items()}
    rivals |= torch_rivals(report, size, batches, gpu, steps=BEFORE + 2 * rounds)
    results = measure(selected(rivals, chosen), exact, rounds=rounds)
    text = f"ViT of {size.blocks} blocks, {size.features} features, batch {size.batch}"
    return report_measured(report, text, results, blocks=size.blocks, batch=size.batch)


def compile_steps(report: Report, target: str, size: Any, chosen: Sequence[str]) -> None:
    optimizer, state, batch = abstract_step(vit, size)
    rows = []
    for name, rival in selected(jax_rivals(report, gpu=False), chosen).items():
        scaled = state._replace(scaling=eqx.filter_eval_shape(rival.scaling))
        where = {"blocks": size.blocks, "batch": size.batch, "rival": name}
        step = partial(rival.step, optimizer)
        try:
            program = compiled(report, target, step, scaled, batch, rival.products, **where)
        except TargetUnavailable as e:
            report.note(str(e))
            return
        if isinstance(program, str):
            rows.append([name, None, None, program])
            continue
        products = products_by_kind(program)
        report.record(
            "programs", target=target, **where, temp_bytes=program.temp_bytes, products=products
        )
        text = ", ".join(f"{count} {kind}" for kind, count in sorted(products.items()))
        rows.append([name, program.temp_bytes / 2**30, text, None])
        print(name, size.batch, f"{program.temp_bytes / 2**30:.2f} GiB", flush=True)
    text = f"ViT of {size.blocks} blocks, batch {size.batch}, for {title(target)}"
    report.table(text, ["rival", "temp, GiB", "products", "failed"], rows)


def selected(rivals: Mapping[str, Any], names: Sequence[str] | None) -> dict[str, Any]:
    """Those whose names are asked for; all without."""
    return {name: r for name, r in rivals.items() if names is None or name in names}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batches", type=int, nargs="+", help="batch sizes")
    parser.add_argument("--rivals", nargs="+", help="their names; by default all")
    parser.add_argument("--target", choices=TARGETS, help="compile for it; nothing runs")
    parser.add_argument(
        "--minutes", type=float, default=7.0, help="no batch size is begun after so many of them"
    )


def run(report: Report, args: argparse.Namespace) -> int:
    gpu = jax.default_backend() == "gpu"
    size = vit.SIZES["base" if gpu or args.target else "small"]
    if args.quick:
        size = dataclasses.replace(size, blocks=1)
    batches = args.batches or ([16] if args.quick else GPU_BATCHES if gpu else CPU_BATCHES)
    if args.target:
        report.name = f"vit_step-{args.target}"
        for batch in args.batches or ([16] if args.quick else TARGET_BATCHES):
            sized = dataclasses.replace(size, batch=batch)
            compile_steps(report, args.target, sized, args.rivals or TARGET_RIVALS)
        return 0
    failed = 0
    for batch in within(args.minutes, batches, report):
        sized = dataclasses.replace(size, batch=batch)
        failed += run_steps(report, sized, gpu, args.rivals, 1 if args.quick else args.rounds)
    return int(failed > 0)

"""A vision transformer whose code never mentions precision, trained in five ways.

The architecture is that of Dosovitskiy et al. (2020), as in the evaluation of MPX (Gräfe &
Trimpe, 2025): a linear layer embeds patches, and residual blocks of attention and of two dense
layers follow. The images are scikit-learn's handwritten digits, 8 × 8 pixels each, so nothing is
downloaded; 1,437 of them train and 360 test. One loop trains the network from the same start
with the same batches

- in float32,
- by autocast (`autocast=True`), in float16 and in bfloat16, with a precision for each operation,
- by casting the whole model and the images to float16 and to bfloat16, as MPX does.

    python examples/vit.py                                # all five
    python examples/vit.py --quick                        # all five, about a minute
    python examples/vit.py --precision float32 autocast-float16 --seed 1
    python examples/vit.py --size base                    # ViT-Base, synthetic images of 224²

What to expect on two CPU cores: all five reach a test accuracy of 96 to 98% and skip no step. Half
precision is no faster there, since XLA converts to float32 and back on a CPU; it saves time and
memory on GPUs and TPUs. `--size base` is meant for one of these: a step of it takes minutes on a
CPU.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _command_line import progress_bar, run_main, stop_on_interrupt, training_parser
from jaxtyping import Array, Float, Int, PRNGKeyArray
from matplotlib.figure import Figure
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits

import mpx_pde as mpx


PRECISIONS = ("float32", "autocast-float16", "autocast-bfloat16", "cast-float16", "cast-bfloat16")


@dataclass(frozen=True)
class Size:
    """A network, its images and its training."""

    image: int  # pixels along a side
    channels: int
    patch: int  # pixels along a side
    classes: int
    features: int
    heads: int
    blocks: int
    hidden: int  # width of the dense layers inside a block
    batch: int
    learning_rate: float
    steps: int
    quick_steps: int
    steps_per_call: int  # steps in one compiled call

    @property
    def tokens(self) -> int:
        return (self.image // self.patch) ** 2


SIZES = {
    "small": Size(8, 1, 2, 10, 48, 4, 3, 96, 64, 3e-3, 600, 200, 20),
    "base": Size(224, 3, 16, 1000, 768, 12, 12, 3072, 64, 3e-4, 40, 4, 4),
}


# --- The network, which never mentions precision ---------------------------------------------


class Attention(eqx.Module):
    norm: eqx.nn.LayerNorm
    queries: eqx.nn.Linear
    keys: eqx.nn.Linear
    values: eqx.nn.Linear
    out: eqx.nn.Linear
    heads: int = eqx.field(static=True)

    def __init__(self, features: int, heads: int, *, key: PRNGKeyArray):
        q, k, v, out = jax.random.split(key, 4)
        self.norm = eqx.nn.LayerNorm(features)
        self.queries = eqx.nn.Linear(features, features, key=q)
        self.keys = eqx.nn.Linear(features, features, key=k)
        self.values = eqx.nn.Linear(features, features, key=v)
        self.out = eqx.nn.Linear(features, features, key=out)
        self.heads = heads

    def __call__(self, x: Float[Array, "tokens features"]) -> Float[Array, "tokens features"]:
        tokens, features = x.shape
        h = jax.vmap(self.norm)(x)
        q, k, v = (
            jax.vmap(layer)(h).reshape(tokens, self.heads, features // self.heads)
            for layer in (self.queries, self.keys, self.values)
        )
        scores = jnp.einsum("shd,thd->hst", q, k) / math.sqrt(features // self.heads)
        mixed = jnp.einsum("hst,thd->shd", jax.nn.softmax(scores), v)
        return x + jax.vmap(self.out)(mixed.reshape(tokens, features))


class Dense(eqx.Module):
    norm: eqx.nn.LayerNorm
    first: eqx.nn.Linear
    second: eqx.nn.Linear

    def __init__(self, features: int, hidden: int, *, key: PRNGKeyArray):
        first, second = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(features)
        self.first = eqx.nn.Linear(features, hidden, key=first)
        self.second = eqx.nn.Linear(hidden, features, key=second)

    def __call__(self, x: Float[Array, "tokens features"]) -> Float[Array, "tokens features"]:
        h = jax.vmap(self.first)(jax.vmap(self.norm)(x))
        return x + jax.vmap(self.second)(jax.nn.gelu(h))


class ViT(eqx.Module):
    """Patches, residual blocks, and a linear layer on the mean over all tokens."""

    embedding: eqx.nn.Linear
    positions: Float[Array, "tokens features"]
    blocks: list[tuple[Attention, Dense]]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    patch: int = eqx.field(static=True)

    def __init__(self, size: Size, *, key: PRNGKeyArray):
        embedding, positions, head, *keys = jax.random.split(key, 3 + 2 * size.blocks)
        pixels = size.channels * size.patch**2
        self.embedding = eqx.nn.Linear(pixels, size.features, key=embedding)
        self.positions = 0.02 * jax.random.normal(positions, (size.tokens, size.features))
        self.blocks = [
            (Attention(size.features, size.heads, key=a), Dense(size.features, size.hidden, key=b))
            for a, b in zip(keys[::2], keys[1::2], strict=True)
        ]
        self.norm = eqx.nn.LayerNorm(size.features)
        self.head = eqx.nn.Linear(size.features, size.classes, key=head)
        self.patch = size.patch

    def __call__(self, image: Float[Array, "channels height width"]) -> Float[Array, " classes"]:
        c, n, p = image.shape[0], image.shape[1] // self.patch, self.patch
        patches = image.reshape(c, n, p, n, p).transpose(1, 3, 0, 2, 4).reshape(n * n, -1)
        x = jax.vmap(self.embedding)(patches) + self.positions
        for attention, dense in self.blocks:
            x = dense(attention(x))
        return self.head(jnp.mean(jax.vmap(self.norm)(x), axis=0))


class Batch(NamedTuple):
    images: Float[Array | np.ndarray, "batch channels height width"]
    labels: Int[Array | np.ndarray, " batch"]


def loss(model: ViT, batch: Batch) -> Float[Array, ""]:
    logits = jax.vmap(model)(jnp.asarray(batch.images))
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels))


# --- Images ----------------------------------------------------------------------------------


def digits(seed: int) -> tuple[Batch, Batch]:
    """Returns scikit-learn's digits, four fifths for training and one fifth for testing."""
    data: Any = load_digits()
    images = np.asarray(data.images[:, None] / 8 - 1, np.float32)
    order = np.random.default_rng(seed).permutation(len(images))
    train, test = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
    labels = np.asarray(data.target, np.int32)
    return Batch(images[train], labels[train]), Batch(images[test], labels[test])


def synthetic_images(size: Size, seed: int) -> tuple[Batch, Batch]:
    """Draws a coarse pattern for each class plus noise: something to learn at any resolution."""
    rng = np.random.default_rng(seed)
    coarse = size.image // size.patch
    patterns = rng.normal(size=(size.classes, size.channels, coarse, coarse))

    def draw(count):
        labels = rng.integers(size.classes, size=count)
        shape = (count, size.channels, size.image, size.image)
        images = rng.standard_normal(shape, np.float32)
        images += np.kron(patterns[labels], np.ones((size.patch, size.patch)))
        return Batch(images, labels.astype(np.int32))

    return draw(4 * size.batch), draw(size.batch)


# --- The training loop -----------------------------------------------------------------------


def gradient_options(precision: str) -> dict[str, Any]:
    """Returns the options of `mpx.filter_value_and_grad` that distinguish the five trainings."""
    if precision == "float32":
        return {"use_mixed_precision": False}
    method, dtype = precision.split("-")
    policy = f"params=float32,compute={dtype},output=float32"
    return {"policy": policy, "autocast": method == "autocast"}


class State(NamedTuple):
    model: ViT
    opt_state: Any
    scaling: mpx.DynamicLossScaling


def training_step(
    precision: str, optimizer: optax.GradientTransformation, state: State, batch: Batch
) -> tuple[State, tuple[Array, Array]]:
    """Takes one step; also returns the loss and the scale of the next step."""
    model, opt_state, scaling = state
    value, scaling, grads_finite, grads = mpx.filter_value_and_grad(
        loss, scaling, **gradient_options(precision)
    )(model, batch)
    model, opt_state = mpx.optimizer_update(model, optimizer, opt_state, grads, grads_finite)
    return State(model, opt_state, scaling), (value, scaling.loss_scaling)


def make_optimizer(size: Size, steps: int) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0.0, size.learning_rate, steps // 10, steps)
    return optax.adamw(schedule, weight_decay=0.05)


def initial_state(size: Size, optimizer: optax.GradientTransformation, key: PRNGKeyArray) -> State:
    model = ViT(size, key=key)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    return State(model, opt_state, mpx.DynamicLossScaling(2**15))


@dataclass(frozen=True)
class Result:
    """The result of one training. `loss` and `scale` have an entry for each step."""

    precision: str
    accuracy: float  # on the test images
    test_loss: float
    skipped_steps: int
    ms_per_step: float
    temp_bytes: int  # scratch memory of the compiled steps
    loss: np.ndarray
    scale: np.ndarray


@jax.jit
def evaluate(model: ViT, images: Float[Array, "test ..."]) -> Float[Array, "test classes"]:
    """Returns the logits, in float32."""
    return jax.vmap(model)(images)


def train(
    precision: str,
    size: Size,
    data: tuple[Batch, Batch],
    *,
    steps: int,
    seed: int,
    progress: Any,
    stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Trains one network in `precision`, one of `PRECISIONS`, until `stop()` is true."""
    calls = math.ceil(steps / size.steps_per_call)
    steps = calls * size.steps_per_call
    training, test = (jax.tree.map(jnp.asarray, batch) for batch in data)
    model_key, key = jax.random.split(jax.random.key(seed))
    optimizer = make_optimizer(size, steps)
    state = initial_state(size, optimizer, model_key)

    @partial(jax.jit, donate_argnums=0)
    def run_steps(state, training, choices):
        def step(state, choice):
            batch = jax.tree.map(lambda x: x[choice], training)
            return training_step(precision, optimizer, state, batch)

        return jax.lax.scan(step, state, choices)

    def choose(key):
        shape = (size.steps_per_call, size.batch)
        return jax.random.randint(key, shape, 0, len(training.labels))

    task = progress.add_task(precision, total=steps, loss="compiling")
    compiled = run_steps.lower(state, training, choose(key)).compile()
    memory = compiled.memory_analysis()
    losses, scales, seconds = [], [], 0.0
    for _ in range(calls):
        key, choice_key = jax.random.split(key)
        choices = jax.block_until_ready(choose(choice_key))
        start = time.perf_counter()
        state, (values, step_scales) = jax.block_until_ready(compiled(state, training, choices))
        seconds += time.perf_counter() - start
        losses.append(np.asarray(values))
        scales.append(np.asarray(step_scales))
        progress.update(task, advance=size.steps_per_call, loss=f"loss {losses[-1].mean():.3f}")
        if stop():
            break

    logits = evaluate(state.model, test.images)
    test_losses = optax.softmax_cross_entropy_with_integer_labels(logits, test.labels)
    return Result(
        precision=precision,
        accuracy=float(jnp.mean(jnp.argmax(logits, -1) == test.labels)),
        test_loss=float(jnp.mean(test_losses)),
        skipped_steps=int(state.scaling.skipped_steps),
        ms_per_step=1000 * seconds / (len(losses) * size.steps_per_call),
        temp_bytes=memory.temp_size_in_bytes if memory is not None else 0,
        loss=np.concatenate(losses),
        scale=np.concatenate(scales),
    )


# --- Results ---------------------------------------------------------------------------------


def table(results: Sequence[Result], title: str) -> Table:
    columns = ("precision", "accuracy", "loss", "test loss", "skipped", "ms/step", "MiB")
    title = f"{title}: accuracy and loss on test images, scratch memory"
    out = Table(*columns, title=title, box=SIMPLE, padding=(0, 1, 0, 0))
    for r in results:
        scaled = r.precision != "float32"
        out.add_row(
            r.precision,
            f"{r.accuracy:.1%}",
            f"{r.loss[-20:].mean():.4f}",
            f"{r.test_loss:.4f}",
            str(r.skipped_steps) if scaled else "–",
            f"{r.ms_per_step:.1f}",
            f"{r.temp_bytes / 2**20:.2f}",
        )
    return out


def plot(results: Sequence[Result], path: Path) -> None:
    """Draws losses and scales over the steps."""
    figure = Figure(figsize=(7, 5.5), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for i, r in enumerate(results):
        width = min(20, len(r.loss))
        means = np.convolve(r.loss, np.ones(width) / width, "valid")
        style = {"color": f"C{i}", "linestyle": "--" if r.precision.startswith("cast") else "-"}
        axes[0].semilogy(np.arange(len(means)) + width, means, label=r.precision, **style)
        if r.precision != "float32":
            axes[1].semilogy(r.scale, base=2, **style)
    axes[0].set(title="loss, running mean")
    axes[1].set(title="loss scale", xlabel="step")
    # Below the panels, where it covers no line.
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    figure.savefig(path, dpi=120)


def main(
    precisions: Sequence[str] = PRECISIONS,
    *,
    size: str = "small",
    steps: int | None = None,
    seed: int = 0,
    out: str | Path | None = "outputs/vit",
    quick: bool = False,
) -> dict[str, Result]:
    """Trains in each precision, prints a table and draws `vit.png` in the folder `out`.

    `steps` is rounded up to whole calls (20 steps, or 4 for `size="base"`); `out=None` draws
    nothing. After Ctrl-C, the table and the picture show what was trained by then.
    """
    chosen = SIZES[size]
    if steps is None:
        steps = chosen.quick_steps if quick else chosen.steps
    if steps < 1:
        raise ValueError(f"`steps` must be at least 1, but got {steps}.")
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)  # fails now rather than after the training
    data = digits(seed) if size == "small" else synthetic_images(chosen, seed)
    console = Console()
    options: dict[str, Any] = {"steps": steps, "seed": seed}
    with stop_on_interrupt() as stop:
        results = []
        with progress_bar(console, 17) as progress:
            for p in precisions:
                results.append(train(p, chosen, data, progress=progress, stop=stop, **options))
                if stop():
                    console.print(f"{p}: stopped after {len(results[-1].loss):,} steps.")
                    break
        title = "Handwritten digits" if size == "small" else "Synthetic images"
        console.print(table(results, title))
        if out is not None:
            path = Path(out) / "vit.png"
            plot(results, path)
            console.print(f"Picture: {path}")
    return {r.precision: r for r in results}


if __name__ == "__main__":
    small = SIZES["small"]
    default = f"by default {small.steps:,}, or {small.quick_steps:,} with --quick"
    options = training_parser(
        __doc__,
        precisions=PRECISIONS,
        shown=PRECISIONS,
        steps=f"in whole calls of some steps; {default} (base: {SIZES['base'].steps:,})",
        data="the batches",
        out="outputs/vit",
        quick="about a minute, less accurate",
    )
    told = "size of network and images; `base` is ViT-Base on random images, for a GPU"
    options.add_argument("--size", choices=tuple(SIZES), default="small", help=told)
    run_main(main, options)

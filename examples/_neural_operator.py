"""What the neural-operator examples share: the training loop, the table and the picture.

A Fourier neural operator (Li et al., 2021) learns the map between two fields from pairs of them,
on one grid, and is tested on fields that it has not seen, on that grid and on a finer one. It is
trained by the same Optax loop, from the same seed and with the same batches, in float32 and with
its weights and activations cast to half precision; the float32 masters stay with the optimizer.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _command_line import folder, parser, positive, run_main, stop_on_interrupt
from _operator_losses import relative_h1, relative_l2
from _progress import progress_bar
from jaxtyping import Array, Float, Float32, PyTree
from matplotlib.figure import Figure
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import mpx_pde as mpx


PRECISIONS = ("float32", "float16", "bfloat16")
LOSSES = ("h1", "l2")
SAMPLES, QUICK_SAMPLES = 400, 120
TEST_SAMPLES = 100
STEPS, QUICK_STEPS = 1000, 200
RESOLUTION, QUICK_RESOLUTION = 32, 16  # of the training; tested on twice as many points too
STEPS_PER_CALL = 10  # steps in one compiled call
BATCH = 16
LEARNING_RATE = 3e-3
PADDING = 0.25  # by which a domain that is not periodic is extended

Fields = Float32[np.ndarray, "samples 1 n n"]


# --- The problem -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """Pairs of fields on the unit square, normalized: inputs to mean 0 and standard deviation 1,
    outputs to a root mean square of 1, both by the training samples."""

    name: str
    title: str
    periodic: bool
    inputs: Fields
    outputs: Fields
    tests: dict[int, tuple[Fields, Fields]]  # by resolution; the first is that of the training
    labels: tuple[str, str]  # what the fields are, for the picture


def make_problem(
    inputs: Float32[np.ndarray, "samples n n"],
    outputs: Float32[np.ndarray, "samples n n"],
    *,
    train_samples: int,
    strides: Sequence[int],
    **names: Any,
) -> Problem:
    """Splits and normalizes the data. `strides` are the subsamplings of the grid that are tested;
    the first of them is trained on."""
    pairs = {}
    for stride in strides:
        pair = [x[:, None, ::stride, ::stride] for x in (inputs, outputs)]
        pairs[pair[0].shape[-1]] = pair
    train_inputs, train_outputs = (x[:train_samples] for x in next(iter(pairs.values())))
    mean, std = train_inputs.mean(), train_inputs.std()
    size = np.sqrt(np.mean(train_outputs**2))
    return Problem(
        inputs=(train_inputs - mean) / std,
        outputs=train_outputs / size,
        tests={
            n: ((x[train_samples:] - mean) / std, y[train_samples:] / size)
            for n, (x, y) in pairs.items()
        },
        **names,
    )


# --- The training loop -----------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """What one training came to. `loss` and `scale` have an entry for each step."""

    precision: str
    errors: dict[int, dict[str, float]]  # of the test samples, by resolution and norm
    skipped_steps: int
    final_scale: float
    ms_per_step: float
    temp_bytes: int  # scratch memory of the compiled steps
    loss: np.ndarray
    scale: np.ndarray
    prediction: Float[np.ndarray, "n n"]  # of the first test sample, on the finest grid

    @property
    def error(self) -> float:
        """The relative L2 error on the grid of the training."""
        return next(iter(self.errors.values()))["l2"]


def batches(samples: int, steps: int, seed: int) -> np.ndarray:
    """Indices of the samples of each step: epoch after epoch, shuffled anew."""
    rng = np.random.default_rng(seed)
    batch = min(BATCH, samples)
    epochs = -(-steps * batch // samples)
    order = np.concatenate([rng.permutation(samples) for _ in range(epochs)])
    return order[: steps * batch].reshape(steps, batch)


class Training:
    """The training of one operator with weights and activations in `precision`: a program that is
    compiled once, for any number of seeds. `forward` is the precision of the forward pass.

    `network` goes to [`FNO`][mpx_pde.nn.FNO].
    """

    def __init__(
        self,
        problem: Problem,
        precision: str,
        *,
        steps: int,
        forward: Any = "half",
        loss: str = "h1",
        hidden_channels: int = 24,
        num_layers: int = 4,
        modes: int = 16,
        **network: Any,
    ):
        self.problem, self.precision, self.forward = problem, precision, forward
        self.calls = math.ceil(steps / STEPS_PER_CALL)
        self.steps = self.calls * STEPS_PER_CALL
        self.loss = norms(problem)[loss]
        self.network = partial(
            mpx.nn.FNO,
            1,
            1,
            hidden_channels,
            num_layers,
            (modes, modes),
            domain_padding=0.0 if problem.periodic else PADDING,
            **network,
        )
        self.learning_rates = optax.warmup_cosine_decay_schedule(
            0.0, LEARNING_RATE, self.steps // 10, self.steps
        )
        self.optimizer = optax.adam(self.learning_rates)
        self.data = jax.tree.map(jnp.asarray, (problem.inputs, problem.outputs))
        # What is no array in the state is the same for each seed.
        arrays, self.static = eqx.partition(self.initial(0), eqx.is_array)
        indices = jnp.asarray(self.indices(0)[0])
        self.run_steps = jax.jit(self._run_steps).lower(arrays, self.data, indices).compile()
        self.predict = jax.jit(self._predict)

    def initial(self, seed: int) -> PyTree:
        model = self.network(key=jax.random.key(seed))
        opt_state = self.optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        return model, opt_state, mpx.DynamicLossScaling(2**15)

    def indices(self, seed: int) -> np.ndarray:
        order = batches(len(self.problem.inputs), self.steps, seed)
        return order.reshape(self.calls, STEPS_PER_CALL, -1)

    def loss_function(self, model: mpx.nn.FNO, batch: Any) -> Float32[Array, ""]:
        inputs, outputs = batch
        return self.loss(jax.vmap(model)(inputs), outputs)

    def step(self, state: PyTree, batch: Any) -> tuple[PyTree, Any]:
        """One step in mixed precision: this is how the library is used."""
        model, opt_state, scaling = state
        value, scaling, grads_finite, grads = mpx.filter_value_and_grad(
            self.loss_function,
            scaling,
            use_mixed_precision=self.precision != "float32",
            policy=f"params=float32,compute={self.precision},output=float32",
            keep_full=(False, True),  # cast the operator, not the fields it is compared with
            forward=self.forward,
        )(model, batch)
        model, opt_state = mpx.optimizer_update(
            model, self.optimizer, opt_state, grads, grads_finite
        )
        return (model, opt_state, scaling), (value, scaling.loss_scaling)

    def _run_steps(self, arrays: PyTree, data: Any, indices: Array) -> tuple[PyTree, Any]:
        def body(arrays, index):
            batch = jax.tree.map(lambda x: x[index], data)
            state, record = self.step(eqx.combine(arrays, self.static), batch)
            return eqx.filter(state, eqx.is_array), record

        return jax.lax.scan(body, arrays, indices)

    def _predict(self, arrays: PyTree, inputs: Array) -> Array:
        """The operator's answers, computed in the precision that it was trained in."""
        model, *_ = eqx.combine(arrays, self.static)
        if self.forward == "half":
            model = mpx.cast_tree(model, self.precision)
        return jax.lax.map(model, inputs, batch_size=BATCH)

    def __call__(
        self,
        seed: int,
        progress: Progress,
        label: str | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Result:
        arrays = eqx.filter(self.initial(seed), eqx.is_array)
        losses, scales, seconds = [], [], []
        task = progress.add_task(label or self.precision, total=self.steps, loss="")
        for index in jnp.asarray(self.indices(seed)):
            start = time.perf_counter()
            arrays, record = jax.block_until_ready(self.run_steps(arrays, self.data, index))
            seconds.append(time.perf_counter() - start)
            for values, value in zip((losses, scales), record, strict=True):
                values.append(np.asarray(value))
            progress.update(task, advance=STEPS_PER_CALL, loss=f"loss {losses[-1].mean():.3f}")
            if stop():
                break

        _, _, scaling = eqx.combine(arrays, self.static)
        memory = self.run_steps.memory_analysis()
        predictions = {
            n: np.asarray(self.predict(arrays, jnp.asarray(inputs)), np.float32)
            for n, (inputs, _) in self.problem.tests.items()
        }
        return Result(
            precision=self.precision,
            errors={n: test_errors(self.problem, n, p) for n, p in predictions.items()},
            skipped_steps=int(scaling.skipped_steps),
            final_scale=float(scaling.loss_scaling),
            # The median does not see that the machine was busy with something else for a while.
            ms_per_step=1000 * float(np.median(seconds)) / STEPS_PER_CALL,
            temp_bytes=memory.temp_size_in_bytes if memory is not None else 0,
            loss=np.concatenate(losses),
            scale=np.concatenate(scales),
            prediction=predictions[max(predictions)][0, 0],
        )


# --- Results ---------------------------------------------------------------------------------


def norms(problem: Problem) -> dict[str, Callable[..., Float32[Array, ""]]]:
    """The relative errors, by name."""

    def h1(prediction, truth):
        return relative_h1(prediction, truth, periodic=problem.periodic)

    return {"l2": relative_l2, "h1": h1}


def test_errors(problem: Problem, resolution: int, prediction: Fields) -> dict[str, float]:
    _, truth = problem.tests[resolution]
    return {
        name: float(norm(jnp.asarray(prediction), jnp.asarray(truth)))
        for name, norm in norms(problem).items()
    }


def table(problem: Problem, results: Sequence[Result]) -> Table:
    columns = ["precision"]
    columns += [f"{norm.upper()} {n}²" for n in problem.tests for norm in ("l2", "h1")]
    columns += ["skipped", "scale", "ms/step", "MiB"]
    title = f"{problem.title}: relative test errors, by norm and grid"
    out = Table(*columns, title=title, box=SIMPLE, padding=(0, 1, 0, 0))
    for r in results:
        scaled = r.precision != "float32"
        out.add_row(
            r.precision,
            *(f"{r.errors[n][norm]:.4f}" for n in problem.tests for norm in ("l2", "h1")),
            str(r.skipped_steps) if scaled else "–",
            f"2^{math.log2(r.final_scale):.0f}" if scaled else "–",
            f"{r.ms_per_step:.1f}",
            f"{r.temp_bytes / 2**20:.1f}",
        )
    return out


def plot(problem: Problem, results: Sequence[Result], path: Path) -> None:
    """The first test sample on the finest grid: input and truth, each prediction and its error;
    and the losses."""
    resolution = max(problem.tests)
    inputs, truths = problem.tests[resolution]
    truth = truths[0, 0]
    limits: dict[str, Any] = {"vmin": truth.min(), "vmax": truth.max()}
    largest = max(np.abs(r.prediction - truth).max() for r in results)
    figure = Figure(figsize=(3.2 * len(results) + 6.4, 6), layout="constrained")
    axes = figure.subplots(2, len(results) + 2, squeeze=False)

    def show(axis, field, title, **options):
        image = axis.imshow(field.T, origin="lower", extent=(0, 1, 0, 1), **options)
        axis.set(title=title, xticks=[], yticks=[])
        figure.colorbar(image, ax=axis, shrink=0.8)

    show(axes[0, 0], inputs[0, 0], f"input: {problem.labels[0]}", cmap="cividis")
    show(axes[1, 0], truth, f"truth: {problem.labels[1]}", cmap="RdBu_r", **limits)
    for (top, bottom), r in zip(axes[:, 1:-1].T, results, strict=True):
        show(top, r.prediction, f"prediction, {r.precision}", cmap="RdBu_r", **limits)
        error = np.abs(r.prediction - truth)
        show(bottom, error, f"|error|, {resolution}²", cmap="magma", vmin=0, vmax=largest)
    for r in results:
        means = r.loss.reshape(-1, STEPS_PER_CALL).mean(axis=1)
        axes[0, -1].semilogy(np.arange(len(means)) * STEPS_PER_CALL, means, label=r.precision)
        if r.precision != "float32":
            axes[1, -1].semilogy(r.scale, base=2, label=r.precision)
    axes[0, -1].set(title="training loss", xlabel="step")
    axes[0, -1].legend()
    axes[1, -1].set(title="loss scale", xlabel="step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def run(
    make: Callable[..., Problem],
    precisions: Sequence[str],
    *,
    steps: int | None = None,
    samples: int | None = None,
    seed: int = 0,
    loss: str = "h1",
    out: str | Path | None,
    quick: bool = False,
    **network: Any,
) -> dict[str, Result]:
    """Trains in each precision, prints a table and draws a picture in the folder `out`.

    `make(samples, finest=...)` is the problem with so many training samples. `steps` is rounded up
    to whole tens; `out=None` draws nothing; `network` goes to `Training`. After Ctrl-C the table
    and the picture have what was trained by then.
    """
    sizes = (
        (QUICK_SAMPLES, QUICK_STEPS, QUICK_RESOLUTION) if quick else (SAMPLES, STEPS, RESOLUTION)
    )
    steps = sizes[1] if steps is None else steps
    if steps < 1:
        raise ValueError(f"`steps` must be at least 1, but got {steps}.")
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)  # fails now rather than after the training
    problem = make(samples or sizes[0], finest=2 * sizes[2])
    console = Console()
    with stop_on_interrupt() as stop:
        results = []
        with progress_bar(console, 9) as progress:
            for precision in precisions:
                compiling = progress.add_task(precision, total=None, loss="compiling")
                training = Training(
                    problem, precision, steps=steps, loss=loss, modes=sizes[2] // 2, **network
                )
                progress.remove_task(compiling)
                results.append(training(seed, progress, stop=stop))
                if stop():
                    trained = len(results[-1].loss)
                    console.print(f"{precision}: stopped after {trained:,} steps.")
                    break
        console.print(table(problem, results))
        if out is not None:
            path = Path(out) / f"{problem.name}.png"
            plot(problem, results, path)
            console.print(f"Picture: {path}")
    return {r.precision: r for r in results}


def command_line(main: Callable[..., Any], name: str, description: str) -> None:
    """Runs `main` with what the command line says."""
    options = parser(description)
    options.add_argument(
        "--precision",
        nargs="+",
        choices=PRECISIONS,
        default=PRECISIONS,
        dest="precisions",
        help="what to train in, one after another",
    )
    options.add_argument(
        "--steps",
        type=positive,
        help=f"of each training, rounded up to whole tens; by default {STEPS:,}, or "
        f"{QUICK_STEPS:,} with --quick",
    )
    options.add_argument("--loss", choices=LOSSES, default="h1", help="relative norm to train with")
    options.add_argument("--seed", type=int, default=0, help="of the first weights and the batches")
    options.add_argument(
        "--out", type=folder, default=f"outputs/{name}", help="folder of the picture"
    )
    options.add_argument("--quick", action="store_true", help="under a minute, less accurate")
    run_main(main, options)

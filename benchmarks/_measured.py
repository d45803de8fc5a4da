"""Training steps as rivals: the same data and weights, time and memory and error side by side."""

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple, Protocol

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ._deviceless import CUBLAS, Compiled, TargetUnavailable, compile_for
from ._report import Report, interleave
from ._rivals import failure
from ._roofline import predicted_seconds


FIRST_MOMENT = 0.1  # of the gradient, in Adam's state after the first step
BEFORE = 3  # steps before the rounds of the clock, each of which takes two
LARGEST_SKIPS = 30  # steps that overflow before a loss scale fits


class First(NamedTuple):
    """What a first step computes, in NumPy: predictions, and gradients in the order of the
    parameters."""

    predictions: np.ndarray
    gradients: Sequence[np.ndarray]


class Step(Protocol):
    """A training step with its own state. Calls go through the batches in turn."""

    temp_bytes: int | None  # beyond state and batch; `None` where it cannot be told, and before
    # the second call

    def first(self) -> First: ...

    def __call__(self) -> Any:
        """Takes a step; the loss before it."""
        ...


class JaxStep:
    """A step in JAX, compiled once, which takes over the memory of its state.

    `step(state, batch)` returns the new state, the loss and the predictions; `state[1]` is that of
    an Optax optimizer which begins with Adam. `precision` is that of products of float32 which do
    not ask for one, on a GPU.
    """

    def __init__(
        self, step: Callable, state: Any, batches: Sequence[Any], precision: str | None = None
    ):
        arrays, static = eqx.partition(state, eqx.is_array)

        def run(arrays, batch):
            state, value, predictions = step(eqx.combine(arrays, static), batch)
            return eqx.filter(state, eqx.is_array), value, predictions

        # A copy of its own, because each step takes over the memory of the state before it.
        self.state = jax.tree.map(jnp.copy, arrays)
        self.batches = cycle(batches)
        with jax.default_matmul_precision(precision):
            lowered = jax.jit(run, donate_argnums=0).lower(self.state, batches[0])
        self.compiled = lowered.compile()
        device = jax.devices()[0].device_kind
        self.predicted = predicted_seconds(self.compiled.as_text(), device)
        memory = self.compiled.memory_analysis()
        self.temp_bytes = memory.temp_size_in_bytes if memory is not None else None

    def first(self) -> First:
        batch = next(self.batches)
        for _ in range(LARGEST_SKIPS):
            self.state, _, predictions = self.compiled(self.state, batch)
            # A step that overflows is skipped and leaves no trace but a smaller scale.
            gradients = [np.asarray(m) / FIRST_MOMENT for m in jax.tree.leaves(self._moment())]
            if any(map(np.any, gradients)):
                return First(np.asarray(predictions), gradients)
        raise FloatingPointError(f"{LARGEST_SKIPS} steps in a row overflow.")

    def _moment(self) -> Any:
        return self.state[1][0].mu

    def __call__(self) -> jax.Array:
        self.state, value, _ = self.compiled(self.state, next(self.batches))
        return value


def float64_first(
    loss: Callable[[Any, Any], tuple[jax.Array, jax.Array]], model: Any, batch: Any, chunk: int
) -> First:
    """The gradient and the predictions in float64, `chunk` samples at a time.

    `loss(model, batch)` is a mean over the samples, and has the predictions beside it.
    """
    with jax.enable_x64(True):
        arrays, static = eqx.partition(model, eqx.is_inexact_array)
        wide = lambda x: jnp.asarray(
            x, jnp.float64 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
        )
        arrays, batch = jax.tree.map(wide, (arrays, batch))
        samples = len(jax.tree.leaves(batch)[0])
        chunk = min(chunk, samples)
        chunks = jax.tree.map(lambda x: x.reshape(samples // chunk, chunk, *x.shape[1:]), batch)

        @jax.jit
        def evaluate(arrays, chunks):
            def body(total, part):
                function = lambda arrays: loss(eqx.combine(arrays, static), part)
                gradient, predictions = jax.grad(function, has_aux=True)(arrays)
                return jax.tree.map(jnp.add, total, gradient), predictions

            return jax.lax.scan(body, jax.tree.map(jnp.zeros_like, arrays), chunks)

        total, predictions = evaluate(arrays, chunks)
        gradients = [np.asarray(g) * (chunk / samples) for g in jax.tree.leaves(total)]
        return First(np.asarray(predictions).reshape(samples, *predictions.shape[2:]), gradients)


def relative_error(got: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> float:
    """‖got − want‖ / ‖want‖, of all arrays together."""
    square = lambda x: float(np.sum(np.asarray(x, np.float64) ** 2))
    errors = sum(square(np.asarray(g, np.float64) - w) for g, w in zip(got, want, strict=True))
    return (errors / sum(map(square, want))) ** 0.5


def within(minutes: float, sizes: Iterable[Any], report: Report) -> Iterator[Any]:
    """The sizes one by one, and a note for each that is left out because the time is over."""
    start = time.monotonic()
    for size in sizes:
        if time.monotonic() - start > 60 * minutes:
            report.note(f"Left out, for {minutes} minutes have passed: {size}.")
        else:
            yield size


def measure(
    rivals: Mapping[str, Callable[[], Step]], exact: First, *, rounds: int
) -> dict[str, dict[str, Any]]:
    """Builds the rivals, compares their first steps with `exact`, and times the next ones.

    **Returns:**

    For each rival the fields of its record; for one that fails, how.
    """
    fields: dict[str, dict[str, Any]] = {}
    steps: dict[str, Step] = {}
    for name, make in rivals.items():
        try:
            step = make()
            predictions, gradients = step.first()
        except Exception as error:  # whatever it is, it is what this rival has to show
            fields[name] = {"failed": failure(error)}
            continue
        steps[name] = step
        fields[name] = {
            "error_output": relative_error([predictions], [exact.predictions]),
            "error_gradient": relative_error(gradients, exact.gradients),
        }
    losses: dict[str, list[Any]] = {name: [] for name in steps}

    def timed(name):
        losses[name].append(steps[name]())
        return losses[name][-1]

    timers = {name: partial(timed, name) for name in steps}
    times = interleave(timers, rounds=rounds, warmup=BEFORE - 1)
    for name in steps:
        fields[name] |= {
            "seconds": times[name],
            "predicted_seconds": getattr(steps[name], "predicted", None),
            "temp_bytes": steps[name].temp_bytes,
            "steps": 1 + len(losses[name]),
            "loss": float(losses[name][-1]),
        }
    steps.clear()
    gc.collect()  # states are large, and the next configuration wants the memory
    return fields


def compiled(
    report: Report,
    target: str,
    step: Callable,
    state: Any,
    batch: Any,
    precision: str | None,
    /,
    **where: Any,
) -> Compiled | str:
    """A step as of `JaxStep`, compiled for a device that need not be here; of one that fails how,
    which is recorded among the `programs`."""
    options = CUBLAS if "h100" in target else None
    try:
        with jax.default_matmul_precision(precision):
            return compile_for(target, step, state, batch, donate=(0,), compiler_options=options)
    except TargetUnavailable:
        raise
    except Exception as error:  # of a rival
        return report.record("programs", target=target, **where, failed=failure(error))["failed"]


COLUMNS = (
    "time",
    "predicted, ms",
    "temp, MiB",
    "error of outputs",
    "of gradients",
    "loss",
    "failed",
)


def row(record: Mapping[str, Any]) -> list[Any]:
    """A record of `measure` as cells of a table, under `COLUMNS`."""
    if "failed" in record:
        return [None] * (len(COLUMNS) - 1) + [record["failed"]]
    seconds, memory = record["seconds"], record["temp_bytes"]
    return [
        "{:.4g} [{:.4g}, {:.4g}] ms".format(
            *(1e3 * seconds[k] for k in ("median", "lower", "upper"))
        ),
        _predicted(record),
        "not measured" if memory is None else memory / 2**20,
        *(record[k] for k in ("error_output", "error_gradient", "loss")),
        None,
    ]


def _predicted(record: Mapping[str, Any]) -> float | None:
    """Milliseconds by the compiled program (`_roofline.py`), where the device is known."""
    seconds = record.get("predicted_seconds")
    return None if seconds is None else 1e3 * seconds


def report_measured(
    report: Report, title: str, fields: Mapping[str, Mapping[str, Any]], **where: Any
) -> int:
    """Records what `measure` found and prints the table; how many of our own steps failed."""
    records = [report.record("steps", **where, rival=name, **f) for name, f in fields.items()]
    report.table(title, ["rival", *COLUMNS], [[r["rival"], *row(r)] for r in records])
    return sum("failed" in r and r["rival"].startswith("mpx_pde") for r in records)

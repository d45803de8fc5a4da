"""Steps of rivals on the same data from the same weights: time, memory and error side by side."""

import argparse
import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple, Protocol

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ._report import Report, failure, interleave
from ._steps import Rival, Task


FIRST_MOMENT = 0.1  # of the gradient, in Adam's state after the first step
BEFORE = 3  # steps before the rounds of the clock, each of which takes two
LARGEST_SKIPS = 40  # steps that overflow before a loss scale fits


class First(NamedTuple):
    """What a first step computes, in NumPy: predictions, and gradients in the order of the
    parameters; and how many steps were skipped before it."""

    predictions: Any
    gradients: Sequence[np.ndarray]
    skipped: int = 0
    loss: float | None = None


class Step(Protocol):
    """A training step with its own state. Calls go through the batches in turn."""

    temp_bytes: int | None  # beyond state and batch; `None` where it cannot be told, and before
    # the second call

    def first(self) -> First: ...

    def __call__(self) -> Any:
        """Takes a step; the loss before it."""
        ...


class JaxStep:
    """A step in JAX, compiled once, which takes over the memory of its state. Its optimizer begins
    with Adam."""

    def __init__(self, task: Task, rival: Rival, batches: Sequence[Any]):
        arrays, static = eqx.partition(task.state(rival), eqx.is_array)
        step = task.step(rival)

        def run(arrays, batch):
            state, value, aux = step(eqx.combine(arrays, static), batch)
            return eqx.filter(state, eqx.is_array), value, aux

        # A copy of its own, because each step takes over the memory of the state before it.
        self.state = jax.tree.map(jnp.copy, arrays)
        self.batches = cycle(batches)
        self._run = jax.jit(run, donate_argnums=0).lower(self.state, batches[0]).compile()
        memory = self._run.memory_analysis()
        self.temp_bytes = memory.temp_size_in_bytes if memory is not None else None

    def first(self) -> First:
        batch = next(self.batches)
        for skipped in range(LARGEST_SKIPS):
            self.state, _, predictions = self._run(self.state, batch)
            # A step that overflows is skipped and leaves no trace but a smaller scale.
            moment = jax.tree.leaves(self.state[1][0].mu)
            gradients = [np.asarray(m) / FIRST_MOMENT for m in moment]
            if any(map(np.any, gradients)):
                return First(jax.tree.map(np.asarray, predictions), gradients, skipped)
        raise FloatingPointError(f"{LARGEST_SKIPS} steps in a row overflow.")

    def __call__(self) -> jax.Array:
        self.state, value, _ = self._run(self.state, next(self.batches))
        return value


class Exact:
    """Loss, gradient and predictions in float64, `chunk` samples at a time.

    `loss(model, batch)` is a mean over the samples, and has the predictions beside it.
    """

    def __init__(self, loss: Callable, batch: Any, chunk: int):
        samples = len(jax.tree.leaves(batch)[0])
        self.batch, self.samples = batch, samples
        self.chunk = next(n for n in range(min(chunk, samples), 0, -1) if samples % n == 0)

        @eqx.filter_jit
        def evaluate(model, chunks):
            arrays, static = eqx.partition(model, eqx.is_inexact_array)
            function = lambda arrays, part: loss(eqx.combine(arrays, static), part)

            def body(total, part):
                both = jax.value_and_grad(function, has_aux=True)(arrays, part)
                (value, predictions), gradient = both
                return jax.tree.map(jnp.add, total, (value, gradient)), predictions

            zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, arrays)
            return jax.lax.scan(body, zero, chunks)

        self._evaluate = evaluate

    def __call__(self, model: Any) -> First:
        with jax.enable_x64(True):
            wide = lambda x: jnp.asarray(x, jnp.float64) if eqx.is_inexact_array(x) else x
            model, batch = jax.tree.map(wide, (model, self.batch))
            count = self.samples // self.chunk
            chunks = jax.tree.map(lambda x: x.reshape(count, self.chunk, *x.shape[1:]), batch)
            (value, gradient), predictions = self._evaluate(model, chunks)
            gradients = [np.asarray(g) / count for g in jax.tree.leaves(gradient)]
            whole = lambda x: np.asarray(x).reshape(self.samples, *x.shape[2:])
            return First(jax.tree.map(whole, predictions), gradients, loss=float(value) / count)


def relative_error(got: Any, want: Any) -> float:
    """‖got − want‖ / ‖want‖, of all arrays together."""
    square = lambda x: float(np.sum(np.asarray(x, np.float64) ** 2))
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    errors = sum(square(np.asarray(g, np.float64) - w) for g, w in pairs)
    return (errors / sum(map(square, jax.tree.leaves(want)))) ** 0.5


def measure(
    rivals: Mapping[str, Callable[[], Step]],
    observe: Callable[[Step], dict[str, Any]],
    *,
    rounds: int,
) -> dict[str, dict[str, Any]]:
    """Builds the rivals, observes their first steps, and times the next ones in turn.

    **Returns:**

    For each rival the fields of its record, the last loss among them; for one that fails, how.
    """
    fields: dict[str, dict[str, Any]] = {}
    steps: dict[str, Step] = {}
    for name, make in rivals.items():
        try:
            step = make()
            fields[name] = observe(step)
        except Exception as error:  # whatever it is, it is what this rival has to show
            fields[name] = {"failed": failure(error)}
        else:
            steps[name] = step
    last: dict[str, Any] = {}

    def timed(name):
        last[name] = steps[name]()
        return last[name]

    timers = {name: partial(timed, name) for name in steps}
    times = interleave(timers, rounds=rounds, warmup=BEFORE - 1)
    for name, step in steps.items():
        told = {"seconds": times[name], "temp_bytes": step.temp_bytes}
        fields[name] |= {**told, "steps": BEFORE + 2 * rounds, "loss": float(last[name])}
    steps.clear()
    gc.collect()  # states are large, and the next configuration wants the memory
    return fields


def add_arguments(parser: argparse.ArgumentParser, rounds: int) -> None:
    """What `run_sizes` understands."""
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="no size is begun after so many of them"
    )


def run_sizes(
    report: Report,
    args: argparse.Namespace,
    tasks: Iterable[Task],
    others: Callable[[Task], Mapping[str, Callable[[], Step]]] = lambda task: {},
    needs: Sequence[str] = (),
    *,
    chunk: int = 1,
    chosen: Callable[[Task, str], bool] = lambda task, rival: True,
) -> bool:
    """Runs the tasks one by one; whether one of our own steps failed.

    **Arguments:**

    - `others`: what makes the steps that are not written in JAX, from a task.
    - `needs`: the modules that these take.
    - `chunk`: samples at a time in float64.
    - `chosen`: whether a task is run by a rival.
    """
    failed = False
    for task in report.within(args.minutes, tasks):
        batches = task.batches()
        exact = Exact(task.loss, batches[0], chunk)(task.model())
        on_device = jax.tree.map(jnp.asarray, batches)

        def observe(step: Step, exact: First = exact) -> dict[str, Any]:
            first = step.first()
            outputs = {"error_output": relative_error(first.predictions, exact.predictions)}
            return {
                **(outputs if first.predictions is not None else {}),
                "error_gradient": relative_error(first.gradients, exact.gradients),
                "skipped": first.skipped,
            }

        there = task.there(report).items()
        steps: dict[str, Any] = {name: partial(JaxStep, task, r, on_device) for name, r in there}
        steps |= others(task) if report.installed(*needs) else {}
        steps = {name: make for name, make in steps.items() if chosen(task, name)}
        for name, fields in measure(
            steps, observe, rounds=1 if args.quick else args.rounds
        ).items():
            report.record("steps", **task.where, rival=name, **fields)
            failed |= "failed" in fields and name.startswith("mpx_pde")
    return failed

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

from ._deviceless import CUBLAS, TARGETS, Compiled
from ._report import Report, interleave
from ._rivals import failure
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

    def weights(self) -> Any:
        """The network as it is now, in the order of the first gradients."""
        ...


class JaxStep:
    """A step in JAX, compiled once, which takes over the memory of its state. Its optimizer begins
    with Adam. `layers` brings networks, and what has their shape, into the order of other rivals.
    """

    def __init__(
        self,
        task: Task,
        rival: Rival,
        batches: Sequence[Any],
        *,
        layers: Callable[[Any], Any] = lambda model: model,
    ):
        arrays, static = eqx.partition(task.state(rival), eqx.is_array)
        step = task.step(rival)

        def run(arrays, batch):
            state, value, aux = step(eqx.combine(arrays, static), batch)
            return eqx.filter(state, eqx.is_array), value, aux

        # A copy of its own, because each step takes over the memory of the state before it.
        self.state = jax.tree.map(jnp.copy, arrays)
        self.batches, self._layers = cycle(batches), layers
        self._run = jax.jit(run, donate_argnums=0).lower(self.state, batches[0]).compile()
        memory = self._run.memory_analysis()
        self.temp_bytes = memory.temp_size_in_bytes if memory is not None else None

    def first(self) -> First:
        batch = next(self.batches)
        for skipped in range(LARGEST_SKIPS):
            self.state, _, predictions = self._run(self.state, batch)
            # A step that overflows is skipped and leaves no trace but a smaller scale.
            moment = self._layers(self.state[1][0].mu)
            gradients = [np.asarray(m) / FIRST_MOMENT for m in jax.tree.leaves(moment)]
            if any(map(np.any, gradients)):
                return First(jax.tree.map(np.asarray, predictions), gradients, skipped)
        raise FloatingPointError(f"{LARGEST_SKIPS} steps in a row overflow.")

    def __call__(self) -> jax.Array:
        self.state, value, _ = self._run(self.state, next(self.batches))
        return value

    def weights(self) -> Any:
        return self._layers(self.state[0])


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
    rivals: Mapping[Any, Callable[[], Step]],
    observe: Callable[[Step], dict[str, Any]],
    conclude: Callable[[Any], dict[str, Any]] = lambda last: {},
    *,
    rounds: int,
    warmup: int = 2,
) -> dict[Any, dict[str, Any]]:
    """Builds the rivals, observes their first steps, and times the next ones in turn. `conclude`
    takes the loss of the last of them.

    **Returns:**

    For each rival the fields of its record; for one that fails, how.
    """
    fields: dict[Any, dict[str, Any]] = {}
    steps: dict[Any, Step] = {}
    for name, make in rivals.items():
        try:
            step = make()
            fields[name] = observe(step)
        except Exception as error:  # whatever it is, it is what this rival has to show
            fields[name] = {"failed": failure(error)}
        else:
            steps[name] = step
    last: dict[Any, Any] = {}

    def timed(name):
        last[name] = steps[name]()
        return last[name]

    timers = {name: partial(timed, name) for name in steps}
    times = interleave(timers, rounds=rounds, warmup=warmup)
    for name, step in steps.items():
        told = {"seconds": times[name], "temp_bytes": step.temp_bytes}
        fields[name] |= {**told, **conclude(last[name])}
    steps.clear()
    gc.collect()  # states are large, and the next configuration wants the memory
    return fields


def _run(
    report: Report, task: Task, others: Mapping[str, Callable[[], Step]], *, rounds: int, chunk: int
) -> bool:
    """Runs a task by all rivals, and by those that are not written in JAX; whether one of our own
    steps failed."""
    batches = task.batches()
    exact = Exact(task.loss, batches[0], chunk)(task.model())
    on_device = jax.tree.map(jnp.asarray, batches)

    def observe(step: Step) -> dict[str, Any]:
        first = step.first()
        return {
            "error_output": relative_error(first.predictions, exact.predictions),
            "error_gradient": relative_error(first.gradients, exact.gradients),
        }

    def conclude(last: Any) -> dict[str, Any]:
        return {"steps": BEFORE + 2 * rounds, "loss": float(last)}

    rivals = task.there(report)
    ours = {name: partial(JaxStep, task, rival, on_device) for name, rival in rivals.items()}
    measured = measure({**ours, **others}, observe, conclude, rounds=rounds, warmup=BEFORE - 1)
    for name, fields in measured.items():
        report.record("steps", **task.where, rival=name, **fields)
    return any("failed" in f and name.startswith("mpx_pde") for name, f in measured.items())


def _compile(
    report: Report, target: str, task: Task, tell: Callable[[Compiled], dict[str, Any]]
) -> None:
    """Compiles all rivals of a task, and records memory and what else is to be told of them; of one
    that fails, how."""

    def told(rival: Rival) -> dict[str, Any]:
        program = task.compiled(target, rival, CUBLAS)
        return {"temp_bytes": program.temp_bytes, **tell(program)}

    for name, rival in task.there(report).items():
        where = {"target": target, **task.where, "rival": name}
        print(report.attempt("programs", where, partial(told, rival)), flush=True)


def add_arguments(parser: argparse.ArgumentParser, rounds: int) -> None:
    """What `run_sizes` understands."""
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--target", choices=TARGETS, help="compile for it; nothing runs")
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="no size is begun after so many of them"
    )


def run_sizes(
    report: Report,
    args: argparse.Namespace,
    tasks: Iterable[Task],
    others: Callable[[Task], Mapping[str, Callable[[], Step]]],
    needs: Sequence[str],
    tell: Callable[[Compiled], dict[str, Any]],
    *,
    chunk: int = 1,
) -> bool:
    """Runs the tasks one by one, or compiles them for the target that was asked for; whether one of
    our own steps failed.

    **Arguments:**

    - `others`: what makes the steps that are not written in JAX, from a task.
    - `needs`: the modules that these take.
    - `tell`: what records hold of a compiled program.
    - `chunk`: samples at a time in float64.
    """
    if args.target:
        report.name = f"{report.name}-{args.target}"
        for task in tasks:
            _compile(report, args.target, task, tell)
        return False
    rounds, failed = 1 if args.quick else args.rounds, []
    for task in report.within(args.minutes, tasks):
        found = others(task) if report.installed(*needs) else {}
        failed.append(_run(report, task, found, rounds=rounds, chunk=chunk))
    return any(failed)

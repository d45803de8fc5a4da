"""Training tasks, and one step of each: written with each of the libraries, and by hand.

A `Task` is a network, its loss, its data and the rivals that take its step. A step takes the
optimizer, a batch, and a state of network, optimizer and loss scaling. It returns the new state,
the loss, and auxiliary outputs such as predictions. `run_sizes` measures the steps of all rivals on
the same data from the same weights: time, memory and error side by side.
"""

import argparse
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple, Protocol, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax

import mpx_pde as mpx

from ._deviceless import Compiled, compile_for
from ._report import Report, failure, interleave, require


FIRST_MOMENT = 0.1  # share of the gradient in Adam's state after the first step
BEFORE = 3  # steps before the timed rounds; each round also starts with an untimed step
IN_A_ROW = 5  # steps timed together on a GPU
LARGEST_SKIPS = 40  # steps that overflow before a loss scale fits
START, PERIOD = 2.0**15, 2000
MIN_SCALE = 2.0**-24
MAX_SCALE = {"float16": 2.0**15, "bfloat16": 2.0**127}

HIGHEST, TF32 = "highest", "tensorfloat32"
"""Precisions that JAX may use for products of float32."""

EXACT = "float64"
"""The name of a task's first step in float64, among its rivals."""

adam = optax.adam(1e-3)

T = TypeVar("T")

Loss = Callable[..., tuple[Any, Any]]
"""A function from a network and a batch to the loss and auxiliary outputs."""


class Rival(NamedTuple):
    """A library's way to take the step of a task.

    **Attributes:**

    - `step`: takes optimizer, state and batch.
    - `scaling`: makes the first state of its loss scaling.
    - `products`: the precision that JAX may use for float32 products that request none.
    - `model`: makes its network, if it differs from the task's.
    - `needs`: the modules of other libraries that it uses, which may be missing.
    """

    step: Callable
    scaling: Callable[[], Any] = partial(mpx.DynamicLossScaling, START)
    products: str | None = None
    model: Callable[[], Any] | None = None
    needs: tuple[str, ...] = ()


class Task(NamedTuple):
    """A network to train, its loss, its data and its rivals.

    **Attributes:**

    - `where`: the fields that identify the task in records, including its size.
    - `model`: makes the network, the same each time.
    - `loss`: takes network and batch and computes in their precision.
    - `batches`: makes the data, in NumPy.
    - `batch`: the shapes of one batch.
    - `rivals`: the rivals by name.
    - `chunk`: the number of samples that are evaluated at a time in float64.
    """

    where: dict[str, Any]
    model: Callable[[], Any]
    loss: Loss
    batches: Callable[[], Sequence[Any]]
    batch: Any
    rivals: Mapping[Any, Rival]
    optimizer: optax.GradientTransformation = adam
    chunk: int = 1

    def there(self, report: Report) -> dict[Any, Rival]:
        """Returns the rivals whose libraries are installed, and prints a note for the others."""
        return {name: r for name, r in self.rivals.items() if report.installed(*r.needs)}

    def state(self, rival: Rival) -> tuple[Any, Any, Any]:
        """Returns the initial state of a rival."""
        model = (rival.model or self.model)()
        opt_state = self.optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        return model, opt_state, rival.scaling()

    def step(self, rival: Rival) -> Callable[[Any, Any], tuple[Any, Any, Any]]:
        """Returns a function from state and batch to new state, loss and auxiliary outputs."""

        def run(state, batch):
            with jax.default_matmul_precision(rival.products):
                return rival.step(self.optimizer, state, batch)

        return run

    def compiled(self, target: str, rival: Rival, options: Any = None) -> Compiled:
        """Compiles a step for a target; it reuses its state's memory. `options` are XLA's."""
        state = eqx.filter_eval_shape(lambda: self.state(rival))
        parts = self.step(rival), state, self.batch
        return compile_for(target, *parts, donate=(0,), compiler_options=options)


def alone(loss: Callable[..., Any]) -> Loss:
    """Wraps a loss that has no auxiliary outputs."""
    return lambda model, batch, **given: (loss(model, batch, **given), None)


# --- By hand: written without a library ------------------------------------------------------


class HandScaling(NamedTuple):
    """The state of a dynamic loss scale."""

    scale: jax.Array
    counter: jax.Array
    skipped: jax.Array
    consecutive: jax.Array


def hand_scaling(scale: float) -> HandScaling:
    return HandScaling(jnp.array(scale, jnp.float32), *(jnp.array(0, jnp.int32) for _ in range(3)))


def _cast(tree: Any, dtype: str) -> Any:
    return jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, tree)


def by_hand(loss: Loss, dtype: str) -> Rival:
    """Casts everything, with a dynamic loss scale."""

    def step(optimizer, state, batch):
        model, opt_state, scaling = state
        params, static = eqx.partition(model, eqx.is_inexact_array)

        def scaled_loss(params):
            half, half_batch = _cast((params, batch), dtype)
            value, aux = loss(eqx.combine(half, static), half_batch)
            return value * scaling.scale, (value, aux)

        grads, (value, aux) = jax.grad(scaled_loss, has_aux=True)(params)
        grads = jax.tree.map(lambda g: g / scaling.scale, grads)
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))

        safe = jax.tree.map(lambda g: jnp.where(finite, g, jnp.zeros_like(g)), grads)
        updates, new_opt_state = optimizer.update(safe, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        keep = lambda new, old: jnp.where(finite, new, old)
        params = jax.tree.map(keep, new_params, params)
        opt_state = jax.tree.map(keep, new_opt_state, opt_state)

        counted = scaling.counter + 1
        grow = finite & (counted >= PERIOD)
        grown = jnp.minimum(scaling.scale * 2, MAX_SCALE[dtype])
        shrunk = jnp.maximum(scaling.scale / 2, MIN_SCALE)
        skip = jnp.where(finite, 0, 1)
        scale = jnp.where(finite, jnp.where(grow, grown, scaling.scale), shrunk)
        counted = jnp.where(finite & ~grow, counted, 0)
        skips = scaling.skipped + skip, (scaling.consecutive + 1) * skip
        scaling = HandScaling(scale, counted, *skips)
        return (eqx.combine(params, static), opt_state, scaling), value, aux

    return Rival(step, partial(hand_scaling, START))


def in_float32(loss: Loss, products: str | None = None) -> Rival:
    """Takes the plain step."""

    def step(optimizer, state, batch):
        model, opt_state, scaling = state
        (value, aux), grads = eqx.filter_value_and_grad(loss, has_aux=True)(model, batch)
        updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return (eqx.apply_updates(model, updates), opt_state, scaling), value, aux

    return Rival(step, partial(hand_scaling, 1.0), products)


# --- By the libraries ------------------------------------------------------------------------


def by_library(loss: Loss, **options: Any) -> Rival:
    """Takes the step with this library; `options` are those of `mpx.filter_value_and_grad`."""

    def step(optimizer, state, batch):
        model, opt_state, scaling = state
        gradient = mpx.filter_value_and_grad(loss, scaling, has_aux=True, **options)
        (value, aux), scaling, finite, grads = gradient(model, batch)
        model, opt_state = mpx.optimizer_update(model, optimizer, opt_state, grads, finite)
        return (model, opt_state, scaling), value, aux

    return Rival(step)


def by_jmp(loss: Callable[[jmp.Policy], Loss], dtype: str, scaled: bool = True) -> Rival:
    """Takes the step with jmp as in its README; the loss may use its policy to cast to output."""
    policy = jmp.get_policy(policy_of(dtype))

    def step(optimizer, state, batch):
        model, opt_state, scaling = state
        scaler = jmp.DynamicLossScale(*scaling, period=PERIOD) if scaled else jmp.NoOpLossScale()
        # `jmp.select_tree` accepts only trees of arrays.
        params, static = eqx.partition(model, eqx.is_inexact_array)

        def scaled_loss(params):
            half, half_batch = policy.cast_to_compute((params, batch))
            value, aux = loss(policy)(eqx.combine(half, static), half_batch)
            value = policy.cast_to_output(value)
            return scaler.scale(value), (value, aux)

        grads, (value, aux) = jax.grad(scaled_loss, has_aux=True)(params)
        grads = scaler.unscale(grads)
        finite = jmp.all_finite(grads)
        updates, new_opt_state = optimizer.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_opt_state
        params, opt_state = jmp.select_tree(finite, new, (params, opt_state))
        if scaled:
            adjusted: Any = scaler.adjust(finite)
            scaling = adjusted.loss_scale, adjusted.counter
        return (eqx.combine(params, static), opt_state, scaling), value, aux

    # As a PyTree, jmp's loss scale refuses leaves that are not arrays, but Equinox puts such leaves
    # in it. So the state holds only its fields that change.
    start = lambda: (jnp.array(START, jnp.float32), jnp.array(0, jnp.int32))
    return Rival(step, start if scaled else tuple)


def by_mpx(loss: Loss, dtype: str, scale: float = START, products: str | None = None) -> Rival:
    """Takes the step with MPX (mixed-precision-for-JAX)."""

    def step(optimizer, state, batch):
        rival = require("mpx")
        rival.set_half_precision_datatype(getattr(jnp, dtype))
        model, opt_state, scaling = state
        gradient = rival.filter_value_and_grad(loss, scaling, has_aux=True)
        (value, aux), scaling, finite, grads = gradient(model, batch)
        model, opt_state = rival.optimizer_update(model, optimizer, opt_state, grads, finite)
        return (model, opt_state, scaling), value, aux

    def start():
        scales = jnp.array(scale, jnp.float32), jnp.ones((), jnp.float32)
        return require("mpx").DynamicLossScaling(*scales, period=PERIOD)

    return Rival(step, start, products, needs=("mpx",))


def policy_of(dtype: str) -> str:
    return f"params=float32,compute={dtype},output=float32"


def precision_options(precision: str) -> dict[str, Any]:
    """Returns the options of `mpx.filter_value_and_grad` for a precision."""
    return {"use_mixed_precision": precision != "float32", "policy": policy_of(precision)}


def rivals(loss: Loss, dtype: str = "float16") -> dict[str, Rival]:
    """Returns the rivals by name; on a GPU also in TF32."""
    found = {
        "by hand": by_hand(loss, dtype),
        "mpx_pde": by_library(loss, policy=policy_of(dtype)),
        "jmp": by_jmp(lambda policy: loss, dtype),
        "MPX": by_mpx(loss, dtype),
        "float32": in_float32(loss),
    }
    if jax.default_backend() == "gpu":  # its float32 products are TF32 by default
        found["TF32"] = in_float32(loss, TF32)
        found["float32"] = in_float32(loss, HIGHEST)
    return found


# --- Side by side ----------------------------------------------------------------------------


class First(NamedTuple):
    """The results of a first step, in NumPy: predictions, gradients in the order of the parameters,
    and the number of steps skipped before it."""

    predictions: Any
    gradients: Sequence[np.ndarray]
    skipped: int = 0


class Step(Protocol):
    """A training step with its own state. Successive calls cycle through the batches."""

    temp_bytes: int | None  # beyond state and batch; `None` before the second call, and where it
    # is unknown

    def first(self) -> First: ...

    def __call__(self) -> Any:
        """Takes a step and returns the loss before it."""
        ...


class JaxStep:
    """A step in JAX, compiled once, that reuses the memory of its state. Its optimizer's state must
    begin with Adam's."""

    def __init__(self, task: Task, rival: Rival, batches: Sequence[Any]):
        arrays, static = eqx.partition(task.state(rival), eqx.is_array)
        step = task.step(rival)

        def run(arrays, batch):
            state, value, aux = step(eqx.combine(arrays, static), batch)
            return eqx.filter(state, eqx.is_array), value, aux

        # Copies the state, because each step takes over the memory of the state before it.
        self.state = jax.tree.map(jnp.copy, arrays)
        self.batches = cycle(batches)
        self._run = jax.jit(run, donate_argnums=0).lower(self.state, batches[0]).compile()
        memory = self._run.memory_analysis()
        self.temp_bytes = memory.temp_size_in_bytes if memory is not None else None

    def first(self) -> First:
        batch = next(self.batches)
        for skipped in range(LARGEST_SKIPS):
            self.state, _, predictions = self._run(self.state, batch)
            # A step that overflows is skipped and changes only the scale, which shrinks.
            moment = jax.tree.leaves(self.state[1][0].mu)
            gradients = [np.asarray(m) / FIRST_MOMENT for m in moment]
            if any(map(np.any, gradients)):
                return First(jax.tree.map(np.asarray, predictions), gradients, skipped)
        raise FloatingPointError(f"{LARGEST_SKIPS} steps in a row overflow.")

    def __call__(self) -> jax.Array:
        self.state, value, _ = self._run(self.state, next(self.batches))
        return value


class Exact:
    """Computes gradient and predictions in float64, `chunk` samples at a time.

    `loss(model, batch)` is a mean over the samples and also returns the predictions. It is compiled
    when an instance is made, and evaluated by a call.
    """

    def __init__(self, loss: Callable, model: Any, batch: Any, chunk: int):
        self.samples = len(jax.tree.leaves(batch)[0])
        chunk = next(n for n in range(min(chunk, self.samples), 0, -1) if self.samples % n == 0)
        self.count = self.samples // chunk
        arrays, static = eqx.partition(model, eqx.is_inexact_array)

        @jax.jit
        def evaluate(arrays, chunks):
            function = lambda arrays, part: loss(eqx.combine(arrays, static), part)

            def body(total, part):
                gradient, predictions = jax.grad(function, has_aux=True)(arrays, part)
                return jax.tree.map(jnp.add, total, gradient), predictions

            return jax.lax.scan(body, jax.tree.map(jnp.zeros_like, arrays), chunks)

        wide = lambda x: np.asarray(x, np.float64) if eqx.is_inexact_array(x) else x
        self.arrays, batch = jax.tree.map(wide, (arrays, batch))
        reshape = lambda x: x.reshape(self.count, chunk, *x.shape[1:])
        self.chunks = jax.tree.map(reshape, batch)
        with jax.enable_x64(True):
            self._evaluate = evaluate.lower(self.arrays, self.chunks).compile()

    def __call__(self) -> First:
        with jax.enable_x64(True):
            gradient, predictions = self._evaluate(self.arrays, self.chunks)
            gradients = [np.asarray(g) / self.count for g in jax.tree.leaves(gradient)]
            whole = lambda x: np.asarray(x).reshape(self.samples, *x.shape[2:])
            return First(jax.tree.map(whole, predictions), gradients)


def relative_error(got: Any, want: Any) -> float:
    """Returns ‖got − want‖ / ‖want‖, over all arrays together."""
    square = lambda x: float(np.sum(np.asarray(x, np.float64) ** 2))
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    errors = sum(square(np.asarray(g, np.float64) - w) for g, w in pairs)
    return (errors / sum(map(square, jax.tree.leaves(want)))) ** 0.5


def _tried(make: Callable[[], T]) -> T | Exception:
    try:
        return make()
    except Exception as error:  # any failure is this rival's result
        return error


def built(
    tasks: Iterable[T], makes: Callable[[T], Mapping[str, Callable[[], Any]]], jobs: int
) -> Iterator[tuple[T, dict[str, Any]]]:
    """Yields each task with what its functions make, or the errors that they raise.

    With several jobs, those of all tasks are called before the first is yielded, so nothing is
    compiled while a step is timed.
    """
    if jobs == 1:
        for task in tasks:
            yield task, {name: _tried(make) for name, make in makes(task).items()}
        return
    with ThreadPoolExecutor(jobs) as pool:
        submit = lambda make: pool.submit(_tried, make)
        begun = [(task, {n: submit(make) for n, make in makes(task).items()}) for task in tasks]
    while begun:
        task, made = begun.pop(0)  # states are large: none outlives its task
        yield task, {name: future.result() for name, future in made.items()}


def measure(
    made: Mapping[str, Any], observe: Callable[[Step], dict[str, Any]], *, rounds: int
) -> dict[str, dict[str, Any]]:
    """Observes the first steps of the rivals, and times further steps in turn. On a GPU several
    steps are launched before the clock waits for them, as in a training.

    **Arguments:**

    - `made`: the rivals' steps, or why there are none.

    **Returns:**

    The fields of each rival's record, including the last loss; for a rival that fails, the reason.
    """
    fields: dict[str, dict[str, Any]] = {}
    steps: dict[str, Step] = {}
    for name, step in made.items():
        try:
            if isinstance(step, Exception):
                raise step
            fields[name] = observe(step)
        except Exception as error:
            fields[name] = {"failed": failure(error)}
        else:
            steps[name] = step
    last: dict[str, Any] = {}

    def timed(name):
        last[name] = steps[name]()
        return last[name]

    timers = {name: partial(timed, name) for name in steps}
    calls = IN_A_ROW if jax.default_backend() == "gpu" else 1
    times = interleave(timers, rounds=rounds, warmup=BEFORE - 1, calls=calls)
    taken = BEFORE + (1 + calls) * rounds
    for name, step in steps.items():
        told = {"seconds": times[name], "temp_bytes": step.temp_bytes}
        fields[name] |= {**told, "steps": taken, "loss": float(last[name])}
    return fields


def add_arguments(
    parser: argparse.ArgumentParser, rounds: int, minutes: float | None = 8.0
) -> None:
    """Adds the options that `run_sizes` reads."""
    told = "start no further size after so many minutes"
    parser.add_argument("--rounds", type=int, default=rounds, help="timed rounds")
    parser.add_argument("--minutes", type=float, default=minutes, help=told)
    parser.add_argument("--jobs", type=int, default=1, help="number of steps to compile at once")


def run_sizes(
    report: Report,
    args: argparse.Namespace,
    tasks: Iterable[Task],
    others: Callable[[Task], Mapping[str, Callable[[], Step]]] = lambda task: {},
    needs: Sequence[str] = (),
    *,
    chosen: Callable[[Task, str], bool] = lambda task, rival: True,
) -> bool:
    """Runs the tasks one by one and returns whether one of this library's steps failed.

    **Arguments:**

    - `others`: makes a task's steps that are not written in JAX.
    - `needs`: the modules that these steps use.
    - `chosen`: whether a rival runs a task.
    """

    def makes(task: Task) -> dict[str, Callable[[], Any]]:
        batches = task.batches()
        on_device = jax.tree.map(jnp.asarray, batches)
        there = task.there(report).items()
        steps: dict[str, Any] = {name: partial(JaxStep, task, r, on_device) for name, r in there}
        steps |= others(task) if report.installed(*needs) else {}
        exact = lambda: Exact(task.loss, task.model(), batches[0], task.chunk)
        return {EXACT: exact, **{n: make for n, make in steps.items() if chosen(task, n)}}

    failed = False
    for task, made in built(report.within(args.minutes, tasks), makes, args.jobs):
        reference = made.pop(EXACT)
        if isinstance(reference, Exception):
            raise reference
        exact = reference()

        def observe(step: Step, exact: First = exact) -> dict[str, Any]:
            first, told = step.first(), {}
            if first.predictions is not None:
                told["error_output"] = relative_error(first.predictions, exact.predictions)
            told["error_gradient"] = relative_error(first.gradients, exact.gradients)
            return {**told, "skipped": first.skipped}

        rounds = 1 if args.quick else args.rounds
        for name, fields in measure(made, observe, rounds=rounds).items():
            report.record("steps", **task.where, rival=name, **fields)
            failed |= "failed" in fields and name.startswith("mpx_pde")
        report.save()
        made.clear()
        gc.collect()  # states are large, and the next task needs the memory
    return failed

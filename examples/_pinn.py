"""What the physics-informed examples share: the training loop and the command line.

An example says what its problem is (a `Problem`: network, loss, points, reference, picture) and
calls `run`. Everything that has to do with mixed precision stands in `step`.
"""

import argparse
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _command_line import folder, parser, positive, run_main as run_main, stop_on_interrupt
from _pinn_report import draw, draw_fields as draw_fields, table
from _progress import progress_bar
from jaxtyping import Array, Bool, Float, Float32, PRNGKeyArray, PyTree
from rich.console import Console
from rich.progress import Progress

import mpx_pde as mpx


NAIVE = "naive-float16"
"""What one does without this library's help: everything in float16, coordinates and first layer
too, no derivative scaling, loss scaling alone. For comparison."""

PRECISIONS = ("float32", "float16", "bfloat16")
RUNGS = ("half", "tensorfloat32", "bfloat16_x3", "bfloat16_x6", "float32", "full")
STEPS_PER_CALL = 100  # steps in one compiled call, and between two choices of points
WARM_UP = 1 / 20  # of the steps: the learning rate rises, and the scales find their place


class Training(NamedTuple):
    """How long to train."""

    steps: int
    learning_rate: float  # the highest: it rises over the first steps and falls as a cosine


@dataclass(frozen=True)
class Problem:
    """What an example tells the training.

    - `name`: of the picture's file.
    - `network(key)`: the network, in float32.
    - `loss(model, points, *, derivatives=None)`: the loss on the points of one step. `derivatives`
      goes on to `mpx.partials` as its `scaling`.
    - `points(model, key)`: points for the next steps, a PyTree of float32 arrays of shape
      `[STEPS_PER_CALL, ...]`.
    - `errors(model)`: errors against the reference by name; the first is *the* error.
    - `draw(figure, results)`: the picture of the solutions, into a (sub)figure.
    - `derivatives(model, mode)`: the derivative scaling to begin with.
    - `loss_scale`: the loss scale to begin with.
    - `optimizer(schedule)`: from a learning-rate schedule.
    """

    name: str
    title: str
    network: Callable[[PRNGKeyArray], eqx.Module]
    loss: Callable[..., Float32[Array, ""]]
    points: Callable[[Any, PRNGKeyArray], PyTree]
    errors: Callable[[Any], Mapping[str, float]]
    draw: Callable[[Any, Sequence["Result"]], None]
    derivatives: Callable[[Any, str], mpx.DerivativeScaling]
    full: Training
    quick: Training
    loss_scale: float = 2.0**15
    optimizer: Callable[[Any], optax.GradientTransformation] = lambda rate: optax.adam(
        rate, b2=0.99
    )


@dataclass(frozen=True)
class Result:
    """What one training came to. `loss`, `scale` and `skipped` have an entry for each step."""

    precision: str
    mode: str  # of the derivative scaling
    rungs: tuple[str, ...]  # what it could climb
    errors: Mapping[str, float]
    loss: np.ndarray
    scale: np.ndarray  # of the loss
    skipped: np.ndarray  # whether the step was
    derivative_scales: Mapping[str, float]  # the last ones
    history: Sequence[Mapping[str, Any]]  # telemetry of the derivatives, once in STEPS_PER_CALL
    ms_per_step: float
    temp_bytes: int  # scratch memory of the compiled steps
    model: Any  # the running average of the float32 weights
    errors_as_trained: Mapping[str, float] = field(default_factory=dict)  # with rounded weights
    climbs: Mapping[str, int] = field(default_factory=dict)  # the step after which each rung began

    @property
    def error(self) -> float:
        return next(iter(self.errors.values()))

    @property
    def skipped_late(self) -> int:
        """Steps skipped after the warm-up."""
        return int(self.skipped[int(WARM_UP * len(self.skipped)) :].sum())

    @property
    def label(self) -> str:
        half = self.precision in ("float16", "bfloat16")
        predictive = ", predictive" if self.precision == "float16" and self.mode != "paper" else ""
        return self.precision + predictive + (", climbing" if half and self.rungs else "")


# --- A step ----------------------------------------------------------------------------------


class State(NamedTuple):
    """All that a step changes. It is float32 (and integers) whatever the precision of the step."""

    model: Any
    opt_state: PyTree
    scaling: Any
    average: Any  # of the weights over the last tenth of the steps or so


def step(
    problem: Problem,
    optimizer: Any,
    precision: str,
    rate: float,
    state: State,
    points: PyTree,
    ladder: mpx.PrecisionLadder | None = None,
) -> tuple[State, tuple[Float32[Array, ""], Bool[Array, ""]]]:
    """One step in mixed precision: this is how the library is used.

    With a `mpx.Scaling`, the loss receives its derivative scaling as `derivatives`; in float32 it
    receives None. A step whose derivatives or gradients overflowed changes the scaling alone.
    """
    model, opt_state, scaling, average = state
    ladder = first_rung(precision) if ladder is None else ladder
    value, scaling, finite, grads = mpx.filter_value_and_grad(
        problem.loss, scaling, **casts(precision), **ladder.options
    )(model, points)
    model, opt_state = mpx.optimizer_update(model, optimizer, opt_state, grads, finite)
    average = running_average(average, model, finite, rate)
    return State(model, opt_state, scaling, average), (value, finite)


def first_rung(precision: str) -> mpx.PrecisionLadder:
    """What a training in one precision climbs: nothing."""
    return mpx.PrecisionLadder(("full",) if precision == "float32" else ("half",))


def casts(precision: str) -> dict[str, Any]:
    """What is cast to which half precision, where one is asked for."""
    compute = "bfloat16" if precision == "float32" else compute_dtype(precision)
    return {
        "policy": f"params=float32,compute={compute},output=float32",
        "keep_full": (False, precision != NAIVE),  # cast the network, not the collocation points
    }


def running_average(average: Any, model: Any, finite: Bool[Array, ""], rate: float) -> Any:
    """The average of the weights moved towards the model, unless the step was skipped."""
    arrays, static = eqx.partition(average, eqx.is_inexact_array)
    moved = optax.incremental_update(eqx.filter(model, eqx.is_inexact_array), arrays, rate)
    return eqx.combine(mpx.select_tree(finite, moved, arrays), static)


def compute_dtype(precision: str) -> str:
    return "float16" if precision == NAIVE else precision


class Plain(eqx.Module):
    """A network that computes its derivatives by itself, one order after the other, in whatever its
    weights are: what a cast of the model and nested `jax.jvp` come to."""

    network: Callable

    def __call__(self, point: Float[Array, " coords"]) -> Float[Array, "..."]:
        arrays, static = eqx.partition(self.network, eqx.is_array)
        evaluate = lambda arrays, point: eqx.combine(arrays, static)(point)
        alone = jax.custom_jvp(evaluate)
        alone.defjvp(lambda primals, tangents: jax.jvp(evaluate, primals, tangents))
        dtype = jax.tree.leaves(arrays)[0].dtype
        return alone(arrays, point.astype(dtype))


def without_protection(model: Any) -> Any:
    """The model with no layer or activation that insists on float32."""
    safe = type(mpx.nn.tanh)

    def strip(x):
        if isinstance(x, mpx.FullPrecision):
            return x.module
        return x.fun if isinstance(x, safe) else x

    is_network = lambda x: isinstance(x, mpx.nn.CoordinateMLP)
    model = jax.tree.map(strip, model, is_leaf=lambda x: isinstance(x, mpx.FullPrecision | safe))
    return jax.tree.map(lambda x: Plain(x) if is_network(x) else x, model, is_leaf=is_network)


# --- The training loop -----------------------------------------------------------------------


def compiled_steps(run_step: Callable, state: State, points: PyTree) -> Callable:
    """The program of `STEPS_PER_CALL` steps: from arrays of a state and points to the same arrays
    and, for each step, loss, whether it counted, and loss scale."""
    arrays, static = eqx.partition(state, eqx.is_array)

    def body(arrays, points):
        new, record = run_step(eqx.combine(arrays, static), points)
        return eqx.filter(new, eqx.is_array), (*record, loss_scaling(new.scaling).loss_scaling)

    return jax.jit(partial(jax.lax.scan, body)).lower(arrays, points).compile()


def loss_scaling(scaling: Any) -> Any:
    return scaling.loss if isinstance(scaling, mpx.Scaling) else scaling


def learning_rates(steps: int, highest: float) -> optax.Schedule:
    return optax.warmup_cosine_decay_schedule(0.0, highest, int(WARM_UP * steps), steps)


def initial(
    problem: Problem, precision: str, *, mode: str, steps: int, learning_rate: float, seed: int
) -> tuple[State, optax.GradientTransformation, PRNGKeyArray]:
    """The state before the first step, the optimizer, and a key for the points."""
    model_key, key = jax.random.split(jax.random.key(seed))
    model = problem.network(model_key)
    optimizer = problem.optimizer(learning_rates(steps, learning_rate))
    loss_scale = mpx.DynamicLossScaling(problem.loss_scale)
    if precision == NAIVE:
        model, scaling = without_protection(model), loss_scale
    else:
        with mpx.half_precision("bfloat16" if precision == "bfloat16" else "float16"):
            scaling = mpx.Scaling(loss_scale, problem.derivatives(model, mode))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    return State(model, opt_state, scaling, average=model), optimizer, key


def train(
    problem: Problem,
    precision: str,
    *,
    mode: str = "paper",
    rungs: Sequence[str] = (),
    steps: int,
    learning_rate: float,
    seed: int,
    progress: Progress,
    stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Trains the network of `problem`.

    Of a half precision it climbs the `rungs` of a `mpx.PrecisionLadder`: a program for each, which
    goes on from the state of the one before, with nothing to convert. Once `stop()` is true, the
    training ends where it is.
    """
    calls = math.ceil(steps / STEPS_PER_CALL)
    steps = calls * STEPS_PER_CALL
    state, optimizer, key = initial(
        problem, precision, mode=mode, steps=steps, learning_rate=learning_rate, seed=seed
    )
    choose_points = eqx.filter_jit(problem.points)

    task = progress.add_task(precision, total=steps, loss="compiling")
    points = choose_points(state.model, key)

    @cache
    def program(ladder):
        run_step = partial(step, problem, optimizer, precision, 10 / steps, ladder=ladder)
        return compiled_steps(run_step, state, points)

    ladder = first_rung(precision)
    if rungs and precision != "float32":
        say = lambda line: progress.console.print(f"{precision}: {line}")
        interval = STEPS_PER_CALL * math.ceil(calls / 20)
        ladder = mpx.PrecisionLadder(rungs, interval=interval, say=say)
    memory = program(ladder).memory_analysis()
    arrays, static = eqx.partition(state, eqx.is_array)
    records, history, climbs, seconds = [], [], {}, 0.0
    for call in range(calls):
        key, points_key = jax.random.split(key)
        model = eqx.combine(arrays, static).model
        points = jax.block_until_ready(choose_points(model, points_key))
        run_steps = program(ladder)
        start = time.perf_counter()
        arrays, record = jax.block_until_ready(run_steps(arrays, points))
        seconds += time.perf_counter() - start
        records.append(jax.tree.map(np.asarray, record))
        if isinstance(state.scaling, mpx.Scaling) and ladder.rung != "full":
            told = mpx.derivatives.telemetry(eqx.combine(arrays, static).scaling)
            history.append(jax.tree.map(np.asarray, told))
        progress.update(task, advance=STEPS_PER_CALL, loss=f"loss {records[-1][0].mean():.1e}")
        before, ladder = ladder, climbed(ladder, problem, precision, arrays, static, points, call)
        if ladder is not before:
            climbs[ladder.rung] = (call + 1) * STEPS_PER_CALL
        if stop():
            break

    values, finite, scales = (np.concatenate(r) for r in zip(*records, strict=True))
    state = eqx.combine(arrays, static)
    return Result(
        precision=precision,
        mode=mode,
        rungs=tuple(rungs),
        errors=problem.errors(state.average),
        errors_as_trained=problem.errors(as_trained(state.average, precision, ladder)),
        climbs=climbs,
        loss=values,
        scale=scales,
        skipped=~finite,
        derivative_scales={k: float(v) for k, v in history[-1]["scale"].items()} if history else {},
        history=history if precision != "float32" else [],
        ms_per_step=1000 * seconds / len(values),
        temp_bytes=memory.temp_size_in_bytes if memory is not None else 0,
        model=state.average,
    )


def climbed(
    ladder: mpx.PrecisionLadder,
    problem: Problem,
    precision: str,
    arrays: PyTree,
    static: PyTree,
    points: PyTree,
    call: int,
) -> mpx.PrecisionLadder:
    """The ladder for the next steps, by what rounding does to the last of these."""
    state = eqx.combine(arrays, static)
    update = ladder.update(
        (call + 1) * STEPS_PER_CALL, problem.loss, state.scaling, **casts(precision)
    )
    return update(state.model, jax.tree.map(lambda x: x[-1], points))


def as_trained(model: Any, precision: str, ladder: mpx.PrecisionLadder) -> Any:
    """The network as the last steps have seen it."""
    if ladder.rung == "full":
        return model
    policy = casts(precision)["policy"]
    return mpx.as_trained(model, policy=policy, **ladder.options)


def uniform(key: PRNGKeyArray, count: int, low: Any, high: Any) -> Float32[Array, "count coords"]:
    """Points from a box with the corners `low` and `high`."""
    low, high = jnp.float32(low), jnp.float32(high)
    return jax.random.uniform(key, (count, len(low)), minval=low, maxval=high)


def choose(
    key: PRNGKeyArray,
    points: Float32[Array, "candidates coords"],
    residuals: Float32[Array, " candidates"],
    batch: int,
    *,
    floor: float = 4.0,
) -> Float32[Array, "steps batch coords"]:
    """Batches for the next steps, of candidates that are taken more often where the residual is
    large (residual-based adaptive distribution, Wu et al., 2023)."""
    size = jnp.abs(residuals)
    density = size / jnp.mean(size) + floor
    shape = (STEPS_PER_CALL, batch)
    return jax.random.choice(key, points, shape, p=density / jnp.sum(density))


def evaluate(model: Any, *axes: Float[np.ndarray, " n"]) -> Float[np.ndarray, "..."]:
    """The network with its float32 weights on the grid of these axes."""
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1)
    values = eqx.filter_jit(lambda u, points: jax.vmap(lambda p: u(p))(points))
    flat = values(model, jnp.float32(grid.reshape(-1, len(axes))))
    return np.asarray(flat, np.float64).reshape(*grid.shape[:-1], *flat.shape[1:])


# --- The command line ------------------------------------------------------------------------


def run(
    problem: Problem,
    precisions: Sequence[str] = PRECISIONS,
    *,
    steps: int | None = None,
    seed: int = 0,
    out: str | Path | None = "outputs",
    quick: bool = False,
    mode: str = "paper",
    rungs: Sequence[str] = (),
) -> dict[str, Result]:
    """Trains in each precision, prints a table and draws pictures in the folder `out`.

    `steps` is rounded up to whole hundreds; `out=None` draws nothing. After Ctrl-C the table and
    the pictures have what was trained by then.
    """
    training = problem.quick if quick else problem.full
    steps = training.steps if steps is None else steps
    if steps < 1:
        raise ValueError(f"`steps` must be at least 1, but got {steps}.")
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)  # fails now rather than after the training
    console = Console()
    if rungs:
        mpx.PrecisionLadder(rungs)  # says now what it says of wrong ones
    options: dict[str, Any] = {"mode": mode, "rungs": rungs, "steps": steps, "seed": seed}
    options["learning_rate"] = training.learning_rate
    with stop_on_interrupt() as stop:
        results = []
        with progress_bar(console, 13) as progress:
            for p in precisions:
                results.append(train(problem, p, progress=progress, stop=stop, **options))
                if stop():
                    trained = len(results[-1].loss)
                    console.print(f"{results[-1].label}: stopped after {trained:,} steps.")
                    break
        console.print(table(problem.title, results))
        if out is not None:
            for path in draw(problem, results, Path(out), every=STEPS_PER_CALL):
                console.print(f"Picture: {path}")
    return {r.precision: r for r in results}


def arguments(description: str | None, problem: Problem, *, out: str) -> argparse.ArgumentParser:
    """The options of `run`, as a parser to which an example may add its own."""
    options = parser(description)
    known = (*PRECISIONS, NAIVE)
    options.add_argument(
        "--precision",
        nargs="+",
        choices=known,
        default=PRECISIONS,
        dest="precisions",
        help="what to train in, one after another",
    )
    options.add_argument(
        "--steps",
        type=positive,
        help=f"of each training, rounded up to whole hundreds; by default {problem.full.steps:,}, "
        f"or {problem.quick.steps:,} with --quick",
    )
    options.add_argument("--seed", type=int, default=0, help="of the first weights and the points")
    options.add_argument("--out", type=folder, default=out, help="folder of the pictures")
    options.add_argument("--quick", action="store_true", help="a short run, less accurate")
    options.add_argument(
        "--mode",
        choices=("paper", "predictive"),
        default="paper",
        help="how derivative scales follow what they see: after an overflow, or before",
    )
    options.add_argument(
        "--rungs",
        nargs="+",
        choices=RUNGS,
        default=(),
        help="precisions that a training in half climbs from below when rounding is what is left, "
        "such as: half float32 full",
    )
    return options

"""How long does it take to reach an error? Every rival trains the same problem: error against time.

The problems are `cavity` and `burgers_1d` of `examples/problems`. Network, initial weights, points,
optimizer and steps are the same for all rivals. The error is the problem's, against its reference:
on the center lines of the cavity, and on a grid for Burgers' equation.

A busy machine changes times but not errors by step. So trainings and times are separate runs whose
results add up in one file. A run trains from each seed the rivals that the file lacks. `--time`
times the steps of all rivals in turn, on a machine where nothing else runs. The time to an error is
the number of steps times the median time of one; compilation is recorded separately.

On a CPU, `TF32, emulated` rounds the operands of all products as a GPU does: its errors are those
of TF32, but its time means nothing.
"""

import argparse
import dataclasses
import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx
from examples.problems import burgers_1d as _burgers, cavity as _cavity
from examples.problems._naive import without_protection
from examples.problems._runner import State, Trainer, running_average

from ._problems import emulate_tf32
from ._report import Report, RivalMissing, failure, require, timing
from .pinn_step import layers_of, with_layers


SHOCK = 0.05  # standard deviation of the distance of half of the points from the shock
PER_CALL = 100  # steps
ROUNDS = 8

# --- Problems ---------------------------------------------------------------------------------


class Size(NamedTuple):
    """The sizes of the network, the number of points in a step, and the number of steps."""

    width: int
    depth: int
    points: int
    steps: int


SIZES = {
    "quick": Size(16, 2, 64, 200),
    "small": Size(32, 4, 384, 8000),
    "full": Size(512, 6, 16_384, 8000),
}


def cavity(size: Size) -> Any:
    """Builds the problem at another size."""

    def network(key):
        options = {"key": key, "fourier_features": (16, 0.5)}
        return mpx.nn.Ansatz(
            mpx.nn.CoordinateMLP(2, 3, size.width, size.depth, **options), _cavity.form
        )

    def points(_, key):
        shape = (PER_CALL, size.points, 2)
        return jax.random.uniform(key, shape, maxval=jnp.array([1.0, 0.998]))

    # Second derivatives are singular in the corners: a point close to one is a spike, many powers
    # of two above the values of the last steps.
    derivatives = lambda: mpx.DerivativeScaling.per_direction("xy", order=2, margin=12)
    given = {"network": network, "points": points, "steps": size.steps, "derivatives": derivatives}
    return dataclasses.replace(_cavity.PROBLEM, **given)


def burgers(size: Size) -> Any:
    """Builds the same, on points that no network chooses: half lie around the shock at x = 0."""

    def points(_, key):
        shape = (PER_CALL, size.points)
        t_key, x_key, near_key = jax.random.split(key, 3)
        t = jax.random.uniform(t_key, shape)
        x = jax.random.uniform(x_key, shape, minval=-1, maxval=1)
        near = jnp.clip(SHOCK * jax.random.normal(near_key, shape), -1, 1)
        x = jnp.where(jnp.arange(size.points) % 2 == 0, x, near)
        return jnp.stack([t, x], axis=-1)

    network = lambda key: _burgers.BurgersNetwork(size.width, size.depth, key=key)
    given = {"network": network, "points": points, "steps": size.steps}
    return dataclasses.replace(_burgers.PROBLEM, **given, optimizer="adam", learning_rate=5e-3)


# --- Trainings that can be followed: generators that train a little and yield their state -----


class Moment(NamedTuple):
    """The state of a training. Its error is computed only on request."""

    steps: int
    seconds: float  # of the steps alone, without compilation and evaluation
    error: Callable[[], float]


Training = Iterator[Moment]
"""Compiles, yields the moment before the first step, and trains from one moment to the next."""


def points_by_call(trainer: Any, model: Any, key: jax.Array) -> Iterator[Any]:
    """Yields the points of all steps of each call in a training; the model chooses none of them."""
    for _ in range(trainer.steps // trainer.per_call):
        key, points_key = jax.random.split(key)
        yield jax.block_until_ready(trainer.next_points(model, points_key))


def take_turns(trainings: dict[str, Training]) -> Iterator[tuple[str, Moment]]:
    """Yields the moments of all trainings, one of each in turn.

    A machine that slows down thus slows down all of them. A training that fails raises its error in
    place of its moment.
    """
    for moments in itertools.zip_longest(*trainings.values()):
        yield from ((n, m) for n, m in zip(trainings, moments, strict=True) if m is not None)


# --- Rivals -----------------------------------------------------------------------------------


def in_jax(
    problem: Any,
    seed: int,
    *,
    precision: str,
    plain: bool = False,
    matmul: str | None = None,
    make: Callable[..., Any] = Trainer,
) -> Training:
    """Trains with the runner in one of its precisions.

    With `plain`, the network is an opaque function, differentiated by nested `jax.jvp`. `matmul` is
    JAX's default precision of products.
    """
    if plain:
        plainly = lambda key, network=problem.network: without_protection(network(key))
        problem = dataclasses.replace(problem, network=plainly)
    with jax.default_matmul_precision(matmul), warnings.catch_warnings():
        warnings.simplefilter("ignore", mpx.PrecisionWarning)
        trainer = make(problem, precision)
        state, key = trainer.initial(seed)
        model = state.model
        first = next(points_by_call(trainer, model, key))
        state = trainer.with_first_scales(state, first)
        arrays = eqx.filter(state, eqx.is_array)
        run = trainer.steps_of(state).lower(arrays, first).compile()

    def error(arrays: Any) -> float:
        now = eqx.combine(arrays, trainer.static)
        return next(iter(trainer.errors(now.average).values()))

    seconds = 0.0
    yield Moment(0, seconds, partial(error, arrays))
    for call, points in enumerate(points_by_call(trainer, model, key), 1):
        start = time.perf_counter()
        arrays, _ = jax.block_until_ready(run(arrays, points))
        seconds += time.perf_counter() - start
        yield Moment(call * trainer.per_call, seconds, partial(error, arrays))


class ByMpx(Trainer):
    """Trains with MPX as documented: everything in float16, with its loss scaling."""

    def _scaling(self) -> Any:
        return require("mpx").DynamicLossScaling(
            loss_scaling=jnp.float32(2.0**15), min_loss_scaling=jnp.float32(1.0), period=2000
        )

    def step(self, state: State, points: Any) -> tuple[State, Any]:
        rival: Any = require("mpx")
        model, opt_state, scaling, average, count = state
        gradient = rival.filter_value_and_grad(self.problem.loss, scaling)
        value, scaling, finite, grads = gradient(model, points)
        model, opt_state = rival.optimizer_update(model, self.optimizer, opt_state, grads, finite)
        average = running_average(average, model, finite, min(1.0, 10 / self.steps))
        return State(model, opt_state, scaling, average, count + 1), (value, finite)


def in_torch(problem: Any, seed: int, *, precision: str) -> Training:
    """Trains the cavity in PyTorch, with the same weights and points: see `_torch/pinn.py`."""
    require("torch")
    from ._torch.pinn import train

    trainer = Trainer(problem)
    state, key = trainer.initial(seed)
    network = state.model.network

    def error(layers):
        model = eqx.tree_at(lambda m: m.network, state.model, with_layers(network, layers))
        return next(iter(problem.errors(model).values()))

    moments = train(
        jax.tree.map(np.asarray, layers_of(network)),
        np.asarray(network.embedding.module.frequencies),
        map(np.asarray, points_by_call(trainer, state.model, key)),
        np.asarray(trainer.rates(np.arange(trainer.steps))).tolist(),
        precision,
    )
    for call, (seconds, layers) in enumerate(moments):
        yield Moment(call * trainer.per_call, seconds, partial(error, layers))


HALVES = ("float16", "bfloat16")
EXACT = partial(in_jax, precision="float32", matmul="highest")
"""True float32, even where products are TF32 by default."""


def burgers_rivals(on_gpu: bool) -> dict[str, Callable[[Any, int], Training]]:
    """Returns by name the functions that train a problem from a seed."""
    plain = partial(in_jax, precision="float32", plain=True)
    emulated = partial(plain, make=partial(Trainer, transform=emulate_tf32))
    tf32 = partial(plain, matmul="tensorfloat32")
    return {
        "float32": partial(EXACT, plain=True),
        **({"TF32": tf32} if on_gpu else {"TF32, emulated": emulated}),
        "casts by hand, float16": partial(in_jax, precision="naive-float16"),
        "MPX, float16": partial(in_jax, precision="naive-float16", make=ByMpx),
        "mpx_pde, float32": EXACT,
        **{f"mpx_pde, {half}": partial(in_jax, precision=half) for half in HALVES},
        **{
            f"mpx_pde, forward float32, {h}": partial(in_jax, precision=f"forward-float32-{h}")
            for h in HALVES
        },
    }


def cavity_rivals(on_gpu: bool) -> dict[str, Callable[[Any, int], Training]]:
    """Returns the same, and those by PyTorch."""
    return {
        **burgers_rivals(on_gpu),
        "PyTorch, float32": partial(in_torch, precision="float32"),
        **({"PyTorch, TF32": partial(in_torch, precision="TF32")} if on_gpu else {}),
        **{f"torch.amp, {half}": partial(in_torch, precision=half) for half in HALVES},
    }


PROBLEMS = {"cavity": (cavity, cavity_rivals), "burgers": (burgers, burgers_rivals)}
"""For each problem, its builder from a size and the builder of its rivals."""

# --- Runs ------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--problem", choices=PROBLEMS, required=True)
    parser.add_argument("--size", choices=("small", "full"), help="by default small; full on a GPU")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rivals", nargs="+", help="by default all")
    parser.add_argument("--time", action="store_true", help="time steps, and train nothing")


def compiled(report: Report, trainings: dict[str, Training]) -> dict[str, tuple[Moment, float]]:
    """Returns each rival's moment before the first step, and the seconds until then.

    Leaves out rivals that fail or are not installed, and records or prints the reason.
    """
    out = {}
    for name, training in trainings.items():
        start = time.perf_counter()
        try:
            first = next(training)
        except RivalMissing as e:
            report.note(f"{name}: {e}")
        except Exception as e:
            report.record("curves", rival=name, failed=failure(e))
        else:
            out[name] = first, time.perf_counter() - start
    return out


def follow(report: Report, problem: Any, seed: int, rivals: dict[str, Any]) -> None:
    """Trains rivals from one seed."""
    trainings = {name: train(problem, seed) for name, train in rivals.items()}
    records = {}
    for name, (first, _) in compiled(report, trainings).items():
        start = {"seed": seed, "steps": [first.steps], "errors": [first.error()]}
        records[name] = report.record("curves", rival=name, **start)
    for name, moment in take_turns({name: trainings[name] for name in records}):
        records[name]["steps"].append(moment.steps)
        records[name]["errors"].append(moment.error())


def clock(report: Report, problem: Any, rivals: dict[str, Any]) -> None:
    """Times the steps of rivals in turn; emulated rivals get no time, for theirs means nothing."""
    trainings = {name: train(problem, 0) for name, train in rivals.items()}
    started = compiled(report, trainings)
    before = {name: first for name, (first, _) in started.items()}
    seconds: dict[str, list[float]] = {name: [] for name in started}
    turns = take_turns({name: trainings[name] for name in started})
    # The first round warms up.
    for name, moment in itertools.islice(turns, (1 + ROUNDS) * len(started)):
        past, before[name] = before[name], moment
        seconds[name].append((moment.seconds - past.seconds) / (moment.steps - past.steps))
    for name, (_, start) in started.items():
        step = None if "emulated" in name else timing(seconds[name][1:])
        report.record("times", rival=name, start_seconds=start, step=step)


def run(report: Report, args: argparse.Namespace) -> None:
    make_problem, make_rivals = PROBLEMS[args.problem]
    report.name = f"time_to_error-{args.problem}"
    on_gpu = jax.default_backend() == "gpu"
    size = "quick" if args.quick else args.size or ("full" if on_gpu else "small")
    problem, rivals = make_problem(SIZES[size]), make_rivals(on_gpu)
    chosen = {name: rivals[name] for name in args.rivals or rivals}
    if not args.quick:  # times are always taken anew
        report.resume(*(["curves"] if args.time else ["curves", "times"]), same_code=True)
    report.record("size", name=size, **SIZES[size]._asdict())
    if args.time or args.quick:
        clock(report, problem, chosen)
    for seed in () if args.time else args.seeds:
        there = {c["rival"] for c in report.sections.get("curves", []) if c.get("seed") == seed}
        follow(report, problem, seed, {n: t for n, t in chosen.items() if n not in there})
        report.save()

"""How far do second-order steps get? Levenberg–Marquardt on the collection, by precision.

The recipe is that of `python -m examples.problems run NAME --recipe deep`, which takes 1,200 steps.

    python -m benchmarks second_order --problems kovasznay --seeds 0
    python -m benchmarks second_order --target h100     # predicts the time of a step without a run
    python -m benchmarks second_order --time 8          # times eight steps of each on a GPU
    python -m benchmarks second_order --race 30         # methods and rivals, 30 CPU seconds each
"""

import argparse
import dataclasses
import importlib
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpx_pde as mpx

from ._chips import CHIPS
from ._deviceless import CUBLAS, compile_for
from ._problems import problems
from ._report import Report, interleave
from ._roofline import Roofline, summary


PRECISIONS = ("float64", "float64-float32", "float32")
COMPILED = ("float64", "float32", *(f"float64-{j}" for j in ("float32", "bfloat16_x3", "bfloat16")))
WIDTH, POINTS = 99, 32_768  # 20,197 parameters


class _Untold(mpx.LevenbergMarquardt):
    """An optimizer without host callbacks, which a program for an absent device cannot contain."""

    def __init__(self, *residuals: Any, **options: Any):
        super().__init__(*residuals, **options)

    def _tell(self, *_: Any) -> None: ...


class Sized(NamedTuple):
    """A step on Burgers' equation with a wider network."""

    optimizer: mpx.LevenbergMarquardt
    network: Callable[[], Any]
    points: int

    def taken(self, state: Any, batch: Any) -> Any:
        """Takes a step; returns the new state, its loss and its conjugate gradient iterations."""
        model, optimizer_state = state
        new = self.optimizer.update(model, optimizer_state, batch)
        return new, new[1].loss, new[1].iterations

    def begun(self) -> Any:
        model = self.network()
        return model, self.optimizer.init(model)


def sized(precision: str, quick: bool, kind: Any = mpx.LevenbergMarquardt) -> Sized:
    deep = importlib.import_module("examples.problems._deep")
    width, points = (16, 256) if quick else (WIDTH, POINTS)
    problem = dataclasses.replace(problems.load("burgers_1d").deep, width=width)
    forward, jacobian = deep.PRECISIONS[precision]
    network = partial(deep.Network, problem, jnp.dtype(forward), key=jax.random.key(0))
    return Sized(kind(problem.residual, forward=forward, jacobian=jacobian), network, points)


def predict(report: Report, target: str, quick: bool) -> None:
    """Predicts the time of a step. The number of conjugate gradient iterations is not known in
    advance, so one iteration is counted for each solve."""
    for precision in COMPILED:
        with jax.enable_x64("float64" in precision):
            step = sized(precision, quick, _Untold)
            state = eqx.filter_eval_shape(step.begun)
            batch = jax.ShapeDtypeStruct((step.points, 2), jnp.dtype(step.optimizer.forward))
            options = {"compiler_options": {} if "_x3" in precision else CUBLAS, "donate": (0,)}
            program = compile_for(target, step.taken, state, batch, **options)
            arrays = jax.tree.leaves(eqx.filter(step.network(), eqx.is_inexact_array))
        told = {"parameters": sum(x.size for x in arrays), "points": step.points}
        told |= summary(Roofline(program.module).kernels(), CHIPS[target])
        report.record("steps", precision=precision, temp_bytes=program.temp_bytes, **told)


def _running(precision: str, quick: bool) -> Callable[[], Any]:
    """Returns a function that takes a step per call; all start from the same weights and points."""
    wide = "float64" in precision
    with jax.enable_x64(wide):
        step = sized(precision, quick)
        at = np.random.default_rng(0).uniform((0, -1), (1, 1), (step.points, 2))
        batch = jnp.asarray(at, step.optimizer.forward)
        take, state = eqx.filter_jit(step.taken), step.begun()

    def run():
        nonlocal state
        with jax.enable_x64(wide):
            state, *told = take(state, batch)
        return told

    return run


def measure(report: Report, rounds: int, quick: bool) -> None:
    """Times steps of all precisions in turn."""
    running = {precision: _running(precision, quick) for precision in COMPILED}
    with ThreadPoolExecutor(3) as pool:  # compiles the steps
        list(pool.map(lambda run: jax.block_until_ready(run()), running.values()))
    for precision, seconds in interleave(running, rounds=rounds, warmup=0).items():
        loss, iterations = running[precision]()
        last = {"seconds": seconds, "loss": float(loss), "iterations": int(iterations)}
        report.record("steps", precision=precision, **last)


# --- The race on Poisson's equation, where parameters outnumber points ----------------------

DIMS, WIDTHS, ROWS = (2, 3, 5), (32, 64, 128), 500
PRIMAL_MOST = 3000  # parameters
RACED = {
    "primal": {"method": "primal"},
    "dual": {"method": "dual"},
    "dual-float32": {"method": "dual", "jacobian": "float32"},
    "dual-bfloat16": {"method": "dual", "jacobian": "bfloat16"},
    "low_rank": {"method": "low_rank"},
}
"""Options of `LevenbergMarquardt` with a float64 residual."""


class Poisson(NamedTuple):
    """The Laplacian of `u` on a unit cube, whose solution is the mean of sines, with a network of
    float64. Every fifth point is on the boundary."""

    dims: int

    def exact(self, x: Any) -> Any:
        return jnp.mean(jnp.sin(jnp.pi * x))

    def interior(self, model: Any, x: Any) -> Any:
        found = mpx.laplacian(model, coords="xyzvw"[: self.dims], outputs="u")(x)
        return (found["lap_u"] + jnp.pi**2 * self.exact(x)) / 10

    def boundary(self, model: Any, x: Any) -> Any:
        return jnp.reshape(model(x), ()) - self.exact(x)

    def samples(self, count: int) -> tuple[mpx.Points, mpx.Points]:
        low, high, edge = [0.0] * self.dims, [1.0] * self.dims, count // 5
        inside = mpx.Points(low, high, count - edge)
        return inside, mpx.Points(low, high, edge, faces=range(self.dims))

    def error(self, model: Any) -> float:
        points = mpx.Points([0.0] * self.dims, [1.0] * self.dims, 2000)(None, key=jax.random.key(9))
        want = jax.vmap(self.exact)(points)
        got = jnp.ravel(jax.vmap(model)(points))
        return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def _ours(options: dict[str, Any], residuals: Any, model: Any) -> tuple[Any, Any, Any]:
    """Returns a function that takes a step, its first state, and one that computes the loss."""
    optimizer = mpx.LevenbergMarquardt(residuals, forward="float64", **options)
    return optimizer.update, optimizer.init(model), lambda state: state.loss


def _lbfgs(residuals: Any, model: Any) -> tuple[Any, Any, Any]:
    """L-BFGS as Optax recommends it, with its zoom line search."""
    optimizer = optax.lbfgs()
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def update(model, state, batches):
        def loss(params):
            each = zip(residuals, batches, strict=True)
            whole = eqx.combine(params, static)
            return sum(jnp.mean(jax.vmap(f, (None, 0))(whole, x) ** 2) for f, x in each)

        params = eqx.filter(model, eqx.is_inexact_array)
        value, grad = optax.value_and_grad_from_state(loss)(params, state=state)
        updates, state = optimizer.update(
            grad, state, params, value=value, grad=grad, value_fn=loss
        )
        return eqx.apply_updates(model, updates), state

    value = lambda state: optax.tree.get(state, "value")
    return update, optimizer.init(params), value


def race(report: Report, seconds: int, seeds: list[int], quick: bool) -> None:
    """Lets each method and rival train for some CPU seconds from the same weights and points."""
    sizes = itertools.product(seeds, DIMS[:1] if quick else DIMS, WIDTHS[:1] if quick else WIDTHS)
    keys = [
        {"dims": dims, "width": width, "seed": seed, "rival": rival}
        for (seed, dims, width), rival in itertools.product(sizes, (*RACED, "lbfgs"))
    ]
    for key in report.missing("race", keys):
        with jax.enable_x64(True):
            if (found := _raced(key, seconds)) is not None:
                report.record("race", **key, **found)


def _raced(key: dict[str, Any], seconds: int) -> dict[str, Any] | None:
    problem, seed = Poisson(key["dims"]), jax.random.key(key["seed"])
    shape = problem.dims, 1, key["width"], 3
    model: Any = eqx.nn.MLP(*shape, jnp.tanh, key=seed, dtype=jnp.float64)
    count = sum(x.size for x in jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array)))
    if key["rival"] == "primal" and count > PRIMAL_MOST:
        return None
    residuals = (problem.interior, problem.boundary)
    drawn = problem.samples(ROWS)
    batches = tuple(draw(None, key=jax.random.fold_in(seed, i)) for i, draw in enumerate(drawn))
    begin = partial(_ours, RACED[key["rival"]]) if key["rival"] in RACED else _lbfgs
    update, state, loss = begin(residuals, model)
    arrays, static = eqx.partition((model, state), eqx.is_array)

    def step(arrays, batches):
        return eqx.filter(update(*eqx.combine(arrays, static), batches), eqx.is_array)

    compiled = jax.jit(step).lower(arrays, batches).compile()
    memory: Any = compiled.memory_analysis()
    steps, spent, curve = 0, 0.0, []
    while spent < seconds:
        began = time.process_time()
        arrays = jax.block_until_ready(compiled(arrays, batches))
        spent, steps = spent + time.process_time() - began, steps + 1
        if steps & (steps - 1) == 0 or spent >= seconds:
            model, state = eqx.combine(arrays, static)
            curve.append((steps, round(spent, 2), float(loss(state)), problem.error(model)))
    return {
        "parameters": count,
        "rows": ROWS,
        "steps": steps,
        "cpu_seconds": spent,
        "loss": curve[-1][2],
        "error": curve[-1][3],
        "temp_bytes": memory.temp_size_in_bytes,
        "curve": curve,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--problems", nargs="+", help="by default all that have the recipe")
    parser.add_argument("--precision", nargs="+", default=list(PRECISIONS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300, help="a quarter of the recipe's")
    parser.add_argument("--target", choices=CHIPS, help="compile for this chip, and predict")
    parser.add_argument("--time", type=int, help="time so many steps of a wide network")
    parser.add_argument("--race", type=int, help="CPU seconds of each method and rival")
    parser.add_argument("--resume", action="store_true", help="keep the trainings in the file")


def run(report: Report, args: argparse.Namespace) -> None:
    if args.target:
        report.name = f"second_order-{args.target}"
        predict(report, args.target, args.quick)
        return
    if args.time:
        report.name = "second_order-steps"
        measure(report, args.time, args.quick)
        return
    if args.race:
        report.name = "second_order-race"
        if args.resume:
            report.resume("race")
        race(report, args.race, args.seeds, args.quick)
        return
    deep = importlib.import_module("examples.problems._deep")
    steps, points = 4 if args.quick else args.steps, deep.POINTS
    names = args.problems or [n for n in problems.names() if problems.load(n).deep is not None]
    names = names[:1] if args.quick else names
    if args.resume:
        report.resume("trainings")
    keys = [
        {"problem": name, "precision": precision, "seed": seed, "steps": steps, "points": points}
        for seed, name, precision in itertools.product(args.seeds, names, args.precision)
    ]
    for key in report.missing("trainings", keys):
        problem = problems.load(key["problem"])
        outcome = deep.DeepTrainer(problem, key["precision"], steps=steps)(key["seed"])
        found = {"title": problem.title, **outcome.record()}
        report.record("trainings", **key, **{n: x for n, x in found.items() if n not in key})

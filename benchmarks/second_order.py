"""How far do second-order steps get? Levenberg–Marquardt on the collection, by precision.

The recipe is that of `python -m examples.problems run NAME --recipe deep`, which takes 1,200 steps.

    python -m benchmarks second_order --problems kovasznay --seeds 0
    python -m benchmarks second_order --target h100     # predicts the time of a step without a run
    python -m benchmarks second_order --target h100 --dual   # with a million parameters
    python -m benchmarks second_order --time 8          # times eight steps of each on a GPU
    python -m benchmarks second_order --time 3 --dual   # the same with a million parameters
    python -m benchmarks second_order --methods 6   # primal or dual, by size
    python -m benchmarks second_order --widths 4    # the dual step by width and precision
    python -m benchmarks second_order --narrow 60   # dual steps with narrow matrices
    python -m benchmarks second_order --dampings 60 # many dampings on one factorization
    python -m benchmarks second_order --draws 60    # points that stay, or are drawn anew
    python -m benchmarks second_order --wide 600    # a wide network, for so many seconds
    python -m benchmarks second_order --race 30         # methods and rivals, 30 CPU seconds each
"""

import argparse
import dataclasses
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

import mpx_pde as mpx
from examples.problems import _deep
from examples.problems._runner import errors_of

from . import _rivals
from ._chips import CHIPS
from ._deviceless import CUBLAS, compile_for
from ._problems import problems
from ._race import PROBLEMS, SMALL, Heat
from ._radii import TRIED, Radii
from ._report import Report, commit, interleave
from ._roofline import Roofline, summary
from ._trained import Trainer


PRECISIONS = ("float64", "float64-float32", "float32")
COMPILED = ("float64", "float32", *(f"float64-{j}" for j in ("float32", "bfloat16_x3", "bfloat16")))
WIDTH, POINTS = 99, 32_768  # 20,197 parameters
IN_DUAL = ("float64", *(f"float64-{j}" for j in ("bfloat16", "float32", "bfloat16_x3")))
DUAL_WIDTH, DUAL_POINTS = 706, 16_384  # 1,001,815 parameters
NARROW = ("float64", "float32", "bfloat16", "float16")


class _Untold(mpx.LevenbergMarquardt):
    """An optimizer without host callbacks, which a program for an absent device cannot contain."""

    def __init__(self, *residuals: Any, **options: Any):
        super().__init__(*residuals, **options)

    def _tell(self, *_: Any) -> None: ...


class Sized(NamedTuple):
    """A step with a wide network.

    **Attributes:**

    - `examples`: makes the examples, as `optimizer.update` takes them.
    """

    optimizer: mpx.LevenbergMarquardt
    network: Callable[[], Any]
    examples: Callable[[], Any]

    def taken(self, state: Any, batch: Any) -> Any:
        """Takes a step; returns the new state, its loss and its conjugate gradient iterations."""
        model, optimizer_state = state
        new = self.optimizer.update(model, optimizer_state, batch)
        return new, new[1].loss, new[1].iterations

    def begun(self) -> Any:
        model = self.network()
        return model, self.optimizer.init(model)


def sized(precision: str, quick: bool, kind: Any = mpx.LevenbergMarquardt) -> Sized:
    """Returns a step on Burgers' equation."""
    width, points = (16, 256) if quick else (WIDTH, POINTS)
    problem = dataclasses.replace(problems.load("burgers_1d").deep, width=width)
    forward, jacobian = _deep.PRECISIONS[precision]
    network = partial(_deep.Network, problem, jnp.dtype(forward), key=jax.random.key(0))
    optimizer = kind(problem.residual, forward=forward, jacobian=jacobian)
    at = partial(np.random.default_rng(0).uniform, (0, -1), (1, 1), (points, 2))
    return Sized(optimizer, network, lambda: jnp.asarray(at(), forward))


def dual(precision: str, quick: bool, kind: Any = mpx.LevenbergMarquardt) -> Sized:
    """Returns a step on Poisson's equation in three dimensions, with many more parameters than
    points."""
    problem = Heat(3, *((64, 2, 400) if quick else (DUAL_WIDTH, 3, DUAL_POINTS)))
    jacobian = precision.rpartition("-")[2]
    options = {"forward": "float64", "jacobian": jacobian, "method": "dual"}
    network = partial(problem.network, jax.random.key(0))
    batches = partial(problem.batches, jax.random.key(0))
    return Sized(kind(problem.residuals, **options), network, batches)


def predict(report: Report, target: str, precisions: Any, step_of: Callable[[str], Sized]) -> None:
    """Predicts the time of a step. The number of conjugate gradient iterations is not known in
    advance, so one iteration is counted for each solve."""

    def predicted(key: dict[str, Any]) -> dict[str, Any]:
        precision = key["precision"]
        with jax.enable_x64("float64" in precision):
            step = step_of(precision)
            state, examples = map(eqx.filter_eval_shape, (step.begun, step.examples))
            options = {"compiler_options": {} if "_x3" in precision else CUBLAS, "donate": (0,)}
            program = compile_for(target, step.taken, state, examples, **options)
            arrays = jax.tree.leaves(eqx.filter(state[0], _is_inexact))
        points = sum(len(x) for x in jax.tree.leaves(examples))
        told = {"parameters": sum(x.size for x in arrays), "points": points}
        told |= summary(Roofline(program.module).kernels(), CHIPS[target])
        return {**key, "temp_bytes": program.temp_bytes, **told}

    keys = report.missing("steps", [{"precision": name} for name in precisions])
    with ThreadPoolExecutor(4) as pool:
        for told in pool.map(predicted, keys):
            report.record("steps", **told)


def _is_inexact(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


class _Running:
    """A step that is compiled once and taken by each call. All start from the same weights and
    points."""

    def __init__(self, step_of: Callable[[str], Sized], precision: str):
        self.wide = "float64" in precision
        with jax.enable_x64(self.wide):
            step = step_of(precision)
            self.batch, self.state = step.examples(), step.begun()
            self._take: Any = eqx.filter_jit(step.taken).lower(self.state, self.batch).compile()

    def __call__(self) -> Any:
        with jax.enable_x64(self.wide):
            self.state, *told = self._take(self.state, self.batch)
        return told


def measure(report: Report, rounds: int, precisions: Any, step_of: Callable[[str], Sized]) -> None:
    """Times steps of all precisions in turn."""
    with ThreadPoolExecutor(4) as pool:
        # A wide step needs most of a GPU's memory, so none runs beside another.
        steps = pool.map(partial(_Running, step_of), precisions)
        running = dict(zip(precisions, steps, strict=True))
    for precision, seconds in interleave(running, rounds=rounds, warmup=1).items():
        loss, iterations = running[precision]()
        last = {"seconds": seconds, "loss": float(loss), "iterations": int(iterations)}
        report.record("steps", precision=precision, **last)


# --- Which method is faster -----------------------------------------------------------------

SIZES = ((16, 400), (24, 300), (24, 700), (24, 1200), (32, 400), (32, 1100), (32, 2200), (50, 270))
"""Widths and points of Poisson's equation in two dimensions."""


def compare(report: Report, rounds: int, quick: bool) -> None:
    """Compares counted operations with processor seconds of steps whose first try was taken."""
    sizes = [{"width": width, "rows": rows} for width, rows in SIZES[: 1 if quick else None]]
    for size in report.missing("methods", sizes):
        width, points = size["width"], size["rows"]
        with jax.enable_x64(True):
            problem, key = Heat(2, width, 2, points), jax.random.key(0)
            model, batches = problem.network(key), problem.batches(key)
            told: dict[str, Any] = {}
            for method in ("primal", "dual"):
                options = {"method": method}
                seconds, count, memory = _step_of(options, problem, model, batches, rounds)
                told |= {method: seconds, f"{method}_bytes": memory, "parameters": count}
            optimizer = mpx.LevenbergMarquardt(problem.residuals, forward="float64")
            choice = optimizer.choice(model, batches)
        report.record("methods", **size, **told, operations=choice.operations, auto=choice.method)


def _step_of(options: Any, problem: Heat, model: Any, batches: Any, rounds: int) -> tuple:
    """Returns the fewest processor seconds of a step, the number of parameters, and the memory."""
    update, state = _ours(options, problem.residuals, model, batches)
    arrays, static = eqx.partition((model, state), eqx.is_array)

    def step(arrays, batches):
        return eqx.filter(update(*eqx.combine(arrays, static), batches), eqx.is_array)

    compiled = jax.jit(step).lower(arrays, batches).compile()
    memory: Any = compiled.memory_analysis()
    least = float("inf")
    for _ in range(rounds + 2):
        before, began = eqx.combine(arrays, static)[1].rejected, time.process_time()
        arrays = jax.block_until_ready(compiled(arrays, batches))
        spent = time.process_time() - began
        if eqx.combine(arrays, static)[1].rejected == before:
            least = min(least, spent)
    count = sum(x.size for x in jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array)))
    return least, count, memory.temp_size_in_bytes


# --- Which Jacobian is faster ---------------------------------------------------------------

WIDTHS, ROWS = (32, 64, 128, 224), 500
"""Widths of three hidden layers for Poisson's equation in three dimensions, and its points."""


def by_width(report: Report, rounds: int, quick: bool) -> None:
    """Measures processor seconds of dual steps by the precision of the Jacobian."""
    widths = WIDTHS[: 1 if quick else None]
    keys = [{"width": w, "jacobian": j} for w, j in itertools.product(widths, NARROW)]
    for key in report.missing("widths", keys):
        with jax.enable_x64(True):
            problem = Heat(3, key["width"], 3, ROWS)
            model, batches = problem.network(jax.random.key(0)), problem.batches(jax.random.key(0))
            options = {"method": "dual", "jacobian": key["jacobian"]}
            seconds, count, memory = _step_of(options, problem, model, batches, rounds)
        told = {"seconds": seconds, "parameters": count, "bytes": memory}
        report.record("widths", **key, rows=ROWS, **told)


# --- Narrow matrices ------------------------------------------------------------------------

REDRAW = 5


def narrow(report: Report, steps: int, seeds: list[int], names: list[str]) -> None:
    """Trains with a dual matrix of each precision."""
    for name, jacobian in itertools.product(names, NARROW):
        keys = ({"problem": name, "jacobian": jacobian, "steps": steps, "seed": s} for s in seeds)
        with jax.enable_x64(True):
            trainer = Trainer(SMALL[name], jacobian=jacobian)
            for key in report.missing("narrow", keys):
                report.record("narrow", **key, **trainer(key["seed"], steps, REDRAW))


# --- Points that stay -----------------------------------------------------------------------

DRAWS = (1, 5, 20, 0)
"""The steps from one draw of points to the next. With 0 they stay."""


def drawn(report: Report, steps: int, seeds: list[int], names: list[str]) -> None:
    """Trains networks of many more parameters than points, which stay or are drawn anew."""
    for name in names:
        keys = ({"problem": name, "redraw": n, "seed": s} for s in seeds for n in DRAWS)
        with jax.enable_x64(True):
            trainer = Trainer(SMALL[name])
            for key in report.missing("draws", keys):
                told = trainer(key["seed"], steps, key["redraw"] or steps)
                report.record("draws", **key, steps=steps, **told)


# --- A wide network -------------------------------------------------------------------------

SHARES = {500: 1 / 6, 1000: 1 / 6, 2000: 1 / 4, 4000: 5 / 12}
"""The shares of the time in which a wide network is trained at so many points."""


def wide(report: Report, seconds: int, seeds: list[int], quick: bool) -> None:
    """Trains a wide network of Burgers' equation for some seconds. Compilation does not count."""
    for key in report.missing("wide", ({"seconds": seconds, "seed": s} for s in seeds)):
        with jax.enable_x64(True):
            report.record("wide", **key, **_widely(key["seed"], seconds, quick), commit=commit())


def _widely(seed: int, seconds: int, quick: bool) -> dict[str, Any]:
    burgers = problems.load("burgers_1d")
    deep = dataclasses.replace(burgers.deep, width=20 if quick else WIDTH)
    key = jax.random.key(seed)
    model: Any = _deep.Network(deep, jnp.dtype("float64"), key=key)
    optimizer = mpx.LevenbergMarquardt(deep.residual, forward="float64", method="dual")
    state, update = optimizer.init(model), eqx.filter_jit(optimizer.update)
    high = jnp.asarray(deep.high, jnp.float64)
    steps, spent, end, curve = 0, 0.0, 0.0, []
    for points, share in SHARES.items():
        update(model, state, _deep.draw(deep, model, key, points, high))  # compiles
        end += share * seconds
        while spent < end:
            began = time.perf_counter()
            drawn = _deep.draw(deep, model, jax.random.fold_in(key, steps), points, high)
            model, state = jax.block_until_ready(update(model, state, drawn))
            steps, spent = steps + 1, spent + time.perf_counter() - began
            if steps % 10 == 0 or spent >= end:
                told = float(state.loss), float(errors_of(burgers, model)["u"])
                curve.append((steps, round(spent, 1), points, *told))
                print(*curve[-1], flush=True)
    arrays = jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))
    return {
        "parameters": sum(x.size for x in arrays),
        "steps": steps,
        "loss": curve[-1][3],
        "error": curve[-1][4],
        "curve": curve,
    }


# --- Many dampings at once ------------------------------------------------------------------

DAMPINGS = {
    "one at a time": lambda problem: Trainer(problem),
    "one at a time, no acceleration": lambda problem: Trainer(problem, acceleration=0.0),
    f"{TRIED} at once": lambda problem: Trainer(problem, Radii(problem.residuals)),
}


def tried(report: Report, steps: int, seeds: list[int], names: list[str]) -> None:
    """Compares dampings that are tried one by one with many on one eigendecomposition."""
    for name, (way, begun) in itertools.product(names, DAMPINGS.items()):
        keys = ({"problem": name, "dampings": way, "steps": steps, "seed": s} for s in seeds)
        with jax.enable_x64(True):
            trainer = begun(SMALL[name])
            for key in report.missing("dampings", keys):
                report.record("dampings", **key, **trainer(key["seed"], steps, REDRAW))


# --- The race of methods and rivals ---------------------------------------------------------

PRIMAL_MOST, DENSE_MOST = 3000, 1500  # parameters
OURS = {
    "primal": {"method": "primal"},
    "dual": {"method": "dual"},
    "dual-float32": {"method": "dual", "jacobian": "float32"},
    "dual-bfloat16": {"method": "dual", "jacobian": "bfloat16"},
    "low_rank": {"method": "low_rank"},
    "auto": {},
}
"""Options of `LevenbergMarquardt` with a float64 residual."""


def _ours(options: dict[str, Any], residuals: Any, model: Any, batches: Any) -> tuple[Any, Any]:
    """Returns a function that takes a step, and its first state."""
    optimizer = mpx.LevenbergMarquardt(residuals, forward="float64", **options)
    return optimizer.update, optimizer.init(model)


def race(
    report: Report, seconds: int, seeds: list[int], names: list[str], rivals: list[str], quick: bool
) -> None:
    """Lets methods and rivals train for some CPU seconds from the same weights and points."""
    keys = [
        {"problem": name, "seed": seed, "rival": rival}
        for seed, name, rival in itertools.product(seeds, names, rivals)
    ]
    for key in report.missing("race", keys):
        with jax.enable_x64(True):
            if (found := _raced(report, key, 1 if quick else seconds)) is not None:
                report.record("race", **key, commit=commit(), **found)


def _raced(report: Report, key: dict[str, Any], seconds: int) -> dict[str, Any] | None:
    problem, rival, seed = PROBLEMS[key["problem"]], key["rival"], jax.random.key(key["seed"])
    model: Any = problem.network(seed)
    count = sum(x.size for x in jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array)))
    dense = DENSE_MOST if rival in _rivals.DENSE else PRIMAL_MOST if rival == "primal" else count
    if count > dense:
        return None
    residuals, batches = problem.residuals, problem.batches(seed)
    begin = partial(_ours, OURS[rival]) if rival in OURS else _rivals.RIVALS[rival]
    try:
        update, state = begin(residuals, model, batches)
    except ModuleNotFoundError as error:
        report.note(f"Left out {rival}: {error}")
        return None
    arrays, static = eqx.partition((model, state), eqx.is_array)

    def step(arrays, batches):
        return eqx.filter(update(*eqx.combine(arrays, static), batches), eqx.is_array)

    loss = eqx.filter_jit(partial(_rivals.loss_of, residuals))
    compiled = jax.jit(step).lower(arrays, batches).compile()
    memory: Any = compiled.memory_analysis()
    steps, spent, curve, due = 0, 0.0, [], 0.0
    while spent < seconds:
        began = time.process_time()
        arrays = jax.block_until_ready(compiled(arrays, batches))
        spent, steps = spent + time.process_time() - began, steps + 1
        if spent >= due or spent >= seconds:
            model, _ = eqx.combine(arrays, static)
            told = float(loss(model, batches)), problem.error(model)
            curve.append((steps, round(spent, 3), *told))
            due = max(1.15 * spent, 0.1)
    rows = eqx.filter_eval_shape(partial(_rivals.values, residuals), model, batches)
    return {
        "parameters": count,
        "rows": rows.size,
        "version": _rivals.version_of(rival),
        "steps": steps,
        "cpu_seconds": spent,
        "loss": curve[-1][2],
        "error": curve[-1][3],
        "bytes": memory.temp_size_in_bytes + memory.output_size_in_bytes,
        "curve": curve,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--problems", nargs="+", help="by default all that have the recipe")
    parser.add_argument("--precision", nargs="+", default=list(PRECISIONS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300, help="a quarter of the recipe's")
    parser.add_argument("--target", choices=CHIPS, help="compile for this chip, and predict")
    parser.add_argument("--dual", action="store_true", help="that of the dual method, and wider")
    parser.add_argument("--time", type=int, help="time so many steps of a wide network")
    parser.add_argument("--race", type=int, help="CPU seconds of each method and rival")
    parser.add_argument("--methods", type=int, help="time so many steps by method and size")
    parser.add_argument("--widths", type=int, help="time so many dual steps by width and precision")
    parser.add_argument("--narrow", type=int, help="so many dual steps with narrow matrices")
    parser.add_argument("--wide", type=int, help="seconds for a wide network of Burgers' equation")
    parser.add_argument(
        "--draws", type=int, help="so many dual steps, points drawn more or less often"
    )
    parser.add_argument(
        "--dampings", type=int, help="so many steps, dampings one by one or at once"
    )
    parser.add_argument("--rivals", nargs="+", help="methods of the race, by default all")
    parser.add_argument("--resume", action="store_true", help="keep the trainings in the file")


def run(report: Report, args: argparse.Namespace) -> None:
    def begin(name: str, section: str) -> None:
        """Names the file, and keeps what a section of it has if that is asked for."""
        report.name = f"second_order-{name}"
        if args.resume:
            report.resume(section)

    if args.target or args.time:
        name, precisions = ("dual-", IN_DUAL) if args.dual else ("", COMPILED)
        step_of = partial(dual if args.dual else sized, quick=args.quick)
        if args.target:
            begin(f"{name}{args.target}", "steps")
            predict(report, args.target, precisions, partial(step_of, kind=_Untold))
        else:
            report.name = f"second_order-{name}steps"
            measure(report, args.time, precisions, step_of)
        return
    if args.methods:
        begin("methods", "methods")
        compare(report, args.methods, args.quick)
        return
    if args.widths:
        begin("widths", "widths")
        by_width(report, args.widths, args.quick)
        return
    for name, trains in {"narrow": narrow, "draws": drawn, "dampings": tried}.items():
        if steps := getattr(args, name):
            begin(name, name)
            problems_of = args.problems or list(SMALL)
            trains(report, steps, args.seeds, problems_of[: 1 if args.quick else None])
            return
    if args.wide:
        begin("wide", "wide")
        wide(report, args.wide, args.seeds, args.quick)
        return
    if args.race:
        begin("race", "race")
        names = args.problems or list(PROBLEMS)
        rivals = args.rivals or [*OURS, *_rivals.RIVALS]
        race(report, args.race, args.seeds, names[: 1 if args.quick else None], rivals, args.quick)
        return
    steps, points = 4 if args.quick else args.steps, _deep.POINTS
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
        outcome = _deep.DeepTrainer(problem, key["precision"], steps=steps)(key["seed"])
        found = {"title": problem.title, **outcome.record()}
        report.record("trainings", **key, **{n: x for n, x in found.items() if n not in key})

"""Burgers' equation by Levenberg–Marquardt, with residual and Jacobian in precisions of their own.

The problem is

    u_t + u u_x = ν u_xx    for −1 ≤ x ≤ 1 and 0 ≤ t ≤ 1,    ν = 0.01/π,

from −sin(πx), with a shock 0.01 wide in the end. A network of 921 parameters, in an ansatz that
meets initial and boundary values, takes damped Gauss–Newton steps: the residual decides where the
training ends, and the Jacobian only how it gets there. So the residual is float64 and the Jacobian
float32 unless asked otherwise. The relative error of seed 0 ends at 4.9e-6, after 500 steps that
take 102 s of one core. It moves as points are drawn anew: from step 380 on between that and 2.7e-5.

    python examples/second_order.py
    python examples/second_order.py --jacobian float64
    python examples/second_order.py --forward float32
    python examples/second_order.py --problem poisson           # a smooth solution
    python examples/second_order.py --problem poisson --optimizer lbfgs --jacobian bfloat16

With `--optimizer lbfgs` or `muon`, Optax's take the steps, with `forward=` of
`mpx.filter_value_and_grad`.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _command_line import file, parser, positive, progress_bar, run_main, stop_on_interrupt
from jaxtyping import Array, Float
from matplotlib.figure import Figure
from problems import burgers_1d
from rich.console import Console

import mpx_pde as mpx


PI = jnp.pi
REDRAWN = 10  # steps with the same points
CANDIDATES = 8  # for each point that is chosen
TOLD = 12  # moments of a training
OPTIMIZERS = ("lm", "lbfgs", "muon")
Point = Float[Array, "2"]


class Problem(NamedTuple):
    network: Callable[[Any, int, Any], Any]
    residual: Callable[[Any, Point], Float[Array, ""]]
    solution: Callable[[np.ndarray, np.ndarray], np.ndarray]
    low: tuple[float, float]
    high: tuple[float, float]
    width: int
    points: float  # for each parameter
    steps: dict[str, int]
    chosen: bool  # whether points are drawn again, by their residuals


class Result(NamedTuple):
    error: float
    loss: float
    seconds: float
    curve: list[tuple[int, float]]  # error after some of the steps
    model: Any


# --- Burgers' equation -------------------------------------------------------------------------


def burgers_network(key: Any, width: int, dtype: Any) -> mpx.nn.Ansatz:
    mlp = eqx.nn.MLP(2, "scalar", width, 3, jnp.tanh, dtype=dtype, key=key)
    start = lambda x: -jnp.sin(PI * x)
    return mpx.nn.Ansatz(mlp, lambda p, u: start(p[1]) + p[0] * (1 - p[1] ** 2) * u)


def burgers_residual(model: Any, point: Point) -> Float[Array, ""]:
    """Divided by √(1 + |u_x|): the points in the shock would drown all others."""
    d = mpx.partials(model, ["u", "u_t", "u_x", "u_xx"], coords="tx", outputs="u")(point)
    weight = jax.lax.stop_gradient(jax.lax.rsqrt(1 + jnp.abs(d["u_x"])))
    return weight * (d["u_t"] + d["u"] * d["u_x"] - burgers_1d.NU * d["u_xx"])


# --- Poisson's equation: Δu = −2π² sin(πx) sin(πy), 0 on the boundary of the square ------------


def poisson_network(key: Any, width: int, dtype: Any) -> mpx.nn.Ansatz:
    mlp = eqx.nn.MLP(2, "scalar", width, 2, jnp.tanh, dtype=dtype, key=key)
    first = lambda mlp: (mlp.layers[0].weight, mlp.layers[0].bias)
    # Wider over the square, where the units of the first layer would be almost linear.
    mlp = eqx.tree_at(first, mlp, [3 * x for x in first(mlp)])
    return mpx.nn.Ansatz(mlp, lambda point, u: (1 - point[0] ** 2) * (1 - point[1] ** 2) * u)


def poisson_residual(model: Any, point: Point) -> Float[Array, ""]:
    d = mpx.partials(model, ["u_xx", "u_yy"], coords="xy", outputs="u")(point)
    source = -2 * PI**2 * jnp.sin(PI * point[0]) * jnp.sin(PI * point[1])
    return (d["u_xx"] + d["u_yy"] - source) / 10


PROBLEMS = {
    "burgers": Problem(
        network=burgers_network,
        residual=burgers_residual,
        solution=burgers_1d.solution,
        low=(0, -1),
        high=(1, 1),
        width=20,
        points=5.0,
        steps={"lm": 500, "lbfgs": 3000, "muon": 6000},
        chosen=True,
    ),
    "poisson": Problem(
        network=poisson_network,
        residual=poisson_residual,
        solution=lambda x, y: np.sin(np.pi * x) * np.sin(np.pi * y),
        low=(-1, -1),
        high=(1, 1),
        width=22,
        points=1.5,
        steps={"lm": 240, "lbfgs": 1000, "muon": 3000},
        chosen=False,
    ),
}


# --- Points and errors -------------------------------------------------------------------------


def uniform(problem: Problem, key: Any, count: int, dtype: Any) -> Float[Array, "n 2"]:
    low, high = (jnp.array(x, dtype) for x in (problem.low, problem.high))
    return jax.random.uniform(key, (count, 2), dtype, minval=low, maxval=high)


@eqx.filter_jit
def draw(problem: Problem, model: Any, key: Any, count: int, dtype: Any) -> Float[Array, "n 2"]:
    """Points of the domain, those of a large residual more often where the problem asks for it."""
    if not problem.chosen:
        return uniform(problem, key, count, dtype)
    candidates = uniform(problem, key, CANDIDATES * count, dtype)
    size = jnp.abs(jax.vmap(problem.residual, (None, 0))(model, candidates))
    chance = 1 + size / jnp.mean(size)
    noise = jax.random.gumbel(jax.random.fold_in(key, 1), chance.shape, dtype)
    return candidates[jax.lax.top_k(jnp.log(chance) + noise, count)[1]]


def grid(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    (left, right), (low, high) = zip(problem.low, problem.high, strict=True)
    axes = np.linspace(left, right, 51), np.linspace(low, high, 257)
    first, second = np.meshgrid(*axes, indexing="ij")
    return first, second


def values(model: Any, at: tuple[np.ndarray, np.ndarray], dtype: Any) -> np.ndarray:
    points = jnp.asarray(np.stack(at, -1).reshape(-1, 2), dtype)
    return np.asarray(evaluated(model, points), np.float64).reshape(at[0].shape)


@eqx.filter_jit
def evaluated(model: Any, points: Float[Array, "n 2"]) -> Float[Array, " n"]:
    return jax.vmap(model)(points)


def error(problem: Problem, model: Any, dtype: Any) -> float:
    """Relative L2 error on a grid."""
    at = grid(problem)
    want = problem.solution(*at)
    return float(np.linalg.norm(values(model, at, dtype) - want) / np.linalg.norm(want))


# --- The trainings -----------------------------------------------------------------------------


def by_levenberg_marquardt(problem: Problem, model: Any, forward: str, jacobian: str) -> Callable:
    optimizer = mpx.LevenbergMarquardt(problem.residual, forward=forward, jacobian=jacobian)
    state = optimizer.init(model)
    update = eqx.filter_jit(optimizer.update)

    def step(at: Array) -> tuple[Any, Array]:
        nonlocal model, state
        model, state = update(model, state, at)
        return model, state.loss

    return step


def by_optax(name: str, problem: Problem, model: Any, forward: str, jacobian: str) -> Callable:
    def loss(model, at):
        return jnp.mean(jax.vmap(problem.residual, (None, 0))(model, at) ** 2)

    optimizer = optax.lbfgs() if name == "lbfgs" else optax.contrib.muon(3e-3)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    policy = f"params={forward},compute={jacobian},output={forward}"
    scaling = mpx.DynamicLossScaling() if jacobian == "float16" else mpx.NoOpLossScaling()

    options = {"policy": policy, "forward": forward, "use_mixed_precision": jacobian != forward}

    @eqx.filter_jit
    def update(model, state, scaling, at):
        differentiate = mpx.filter_value_and_grad(loss, scaling, **options)
        value, new, finite, grads = differentiate(model, at)
        extra = {}
        if name == "lbfgs":
            search = mpx.line_search_value(loss, new, **options)
            static = eqx.filter(model, eqx.is_inexact_array, inverse=True)
            whole = lambda params: search(eqx.combine(params, static), at)
            extra = {"value": value, "grad": grads, "value_fn": whole}
        model, state = mpx.optimizer_update(model, optimizer, state, grads, finite, **extra)
        return model, state, new, value

    def step(at: Array) -> tuple[Any, Array]:
        nonlocal model, state, scaling
        model, state, scaling, value = update(model, state, scaling, at)
        return model, value

    return step


def train(
    name: str = "burgers",
    optimizer: str = "lm",
    forward: str = "float64",
    jacobian: str | None = None,
    seed: int = 0,
    steps: int | None = None,
    width: int | None = None,
    follow: Callable[[int, float], bool] = lambda step, loss: False,
) -> Result:
    """Trains a network, and tells its error, its loss, and the time after compilation. `follow` is
    called after each step, and says whether to stop."""
    problem = PROBLEMS[name]
    jacobian = forward if jacobian is None else jacobian
    dtype = jnp.dtype(forward)
    keys = jax.random.split(jax.random.key(seed), 2)
    model = problem.network(keys[0], width or problem.width, dtype)
    parameters = sum(x.size for x in jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array)))
    count = int(problem.points * parameters)
    if optimizer == "lm":
        step = by_levenberg_marquardt(problem, model, forward, jacobian)
    else:
        step = by_optax(optimizer, problem, model, forward, jacobian)
    # A line search wants the same points throughout.
    redrawn = REDRAWN if problem.chosen and optimizer != "lbfgs" else None
    steps = problem.steps[optimizer] if steps is None else steps
    at, loss, started, curve = None, jnp.inf, time.perf_counter(), []
    for i in range(steps):
        if at is None or (redrawn and i % redrawn == 0):
            at = draw(problem, model, jax.random.fold_in(keys[1], i), count, dtype)
        model, loss = jax.block_until_ready(step(at))
        if i == 0:
            started = time.perf_counter()
        if (i + 1) % max(1, steps // TOLD) == 0:
            curve.append((i + 1, error(problem, model, dtype)))
        if follow(i + 1, float(loss)):
            break
    seconds = time.perf_counter() - started
    return Result(error(problem, model, dtype), float(loss), seconds, curve, model)


def picture(problem: Problem, result: Result, dtype: Any, path: Path) -> None:
    """The solution, the error of the network, and the error after some of the steps."""
    at = grid(problem)
    want = problem.solution(*at)
    wrong = np.log10(np.abs(values(result.model, at, dtype) - want) + 1e-16)
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for axis, field, options in (
        (left, want, {"cmap": "viridis"}),
        (middle, wrong, {"cmap": "magma", "vmin": wrong.max() - 4}),
    ):
        figure.colorbar(axis.pcolormesh(*at, field, **options), ax=axis)
    left.set(title="solution")
    middle.set(title="log10 |error|")
    right.semilogy(*zip(*result.curve, strict=True), "o-")
    right.set(title="relative L2 error", xlabel="step")
    figure.savefig(path, dpi=120)


def main(
    problem: str = "burgers",
    optimizer: str = "lm",
    forward: str = "float64",
    jacobian: str | None = None,
    seed: int = 0,
    steps: int | None = None,
    width: int | None = None,
    plot: Path | None = None,
) -> Result:
    """Trains with a progress bar, and draws the error to the file `plot`. Ctrl-C stops early."""
    jacobian = jacobian or "float32"
    console = Console()
    total = steps or PROBLEMS[problem].steps[optimizer]
    with jax.enable_x64(forward == "float64"), stop_on_interrupt() as stop:
        with progress_bar(console, len(problem)) as progress:
            task = progress.add_task(problem, total=total, loss="compiling")

            def follow(step: int, loss: float) -> bool:
                progress.update(task, completed=step, loss=f"loss {loss:.1e}")
                return stop()

            result = train(problem, optimizer, forward, jacobian, seed, total, width, follow)
        for step, found in result.curve:
            console.print(f"step {step:4}: relative L2 error {found:.2e}", highlight=False)
        console.print(
            f"error {result.error:.2e}, loss {result.loss:.2e}, {result.seconds:.0f} s",
            highlight=False,
        )
        if plot is not None:
            plot.parent.mkdir(parents=True, exist_ok=True)
            picture(PROBLEMS[problem], result, jnp.dtype(forward), plot)
            console.print(f"Picture: {plot}")
    return result


def arguments() -> argparse.ArgumentParser:
    options = parser(__doc__)
    options.add_argument("--problem", choices=tuple(PROBLEMS), default="burgers", help="to solve")
    options.add_argument("--optimizer", choices=OPTIMIZERS, default="lm", help="what takes steps")
    options.add_argument(
        "--forward", choices=("float32", "float64"), default="float64", help="of the residual"
    )
    options.add_argument(
        "--jacobian",
        choices=("float16", "bfloat16", "bfloat16_x3", "float32", "float64"),
        default="float32",
        help="of the Jacobian, or of the gradient",
    )
    options.add_argument("--seed", type=int, default=0, help="of weights and points")
    options.add_argument("--steps", type=positive, help="how many; by default enough to converge")
    options.add_argument(
        "--plot", type=file, default=Path("outputs/second_order.png"), help="picture of the error"
    )
    return options


if __name__ == "__main__":
    run_main(main, arguments())

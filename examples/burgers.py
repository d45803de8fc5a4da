"""Burgers' equation by a physics-informed network, in float32, float16 and bfloat16.

The problem (Raissi et al., 2019) is the viscous Burgers equation with ν = 0.01/π,

    u_t + u u_x = ν u_xx     for −1 ≤ x ≤ 1 and 0 ≤ t ≤ 1,
    u(0, x) = −sin(πx),      u(t, ±1) = 0,

whose sine wave steepens into a shock at x = 0, about 0.01 wide. One network is trained three
times by the same Optax loop, from the same seed and among the same random points, of which each
picks those where its own residual is large: in float32, with float16 and with bfloat16 matrix
products. Each is compared with the exact solution.

    python examples/burgers.py                            # all three
    python examples/burgers.py --quick                    # all three, under a minute
    python examples/burgers.py --precision float16 --seed 1

What to expect, from the same command on two CPU cores: a relative L2 error of about 2e-3 in
float32 and in float16, and slightly more in bfloat16, with no step skipped. Here the float16 run
takes longer than the float32 one and no less memory, since XLA converts to float32 and back on a
CPU; the speed and the memory are a matter for GPUs and TPUs. With `--quick` the errors are about
ten times as large, and scatter more between precisions.

The network that is evaluated is a running average of the float32 weights.
"""

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _burgers_exact import NU, exact_solution
from jaxtyping import Array, Float, Float32, PRNGKeyArray
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import mpx_pde as mpx


PRECISIONS = ("float32", "float16", "bfloat16")
STEPS, QUICK_STEPS = 15_000, 1_500
STEPS_PER_CALL = 100  # steps in one compiled call, and between two choices of points
BATCH = 512  # collocation points in a step
CANDIDATES = 8192  # points that a choice is made from
# At 2e-3 the three trainings stay close to each other; at 5e-3 a short one gets further, but
# rounding differences grow, and final errors scatter by 10 to 20% whatever the precision.
LEARNING_RATE, QUICK_LEARNING_RATE = 2e-3, 5e-3


# --- The network -----------------------------------------------------------------------------


class BurgersNetwork(eqx.Module):
    """u(t, x) = −sin(πx) + t (1 − x²) N(t, x), which meets the initial and boundary values.

    The coordinates and the first and last layers stay in float32, and so does all activation
    arithmetic: only the products of the hidden layers, nearly all of the work, are in half.
    """

    first: mpx.FullPrecision
    hidden: list[eqx.nn.Linear]
    last: mpx.FullPrecision

    def __init__(self, width: int = 32, depth: int = 4, *, key: PRNGKeyArray):
        first, last, *hidden = jax.random.split(key, depth + 1)
        self.first = mpx.FullPrecision(eqx.nn.Linear(2, width, key=first))
        self.hidden = [eqx.nn.Linear(width, width, key=k) for k in hidden]
        self.last = mpx.FullPrecision(eqx.nn.Linear(width, 1, key=last))

    def __call__(self, t: Float32[Array, ""], x: Float32[Array, ""]) -> Float32[Array, ""]:
        h = jnp.tanh(self.first(jnp.stack([2 * t - 1, x])))
        for layer in self.hidden:
            z = layer(h.astype(layer.weight.dtype))  # float16 where the weights are
            h = jnp.tanh(z.astype(jnp.float32))
        n = self.last(h)[0]
        return -jnp.sin(jnp.pi * x) + t * (1 - x**2) * n


# --- The equation ----------------------------------------------------------------------------


def residual(u: BurgersNetwork, point: Float32[Array, "2"]) -> Float32[Array, ""]:
    """u_t + u u_x − ν u_xx at one point, divided by √(1 + |u_x|).

    The derivatives are taken in forward mode. Without the weight, the points inside the shock,
    where every term is above 100, would drown all the others.
    """
    t, x = point
    one = jnp.ones_like(x)

    def u_and_u_x(x):
        return jax.jvp(lambda x: u(t, x), (x,), (one,))

    (value, u_x), (_, u_xx) = jax.jvp(u_and_u_x, (x,), (one,))
    _, u_t = jax.jvp(lambda t: u(t, x), (t,), (one,))
    weight = jax.lax.stop_gradient(jax.lax.rsqrt(1 + jnp.abs(u_x)))
    return weight * (u_t + value * u_x - NU * u_xx)


def loss(u: BurgersNetwork, points: Float32[Array, "batch 2"]) -> Float32[Array, ""]:
    residuals = jax.vmap(residual, in_axes=(None, 0))(u, points)
    return jnp.mean(residuals**2)


@jax.jit
def choose_points(u: BurgersNetwork, key: PRNGKeyArray) -> Float32[Array, "steps batch 2"]:
    """Points for the next steps: uniform candidates, chosen more often where the residual is large
    (residual-based adaptive distribution, Wu et al., 2023)."""
    candidate_key, choice_key = jax.random.split(key)
    low, high = jnp.array([0.0, -1.0]), jnp.array([1.0, 1.0])
    points = jax.random.uniform(candidate_key, (CANDIDATES, 2), minval=low, maxval=high)
    size = jnp.abs(jax.vmap(residual, in_axes=(None, 0))(u, points))
    density = size / jnp.mean(size) + 4
    return jax.random.choice(
        choice_key, points, (STEPS_PER_CALL, BATCH), p=density / jnp.sum(density)
    )


# --- The training loop -----------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """What one training came to. `loss` and `scale` have an entry for each step."""

    precision: str
    error: float  # relative L2 error against the exact solution
    skipped_steps: int
    final_scale: float
    ms_per_step: float
    temp_bytes: int  # scratch memory of the compiled steps
    loss: np.ndarray
    scale: np.ndarray
    solution: Float[np.ndarray, "t x"]


def train(
    precision: str, *, steps: int, learning_rate: float, seed: int, progress: Progress
) -> Result:
    """Trains one network with the products of its hidden layers in `precision`."""
    calls = math.ceil(steps / STEPS_PER_CALL)
    steps = calls * STEPS_PER_CALL
    model_key, key = jax.random.split(jax.random.key(seed))
    model = BurgersNetwork(key=model_key)
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, steps // 20, steps)
    optimizer = optax.adam(schedule, b2=0.99)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    scaling = mpx.DynamicLossScaling(2**15)
    average = model  # of the weights over the last tenth of the steps or so

    def step(state, points):
        model, opt_state, scaling, average = state
        value, scaling, grads_finite, grads = mpx.filter_value_and_grad(
            loss,
            scaling,
            use_mixed_precision=precision != "float32",
            policy=f"params=float32,compute={precision},output=float32",
            keep_full=(False, True),  # cast the network, not the collocation points
        )(model, points)
        model, opt_state = mpx.optimizer_update(model, optimizer, opt_state, grads, grads_finite)
        average = optax.incremental_update(model, average, 10 / steps)
        return (model, opt_state, scaling, average), (value, scaling.loss_scaling)

    state = (model, opt_state, scaling, average)
    task = progress.add_task(precision, total=steps, loss="compiling")
    run_steps = jax.jit(partial(jax.lax.scan, step))
    run_steps = run_steps.lower(state, choose_points(model, key)).compile()
    memory = run_steps.memory_analysis()
    losses, scales, seconds = [], [], 0.0
    for _ in range(calls):
        key, points_key = jax.random.split(key)
        points = jax.block_until_ready(choose_points(state[0], points_key))
        start = time.perf_counter()
        state, (values, step_scales) = jax.block_until_ready(run_steps(state, points))
        seconds += time.perf_counter() - start
        losses.append(np.asarray(values))
        scales.append(np.asarray(step_scales))
        progress.update(task, advance=STEPS_PER_CALL, loss=f"loss {losses[-1].mean():.1e}")

    _, _, scaling, average = state
    solution = evaluate(average)
    exact = exact_solution(*np.meshgrid(T, X, indexing="ij"))
    return Result(
        precision=precision,
        error=float(np.linalg.norm(solution - exact) / np.linalg.norm(exact)),
        skipped_steps=int(scaling.skipped_steps),
        final_scale=float(scaling.loss_scaling),
        ms_per_step=1000 * seconds / steps,
        temp_bytes=memory.temp_size_in_bytes if memory is not None else 0,
        loss=np.concatenate(losses),
        scale=np.concatenate(scales),
        solution=solution,
    )


# --- Results ---------------------------------------------------------------------------------


T, X = np.linspace(0, 1, 101), np.linspace(-1, 1, 257)


def evaluate(u: BurgersNetwork) -> Float[np.ndarray, "t x"]:
    """The network on the grid of `T` and `X`, with its float32 weights."""
    on_grid = jax.vmap(jax.vmap(u, in_axes=(None, 0)), in_axes=(0, None))
    return np.asarray(jax.jit(on_grid)(jnp.float32(T), jnp.float32(X)), np.float64)


def table(results: Sequence[Result]) -> Table:
    columns = ("precision", "rel. L2 error", "skipped", "scale", "ms/step", "temp MiB")
    out = Table(*columns, title="Burgers' equation")
    for r in results:
        scaled = r.precision != "float32"
        out.add_row(
            r.precision,
            f"{r.error:.2e}",
            str(r.skipped_steps) if scaled else "–",
            f"2^{math.log2(r.final_scale):.0f}" if scaled else "–",
            f"{r.ms_per_step:.2f}",
            f"{r.temp_bytes / 2**20:.2f}",
        )
    return out


def plot(results: Sequence[Result], path: Path) -> None:
    """Solution, pointwise error, and loss and scale over the steps."""
    exact = exact_solution(*np.meshgrid(T, X, indexing="ij"))
    figure = Figure(figsize=(3.2 * len(results) + 3.2, 6), layout="constrained")
    axes = figure.subplots(2, len(results) + 1, squeeze=False)
    colors = {p: f"C{i}" for i, p in enumerate(PRECISIONS)}
    for column, r in enumerate(results):
        top, bottom = axes[0, column], axes[1, column]
        image = top.pcolormesh(T, X, r.solution.T, cmap="RdBu_r", vmin=-1, vmax=1)
        top.set(title=f"{r.precision}: u(t, x)", xlabel="t", ylabel="x")
        error = np.log10(np.abs(r.solution - exact).T + 1e-12)
        error_image = bottom.pcolormesh(T, X, error, cmap="magma", vmin=-5, vmax=-1)
        bottom.set(title=f"error, relative L2 {r.error:.1e}", xlabel="t", ylabel="x")
        if column == len(results) - 1:
            figure.colorbar(image, ax=top)
            figure.colorbar(error_image, ax=bottom, label="log10 |error|")

    for r in results:
        steps = np.arange(0, len(r.loss), STEPS_PER_CALL)
        means = r.loss.reshape(-1, STEPS_PER_CALL).mean(axis=1)
        axes[0, -1].semilogy(steps, means, color=colors[r.precision], label=r.precision)
        if r.precision != "float32":
            axes[1, -1].semilogy(r.scale, base=2, color=colors[r.precision])
    axes[0, -1].set(title="loss", xlabel="step")
    axes[1, -1].set(title="loss scale", xlabel="step")
    axes[0, -1].legend()
    figure.savefig(path, dpi=120)


def main(
    precisions: Sequence[str] = PRECISIONS,
    *,
    steps: int | None = None,
    seed: int = 0,
    out: str | Path | None = "outputs/burgers",
    quick: bool = False,
) -> dict[str, Result]:
    """Trains in each precision, prints a table and draws `burgers.png` in the folder `out`.

    `steps` is rounded up to whole hundreds; `out=None` draws nothing.
    """
    if steps is None:
        steps = QUICK_STEPS if quick else STEPS
    if steps < 1:
        raise ValueError(f"`steps` must be at least 1, but got {steps}.")
    learning_rate = QUICK_LEARNING_RATE if quick else LEARNING_RATE
    console = Console()
    columns = (TextColumn("{task.description:>9}"), BarColumn(), MofNCompleteColumn())
    columns += (TextColumn("{task.fields[loss]}"), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        results = [
            train(p, steps=steps, learning_rate=learning_rate, seed=seed, progress=progress)
            for p in precisions
        ]
    console.print(table(results))
    if out is not None:
        path = Path(out) / "burgers.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        plot(results, path)
        console.print(f"Picture: {path}")
    return {r.precision: r for r in results}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Burgers' equation in mixed precision")
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--steps", type=int, help="rounded up to whole hundreds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="outputs/burgers", help="folder of the picture")
    parser.add_argument("--quick", action="store_true", help="under a minute, less accurate")
    args = parser.parse_args()
    main(args.precision, steps=args.steps, seed=args.seed, out=args.out, quick=args.quick)

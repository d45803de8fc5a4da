"""Burgers' equation by Levenberg–Marquardt, with separate precisions for residual and Jacobian.

The problem is

    u_t + u u_x = ν u_xx    for −1 ≤ x ≤ 1 and 0 ≤ t ≤ 1,    ν = 0.01/π,

from −sin(πx), with a shock 0.01 wide at the end. A small network, in an ansatz that meets initial
and boundary values, takes damped Gauss–Newton steps. The residual decides where the training ends,
the Jacobian only how it gets there. So by default the residual is float64 and the Jacobian float32.
The recipe is in `problems/_deep.py` and serves other problems too. A quarter of its 1,200 steps is
enough for 1e-5.

    python examples/second_order.py
    python examples/second_order.py --precision float64
    python examples/second_order.py --precision float32-bfloat16_x3 --problem kovasznay
"""

import argparse
from pathlib import Path

import jax
import numpy as np
from _command_line import file, parser, positive, progress_bar, run_main, stop_on_interrupt
from matplotlib.figure import Figure
from problems import load, names
from problems._deep import PRECISIONS, DeepOutcome, DeepTrainer
from problems._runner import reference_of, values_at
from rich.console import Console


def picture(trainer: DeepTrainer, outcome: DeepOutcome, path: Path) -> None:
    """Draws the first field, the error of the network, and the error over the steps."""
    points, want = reference_of(trainer.problem)
    with jax.enable_x64(trainer.forward == "float64"):
        got = values_at(trainer.model, points)
    axes = [np.unique(axis) for axis in points.T]
    as_grid = lambda x: x.reshape(len(points), -1)[:, 0].reshape([len(a) for a in axes])
    wrong = np.log10(np.abs(as_grid(got) - as_grid(want)) + 1e-16)
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for axis, field, options in (
        (left, as_grid(want), {"cmap": "viridis"}),
        (middle, wrong, {"cmap": "magma", "vmin": wrong.max() - 4}),
    ):
        figure.colorbar(axis.pcolormesh(*axes, field.T, **options), ax=axis)
    left.set(title="solution")
    middle.set(title="log10 |error|")
    steps, _, errors = zip(*outcome.curve, strict=True)
    right.semilogy(steps, errors, "o-")
    right.set(title="relative L2 error", xlabel="step")
    figure.savefig(path, dpi=120)


def main(
    problem: str = "burgers_1d",
    precision: str = "float64-float32",
    seed: int = 0,
    steps: int = 300,
    plot: Path | None = None,
) -> DeepOutcome:
    """Trains with a progress bar and draws the error to the file `plot`. Ctrl-C stops early."""
    console = Console()
    trainer = DeepTrainer(load(problem), precision, steps=steps)
    with stop_on_interrupt() as stop, progress_bar(console, len(problem)) as progress:
        task = progress.add_task(problem, total=trainer.steps, loss="compiling")

        def follow(step, state):
            progress.update(task, completed=step, loss=f"loss {float(state.loss):.1e}")
            return stop()

        outcome = trainer(seed, follow=follow)
    for step, seconds, error in outcome.curve:
        told = f"step {step:4}, {seconds:4.0f} s: relative L2 error {error:.2e}"
        console.print(told, highlight=False)
    if plot is not None and len(trainer.problem.coords) == 2 and trainer.problem.errors is None:
        plot.parent.mkdir(parents=True, exist_ok=True)
        picture(trainer, outcome, plot)
        console.print(f"Picture: {plot}")
    return outcome


def arguments() -> argparse.ArgumentParser:
    options = parser(__doc__)
    told = "what to solve, a NAME of `python -m examples.problems list`"
    options.add_argument(
        "--problem", choices=names(), default="burgers_1d", metavar="NAME", help=told
    )
    options.add_argument(
        "--precision",
        choices=tuple(PRECISIONS),
        default="float64-float32",
        metavar="PRECISION",
        help=f"precision of the residual and, after a hyphen, of its Jacobian: one of "
        f"{', '.join(PRECISIONS)}; by default float64-float32",
    )
    options.add_argument("--seed", type=int, default=0, help="seed of weights and points")
    options.add_argument("--steps", type=positive, default=300, help="number of steps")
    options.add_argument(
        "--plot", type=file, default=Path("outputs/second_order.png"), help="picture of the error"
    )
    return options


if __name__ == "__main__":
    run_main(main, arguments())

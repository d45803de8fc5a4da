"""What the physics-informed examples show of a training: a table and pictures."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure
from rich.box import SIMPLE
from rich.table import Table

import mpx_pde as mpx


def table(title: str, results: Sequence[Any]) -> Table:
    """A column for each result: errors, steps skipped (in all, and after the warm-up), the last
    scales, time and scratch memory."""
    rows: dict[str, list[str]] = {}
    for i, r in enumerate(results):
        told = {name: f"{error:.2e}" for name, error in r.errors.items()}
        if r.precision != "float32":
            # The first error, with the weights that the loss has seen in place of their masters.
            for name, error in [*r.errors_as_trained.items()][:1]:
                told[f"weights rounded: {name}"] = f"{error:.2e}"
            told["steps skipped"] = f"{int(r.skipped.sum())}"
            told["skipped late"] = f"{r.skipped_late}"
            told["loss scale"] = _power(r.scale[-1])
            told |= {f"scale of {n}": _power(s) for n, s in r.derivative_scales.items()}
        told["ms a step"] = f"{r.ms_per_step:.2f}"
        told["memory, MiB"] = f"{r.temp_bytes / 2**20:.2f}"
        for name, text in told.items():
            rows.setdefault(name, ["–"] * len(results))[i] = text
    out = Table(title=title, box=SIMPLE, padding=(0, 1, 0, 0))
    out.add_column(no_wrap=True)
    for r in results:
        out.add_column(r.label, justify="right", overflow="fold")
    last = ("ms a step", "memory, MiB")  # float32 has them, before what the others add
    for name in sorted(rows, key=lambda name: last.index(name) if name in last else -1):
        out.add_row(name, *rows[name])
    return out


def _power(scale: float) -> str:
    return f"2^{round(math.log2(scale))}"


def draw(problem: Any, results: Sequence[Any], folder: Path, *, every: int) -> list[Path]:
    """Writes the picture of the solutions and trainings, and for each half precision the dynamic
    range of its derivatives. There is telemetry of each `every` steps."""
    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(3.2 * max(len(results), 3), 9), layout="constrained")
    grid = figure.add_gridspec(2, 1, height_ratios=(2, 1))
    top, bottom = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
    problem.draw(top, results)
    draw_training(bottom, results, every)
    paths = [folder / f"{problem.name}.png"]
    figure.savefig(paths[0], dpi=120)
    for r in results:
        if r.history:
            steps = range(every, every * len(r.history) + 1, every)
            paths.append(folder / f"{problem.name}-{r.precision}-ranges.png")
            mpx.derivatives.plot(r.history, steps=steps).savefig(paths[-1], dpi=120)
    return paths


def draw_training(figure: Any, results: Sequence[Any], every: int) -> None:
    """Loss, loss scale and derivative scales over the steps."""
    loss, scale, derivative = figure.subplots(1, 3)
    for i, r in enumerate(results):
        n = len(r.loss) // every * every
        steps = np.arange(0, n, every)
        means = r.loss[:n].reshape(-1, every).mean(axis=1)
        loss.semilogy(steps, means, color=f"C{i}", label=r.label)
        if r.precision == "float32":
            continue
        scale.semilogy(r.scale, base=2, color=f"C{i}")
        if r.precision == "bfloat16":
            continue
        for name, style in zip(r.derivative_scales, ("-", "--", ":", "-.") * 9, strict=False):
            values = [float(h["scale"][name]) for h in r.history]
            steps = every * np.arange(1, len(values) + 1)
            derivative.semilogy(
                steps, values, style, base=2, color=f"C{i}", label=f"{r.label}, {name}"
            )
    loss.set(title="loss", xlabel="step")
    loss.legend(fontsize="small")
    scale.set(title="loss scale", xlabel="step")
    derivative.set(title="derivative scales", xlabel="step")
    if derivative.lines:
        derivative.legend(fontsize="small")


def draw_fields(
    figure: Any,
    results: Sequence[Any],
    fields: Sequence[Float[np.ndarray, "a b"]],
    reference: Float[np.ndarray, "a b"],
    grid: tuple[Float[np.ndarray, " a"], Float[np.ndarray, " b"]],
    *,
    names: tuple[str, str],
    field: str = "u",
) -> None:
    """One field of each result over two coordinates, and its error below."""
    axes = figure.subplots(2, len(results), squeeze=False)
    size = float(np.abs(reference).max())
    image = error_image = None
    for (top, bottom), r, values in zip(axes.T, results, fields, strict=True):
        image = top.pcolormesh(*grid, values.T, cmap="RdBu_r", vmin=-size, vmax=size)
        top.set(title=f"{r.label}: {field}", xlabel=names[0], ylabel=names[1])
        error = np.log10(np.abs(values - reference).T / size + 1e-12)
        error_image = bottom.pcolormesh(*grid, error, cmap="magma", vmin=-5, vmax=-1)
        bottom.set(title=f"error {r.error:.1e}", xlabel=names[0], ylabel=names[1])
    figure.colorbar(image, ax=axes[0, -1])
    figure.colorbar(error_image, ax=axes[1, -1], label="log10 of |error| over max |u|")

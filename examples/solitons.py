"""Two solitons by a physics-informed network: float32, mixed precision, and float16 by hand.

The problem is the Korteweg–de Vries equation,

    u_t + 6 u u_x + u_xxx = 0     for −10 ≤ x ≤ 10 and 0 ≤ t ≤ 3,

where a fast wave overtakes a slow one. The same loop trains one network three times, from the same
seed and on the same random points:

- `float32`: no half precision.
- `forward-float32-float16`: the mode that we recommend,
  `mpx.filter_value_and_grad(..., forward="float32")`. The loss is evaluated in float32. The
  backward pass, and what is stored for it, are float16.
- `naive-float16`: network and points cast to float16 by hand, with dynamic loss scaling.

    python examples/solitons.py                          # under three minutes on two cores
    python examples/solitons.py --quick
    python examples/solitons.py --precision float32 bfloat16 --seed 1

What to expect: the recommended mode ends near the error of float32, as another seed would. float16
by hand takes no step at all, because derivatives overflow in the forward pass, before there is a
loss to scale.

The equation and the network are in `problems/kdv.py`, the training loop is in
`problems/_runner.py`, and `Trainer.step` contains everything that mixed precision changes in it.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from _command_line import progress_bar, run_main, stop_on_interrupt, training_parser
from matplotlib.figure import Figure
from problems._runner import PRECISIONS, Outcome, Trainer, reference_of, values_at
from problems.kdv import PROBLEM
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

import mpx_pde as mpx


SHOWN = ("float32", "forward-float32-float16", "naive-float16")
STEPS, QUICK_STEPS = PROBLEM.steps, 600


@dataclasses.dataclass
class Training:
    """One training: its outcome, its network, and a log of steps, loss, time and scales after each
    compiled call."""

    precision: str
    log: list[tuple[int, float, float, dict[str, float]]] = dataclasses.field(default_factory=list)
    model: Any = None
    outcome: Outcome | None = None

    def run(self, steps: int, seed: int, progress: Any, stop: Any) -> None:
        task = progress.add_task(in_words(self.precision), total=steps, loss="compiling")

        def follow(taken: int, loss: float, scaling: Any) -> bool:
            done = self.log[-1][0] if self.log else 0
            self.log.append((done + taken, loss, time.perf_counter(), scales_of(scaling)))
            progress.update(task, advance=taken, loss=f"loss {loss:.1e}")
            return stop()

        trainer = Trainer(PROBLEM, self.precision, steps=steps)
        self.outcome = trainer(seed, follow=follow)
        self.model = trainer.model  # the running average of the float32 weights

    @property
    def ms_per_step(self) -> float:
        """The time per step, without the first call, which compiles."""
        (first, _, start, _), (last, _, end, _) = self.log[0], self.log[-1]
        return 1000 * (end - start) / max(last - first, 1)


def scales_of(scaling: Any) -> dict[str, float]:
    """Returns the loss scale and the derivative scales, by name."""
    if not isinstance(scaling, mpx.Scaling):
        return {"loss": float(scaling.loss_scaling)}
    loss: Any = scaling.loss
    found = {"loss": float(loss.loss_scaling)}
    if scaling.derivatives is not None:
        names, scales = scaling.derivatives.names, scaling.derivatives.scales
        found |= {name: float(s) for name, s in zip(names, scales, strict=True)}
    return found


def in_words(precision: str) -> str:
    """Returns the name of a precision in words, such as `float32 forward, float16 backward`."""
    kind, _, rest = precision.partition("-")
    if kind == "forward":
        forward, _, backward = rest.rpartition("-")
        return f"{forward} forward, {backward} backward"
    return {"naive": f"{rest} cast by hand", "autocast": f"{rest} by autocast"}.get(kind, precision)


def table(trainings: Sequence[Training]) -> Table:
    columns = ("precision", "error", "× float32", "skipped", "loss scale", "ms/step")
    out = Table(
        *columns, title=f"{PROBLEM.title}: relative L2 errors", box=SIMPLE, padding=(0, 1, 0, 0)
    )
    errors = {t.precision: t.outcome.error for t in trainings if t.outcome is not None}
    base = errors.get("float32")
    for t in trainings:
        assert t.outcome is not None
        mixed, error = PRECISIONS[t.precision].mixed, t.outcome.error
        out.add_row(
            in_words(t.precision),
            "none" if error is None else f"{error:.2e}",
            f"{error / base:.3g}" if error and base else "–",
            str(t.outcome.skipped) if mixed else "–",
            f"2^{np.log2(t.outcome.loss_scale):.0f}" if mixed else "–",
            f"{t.ms_per_step:.2f}",
        )
    return out


def on_a_gpu() -> str:
    """Describes a larger network in one line, from compilations recorded for an H100."""
    path = Path(__file__).parent.parent / "benchmarks" / "results" / "predicted-h100-cpu.json"
    if not path.exists():  # not run from a clone
        return ""
    steps = json.loads(path.read_text(encoding="utf-8"))["steps"]
    cavity = {s["rival"]: s for s in steps if s["problem"] == "cavity-512"}
    a, b = cavity["float32"], cavity["mpx_pde float16, forward bfloat16_x3"]
    return (
        f"On an H100 the cavity with 512 × 6 units and 65,536 points takes "
        f"{a['temp_bytes'] / 2**20:,.1f} MiB in float32 and {b['temp_bytes'] / 2**20:,.1f} MiB in "
        f"mixed precision (compiled), and {1e3 * a['seconds']:.2f} and {1e3 * b['seconds']:.2f} ms "
        "(predicted, not run)."
    )


def draw(trainings: Sequence[Training], path: Path) -> None:
    """Draws the error of each training, the losses, and the scales over the steps."""
    points, exact = reference_of(PROBLEM)
    t, x = (np.unique(points[:, i]) for i in (0, 1))
    shape = (len(t), len(x))
    figure = Figure(figsize=(4 * (len(trainings) + 1), 7), layout="constrained")
    rows = figure.add_gridspec(2, 2 * (len(trainings) + 1))
    axes = [figure.add_subplot(rows[0, 2 * i : 2 * i + 2]) for i in range(len(trainings) + 1)]
    fields: list[tuple[str, Any, Any]] = [("u(t, x)", exact.reshape(shape), {"cmap": "viridis"})]
    for training in trainings:
        u = values_at(training.model, points).reshape(shape)
        error = np.log10(np.abs(u - exact.reshape(shape)) + 1e-12)
        fields.append(
            (in_words(training.precision), error, {"cmap": "magma", "vmin": -5, "vmax": 0})
        )
    for axis, (title, values, options) in zip(axes, fields, strict=True):
        image = axis.pcolormesh(t, x, values.T, **options)
        axis.set(title=title, xlabel="t", ylabel="x")
        figure.colorbar(image, ax=axis, label="u" if axis is axes[0] else "log10 |error|")
    half = len(trainings) + 1
    losses, scales = figure.add_subplot(rows[1, :half]), figure.add_subplot(rows[1, half:])
    for training in trainings:
        steps = [step for step, *_ in training.log]
        words = in_words(training.precision)
        losses.semilogy(steps, [loss for _, loss, *_ in training.log], label=words)
        if PRECISIONS[training.precision].mixed:
            for name in training.log[0][-1]:
                found = [np.log2(scale[name]) for *_, scale in training.log]
                scales.step(steps, found, where="post", label=f"{words}: {name}")
    losses.set(title="loss", xlabel="step")
    below: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16)}
    losses.legend(**below, ncols=min(3, len(trainings)), fontsize="small")
    scales.set(title="log2 of the loss scale and of the derivative scales", xlabel="step")
    if scales.lines:
        scales.legend(**below, ncols=2, fontsize="small")
    figure.savefig(path, dpi=120)


def main(
    precisions: Sequence[str] = SHOWN,
    *,
    steps: int | None = None,
    seed: int = 0,
    out: str | Path | None = "outputs/solitons",
    quick: bool = False,
) -> dict[str, Training]:
    """Trains in each precision, prints a table and draws `solitons.png` in the folder `out`.

    `steps` is rounded up to whole hundreds; `out=None` draws nothing. After Ctrl-C, the table and
    the picture show what was trained by then.
    """
    steps = steps or (QUICK_STEPS if quick else STEPS)
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)  # fails now rather than after the training
    console = Console()
    trainings = [Training(precision) for precision in precisions]
    with stop_on_interrupt() as stop:
        with progress_bar(console, max(len(in_words(p)) for p in precisions)) as progress:
            for training in trainings:
                if not stop():
                    training.run(steps, seed, progress, stop)
        done = [t for t in trainings if t.outcome is not None]
        console.print(table(done))
        if jax.default_backend() == "cpu":
            console.print("A CPU computes halves in float32: these times say nothing about a GPU.")
        console.print(on_a_gpu(), highlight=False)
        if out is not None:
            draw(done, Path(out) / "solitons.png")
            console.print(f"Picture: {Path(out) / 'solitons.png'}")
    return {t.precision: t for t in done}


def arguments() -> argparse.ArgumentParser:
    default = f"by default {STEPS:,}, or {QUICK_STEPS:,} with --quick"
    return training_parser(
        __doc__,
        precisions=tuple(PRECISIONS),
        shown=SHOWN,
        steps=f"rounded up to whole hundreds; {default}",
        data="the points",
        out="outputs/solitons",
        quick="a short run, less accurate",
    )


if __name__ == "__main__":
    run_main(main, arguments())

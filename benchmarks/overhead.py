"""What do the wrappers cost? The step of each library against the same step written by hand.

The rivals train the same network with Adam (their steps are in `_steps.py`):

- `by hand`: casts, float32 loss times the scale, gradients unscaled in float32, the check for
  non-finite values, the select and the update of the scale, all spelled out;
- `mpx_pde`: `filter_value_and_grad`, `optimizer_update` and `DynamicLossScaling`;
- `jmp`: its policy, `DynamicLossScale`, `all_finite` and `select_tree`, as its README has them;
- `MPX` (mixed-precision-for-JAX): its `filter_value_and_grad` and `optimizer_update`;
- `float32`: the plain step, for reference; on a GPU at the highest precision, with TF32 beside it.

The first two are compared by what XLA made of them (operations, kernels, flops, bytes, memory), on
this CPU and, where the compilers are installed, for an H100 and a TPU v5e that need not be here;
these numbers repeat exactly. They differ by the loop in which `mpx_pde` takes a step that
overflowed again before the first has been taken; without it (`search=False`) they are the same. The
programs of jmp and MPX differ by design: neither caps the scale nor counts skipped steps, and MPX
casts outside of what is differentiated. How long steps take is told by `pinn_step`. With
`--check` the exit status is 1 if a count of `mpx_pde` differs from that of `by hand` by more than
1 %, or one of the two is traced twice.
"""

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from ._deviceless import TARGETS, Compiled, TargetUnavailable, compile_for, title
from ._measured import JaxStep
from ._report import Report
from ._steps import MAX_SCALE, UNSCALED, Task, alone, note_missing, rivals


TOLERANCE = 0.01


def regression(model, x, y):
    """Mean squared error of a regression."""
    prediction = jax.vmap(model)(x)
    return jnp.mean((prediction - y).astype(jnp.float32) ** 2)


def heat(model, points, source):
    """Mean squared residual of the heat equation u_t - 0.1 u_xx = source."""

    def residual(point, value):
        dt, dx = jnp.eye(2, dtype=point.dtype)
        u_t = jax.jvp(model, (point,), (dt,))[1]
        u_x = lambda p: jax.jvp(model, (p,), (dx,))[1]
        u_xx = jax.jvp(u_x, (point,), (dx,))[1]
        u_t, u_xx, value = (z.astype(jnp.float32) for z in (u_t, u_xx, value))
        return u_t - 0.1 * u_xx - value

    return jnp.mean(jax.vmap(residual)(points, source) ** 2)


class Problem(NamedTuple):
    """A network, its loss and the shapes of a batch."""

    name: str
    size: str
    loss: Callable
    in_size: int
    out_size: Any
    width: int
    points: int

    def task(self, dtype: str, **scale: Any) -> Task:
        """By all rivals; `scale` is that of their loss scaling."""
        key, x_key, y_key = jax.random.split(jax.random.key(0), 3)
        outs = 1 if self.out_size == "scalar" else self.out_size
        x = jax.random.uniform(x_key, (self.points, self.in_size))
        y = jnp.sin(x @ jax.random.normal(y_key, (self.in_size, outs)))
        batch = x, y[:, 0] if self.out_size == "scalar" else y
        network = partial(eqx.nn.MLP, self.in_size, self.out_size, self.width, 4, jnp.tanh)
        loss = alone(lambda model, batch: self.loss(model, *batch))
        return Task(
            f"{self.name} {self.size}",
            {"problem": self.name, "size": self.size},
            partial(network, key=key),
            loss,
            lambda: [batch],
            batch,
            rivals(loss, dtype, **scale),
        )


PROBLEMS = (
    Problem("MLP", "64 × 4, 1024 points", regression, 8, 8, 64, 1024),
    Problem("PINN", "64 × 4, 1024 points", heat, 2, "scalar", 64, 1024),
    Problem("MLP", "512 × 4, 4096 points", regression, 8, 8, 512, 4096),
    Problem("PINN", "256 × 4, 4096 points", heat, 2, "scalar", 256, 4096),
)


COUNTS = ("operations", "kernels", "flops", "bytes_accessed", "temp_bytes")
"""What is compared between the rivals."""


def counts(program: Compiled) -> dict[str, float | None]:
    def read(value: Any) -> Any:
        return value() if callable(value) else value

    return {name: read(getattr(program, name)) for name in COUNTS}


def ratio(ours: float | None, theirs: float | None) -> float | None:
    if ours is None or theirs is None:
        return None
    return 1.0 if ours == theirs else ours / theirs if theirs else float("inf")


def compare_programs(report: Report, problem: Problem, target: str, dtype: str) -> list[str]:
    """Compiles all rivals for a target; returns what is wrong."""
    task = problem.task(dtype)
    where = {**task.where, "target": target, "dtype": dtype}
    programs = {}
    for name, rival in task.rivals.items():
        args = task.step(rival), task.state(rival), task.batch
        programs[name] = compile_for(target, *args, donate=(0,))
        report.record("programs", **where, step=name, **counts(programs[name]))

    hand, ours = counts(programs["by hand"]), counts(programs["mpx_pde"])
    ratios = {key: ratio(ours[key], hand[key]) for key in hand}
    more = programs["mpx_pde"].opcodes()
    more.subtract(programs["by hand"].opcodes())
    report.record("ratios", **where, **ratios, more_operations={k: n for k, n in more.items() if n})
    return [
        f"{task.title}, {title(target)}: {key} {ours[key]:,} against {hand[key]:,}"
        for key, value in ratios.items()
        if value is not None and abs(value - 1) > TOLERANCE
    ]


def runners(task: Task) -> dict[str, JaxStep]:
    return {
        name: JaxStep(task, rival, task.batches(), ahead=False)
        for name, rival in task.rivals.items()
    }


def count_traces(report: Report, problem: Problem, dtype: str, steps: int) -> list[str]:
    """Runs many steps, with growth of the scale and overflow between them."""
    task = problem.task(dtype, scale=2.0**12, period=steps // 10)
    x, y = task.batch
    broken = jnp.full_like(y, jnp.inf)
    wrong = []
    for name, runner in runners(task).items():
        scales = [runner.scale]
        for i in range(steps):
            overflow = name not in UNSCALED and i % (steps // 3) == steps // 4
            runner((x, broken if overflow else y))
            scales.append(runner.scale)
        pairs = list(itertools.pairwise(scales))
        grown, shrunk = sum(a < b for a, b in pairs), sum(a > b for a, b in pairs)
        found = {"steps": steps, "grown": grown, "shrunk": shrunk, "traces": runner.traces}
        report.record("traces", **task.where, step=name, **found)
        if name not in ("by hand", "mpx_pde"):
            continue
        if runner.traces != 1:
            wrong.append(f"{problem.name}: {name} was traced {runner.traces} times")
        if not (grown and shrunk):
            wrong.append(f"{problem.name}: {name} saw {grown} growths and {shrunk} overflows")
    return wrong


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--targets",
        default="cpu,h100,v5e",
        help=f"what to compile for, out of {','.join(TARGETS)}; those without a compiler are left "
        "out (default: %(default)s)",
    )
    parser.add_argument("--dtype", default="float16", choices=tuple(MAX_SCALE))
    parser.add_argument("--check", action="store_true", help="fail when counts differ by over 1 %%")


def run(report: Report, args: argparse.Namespace) -> int:
    note_missing(report)
    problems = PROBLEMS[:2] if args.quick else PROBLEMS
    wrong = []
    for target in args.targets.split(","):
        try:
            for problem in problems:
                wrong += compare_programs(report, problem, target, args.dtype)
        except TargetUnavailable as e:
            report.note(f"{title(target)} is left out. {e}")
    if "ratios" not in report.sections:
        raise SystemExit(f"None of the targets {args.targets} has a compiler here.")
    for problem in PROBLEMS[:2]:
        wrong += count_traces(report, problem, args.dtype, 100 if args.quick else 1000)
    for text in wrong:
        report.note(f"Off by more than {TOLERANCE:.0%}: {text}")
    return 1 if args.check and wrong else 0

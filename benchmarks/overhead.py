"""What do the wrappers cost? The step of each library against the same step written by hand.

The rivals train the same network with Adam (their steps are in `_steps.py`):

- `by hand`: casts, float32 loss times the scale, gradients unscaled in float32, the check for
  non-finite values, the select and the update of the scale, all spelled out;
- `mpx_pde`: `filter_value_and_grad`, `optimizer_update` and `DynamicLossScaling`;
- `jmp`: its policy, `DynamicLossScale`, `all_finite` and `select_tree`, as its README has them;
- `MPX` (mixed-precision-for-JAX): its `filter_value_and_grad` and `optimizer_update`;
- `float32`: the plain step, for reference; on a GPU at the highest precision, with TF32 beside it.

The first two should compile to the same program. So they are compared by what XLA made of them
(operations, kernels, flops, bytes, memory), on this CPU and, where the compilers are installed,
for an H100 and a TPU v5e that need not be here; these numbers repeat exactly. The programs of jmp
and MPX differ by design: neither caps the scale nor counts skipped steps, and MPX casts outside
of what is differentiated. Times are only taken where the step really runs. With `--check` the exit
status is 1 if a count of `mpx_pde` differs from that of `by hand` by more than 1 %, or one of the
two is traced twice.
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
from ._report import Report, interleave
from ._steps import MAX_SCALE, UNSCALED, note_missing, optimizer, rivals


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

    def make(self) -> tuple[eqx.Module, jax.Array, jax.Array]:
        key, x_key, y_key = jax.random.split(jax.random.key(0), 3)
        model = eqx.nn.MLP(self.in_size, self.out_size, self.width, 4, jnp.tanh, key=key)
        outs = 1 if self.out_size == "scalar" else self.out_size
        x = jax.random.uniform(x_key, (self.points, self.in_size))
        y = jnp.sin(x @ jax.random.normal(y_key, (self.in_size, outs)))
        return model, x, y[:, 0] if self.out_size == "scalar" else y


PROBLEMS = (
    Problem("MLP", "64 × 4, 1024 points", regression, 8, 8, 64, 1024),
    Problem("PINN", "64 × 4, 1024 points", heat, 2, "scalar", 64, 1024),
    Problem("MLP", "512 × 4, 4096 points", regression, 8, 8, 512, 4096),
    Problem("PINN", "256 × 4, 4096 points", heat, 2, "scalar", 256, 4096),
)
GPU_PROBLEMS = (
    *PROBLEMS,
    Problem("MLP", "2048 × 4, 16384 points", regression, 8, 8, 2048, 16_384),
    Problem("PINN", "1024 × 4, 32768 points", heat, 2, "scalar", 1024, 32_768),
)


class Runner:
    """A jitted step with its own copy of the state, which counts how often it is traced."""

    def __init__(self, step, model, scaling):
        opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        arrays, static = eqx.partition((model, opt_state, scaling), eqx.is_array)
        # A copy of its own, because each step takes over the memory of the state before it.
        self.state = jax.tree.map(jnp.copy, arrays)
        self.traces = 0

        def traced(arrays, x, y):
            self.traces += 1
            *state, value = step(*eqx.combine(arrays, static), x, y)
            return eqx.filter(tuple(state), eqx.is_array), value

        self.step: Any = jax.jit(traced, donate_argnums=0)

    def __call__(self, x, y) -> jax.Array:
        self.state, value = self.step(self.state, x, y)
        return value

    @property
    def scale(self) -> float:
        return float(jax.tree.leaves(self.state[2])[0])


def counts(program: Compiled) -> dict[str, float | None]:
    """What is compared between the rivals."""
    return {
        "operations": program.operations(),
        "kernels": program.kernels(),
        "flops": program.flops,
        "bytes_accessed": program.bytes_accessed,
        "temp_bytes": program.temp_bytes,
    }


def ratio(ours: float | None, theirs: float | None) -> float | None:
    if ours is None or theirs is None:
        return None
    return 1.0 if ours == theirs else ours / theirs if theirs else float("inf")


def compare_programs(report: Report, problem: Problem, target: str, dtype: str) -> list[str]:
    """Compiles all rivals for a target; returns what is wrong."""
    model, x, y = problem.make()
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    where = {"problem": problem.name, "size": problem.size, "target": target, "dtype": dtype}
    programs = {}
    for name, (step, scaling) in rivals(problem.loss, dtype).items():
        args = (model, opt_state, scaling, x, y)
        programs[name] = compile_for(target, step, *args, donate=(0, 1, 2))
        report.record("programs", **where, step=name, **counts(programs[name]))

    hand, ours = counts(programs["by hand"]), counts(programs["mpx_pde"])
    ratios = {key: ratio(ours[key], hand[key]) for key in hand}
    more = programs["mpx_pde"].opcodes()
    more.subtract(programs["by hand"].opcodes())
    report.record("ratios", **where, **ratios, more_operations={k: n for k, n in more.items() if n})
    return [
        f"{problem.name} {problem.size}, {title(target)}: {key} {ours[key]:,} against {hand[key]:,}"
        for key, value in ratios.items()
        if value is not None and abs(value - 1) > TOLERANCE
    ]


def count_traces(report: Report, problem: Problem, dtype: str, steps: int) -> list[str]:
    """Runs many steps, with growth of the scale and overflow between them."""
    model, x, y = problem.make()
    broken = jnp.full_like(y, jnp.inf)
    wrong = []
    for name, (step, scaling) in rivals(
        problem.loss, dtype, scale=2.0**12, period=steps // 10
    ).items():
        runner = Runner(step, model, scaling)
        scales = [runner.scale]
        for i in range(steps):
            overflow = name not in UNSCALED and i % (steps // 3) == steps // 4
            runner(x, broken if overflow else y)
            scales.append(runner.scale)
        pairs = list(itertools.pairwise(scales))
        grown, shrunk = sum(a < b for a, b in pairs), sum(a > b for a, b in pairs)
        report.record(
            "traces",
            problem=problem.name,
            size=problem.size,
            step=name,
            steps=steps,
            grown=grown,
            shrunk=shrunk,
            traces=runner.traces,
        )
        if name not in ("by hand", "mpx_pde"):
            continue
        if runner.traces != 1:
            wrong.append(f"{problem.name}: {name} was traced {runner.traces} times")
        if not (grown and shrunk):
            wrong.append(f"{problem.name}: {name} saw {grown} growths and {shrunk} overflows")
    return wrong


def take_times(report: Report, problem: Problem, dtype: str, rounds: int, steps: int) -> None:
    """Seconds per step of all rivals in turn, and the loss each ends with."""
    model, x, y = problem.make()
    runners = {
        name: Runner(step, model, scaling)
        for name, (step, scaling) in rivals(problem.loss, dtype).items()
    }
    values = {}
    for name, runner in runners.items():
        for _ in range(steps):
            value = runner(x, y)
        values[name] = float(value)
    calls = max(1, 10 * 64 * 1024 // (problem.width * problem.points))
    times = interleave(
        {n: partial(r, x, y) for n, r in runners.items()}, rounds=rounds, calls=calls
    )
    for name in runners:
        report.record(
            "times",
            problem=problem.name,
            size=problem.size,
            dtype=name if name in UNSCALED else dtype,
            step=name,
            seconds=times[name],
            over_by_hand=times[name].median / times["by hand"].median,
            loss=values[name],
            loss_difference=abs(values[name] / values["by hand"] - 1),
            after_steps=steps,
        )


def print_tables(report: Report) -> None:
    """Prints what was recorded."""
    keys = ("operations", "kernels", "flops", "bytes_accessed", "temp_bytes")
    heads = ("operations", "kernels", "flops", "bytes accessed", "temp bytes")
    report.table(
        "Compiled programs",
        ("problem", "size", "target", "step", *heads),
        [
            (r["problem"], r["size"], title(r["target"]), r["step"], *(r[k] for k in keys))
            for r in report.sections["programs"]
        ],
    )
    report.table(
        "mpx_pde over by hand",
        ("problem", "size", "target", *heads),
        [
            (
                *(r["problem"], r["size"], title(r["target"])),
                *(None if r[k] is None else f"{r[k]:.4f}" for k in keys),
            )
            for r in report.sections["ratios"]
        ],
    )
    if "traces" in report.sections:
        names = ("problem", "size", "step", "steps", "grown", "shrunk", "traces")
        report.table(
            "Traces",
            names,
            [[r[k] for k in names] for r in report.sections["traces"]],
        )
    if "times" in report.sections:
        report.table(
            "Time of a step, and the loss it leads to",
            ("problem", "size", "step", "ms [quartiles]", "over by hand", "loss", "differs by"),
            [
                (
                    *(r["problem"], r["size"], r["step"]),
                    "{median:.3f} [{lower:.3f}, {upper:.3f}]".format(
                        **{k: 1e3 * r["seconds"][k] for k in ("median", "lower", "upper")}
                    ),
                    *(r["over_by_hand"], r["loss"], r["loss_difference"]),
                )
                for r in report.sections["times"]
            ],
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--targets",
        default="cpu,h100,v5e",
        help=f"what to compile for, out of {','.join(TARGETS)}; those without a compiler are left "
        "out (default: %(default)s)",
    )
    parser.add_argument("--dtype", default="float16", choices=tuple(MAX_SCALE))
    parser.add_argument("--check", action="store_true", help="fail when counts differ by over 1 %%")
    parser.add_argument("--no-time", action="store_true", help="compile and count only")


def run(report: Report, args: argparse.Namespace) -> int:
    note_missing(report)
    everything = GPU_PROBLEMS if jax.default_backend() == "gpu" else PROBLEMS
    problems = PROBLEMS[:2] if args.quick else everything
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
    if not args.no_time:
        rounds, steps = (5, 20) if args.quick else (20, 50)
        for problem in problems:
            take_times(report, problem, args.dtype, rounds, steps)
    print_tables(report)
    for text in wrong:
        report.note(f"Off by more than {TOLERANCE:.0%}: {text}")
    return 1 if args.check and wrong else 0

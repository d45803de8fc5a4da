"""How long do tracing and compiling take? Training steps in float32, by the library and its rivals.

The PINN is that of `foreign_step` with a 64 × 4 network. Its first step is plain float32 with
`jax.hessian`. The others use `partials`: in float32, with casts, with `forward="float32"` and with
autocast. An MLP, a Fourier neural operator and a vision transformer with 6 blocks follow, with the
steps of `_steps.py`.

Each stage of `jax.jit` is timed by itself, in seconds of wall clock: `trace` (Python to a jaxpr),
`lower` (to StableHLO) and `compile` (XLA). Times are medians over rounds in which the steps take
turns. All caches are cleared before each, and nothing is kept on disk. `loss_error` is the relative
difference between the first loss and that of float32.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from . import fno_step, foreign_step, overhead, vit_step
from ._report import Report, failure, timing
from ._steps import Rival, Task, by_library, in_float32, policy_of, rivals


STAGES = ("trace", "lower", "compile")


def tasks(quick: bool) -> dict[str, Task]:
    """Returns a task for each network, with its rivals, float32 first."""
    pinn = foreign_step.task("eqx.nn.MLP", 64, 1024)
    halves = {
        "mpx_pde": {},
        "mpx_pde, forward float32": {"forward": "float32"},
        "mpx_pde, autocast": {"autocast": True},
    }
    of_pinn = {
        "float32": pinn.rivals["float32"],
        "mpx_pde, partials in float32": pinn.rivals["mpx_pde float32"],
        **{name: foreign_step.by_library("float16", **given) for name, given in halves.items()},
    }
    size = fno_step.QUICK[0] if quick else fno_step.Size(32, 16, 24, 16)
    network = partial(fno_step.network, size, "dft")
    loss = partial(fno_step.loss, lambda model, x: jax.vmap(model)(x))
    fno = fno_step.task(size)._replace(model=network, loss=loss)
    transformer = replace(vit_step.vit.SIZES["small"], blocks=1 if quick else 6)
    found = {"PINN": pinn._replace(rivals=of_pinn)}
    others = {"MLP": overhead.PROBLEMS[0].task(), "FNO": fno, "ViT": vit_step.task(transformer)}
    for name, task in others.items():
        autocast = by_library(task.loss, policy=policy_of("float16"), autocast=True)
        first = {"float32": in_float32(task.loss), **rivals(task.loss)}
        found[name] = task._replace(rivals={**first, "mpx_pde, autocast": autocast})
    return found


def build(task: Task, rival: Rival) -> dict[str, float]:
    """Traces, lowers, compiles and runs a step once, from empty caches. Returns the seconds of each
    stage, and the loss."""
    step = task.step(rival)
    arrays, static = eqx.partition(task.state(rival), eqx.is_array)
    batch = jax.tree.map(jnp.asarray, task.batches()[0])
    found: dict[str, float] = {}

    def program(arrays, batch):
        state, value, _ = step(eqx.combine(arrays, static), batch)
        return eqx.filter(state, eqx.is_array), value

    def timed(stage: str, run: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        out = run()
        found[stage] = time.perf_counter() - start
        return out

    jax.clear_caches()
    traced = timed("trace", lambda: jax.jit(program).trace(arrays, batch))
    lowered = timed("lower", traced.lower)
    compiled = timed("compile", lowered.compile)
    return {**found, "loss": float(compiled(arrays, batch)[1])}


def measure(report: Report, problem: str, task: Task, rounds: int) -> None:
    there = task.there(report)
    builds: dict[str, Any] = {name: [] for name in there}
    for _ in range(rounds + 1):
        for name, rival in there.items():
            if not isinstance(builds[name], str):
                try:
                    builds[name].append(build(task, rival))
                except Exception as error:
                    builds[name] = failure(error)
    for name, found in builds.items():
        where = {"problem": problem, "step": name}
        if isinstance(found, str):
            report.record("builds", **where, failed=found)
            continue
        # The first round also imports modules and fills caches that cannot be cleared.
        times = {stage: timing([b[stage] for b in found[1:]]) for stage in STAGES}
        error = abs(found[-1]["loss"] / builds["float32"][-1]["loss"] - 1)
        report.record("builds", **where, **times, loss_error=error)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3)


def run(report: Report, args: argparse.Namespace) -> None:
    jax.config.update("jax_enable_compilation_cache", False)
    for problem, task in tasks(args.quick).items():
        measure(report, problem, task, 1 if args.quick else args.rounds)

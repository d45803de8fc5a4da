"""How long do tracing and compiling take? Training steps in float32, by the library and its rivals.

The PINN is that of `foreign_step` with a 64 × 4 network. Its first step is plain float32 with
`jax.hessian`, the second is the same with `forward="float32"`. The others use `partials`: in
float32, with casts, with `forward="float32"` and with autocast. A PINN by nested `jax.grad`, an
MLP, a Fourier neural operator and a vision transformer with 6 blocks follow, with the steps of
`_steps.py`.

They are compiled for this CPU and for an H100, if its compiler is here. XLA has no half products
for most CPUs: it compiles each with the conversions around it.

Each stage of `jax.jit` is timed by itself, in seconds of all processors together: `trace` (Python
to a jaxpr), `lower` (to StableHLO) and `compile` (XLA). Times are medians over rounds in which the
steps take turns. All caches are cleared before each, and nothing is kept on disk. `loss_error` is
the relative difference between the first loss and that of float32, on the CPU.
"""

import argparse
import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from . import fno_step, foreign_step, overhead, vit_step
from ._deviceless import CUBLAS, add_targets, stages_for, there
from ._report import Report, failure, timing
from ._steps import Rival, Task, by_library, in_float32, policy_of, rivals


STAGES = ("trace", "lower", "compile")


def tasks(quick: bool) -> dict[str, Task]:
    """Returns a task for each network, with its rivals, float32 first."""
    pinn = foreign_step.task("eqx.nn.MLP", 64, 1024)
    halves: dict[str, dict[str, Any]] = {
        "mpx_pde": {},
        "mpx_pde, forward float32": {"forward": "float32"},
        "mpx_pde, autocast": {"autocast": True},
    }
    of_pinn = {
        "float32": pinn.rivals["float32"],
        "mpx_pde, jax.hessian, forward float32": by_library(pinn.loss, forward="float32"),
        "mpx_pde, partials in float32": pinn.rivals["mpx_pde float32"],
        **{name: foreign_step.by_library("float16", **given) for name, given in halves.items()},
    }
    size = fno_step.QUICK[0] if quick else fno_step.Size(32, 16, 24, 16)
    network = partial(fno_step.network, size, "dft")
    loss = partial(fno_step.loss, lambda model, x: jax.vmap(model)(x))
    fno = fno_step.task(size)._replace(model=network, loss=loss)
    transformer = replace(vit_step.vit.SIZES["small"], blocks=1 if quick else 6)
    found = {"PINN": pinn._replace(rivals=of_pinn)}
    nested, mlp = overhead.PROBLEMS[1].task(), overhead.PROBLEMS[0].task()
    others = {"nested": nested, "MLP": mlp, "FNO": fno, "ViT": vit_step.task(transformer)}
    for name, task in others.items():
        first = {"float32": in_float32(task.loss), **rivals(task.loss)}
        ours = {
            step: by_library(task.loss, policy=policy_of("float16"), **given)
            for step, given in halves.items()
        }
        found[name] = task._replace(rivals={**first, **ours})
    return found


def build(target: str, task: Task, rival: Rival) -> dict[str, float]:
    """Traces, lowers and compiles a step once, from empty caches. Returns the processor seconds of
    each stage; on a CPU the step is also run, and its loss is returned."""
    found: dict[str, float] = {}

    def timed(stage: str, run: Callable, *args: Any) -> Any:
        start = time.process_time()
        out = run(*args)
        found[stage] = time.process_time() - start
        return out

    state, batch = task.state(rival), jax.tree.map(jnp.asarray, task.batches()[0])
    stages = stages_for(target, task.step(rival), state, batch)
    jax.clear_caches()
    traced = timed("trace", stages.trace)
    lowered = timed("lower", stages.lower, traced)
    compiled = timed("compile", stages.compile, lowered, CUBLAS)
    if target != "cpu":
        return found
    _, value, *_ = compiled(*eqx.filter((state, batch), eqx.is_array))
    return {**found, "loss": float(value)}


def measure(report: Report, target: str, problem: str, task: Task, rounds: int) -> None:
    steps = task.there(report)
    builds: dict[str, Any] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, rival in steps.items():
            if not isinstance(builds[name], str):
                try:
                    builds[name].append(build(target, task, rival))
                except Exception as error:
                    builds[name] = failure(error)
    for name, found in builds.items():
        where = {"target": target, "problem": problem, "step": name}
        if isinstance(found, str):
            report.record("builds", **where, failed=found)
            continue
        # The first round also imports modules and fills caches that cannot be cleared.
        times = {stage: timing([b[stage] for b in found[1:]]) for stage in STAGES}
        first = builds["float32"][-1]
        ran = "loss" in first
        error = {"loss_error": abs(found[-1]["loss"] / first["loss"] - 1)} if ran else {}
        report.record("builds", **where, **times, **error)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_targets(parser, "cpu,h100")
    parser.add_argument("--rounds", type=int, default=3)


def run(report: Report, args: argparse.Namespace) -> None:
    jax.config.update("jax_enable_compilation_cache", False)
    targets = there(report, args.targets.split(","))
    for target, (problem, task) in itertools.product(targets, tasks(args.quick).items()):
        measure(report, target, problem, task, 1 if args.quick else args.rounds)

"""How long do tracing and compiling take? Training steps by hand, by the library and by its rivals.

The same step of the same network, with Adam, in float32, with casts by hand, and by jmp, MPX
(mixed-precision-for-JAX) and `mpx_pde`, which casts or uses autocast (`_steps.py`); for the PINN
also with scaled derivatives. Four networks: the MLP and the PINN of `overhead`, the Fourier
neural operator of the examples and the vision transformer of `examples/vit.py` with 6 blocks.

Each stage of `jax.jit` is timed by itself: `trace` (Python to a jaxpr), `lower` (to StableHLO) and
`compile` (XLA), in seconds of wall clock, and tracing in those of the processor too; medians over
rounds in which the rivals take turns. All caches are cleared before each, and nothing is kept on
disk. `equations` are those of the jaxpr and of all jaxprs within it.

Error beside time: `loss_error` is the relative difference of the first loss, after no training, to
that in float32. MPX multiplies a float16 loss by its scale in float16, so one of 2 or more is
infinite at the scale of 2^15 that all start with.
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

import mpx_pde as mpx
from mpx_pde.interpret._jaxpr import jaxprs_in

from . import overhead
from ._examples import load_example
from ._report import Report, Timing
from ._rivals import failure
from ._steps import START, Loss, Rival, Task, alone, by_library, policy_of, rivals


TIMED = ("trace", "trace_processor", "lower", "compile")


def heat_by_partials(model, batch, *, derivatives):
    """The loss of `overhead.heat`, with its derivatives by `mpx_pde.partials`."""
    points, source = batch
    terms = mpx.partials(model, ["u", "u_t", "u_xx"], coords="tx", outputs="u", scaling=derivatives)
    d = jax.vmap(terms)(points)
    return jnp.mean((d["u_t"] - 0.1 * d["u_xx"] - source) ** 2)


def make_task(name: str, model: Any, loss: Loss, batch: Any) -> Task:
    return Task({"problem": name}, lambda: model, loss, lambda: [batch], batch, rivals(loss))


def fno(quick: bool) -> Task:
    losses = load_example("_operator_losses")
    layers, size = (1, 8) if quick else (4, 32)
    keys = jax.random.split(jax.random.key(0), 3)
    model = mpx.nn.FNO(1, 1, 24, layers, (size // 2, size // 2), key=keys[0])

    def loss(model, batch):
        inputs, outputs = batch
        return losses.relative_h1(jax.vmap(model)(inputs), outputs, periodic=True)

    inputs, outputs = (jax.random.normal(key, (16, 1, size, size)) for key in keys[1:])
    return make_task("FNO", model, alone(loss), (inputs, outputs))


def transformer(quick: bool) -> Task:
    vit = load_example("vit")
    size = replace(vit.SIZES["small"], blocks=1 if quick else 6)
    model_key, key = jax.random.split(jax.random.key(0))
    images = jax.random.normal(key, (size.batch, size.channels, size.image, size.image))
    batch = vit.Batch(images, jnp.arange(size.batch) % size.classes)
    return make_task("ViT", vit.ViT(size, key=model_key), alone(vit.loss), batch)


def with_ours(report: Report, task: Task) -> Task:
    """By float32 first, and by autocast and with scaled derivatives too."""
    policy, found = policy_of("float16"), task.there(report)
    found = {"float32": found["float32"], **found}
    found["mpx_pde, autocast"] = by_library(task.loss, policy=policy, autocast=True)
    if task.where["problem"] == "PINN":
        scaled = by_library(alone(heat_by_partials), policy=policy, keep_full=(False, True))
        derivatives = partial(mpx.DerivativeScaling.per_direction, "tx", order=2)
        found["mpx_pde, scaled derivatives"] = scaled._replace(
            scaling=lambda: mpx.Scaling(mpx.DynamicLossScaling(START), derivatives())
        )
    return task._replace(rivals=found)


def equations(jaxpr: Any) -> int:
    """How many equations a jaxpr has, those within its equations included."""
    return sum(1 + sum(map(equations, jaxprs_in(eqn))) for eqn in jaxpr.eqns)


def build(task: Task, rival: Rival) -> dict[str, float]:
    """Traces, lowers, compiles and runs a step once, from empty caches: what each stage took of
    wall clock and of the processor, and what came out."""
    step = task.step(rival)
    arrays, static = eqx.partition(task.state(rival), eqx.is_array)
    found: dict[str, float] = {}

    def program(arrays, batch):
        state, value, _ = step(eqx.combine(arrays, static), batch)
        return eqx.filter(state, eqx.is_array), value

    def timed(stage: str, run: Callable[[], Any]) -> Any:
        wall, processor = time.perf_counter(), time.process_time()
        out = run()
        found[stage] = time.perf_counter() - wall
        found[f"{stage}_processor"] = time.process_time() - processor
        return out

    jax.clear_caches()
    traced = timed("trace", lambda: jax.jit(program).trace(arrays, task.batch))
    lowered = timed("lower", traced.lower)
    compiled = timed("compile", lowered.compile)
    _, value = compiled(arrays, task.batch)
    return {**found, "equations": equations(traced.jaxpr.jaxpr), "loss": float(value)}


def builds_of(task: Task, rounds: int) -> dict[str, Any]:
    """What each rival took in each round after the first, or how it failed."""
    names = list(task.rivals)
    found: dict[str, Any] = {name: [] for name in names}
    for i in range(rounds + 1):
        start = i % len(names)
        for name in names[start:] + names[:start]:
            if isinstance(found[name], str):
                continue
            try:
                found[name].append(build(task, task.rivals[name]))
            except Exception as e:
                found[name] = failure(e)
    # The first round also imports, and fills caches that cannot be cleared.
    return {name: x if isinstance(x, str) else x[1:] for name, x in found.items()}


def measure(report: Report, task: Task, rounds: int) -> None:
    found = builds_of(task, rounds)
    hand = Timing.of([b["trace_processor"] for b in found["by hand"]])
    for name, builds in found.items():
        key = {"problem": task.where["problem"], "step": name}
        if isinstance(builds, str):
            report.record("builds", **key, failed=builds)
            continue
        last = builds[-1]
        times = {name: Timing.of([b[name] for b in builds]) for name in last if name in TIMED}
        report.record(
            "builds",
            **key,
            **times,
            trace_over_by_hand=times["trace_processor"].median / hand.median,
            equations=last["equations"],
            loss_error=abs(last["loss"] / found["float32"][-1]["loss"] - 1),
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3)


def run(report: Report, args: argparse.Namespace) -> None:
    jax.config.update("jax_enable_compilation_cache", False)
    small = [problem.task() for problem in overhead.PROBLEMS[:2]]
    for task in (*small, fno(args.quick), transformer(args.quick)):
        measure(report, with_ours(report, task), 1 if args.quick else args.rounds)

"""How much memory does a transformer train in? Float32, autocast and casts, for an H100.

The training step of `examples/vit.py` in the size of ViT-Base (batch 64, 224² images, AdamW,
donated state) is compiled for an H100, which need not be here. The program tells its temporary
memory and the dtypes of its products. Beside them is the processor time that JAX takes to trace
the step.
"""

import argparse
import dataclasses
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ._deviceless import CUBLAS, Compiled, TargetUnavailable, compile_for
from ._examples import load_example
from ._report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=2, help="of the clock")
    parser.add_argument("--precision", nargs="+", help="by default those of the example")


def batch_shapes(vit: Any, size: Any) -> Any:
    """A batch of shapes without values."""
    shape = (size.batch, size.channels, size.image, size.image)
    images = jax.ShapeDtypeStruct(shape, jnp.float32)
    return vit.Batch(images, jax.ShapeDtypeStruct((size.batch,), jnp.int32))


def steps(vit: Any, size: Any, precisions: Sequence[str]) -> tuple[dict[str, Callable], Any, Any]:
    """The step in each precision, and shapes of its state and its batch."""
    optimizer = vit.make_optimizer(size, 1000)
    state = eqx.filter_eval_shape(vit.initial_state, size, optimizer, jax.random.key(0))
    named = {p: partial(vit.training_step, p, optimizer) for p in precisions}
    return named, state, batch_shapes(vit, size)


def products_by_kind(program: Compiled) -> dict[str, int]:
    """How many products of each kind, such as `"forward f16 × f16"`."""
    out: Counter[str] = Counter()
    for product, count in program.products().items():
        out[f"{product.direction} {product.lhs} × {product.rhs}"] += count
    return dict(out)


def memory(report: Report, vit: Any, size: Any, precisions: Sequence[str]) -> None:
    named, state, batch = steps(vit, size, precisions)
    float32 = None
    for precision, step in named.items():
        try:
            program = compile_for("h100", step, state, batch, donate=(0,), compiler_options=CUBLAS)
        except TargetUnavailable as e:
            report.note(str(e))
            return
        float32 = float32 or program.temp_bytes  # the first
        report.record(
            "memory",
            precision=precision,
            blocks=size.blocks,
            batch=size.batch,
            temp_bytes=program.temp_bytes,
            over_float32=program.temp_bytes / float32,
            products=products_by_kind(program),
        )
        print(precision, f"{program.temp_bytes / 2**30:.2f} GiB", flush=True)


def tracing(report: Report, vit: Any, size: Any, precisions: Sequence[str], rounds: int) -> None:
    named, state, batch = steps(vit, size, precisions)
    seconds: dict[str, list[float]] = {precision: [] for precision in precisions}
    for _ in range(rounds):
        for precision, step in named.items():
            jax.clear_caches()
            start = time.process_time()
            eqx.filter_make_jaxpr(lambda state, batch, step=step: step(state, batch))(state, batch)
            seconds[precision].append(time.process_time() - start)
    medians = {precision: statistics.median(times) for precision, times in seconds.items()}
    plain = medians[precisions[0]]
    for precision, median in medians.items():
        report.record("tracing", precision=precision, seconds=median, over_float32=median / plain)


def run(report: Report, args: argparse.Namespace) -> int:
    vit = load_example("vit")
    size, precisions = vit.SIZES["base"], args.precision or vit.PRECISIONS
    if args.quick:
        size = dataclasses.replace(size, blocks=1, batch=8)
    tracing(report, vit, size, precisions, rounds=1 if args.quick else args.rounds)
    memory(report, vit, size, precisions)
    return 0

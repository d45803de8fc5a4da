"""What goes over the wire, and in which precision? Sharded steps compiled for 4 × H100 and TPU v5e.

The training steps of `examples/sharded.py` (lid-driven cavity, width 512) in its three layouts,
compiled for four devices that need not be here. Bytes are those of the results on one device.
"""

import argparse
from typing import Any

import equinox as eqx
import jax

from ._deviceless import Compiled, TargetUnavailable, compile_for, target_mesh, title
from ._examples import load_example
from ._report import Report


TARGETS = ("h100x4", "v5ex4")
STEPS = (
    ("data", "float32", None),
    ("data", "float16", None),
    ("full", "float32", None),
    ("full", "float16", None),
    ("full", "bfloat16", None),
    ("shard_map", "float16", None),
    ("shard_map", "float16", "bfloat16"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS)


def compiled(example: Any, target: str, batch: int, width: int, **options: Any) -> Compiled:
    mesh = target_mesh(target, (example.DEVICES,))
    run = example.Run(devices=mesh.devices.flat, batch=batch, width=width, start=False, **options)
    state = jax.eval_shape(run.init, jax.random.key(0))
    specs = jax.tree.map(
        lambda x: example.layout_of(x, mesh, options["layout"]).spec,
        eqx.filter(state, lambda x: isinstance(x, jax.ShapeDtypeStruct)),
    )
    return compile_for(target, run.raw_step, state, mesh=mesh, in_specs=(specs,), donate=(0,))


def run(report: Report, args: argparse.Namespace) -> int:
    example = load_example("sharded")
    batch, width = (1024, 64) if args.quick else (65_536, 512)
    rows = []
    for target in args.targets:
        for layout, precision, sums in STEPS:
            options = {"layout": layout, "precision": precision, "sum_dtype": sums}
            try:
                program = compiled(example, target, batch, width, **options)
            except TargetUnavailable as e:
                report.note(str(e))
                break
            traffic = {
                f"{kind} {dtype}": {"count": t.count, "bytes": t.bytes}
                for (kind, dtype), t in sorted(program.collectives().items())
            }
            report.record(
                "steps",
                target=title(target),
                **options,
                batch=batch,
                width=width,
                collectives=traffic,
                temp_bytes=program.temp_bytes,
                argument_bytes=program.argument_bytes,
            )
            sent = ", ".join(f"{k} {v['count']}× {v['bytes']:,} B" for k, v in traffic.items())
            rows.append([title(target), layout, precision, sums or "float32", sent])
    report.table("On one device", ["target", "layout", "precision", "sums", "sent"], rows)
    return 0

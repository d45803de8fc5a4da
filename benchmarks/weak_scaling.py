"""What goes over the wires and into memory from 1 to 8 H100s and up to 64 TPUs, at constant work?

The training steps of `examples/sharded.py` (lid-driven cavity and Darcy flow) are compiled in its
three layouts, with the same batch on each device, for devices that need not be present. With
perfect weak scaling, memory does not grow with the number of devices, and traffic does not grow
beyond that of a ring.

A record holds three sizes, all for one device and one step:

- `bytes`: the results of the collectives in the program;
- `wire_bytes`: the bytes that a device sends if the collectives are rings. This is a **model**: an
  all-reduce of s bytes sends 2 (n - 1)/n s; an all-gather into s bytes and a reduce-scatter of s
  bytes send (n - 1)/n s each. The actual traffic depends on the network of the hardware;
- `temp_bytes` and `argument_bytes`: memory, also relative to one device (`over_one`).

The 64 TPUs are the 16 hosts of a pod slice, the eight H100s are one host. The compiler for TPUs
takes about a minute for each of the cavity's programs. Nothing runs, so there are neither times nor
errors here; `tests/training/test_sharded.py` tests that all layouts train the same curve on 1 to 8
devices.

    python -m benchmarks weak_scaling --platform h100
    python -m benchmarks weak_scaling --platform v5e
"""

import argparse
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax

from ._deviceless import CUBLAS, Compiled, compile_for, target_mesh, there, title
from ._problems import load_example
from ._report import Report


TARGETS = {
    "h100": ("h100", "h100x4", "h100x8"),
    "v5e": ("v5e", "v5ex4", "v5ex16", "v5ex64"),
}
"""Targets by platform, the smallest first."""


SIZES = {"cavity": (16_384, 512), "fno": (16, 64)}
QUICK_SIZES = {"cavity": (256, 64), "fno": (2, 16)}
"""The rows of a batch on each device, and the width of the network."""
OPTIONS = ("layout", "precision", "sum_dtype")
STEPS = (
    *(("data", precision, None) for precision in ("float32", "float16")),
    *(("full", precision, None) for precision in ("float32", "float16", "bfloat16")),
    *(("shard_map", "float16", sums) for sums in (None, "bfloat16")),
)


def compiled(example: Any, target: str, batch: int, key: dict[str, Any]) -> Compiled:
    mesh = target_mesh(target, example.DEVICES)
    run = example.Run(**key, devices=mesh.devices.flat, batch=batch * mesh.size, start=False)
    state = jax.eval_shape(run.init, jax.random.key(0))
    shapes = eqx.filter(state, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    specs = jax.tree.map(lambda x: example.layout_of(x, mesh, key["layout"]).spec, shapes)
    options = CUBLAS if key["problem"] == "fno" else None
    given = {"mesh": mesh, "in_specs": (specs,), "donate": (0,), "compiler_options": options}
    return compile_for(target, run.raw_step, state, **given)


def ring_bytes(kind: str, size: int, devices: int) -> int:
    """Returns the bytes that each device of a ring sends; `size` is the result's bytes on it."""
    share = (devices - 1) / devices
    # The operand of a reduce-scatter is `devices` times as large.
    factors = {"all-reduce": 2 * share, "reduce-scatter": devices - 1, "collective-permute": 1}
    return round(factors.get(kind, share) * size)


def measure(
    report: Report, example: Any, key: dict[str, Any], batch: int, targets: Sequence[str]
) -> None:
    """Records one step on all targets, the first of which is one device."""
    programs = {target: compiled(example, target, batch, key) for target in targets}
    one = programs[targets[0]]
    for target, program in programs.items():
        devices = target_mesh(target).size
        traffic = {
            f"{kind} {dtype}": {**sent, "wire_bytes": ring_bytes(kind, sent["bytes"], devices)}
            for (kind, dtype), sent in sorted(program.collectives().items())
        }
        where = {"target": title(target), "devices": devices, "batch": batch * devices}
        temp, arguments = program.temp_bytes, program.argument_bytes
        memory = {"temp_bytes": temp, "temp_over_one": temp / one.temp_bytes if temp else None}
        memory |= {"argument_bytes": arguments}
        memory["argument_over_one"] = arguments / one.argument_bytes
        report.record(
            "steps",
            **{**key, **where, "collectives": traffic},
            wire_bytes=sum(t["wire_bytes"] for t in traffic.values()),
            **memory,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--platform", choices=TARGETS, default="h100")
    parser.add_argument("--problem", nargs="+", choices=tuple(SIZES), default=tuple(SIZES))
    parser.add_argument("--resume", action="store_true", help="keep the programs in the file")


def run(report: Report, args: argparse.Namespace) -> None:
    report.name = f"weak_scaling-{args.platform}"
    example = load_example("sharded")
    targets = there(report, TARGETS[args.platform])
    sizes = QUICK_SIZES if args.quick else SIZES
    if args.resume:
        report.resume("steps", same_code=True)
    keys = (
        {"problem": problem, "width": sizes[problem][1], **dict(zip(OPTIONS, step, strict=True))}
        for problem in args.problem
        for step in STEPS
    )
    for key in report.missing("steps", keys):
        measure(report, example, key, sizes[key["problem"]][0], targets)

"""What goes over the wires and into memory from 1 to 8 H100s and up to 64 TPUs, at constant work?

The training steps of `examples/sharded.py` (lid-driven cavity and Darcy flow) in its three
layouts, with the same batch on each device, compiled for devices that need not be here. Perfect
weak scaling is memory that does not grow with the number of devices, and traffic that does not
grow beyond that of a ring.

Three sizes of what is sent stand in a record, all for one device and one step:

- `bytes`: the results of the collectives, as the program has them;
- `wire_bytes`: what a device sends then, if the collectives are rings. This is a **model**: an
  all-reduce of s bytes sends 2 (n - 1)/n s, an all-gather into s bytes (n - 1)/n s, and so does a
  reduce-scatter of s bytes. What the hardware really does depends on its network;
- `temp_bytes` and `argument_bytes`: memory, also relative to one device (`over_one`).

The 64 TPUs are 16 hosts of a pod slice, the eight H100s one host; the compiler for TPUs takes
about a minute for each of the cavity's programs, so what is done is written, and `--resume` goes on
from the file if that is of the same code. Nothing runs, so there are neither times nor
errors here: that all layouts train the same curve on 1 to 8 devices is what
`tests/test_sharded.py` tests.

    python -m benchmarks weak_scaling --platform h100
    python -m benchmarks weak_scaling --platform v5e
"""

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax

from ._deviceless import CUBLAS, Compiled, compile_for, target_mesh, there, title
from ._examples import load_example
from ._report import Report


TARGETS = {
    "h100": ("h100", "h100x4", "h100x8"),
    "v5e": ("v5e", "v5ex4", "v5ex16", "v5ex64"),
}
"""By platform, the smallest first."""


class Size(NamedTuple):
    """The rows of a batch on each device, and the width of the network."""

    batch: int
    width: int


SIZES = {"cavity": Size(16_384, 512), "fno": Size(16, 64)}
QUICK_SIZES = {"cavity": Size(256, 64), "fno": Size(2, 16)}
STEPS = (
    ("data", "float32", None),
    ("data", "float16", None),
    ("full", "float32", None),
    ("full", "float16", None),
    ("full", "bfloat16", None),
    ("shard_map", "float16", None),
    ("shard_map", "float16", "bfloat16"),
)


def compiled(example: Any, problem: str, target: str, size: Size, **options: Any) -> Compiled:
    mesh = target_mesh(target, (example.DEVICES,))
    run = example.Run(
        problem,
        devices=mesh.devices.flat,
        batch=size.batch * mesh.size,
        width=size.width,
        start=False,
        **options,
    )
    state = jax.eval_shape(run.init, jax.random.key(0))
    specs = jax.tree.map(
        lambda x: example.layout_of(x, mesh, options["layout"]).spec,
        eqx.filter(state, lambda x: isinstance(x, jax.ShapeDtypeStruct)),
    )
    return compile_for(
        target,
        run.raw_step,
        state,
        mesh=mesh,
        in_specs=(specs,),
        donate=(0,),
        compiler_options=CUBLAS if problem == "fno" else None,
    )


def ring_bytes(kind: str, size: int, devices: int) -> float:
    """What each device of a ring sends in a collective whose result on it has `size` bytes."""
    others = devices - 1
    return {
        "all-reduce": 2 * others / devices * size,
        "all-gather": others / devices * size,
        "all-to-all": others / devices * size,
        "reduce-scatter": others * size,  # of an operand that is `devices` times as large
        "collective-permute": size,
    }[kind]


def over(size: int, one: int | None) -> float | None:
    return size / one if one else None


def measure(
    report: Report, example: Any, problem: str, size: Size, targets: Sequence[str], options: Any
) -> None:
    """One step on all targets, the smallest first."""
    base: Compiled | None = None  # the program for one device
    for target in targets:
        program = compiled(example, problem, target, size, **options)
        mesh = target_mesh(target)
        if mesh.size == 1:
            base = program
        traffic = {
            f"{kind} {dtype}": {
                "count": t.count,
                "bytes": t.bytes,
                "wire_bytes": round(ring_bytes(kind, t.bytes, mesh.size)),
            }
            for (kind, dtype), t in sorted(program.collectives().items())
        }
        report.record(
            "steps",
            problem=problem,
            target=title(target),
            devices=mesh.size,
            **options,
            batch=size.batch * mesh.size,
            width=size.width,
            collectives=traffic,
            wire_bytes=sum(t["wire_bytes"] for t in traffic.values()),
            temp_bytes=program.temp_bytes,
            temp_over_one=over(program.temp_bytes, base and base.temp_bytes),
            argument_bytes=program.argument_bytes,
            argument_over_one=over(program.argument_bytes, base and base.argument_bytes),
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--platform", choices=TARGETS, default="h100")
    parser.add_argument("--problem", nargs="+", choices=tuple(SIZES), default=tuple(SIZES))
    parser.add_argument("--resume", action="store_true", help="keep the programs in the file")


def run(report: Report, args: argparse.Namespace) -> int:
    report.name = f"weak_scaling-{args.platform}"
    example = load_example("sharded")
    targets = there(report, TARGETS[args.platform])
    sizes = QUICK_SIZES if args.quick else SIZES
    if args.resume:
        report.resume(args.out, "steps", same_code=True)
    for problem in args.problem:
        for layout, precision, sums in STEPS:
            options = {"layout": layout, "precision": precision, "sum_dtype": sums}
            if report.has("steps", problem=problem, width=sizes[problem].width, **options):
                continue
            measure(report, example, problem, sizes[problem], targets, options)
            report.save(args.out)
    return 0

"""How much memory does a cavity step take on an H100? Float32 against half, by what propagates.

The step is that of a large physics-informed network for steady Navier–Stokes in two dimensions: a
`CoordinateMLP` of 6 × 512, 65,536 points, the fields u, v, p with their first and second
derivatives, and the gradient of the mean squared residuals with respect to the parameters.

- `propagated`: `partials` of the network, which carries value and derivatives through its layers;
- `nested jvp`: the same by JAX's own nested forward mode.

The float32 step is the same code with `use_mixed_precision=False`. The programs are compiled for an
H100, which need not be there; temporary memory repeats to the byte.
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp

import mpx_pde as mpx

from ._cavity import gradient, residuals
from ._deviceless import TARGETS, TargetUnavailable, compile_for
from ._report import Report


PRECISIONS = ("float32", "float16", "bfloat16")
MARK = 0.62
"""What the step in half may take of the float32 one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", default="h100", choices=TARGETS)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--points", type=int, default=65_536)
    parser.add_argument("--check", action="store_true", help=f"fail above {MARK} of float32")


def run(report: Report, args: argparse.Namespace) -> int:
    width, depth, count = args.width, args.depth, args.points
    if args.quick:
        width, depth, count = 64, 3, 4096
    model = mpx.nn.CoordinateMLP(2, 3, width, depth, key=jax.random.key(0))
    scaling = mpx.Scaling(derivatives=mpx.DerivativeScaling.per_direction("xy", order=2))
    points = jax.ShapeDtypeStruct((count, 2), jnp.float32)
    missed = False
    for name, propagate in {"propagated": True, "nested jvp": False}.items():
        base = None
        for precision in PRECISIONS:
            step = gradient(partial(residuals, propagate=propagate), precision)
            try:
                program = compile_for(args.target, step, model, scaling, points)
            except TargetUnavailable as error:
                raise SystemExit(str(error)) from error
            base = base or program.temp_bytes
            record = report.record(
                "memory",
                derivatives=name,
                precision=precision,
                target=args.target,
                width=width,
                depth=depth,
                points=count,
                temp_bytes=program.temp_bytes,
                over_float32=program.temp_bytes / base,
                kernels=program.kernels(),
            )
            missed |= propagate and precision != "float32" and record["over_float32"] > MARK
    return int(args.check and missed)

"""How does the cost of a step grow with points, width, depth and order?

The gradient of the cavity's residuals (`_cavity.py`) is compiled, not run:

- `float32, nested`: nested `jax.jvp` of a plain function;
- `float16, naive`: the same with weights and points cast to half;
- `float32`, `float16`: `partials` of a `CoordinateMLP`, which carries derivatives through its
  layers.

One size at a time departs from the base. By derivative order, it is the gradient of one output's
derivatives in x up to that order instead, at the base size; above order 2, a `CoordinateMLP` is
differentiated like any other function.

Each record has what the target tells: an H100's compiler temporary memory and kernels, a CPU's and
a TPU's flops and bytes accessed as well. Everything repeats to the byte, and no hardware is needed;
half precision is emulated on a CPU, where its numbers say nothing of other targets. The compiler
for a TPU takes a minute or more for each of these programs, of which there are 44:

    JAX_PLATFORMS=cpu python -m benchmarks growth --targets v5e
"""

import argparse
import itertools
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import mpx_pde as mpx

from ._cavity import coordinate_mlp, initial_layers, nested_loss, network, residuals
from ._deviceless import Compiled, add_targets, compile_for, there
from ._report import Report


SWEEPS = {
    "points": [4_096, 16_384, 65_536],
    "width": [128, 256, 512],
    "depth": [3, 6, 12],
    "order": [1, 2, 3, 4],
}
QUICK = {"points": [64, 256], "width": [16, 32], "depth": [2, 3], "order": [1, 2]}


WAYS = {
    "float32, nested": ("float32", False),
    "float16, naive": ("float16", False),
    "float32": ("float32", True),
    "float16": ("float16", True),
}
"""The precision, and whether a `CoordinateMLP` carries the derivatives."""


class Case(NamedTuple):
    """A size; `order` is that of `chain`, and None for the cavity."""

    points: int
    width: int
    depth: int
    order: int | None = None


def chain(carried: bool, model: Any, points: Any, *, order: int, derivatives: Any = None) -> Any:
    """The mean squared derivatives of one output in x, up to an order."""
    if carried:
        names = ["u_" + "x" * k for k in range(1, order + 1)]
        terms = mpx.partials(model, names, coords="xy", outputs="uvp", scaling=derivatives)
        return sum(jnp.mean(value**2) for value in jax.vmap(terms)(points).values())
    fun, total = lambda p: network(model, p)[0].astype(jnp.float32), 0.0
    for _ in range(order):
        fun = partial(slope, fun)
        total = total + jnp.mean(jax.vmap(fun)(points) ** 2)
    return total


def slope(fun: Any, point: Any) -> Any:
    """The derivative in x."""
    return jax.jvp(fun, (point,), (jnp.array([1.0, 0.0], point.dtype),))[1]


@cache
def program(target: str, precision: str, carried: bool, case: Case) -> Compiled:
    """The gradient of the loss, compiled."""
    model: Any = initial_layers(case.width, case.depth)
    scaling: Any = mpx.DynamicLossScaling()
    loss = residuals if carried else partial(nested_loss, order=2)
    if case.order is not None:
        loss = partial(chain, carried, order=case.order)
    if carried:
        order = max(2, case.order or 0)
        scaling = mpx.Scaling(scaling, mpx.DerivativeScaling.per_direction("xy", order=order))
        model = coordinate_mlp(model)
    options = {
        "use_mixed_precision": precision != "float32",
        "policy": f"params=float32,compute={precision},output=float32",
        "keep_full": (False, carried),
    }

    def gradient(model, scaling, points):
        return mpx.filter_value_and_grad(loss, scaling, **options)(model, points)

    points = jax.ShapeDtypeStruct((case.points, 2), jnp.float32)
    return compile_for(target, gradient, model, scaling, points)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_targets(parser, "cpu,h100")


def run(report: Report, args: argparse.Namespace) -> None:
    sweeps = QUICK if args.quick else SWEEPS
    base = Case(**{name: sweeps[name][1] for name in ("points", "width", "depth")})
    for target in there(report, args.targets.split(",")):
        for sweep, (name, way) in itertools.product(sweeps, WAYS.items()):
            for size in sweeps[sweep]:
                case = base._replace(**{sweep: size})
                where = {"target": target, "sweep": sweep, "way": name, **case._asdict()}
                report.record("costs", **where, **program(target, *way, case).costs())

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
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import mpx_pde as mpx

from ._cavity import coordinate_mlp, gradient, initial_layers, network, residuals
from ._deviceless import TARGETS, Compiled, compile_for, there
from ._pinn_steps import nested_loss
from ._report import Report


SWEEPS = {
    "points": [4_096, 16_384, 65_536],
    "width": [128, 256, 512],
    "depth": [3, 6, 12],
    "order": [1, 2, 3, 4],
}
QUICK = {"points": [64, 256], "width": [16, 32], "depth": [2, 3], "order": [1, 2]}


class Case(NamedTuple):
    """A size; `order` is that of `chain`, and None for the cavity."""

    points: int
    width: int
    depth: int
    order: int | None = None


class Way(NamedTuple):
    """How derivatives are taken, and in which precision."""

    precision: str
    propagated: bool


WAYS = {
    "float32, nested": Way("float32", False),
    "float16, naive": Way("float16", False),
    "float32": Way("float32", True),
    "float16": Way("float16", True),
}


# --- What is compiled ------------------------------------------------------------------------


def cavity(way: Way, model: Any, points: Any, *, derivatives: Any = None) -> jax.Array:
    """The loss of all sweeps but that of orders."""
    if way.propagated:
        return residuals(model, points, derivatives=derivatives)
    return nested_loss(model, points, order=2)


def chain(way: Way, model: Any, points: Any, *, order: int, derivatives: Any = None) -> Any:
    """The mean squared derivatives of one output in x, up to an order."""
    if way.propagated:
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
def program(target: str, way: Way, case: Case) -> Compiled:
    """The gradient of the loss, compiled."""
    layers = initial_layers(case.width, case.depth)
    loss, scaling = partial(cavity, way), mpx.DynamicLossScaling()
    if case.order is not None:
        loss = partial(chain, way, order=case.order)
    if way.propagated:
        order = max(2, case.order or 0)
        scaling = mpx.Scaling(scaling, mpx.DerivativeScaling.per_direction("xy", order=order))

    step = gradient(loss, way.precision, full_points=way.propagated)
    model = coordinate_mlp(layers) if way.propagated else layers
    points = jax.ShapeDtypeStruct((case.points, 2), jnp.float32)
    return compile_for(target, step, model, scaling, points)


# --- Sweeps ----------------------------------------------------------------------------------


def grow(report: Report, target: str, sweep: str, sizes: Sequence[int], base: Case) -> None:
    """Compiles all ways for all sizes of a sweep, and records what they cost."""
    for name, way in WAYS.items():
        for size in sizes:
            case = base._replace(**{sweep: size})
            where = {"target": target, "sweep": sweep, "way": name, **case._asdict()}
            report.record("costs", **where, **program(target, way, case).costs())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--targets",
        default="cpu,h100",
        help=f"what to compile for, out of {','.join(TARGETS)}; those without a compiler are left "
        "out (default: %(default)s)",
    )


def run(report: Report, args: argparse.Namespace) -> None:
    sweeps = QUICK if args.quick else SWEEPS
    base = Case(**{name: sweeps[name][1] for name in ("points", "width", "depth")})
    for target in there(report, args.targets.split(",")):
        for sweep, sizes in sweeps.items():
            grow(report, target, sweep, sizes, base)

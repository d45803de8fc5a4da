"""What do derivatives cost? Propagated, by nested forward mode and by reverse mode, orders 1 to 4.

Rivals, for a network of coordinates x, y and one output:

- `nested jvp`: JAX's own, with the same seeds at every level, so that XLA merges the levels;
- `reverse`: one cotangent backwards for the first order, and forward mode over it for the others;
- `propagated`: `partials`;
- `forward Laplacian`: `laplacian` (order 2 only);
- `nested Laplacian`: `nested jvp` in each direction.

Counted are flops and temporary memory of the compiled value (`forward`) and of the compiled
gradient with respect to the parameters (`step`), the time of a step, for which the rivals of one
order take turns, and the error in float16 against float32 beside them.
"""

import argparse
from collections.abc import Callable
from functools import reduce

import equinox as eqx
import jax
import jax.numpy as jnp

import mpx_pde as mpx

from ._report import Report, interleave


ORDERS = (1, 2, 3, 4)


def propagated(model, order, scaling):
    """The derivative of some order in x by `partials`."""
    name = "u_" + "x" * order
    fun = mpx.partials(model, [name], coords="xy", outputs="u", scaling=scaling)
    return lambda p: fun(p)[name]


def laplacian(model, _, scaling):
    """The sum of second derivatives as one stream."""
    fun = mpx.laplacian(model, coords="xy", outputs="u", scaling=scaling)
    return lambda p: fun(p)["lap_u"]


def along(fun, direction):
    return lambda p: jax.jvp(fun, (p,), (direction,))[1]


def full(model):
    return lambda p: model(p).astype(jnp.float32)


def nested(model, order, _):
    """The same by `jax.jvp` of `jax.jvp`."""
    return reduce(along, [jnp.array([1.0, 0.0])] * order, full(model))


def reverse(model, order, _):
    """Reverse mode once, and forward mode over it."""
    e = jnp.array([1.0, 0.0])
    return reduce(along, [e] * (order - 1), lambda p: jnp.vdot(jax.grad(full(model))(p), e))


def nested_laplacian(model, *_):
    """Two second derivatives by `jax.jvp`."""
    return lambda p: sum(along(along(full(model), e), e)(p) for e in jnp.eye(2))


def per_direction():
    return mpx.DerivativeScaling.per_direction("xy")


RIVALS = {
    "nested jvp": (nested, ORDERS, lambda: None),
    "propagated": (propagated, ORDERS, per_direction),
    "reverse": (reverse, ORDERS, lambda: None),
    "forward Laplacian": (laplacian, (2,), per_direction),
    "nested Laplacian": (nested_laplacian, (2,), lambda: None),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--points", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5, help="of timed steps; 0 leaves them out")


def _measure(fun, *args):
    compiled = eqx.filter_jit(fun).lower(*args).compile()
    cost = compiled.compiled.cost_analysis() or {}
    memory = compiled.compiled.memory_analysis()
    return cost.get("flops"), memory.temp_size_in_bytes / 2**20, lambda: compiled(*args)


def run(report: Report, args: argparse.Namespace) -> int:
    width, depth, count = args.width, args.depth, args.points
    if args.quick:
        width, depth, count = 32, 2, 64
    key = jax.random.key(0)
    model = mpx.nn.CoordinateMLP(2, "scalar", width, depth, key=key)
    x = jax.random.uniform(key, (count, 2))
    timed: dict[int, dict[str, Callable]] = {order: {} for order in ORDERS}
    for name, (make, orders, scale) in RIVALS.items():
        for order in orders:
            # An argument, as in training: XLA would merge seeds that it knows to be equal.
            scaling = scale()

            def values(model, scaling, x, make=make, order=order):
                return jax.vmap(make(model, order, scaling))(x)

            def step(model, scaling, x, values=values):
                return eqx.filter_grad(lambda m: jnp.mean(values(m, scaling, x) ** 2))(model)

            forward, _, _ = _measure(values, model, scaling, x)
            flops, memory, timed[order][name] = _measure(step, model, scaling, x)
            half, few = mpx.cast_to_half_precision(model), x[:64]
            want = eqx.filter_jit(values)(model, scaling, few)
            error = eqx.filter_jit(values)(half, scaling, few) - want
            report.record(
                "derivatives",
                rival=name,
                order=order,
                width=width,
                depth=depth,
                points=count,
                forward_flops=forward,
                step_flops=flops,
                step_temp_mib=memory,
                error_half=float(jnp.linalg.norm(error) / jnp.linalg.norm(want)),
            )
    if args.rounds:
        for order, rivals in timed.items():
            timings = interleave(rivals, rounds=args.rounds, warmup=1)
            for record in report.sections["derivatives"]:
                if record["order"] == order:
                    record["step_seconds"] = timings[record["rival"]]._asdict()
    return 0

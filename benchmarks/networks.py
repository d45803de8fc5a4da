"""What do derivatives of any network cost? Against `jax.hessian`, nested `jvp`, `jet` and folx.

Networks of many architectures (`_networks.py`) are differentiated one to four times in one
coordinate. Their Laplacians are taken in 2, 3, 16 and 100 dimensions, and the biharmonic operator
in 2. The rivals:

- `mpx_pde`: `partials`, `laplacian` and `linear_operator`;
- `nested jvp`: JAX's own, with the same seeds at every level, so that XLA merges the levels;
- `hessian`: `jax.hessian`, which most people write (second order only);
- `jet`: `jax.experimental.jet`, where it works;
- `folx`: its forward Laplacian (Laplacians only).

Each record describes one step, compiled for this CPU in float32: the mean square of the derivative
and its gradient with respect to the parameters. It holds operations, bytes accessed, temporary
memory, and the error of the derivative against nested differentiation in float64; for `mpx_pde`
also the errors in half precision. `--time` also times the steps, and their tracing and compilation;
use it only on a machine that does nothing else.

A run resumes where an earlier one stopped: it keeps the results in the file if they were taken with
the same sources.
sources, stays.

    python -m benchmarks networks --minutes 2
"""

import argparse
import itertools
import time
from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.jet import jet

import mpx_pde as mpx

from ._networks import NETWORKS
from ._report import Report, failure, interleave, require


WIDTH, QUICK_WIDTH = 256, 32
CHECKED = 32
"""The number of points at which values are compared."""


class Problem(NamedTuple):
    """A derivative of a network.

    **Attributes:**

    - `operator`: `"order"`, `"laplacian"` or `"biharmonic"`.
    - `size`: the number of coordinates.
    - `order`: the order of the derivative.
    - `points`: the number of points.
    """

    operator: str
    size: int
    order: int
    points: int

    @property
    def name(self) -> str:
        return f"order {self.order}" if self.operator == "order" else f"{self.operator} {self.size}"


PROBLEMS = (
    *(Problem("order", 2, order, 2048) for order in (1, 2, 3, 4)),
    *(Problem("laplacian", n, 2, points) for n, points in ((2, 2048), (3, 2048), (16, 256))),
    Problem("laplacian", 100, 2, 64),
    Problem("biharmonic", 2, 4, 2048),
)


# --- Rivals ----------------------------------------------------------------------------------


def along(fun: Callable, direction: Any) -> Callable:
    return lambda p: jax.jvp(fun, (p,), (direction.astype(p.dtype),))[1]


def summed(part: Callable[[Any], Any], size: int) -> Any:
    """Sums a function of a direction over all coordinates."""
    eye = np.eye(size)
    if size <= 3:
        return reduce(lambda a, b: a + b, map(part, eye))
    return jnp.sum(jax.vmap(part)(jnp.asarray(eye)))


def ours(model: Any, problem: Problem) -> Callable:
    coords = [f"x{i}" for i in range(problem.size)] if problem.size > 3 else "xyz"[: problem.size]
    if problem.operator == "order":
        name = "u_" + "x" * problem.order
        terms = mpx.partials(model, [name], coords=coords, outputs="u")
        return lambda p: terms(p)[name]
    operator = {"op": problem.operator}
    terms = mpx.linear_operator(model, operator, coords=coords, outputs="u")
    return lambda p: terms(p)["op_u"]


def nested(model: Any, problem: Problem) -> Callable:
    if problem.operator == "order":
        return reduce(along, [np.eye(problem.size)[0]] * problem.order, model)
    if problem.operator == "laplacian":
        return lambda p: summed(lambda e: along(along(model, e), e)(p), problem.size)
    x, y = np.eye(2)
    pure = [reduce(along, [e] * 4, model) for e in (x, y)]
    mixed = reduce(along, [x, x, y, y], model)
    return lambda p: pure[0](p) + 2 * mixed(p) + pure[1](p)


def by_hessian(model: Any, problem: Problem) -> Callable:
    def derivative(p):
        hessian = jnp.reshape(jax.hessian(model)(p), (problem.size, problem.size))
        return hessian[0, 0] if problem.operator == "order" else jnp.trace(hessian)

    return derivative


def by_jet(model: Any, problem: Problem) -> Callable:
    def highest(p, e, order):
        series = [jnp.asarray(e, p.dtype), *[jnp.zeros_like(p)] * (order - 1)]
        return jet(model, (p,), (series,))[1][order - 1]

    if problem.operator == "order":
        return lambda p: highest(p, np.eye(problem.size)[0], problem.order)
    if problem.operator == "laplacian":
        return lambda p: summed(lambda e: highest(p, e, 2), problem.size)
    # By polarization: 12 u_xxyy = (x + y)^4 + (x - y)^4 - 2 x^4 - 2 y^4.
    x, y = np.eye(2)

    def biharmonic(p):
        pure = highest(p, x, 4) + highest(p, y, 4)
        return pure + (highest(p, x + y, 4) + highest(p, x - y, 4) - 2 * pure) / 6

    return biharmonic


def by_folx(model: Any, problem: Problem) -> Callable:
    del problem
    forward = require("folx").forward_laplacian(model)
    return lambda p: forward(p).laplacian


RIVALS: dict[str, Callable[[Any, Problem], Callable]] = {
    "mpx_pde": ours,
    "nested jvp": nested,
    "hessian": by_hessian,
    "jet": by_jet,
    "folx": by_folx,
}


def values(way: Callable, static: Any, problem: Problem, arrays: Any, x: Any) -> Any:
    """Returns the derivatives at all points."""
    fun = way(eqx.combine(arrays, static), problem)
    return jax.vmap(lambda p: jnp.reshape(fun(p), ()))(x)


def step(way: Callable, static: Any, problem: Problem, arrays: Any, x: Any) -> Any:
    """Returns the gradient of the derivatives' mean square, and the first `CHECKED` derivatives."""

    def loss(arrays):
        out = values(way, static, problem, arrays, x).astype(jnp.float32)
        return jnp.mean(out**2), out[:CHECKED]

    return jax.grad(loss, has_aux=True)(arrays)


# --- Measurements ----------------------------------------------------------------------------


class Case(NamedTuple):
    """One network and one problem."""

    network: str
    problem: Problem
    width: int

    def make(self) -> tuple[Any, Any, jax.Array]:
        """Returns the parameters, the rest of the network, and the points."""
        model = NETWORKS[self.network](self.problem.size, self.width, jax.random.key(0))
        arrays, static = eqx.partition(model, eqx.is_inexact_array)
        shape = (self.problem.points, self.problem.size)
        return arrays, static, jax.random.uniform(jax.random.key(1), shape)

    @property
    def where(self) -> dict[str, Any]:
        return {"network": self.network, "problem": self.problem.name}


def reference(case: Case) -> np.ndarray:
    """Computes the derivatives in float64."""
    arrays, static, x = case.make()
    arrays, x = jax.tree.map(np.asarray, (arrays, x[:CHECKED]))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), (arrays, x))
        return np.asarray(jax.jit(partial(values, nested, static, case.problem))(*wide))


def relative(got: Any, want: np.ndarray) -> float:
    got = np.asarray(got, np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def measure(report: Report, case: Case, clock: bool) -> None:
    """Adds a record for each rival, and the errors in half precision."""
    arrays, static, x = case.make()
    want = reference(case)
    timed: dict[str, Callable] = {}
    records: dict[str, dict[str, Any]] = {}
    for name, way in RIVALS.items():
        if name == "folx" and not (case.problem.operator == "laplacian" and report.installed(name)):
            continue
        if name == "hessian" and case.problem.order != 2:
            continue
        start = time.perf_counter()
        try:
            run = jax.jit(partial(step, way, static, case.problem))
            compiled: Any = run.lower(arrays, x).compile()
            told = {"compile_seconds": time.perf_counter() - start} if clock else {}
            cost = compiled.cost_analysis() or {}
            told |= {key: cost.get(key.replace("_", " ")) for key in ("flops", "bytes_accessed")}
            told["temp_bytes"] = compiled.memory_analysis().temp_size_in_bytes
            told["error"] = relative(compiled(arrays, x)[1], want)
            timed[name] = partial(compiled, arrays, x)
        except Exception as error:  # a rival's failure is its result
            if way is ours:
                raise
            told = {"failed": failure(error)}
        records[name] = report.record("costs", **case.where, rival=name, **told)
    if clock:
        for name, seconds in interleave(timed, rounds=7).items():
            records[name]["seconds"] = seconds
    for half in ("float16", "bfloat16"):
        cast = mpx.cast_tree(arrays, half)
        got = jax.jit(partial(values, ours, static, case.problem))(cast, x[:CHECKED])
        records["mpx_pde"][f"error_{half}"] = relative(got, want)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = [problem.name for problem in PROBLEMS]
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--problems", nargs="+", choices=names, default=names)
    parser.add_argument("--time", action="store_true", help="time steps, tracing and compiling")
    parser.add_argument("--minutes", type=float, help="start no further case after so many")


def run(report: Report, args: argparse.Namespace) -> None:
    width = QUICK_WIDTH if args.quick else WIDTH
    if not args.quick:
        report.resume("costs", same_code=True)
    report.sections["width"] = [{"width": width}]
    cases = (
        Case(network, problem._replace(points=64) if args.quick else problem, width)
        for network, problem in itertools.product(
            args.networks, PROBLEMS[: 2 if args.quick else None]
        )
        if problem.name in args.problems
        # With one network per coordinate, nested jvp compiles for hours at a hundred coordinates.
        and (network != "SPINN" or problem.size <= 16)
    )
    missing = (case for case in cases if not report.has("costs", **case.where))
    for case in report.within(args.minutes, missing):
        print(*case.where.values(), sep=", ", flush=True)
        measure(report, case, args.time)
        report.save()

"""How long does a cavity step take, and in how much memory? Rivals by width, points and order.

The step trains a tanh network for steady flow in two dimensions (`_cavity.py`): the gradient of the
mean squared residuals, and Adam. Order 1 are the Euler equations, order 2 (the base) Navier–Stokes,
order 3 has dispersion besides. All rivals begin with the same weights and points:

- `jax`: nested `jax.jvp` of a plain function, in float32 (and, on a GPU, in TF32);
- `folx`: its forward Laplacian, likewise;
- `by hand`: everything cast to float16, with a dynamic loss scale; `mpx` (MPX 0.1.8) and `jmp`: the
  same step by these libraries, as their READMEs have it;
- `torch`: double backward, and `torch.func` (forward over forward), in float32, by `torch.amp` in
  float16 with `GradScaler` and in bfloat16; each also compiled (which does not support double
  backward, and in 2.13 fails for `torch.func` however its derivatives are written);
- `mpx_pde`: a `CoordinateMLP` that carries derivatives through its layers, by `partials` and by
  `laplacian`. Its float32 is never TF32.

Beside time and memory stand

- the error of the first gradient: relative L2 over all weights, against the same computed in
  float64. Should loss scaling skip steps at the start, it is that of the first step that counts;
- the loss after some steps over that of `jax` in float32, both evaluated in float64.

What is worth its compilation runs at all sizes, the rest at the base.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from . import _steps
from ._cavity import (
    Layers,
    coordinate_mlp,
    initial_layers,
    initial_points,
    laplacian_residuals,
    layers_of,
    mean_square,
    named,
    nested_loss,
    network,
    residuals,
)
from ._measured import LARGEST_SKIPS, Exact, JaxStep, Step, measure, relative_error
from ._report import Report
from ._rivals import require
from ._steps import HIGHEST, START, TF32, Rival, Task, alone, in_float32, precision_options


DEFAULTS = {
    "cpu": {"width": [64, 32, 128], "points": [1024, 256, 4096], "order": [2, 1, 3], "depth": [4]},
    "gpu": {
        "width": [512, 128, 256, 1024],
        "points": [65_536, 8_192],
        "order": [2, 1, 3],
        "depth": [6],
    },
    "quick": {"width": [16], "points": [64], "order": [2], "depth": [2]},
}
"""The base first, from which one size at a time departs."""
CHUNK = 4096  # points that the float64 computation takes at once
STEPS, QUICK_STEPS = 20, 5  # until the loss is compared

Who = tuple[str, str, str]
"""A rival: library, method and precision."""

# --- The rivals ------------------------------------------------------------------------------


def folx_loss(layers, points, *, order):
    """By folx: one pass for value, Jacobian and Laplacian."""
    forward = require("folx").forward_laplacian(partial(network, layers))

    def terms(point):
        out = forward(point)
        d = named(out.x, *out.jacobian.dense_array)
        d["lap_u"], d["lap_v"], _ = out.laplacian
        if order >= 3:
            along = lambda e: jax.jvp(lambda p: forward(p).laplacian, (point,), (e,))[1]
            d["lap_u_x"], d["lap_v_y"] = along(jnp.eye(2)[0])[0], along(jnp.eye(2)[1])[1]
        return d

    return mean_square(jax.vmap(terms)(points), order)


def by_mpx(order: int) -> Rival:
    """As MPX's README has it, what is critical in full precision."""

    def loss(layers, points):
        full_precision = require("mpx").force_full_precision
        finish = full_precision(partial(mean_square, order=order), jnp.float32)
        return nested_loss(layers, points, order=order, finish=finish)

    return _steps.by_mpx(alone(loss), "float16")


def by_jmp(order: int) -> Rival:
    def loss(policy):
        finish = lambda d: mean_square(policy.cast_to_output(d), order)
        return alone(partial(nested_loss, order=order, finish=finish))

    return _steps.by_jmp(loss, "float16")


def by_library(
    layers: Layers, method: str, precision: str, order: int, forward: str = "half"
) -> Rival:
    """The step by this library, its model and its scaling."""
    loss = laplacian_residuals if method == "laplacian" else partial(residuals, order=order)

    def scaling():
        with mpx.half_precision("bfloat16" if precision == "bfloat16" else "float16"):
            derivatives = mpx.DerivativeScaling.per_direction("xy", order=order)
            return mpx.Scaling(mpx.DynamicLossScaling(START), derivatives)

    options = {**precision_options(precision), "keep_full": (False, True), "forward": forward}
    ours = _steps.by_library(alone(loss), **options)
    return ours._replace(scaling=scaling, model=partial(coordinate_mlp, layers))


def jax_rivals(layers: Layers, order: int, gpu: bool) -> dict[Who, Rival]:
    """On a GPU, JAX multiplies in TF32 unless told otherwise; this library always does as told."""
    by_jvp, by_folx = (alone(partial(loss, order=order)) for loss in (nested_loss, folx_loss))
    out: dict[Who, Rival] = {}
    for precision, products in {"float32": HIGHEST, **({"TF32": TF32} if gpu else {})}.items():
        folx = in_float32(by_folx, products)._replace(needs=("folx",))
        out["jax", "nested jvp", precision] = in_float32(by_jvp, products)
        out["folx", "forward Laplacian", precision] = folx
    out["by hand", "nested jvp", "float16"] = _steps.by_hand(by_jvp, "float16")
    out["mpx", "nested jvp", "float16"] = by_mpx(order)
    out["jmp", "nested jvp", "float16"] = by_jmp(order)
    for method in ("partials", "laplacian") if order == 2 else ("partials",):
        for precision in ("float32", "float16", "bfloat16"):
            out["mpx_pde", method, precision] = by_library(layers, method, precision, order)
    return out


def everywhere(who: Who) -> bool:
    """Whether a rival is worth its compilation at all sizes, or only at the first."""
    library, method, precision = who
    if library == "mpx_pde":
        return method == "partials" and precision != "bfloat16"
    at_all = ("nested jvp", "forward Laplacian", "double backward")
    return library not in ("mpx", "jmp") and method in at_all


def task(width: int, depth: int, points: int, order: int = 2, gpu: bool = False) -> Task:
    layers = initial_layers(width, depth)
    exact = partial(nested_loss, order=order, finish=partial(mean_square, order=order))
    return Task(
        {"width": width, "points": points, "order": order, "depth": depth},
        lambda: jax.tree.map(jnp.asarray, layers),
        alone(exact),
        lambda: [initial_points(points)],
        jax.ShapeDtypeStruct((points, 2), jnp.float32),
        jax_rivals(layers, order, gpu),
    )


def torch_steps(task: Task, gpu: bool, quick: bool) -> dict[Who, Callable[[], Step]]:
    """All that PyTorch offers."""
    from ._torch.cavity import METHODS, cavity_step

    layers = initial_layers(task.where["width"], task.where["depth"])
    [points], order = task.batches(), task.where["order"]
    out: dict[Who, Callable[[], Step]] = {}
    for compiled in (False,) if quick else (False, True):
        for method in METHODS:
            for precision in ("float32", *(["TF32"] if gpu else []), "float16", "bfloat16"):
                title = f"{method}, compiled" if compiled else method
                out["torch", title, precision] = partial(
                    cavity_step, method, precision, compiled, START, layers, points, order
                )
    return out


# --- Measurements ----------------------------------------------------------------------------


def observe(exact: Exact, gradients: Any, count: int, step: Step) -> dict[str, Any]:
    """What the first `count` steps come to."""
    try:
        first = step.first()
        error, skipped = relative_error(first.gradients, gradients), first.skipped
    except FloatingPointError:
        error, skipped = None, LARGEST_SKIPS
    for _ in range(count - skipped - 1):
        step()
    loss = exact(jax.tree.map(np.asarray, step.weights())).loss
    return {"gradient_error": error, "skipped": skipped, "after_steps": count, "loss": loss}


def sizes(values: dict[str, list[int]]) -> Iterator[dict[str, int]]:
    """The base, and from there one size at a time."""
    base = {name: first for name, (first, *_) in values.items()}
    yield base
    for name, (_, *others) in values.items():
        yield from ({**base, name: value} for value in others)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    of = "the first is the base, from which one size at a time departs"
    parser.add_argument("--widths", type=int, nargs="+", help=of)
    parser.add_argument("--points", type=int, nargs="+", help=of)
    parser.add_argument("--depth", type=int, nargs="+", help="hidden layers")
    parser.add_argument("--rounds", type=int, default=10, help="of the clock")


def run(report: Report, args: argparse.Namespace) -> None:
    gpu = jax.default_backend() == "gpu"
    defaults = DEFAULTS["quick" if args.quick else "gpu" if gpu else "cpu"]
    given = {"width": args.widths, "points": args.points, "depth": args.depth}
    values = {name: given.get(name) or default for name, default in defaults.items()}
    rounds, count = (2, QUICK_STEPS) if args.quick else (args.rounds, STEPS)
    for i, case in enumerate(sizes(values)):
        one = task(**case, gpu=gpu)
        [points] = one.batches()
        makes: dict[Who, Callable[[], Step]] = {
            who: partial(JaxStep, one, rival, [jnp.asarray(points)], layers=layers_of)
            for who, rival in one.there(report).items()
        }
        if report.installed("torch"):
            makes |= torch_steps(one, gpu, args.quick)
        exact = Exact(one.loss, points, CHUNK)
        told = partial(observe, exact, exact(one.model()).gradients, count)
        chosen = {who: make for who, make in makes.items() if i == 0 or everywhere(who)}
        measured = measure(chosen, told, rounds=rounds)
        reference = measured["jax", "nested jvp", "float32"].get("loss")
        for who, fields in measured.items():
            if "failed" not in fields:
                fields["loss_over_float32"] = fields["loss"] / reference if reference else None
            named_as = dict(zip(("library", "method", "precision"), who, strict=True))
            report.record("steps", **named_as, **one.where, **fields)

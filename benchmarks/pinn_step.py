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

Beside the time stand

- the memory that the step takes beyond weights, optimizer and points: for JAX what the compiled
  program says, for PyTorch the peak of the GPU's allocator, and nothing on a CPU;
- the error of the first gradient: relative L2 over all weights, against the same computed in
  float64. Should loss scaling skip steps at the start, it is that of the first step that counts;
- the loss after some steps over that of `jax` in float32, both evaluated in float64.

What is worth its compilation runs at all sizes, the rest at the base.

A CPU has no arithmetic in half precision: XLA and PyTorch emulate it, which costs time and memory.
Times in half are only worth comparing on a GPU:

    XLA_PYTHON_CLIENT_PREALLOCATE=false python -m benchmarks pinn_step
"""

import argparse
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._cavity import ORDERS, Layers, initial_layers, initial_points, mean_square
from ._pinn_steps import MOMENTUM, Rival, Step, jax_rivals, nested_loss
from ._report import Report, Timing, interleave
from ._rivals import RivalMissing, failure, require
from ._steps import START


LIBRARIES = ("jax", "folx", "by hand", "mpx", "jmp", "torch", "mpx_pde")
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
"""The base first."""
CHUNK = 4096  # points that the float64 computation takes at once
TRIES = 40  # steps within which a loss scale must have found its place

Case = dict[str, int]


def torch_rivals(gpu: bool, quick: bool) -> list[Rival]:
    """All that PyTorch offers; at all sizes, what most people use."""
    from ._torch.cavity import METHODS, CavityStep

    out = []
    for compiled in (False,) if quick else (False, True):
        for method in METHODS:
            for precision in ("float32", *(["TF32"] if gpu else []), "float16", "bfloat16"):
                make = partial(CavityStep, method, precision, compiled, START)
                everywhere = method == "double backward" and not compiled
                title = f"{method}, compiled" if compiled else method
                out.append(Rival("torch", title, precision, make, everywhere))
    return out


def choose_rivals(report: Report, libraries: list[str], quick: bool) -> list[Rival]:
    """Those that are asked for and installed."""
    gpu = jax.default_backend() == "gpu"
    found = []
    for library in libraries:
        try:
            if library in ("folx", "mpx", "jmp", "torch"):
                require(library)
        except RivalMissing as error:
            report.note(f"{library} is left out. {error}")
            continue
        rivals = torch_rivals(gpu, quick) if library == "torch" else jax_rivals(gpu)
        found += [rival for rival in rivals if rival.library == library]
    return found


# --- What is right ---------------------------------------------------------------------------


@cache
def _value_and_gradient(order: int) -> Any:
    loss = partial(nested_loss, order=order, finish=partial(mean_square, order=order))
    return jax.jit(jax.value_and_grad(loss))


def oracle(layers: Layers, points: np.ndarray, order: int) -> tuple[float, Layers]:
    """Loss and gradient in float64."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), list(layers))
        loss, gradient = 0.0, jax.tree.map(jnp.zeros_like, wide)
        for start in range(0, len(points), CHUNK):
            part = points[start : start + CHUNK]
            share = len(part) / len(points)
            value, slope = _value_and_gradient(order)(wide, jnp.asarray(part, jnp.float64))
            loss += share * float(value)
            gradient = jax.tree.map(lambda sum_, x, s=share: sum_ + s * x, gradient, slope)
        return loss, jax.tree.map(np.asarray, gradient)


def flat(layers: Layers) -> np.ndarray:
    """All weights in float64, one after another."""
    return np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(layers)])


def first_gradient(step: Step) -> tuple[np.ndarray | None, int]:
    """The gradient of the first step that counts, and how many were skipped before.

    A skipped step leaves the weights as they were, and of zeros Adam's first moment becomes 1 - b1
    times the gradient.
    """
    for skipped in range(TRIES):
        step()
        gradient = flat(step.moment()) / (1 - MOMENTUM)
        if gradient.any():
            return gradient, skipped
    return None, TRIES


# --- A case ----------------------------------------------------------------------------------


def observe(step: Step, layers: Layers, points: np.ndarray, order: int, count: int) -> dict:
    """What the first `count` steps come to."""
    gradient, skipped = first_gradient(step)
    error = None
    if gradient is not None:
        want = flat(oracle(layers, points, order)[1])
        error = float(np.linalg.norm(gradient - want) / np.linalg.norm(want))
    for _ in range(count - skipped - 1):
        step()
    return {
        "gradient_error": error,
        "skipped": skipped,
        "after_steps": count,
        "loss": oracle(step.layers(), points, order)[0],
    }


def measure(report: Report, rivals: list[Rival], case: Case, rounds: int, count: int) -> None:
    """All rivals at one size, in turn."""
    layers = initial_layers(case["width"], case["depth"])
    points, order = initial_points(case["points"]), case["order"]
    steps, records = {}, {}
    for i, rival in enumerate(rivals):
        fields = {"library": rival.library, "method": rival.method, "precision": rival.precision}
        records[i] = report.record("steps", **fields, **case)
        try:
            step = rival.make(layers, points, order)
            records[i] |= observe(step, layers, points, order, count)
        except Exception as error:
            records[i]["failed"] = failure(error)
        else:
            steps[i] = step
    times = interleave(steps, rounds=rounds)
    reference = [
        r["loss"]
        for i, r in records.items()
        if i in steps and (r["library"], r["precision"]) == ("jax", "float32")
    ]
    for i, step in steps.items():
        records[i]["seconds"] = times[i]._asdict()
        records[i]["predicted_seconds"] = getattr(step, "predicted", None)
        records[i]["temp_bytes"] = step.temp_bytes()
        records[i]["loss_over_float32"] = records[i]["loss"] / reference[0] if reference else None


# --- All cases -------------------------------------------------------------------------------


def sizes(values: dict[str, list[int]], depth: int) -> Iterator[Case]:
    """The base, and from there one size at a time."""
    base = {name: first for name, (first, *_) in values.items()} | {"depth": depth}
    yield base
    for name, (_, *others) in values.items():
        yield from ({**base, name: value} for value in others)


Who = tuple[str, str, str]


def who(record: dict[str, Any]) -> Who:
    return record["library"], record["method"], record["precision"]


def mebibytes(record: dict[str, Any]) -> float | str:
    return "not measured" if record["temp_bytes"] is None else record["temp_bytes"] / 2**20


def print_base(report: Report, records: list[dict[str, Any]]) -> None:
    """All that was measured of every rival."""
    rows = []
    for r in records:
        if "failed" in r:
            rows.append((*who(r), r["failed"], *[None] * 5))
            continue
        told = r["gradient_error"], r["loss_over_float32"], r["skipped"]
        predicted = r["predicted_seconds"] and 1e3 * r["predicted_seconds"]
        rows.append((*who(r), str(Timing(**r["seconds"])), predicted, mebibytes(r), *told))
    report.table(
        "{width} × {depth}, {points:,} points, order {order}".format(**records[0]),
        (
            *("library", "method", "precision", "step", "predicted, ms", "memory, MiB"),
            *("gradient's error", "loss over float32's", "skipped"),
        ),
        rows,
    )


def print_sweep(report: Report, name: str, records: list[dict[str, Any]]) -> None:
    """Milliseconds and memory by one size."""
    values = sorted({r[name] for r in records})
    cells: dict[Who, dict[int, str]] = {}
    for r in records:
        text = "failed"
        if "failed" not in r:
            memory = mebibytes(r)
            memory = f"{memory:.4g} MiB" if isinstance(memory, float) else memory
            text = f"{1e3 * r['seconds']['median']:.4g} ms, {memory}"
        cells.setdefault(who(r), {})[r[name]] = text
    report.table(
        f"By {name}",
        ("library", "method", "precision", *(f"{value:,}" for value in values)),
        [
            (*rival, *(row.get(value) for value in values))
            for rival, row in cells.items()
            if len(row) > 1
        ],
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    of = "the first is the base, from which one size at a time departs"
    parser.add_argument("--widths", type=int, nargs="+", help=of)
    parser.add_argument("--points", type=int, nargs="+", help=of)
    parser.add_argument("--orders", type=int, nargs="+", help=of, choices=ORDERS)
    parser.add_argument("--depth", type=int, help="hidden layers")
    parser.add_argument("--rounds", type=int, default=10, help="of the clock")
    parser.add_argument("--steps", type=int, default=20, help="until the loss is compared")
    parser.add_argument("--rivals", nargs="+", choices=LIBRARIES, default=LIBRARIES)


def run(report: Report, args: argparse.Namespace) -> int:
    kind = "quick" if args.quick else jax.default_backend()
    defaults = DEFAULTS.get(kind, DEFAULTS["gpu"])
    given = {"width": args.widths, "points": args.points, "order": args.orders}
    values = {name: value or defaults[name] for name, value in given.items()}
    rounds, steps = (2, 5) if args.quick else (args.rounds, args.steps)
    rivals = choose_rivals(report, args.rivals, args.quick)
    cases = list(sizes(values, args.depth or defaults["depth"][0]))
    for case in cases:
        chosen = [
            r for r in rivals if case["order"] in r.orders and (r.everywhere or case is cases[0])
        ]
        measure(report, chosen, case, rounds, steps)

    records = report.sections["steps"]
    at = lambda r, case: all(r[name] == value for name, value in case.items())
    print_base(report, [r for r in records if at(r, cases[0])])
    for name in values:
        others = {key: value for key, value in cases[0].items() if key != name}
        if len(values[name]) > 1:
            print_sweep(report, name, [r for r in records if at(r, others)])
    return 0

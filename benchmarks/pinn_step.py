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
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._cavity import ORDERS, initial_layers, layers_of
from ._measured import LARGEST_SKIPS, Exact, JaxStep, Step, measure, relative_error
from ._pinn_steps import Who, cavity, everywhere
from ._report import Report
from ._steps import START, Task


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

Case = dict[str, int]


def torch_steps(task: Task, gpu: bool, quick: bool) -> dict[Who, Any]:
    """All that PyTorch offers."""
    from ._torch.cavity import METHODS, cavity_step

    layers = initial_layers(task.where["width"], task.where["depth"])
    [points], order = task.batches(), task.where["order"]
    out: dict[Who, Any] = {}
    for compiled in (False,) if quick else (False, True):
        for method in METHODS:
            for precision in ("float32", *(["TF32"] if gpu else []), "float16", "bfloat16"):
                title = f"{method}, compiled" if compiled else method
                out["torch", title, precision] = partial(
                    cavity_step, method, precision, compiled, START, layers, points, order
                )
    return out


def steps(task: Task, libraries: list[str], gpu: bool, quick: bool) -> dict[Who, Any]:
    """What makes the steps of all rivals, library by library."""
    points = [jnp.asarray(batch) for batch in task.batches()]
    makes: dict[Who, Any] = {
        who: partial(JaxStep, task, rival, points, layers=layers_of)
        for who, rival in task.rivals.items()
    }
    if "torch" in libraries:
        makes |= torch_steps(task, gpu, quick)
    return {who: makes[who] for library in libraries for who in makes if who[0] == library}


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


def measure_case(
    report: Report, task: Task, makes: dict[Who, Any], rounds: int, count: int
) -> None:
    """All rivals at one size, in turn."""
    [points] = task.batches()
    exact = Exact(task.loss, points, CHUNK)
    gradients = exact(task.model()).gradients
    measured = measure(makes, partial(observe, exact, gradients, count), rounds=rounds)
    reference = measured.get(("jax", "nested jvp", "float32"), {}).get("loss")
    for (library, method, precision), fields in measured.items():
        if "failed" not in fields:
            fields["loss_over_float32"] = fields["loss"] / reference if reference else None
        who = {"library": library, "method": method, "precision": precision}
        report.record("steps", **who, **task.where, **fields)


def sizes(values: dict[str, list[int]], depth: int) -> Iterator[Case]:
    """The base, and from there one size at a time."""
    base = {name: first for name, (first, *_) in values.items()} | {"depth": depth}
    yield base
    for name, (_, *others) in values.items():
        yield from ({**base, name: value} for value in others)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    of = "the first is the base, from which one size at a time departs"
    parser.add_argument("--widths", type=int, nargs="+", help=of)
    parser.add_argument("--points", type=int, nargs="+", help=of)
    parser.add_argument("--orders", type=int, nargs="+", help=of, choices=ORDERS)
    parser.add_argument("--depth", type=int, help="hidden layers")
    parser.add_argument("--rounds", type=int, default=10, help="of the clock")
    parser.add_argument("--steps", type=int, default=20, help="until the loss is compared")
    parser.add_argument("--rivals", nargs="+", choices=LIBRARIES, default=LIBRARIES)


def run(report: Report, args: argparse.Namespace) -> None:
    gpu = jax.default_backend() == "gpu"
    kind = "quick" if args.quick else jax.default_backend()
    defaults = DEFAULTS.get(kind, DEFAULTS["gpu"])
    given = {"width": args.widths, "points": args.points, "order": args.orders}
    values = {name: value or defaults[name] for name, value in given.items()}
    rounds, count = (2, 5) if args.quick else (args.rounds, args.steps)
    optional = ("folx", "mpx", "torch")
    libraries = [name for name in args.rivals if name not in optional or report.installed(name)]
    for i, case in enumerate(sizes(values, args.depth or defaults["depth"][0])):
        task = cavity(**case, gpu=gpu)
        makes = steps(task, libraries, gpu, args.quick)
        chosen = {who: make for who, make in makes.items() if i == 0 or everywhere(who)}
        measure_case(report, task, chosen, rounds, count)

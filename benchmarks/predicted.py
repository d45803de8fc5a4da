"""How long would a training step take on an H100? Predicted from its compiled program, not run.

The steps of `pinn_step`, `foreign_step`, `fno_step` and `vit_step` are compiled, in float32 and in
half precision, for a device that need not be present. For every kernel of the program,
`_roofline.py` counts the bytes that it reads and writes, its products and its other arithmetic. The
assumptions in the first table turn these counts into a time. The sum over the kernels is reported
as a range: memory and products alone; then with arithmetic where it takes longer than both; then
with XLA's own estimates of all kernels except products and FFTs.

*Ideal* is the time of the step's products in half precision, and of reading its state and batch and
writing its new state once. It assumes that everything else stays on the chip.

All numbers repeat to the byte, on any machine with the same JAX. `--measure` checks them on a real
GPU: it times the same steps in turn and records the errors of their gradients.

    python -m benchmarks predicted                                # 25 minutes
    python -m benchmarks predicted --measure --jobs 8             # on a GPU
    python -m benchmarks predicted --problems cavity-512          # keeps the other problems
    python -m benchmarks predicted --quick --check                # runs in CI

`--check` only compiles the small steps and writes no results. The exit status is 1 if the traffic
of one of them has grown by more than 2 % over the recorded value for this version of JAX;
`--record` records it.
"""

import argparse
import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from . import _steps, fno_step, foreign_step, pinn_step, vit_step
from ._chips import H100, Chip
from ._deviceless import CUBLAS, Compiled
from ._hlo import Module
from ._report import Report
from ._roofline import Kernel, Roofline, summary
from ._steps import HIGHEST, TF32, Rival, Task, run_sizes


TRAFFIC = Path(__file__).parent / "_targets" / "traffic.json"
GROWTH = 1.02
"""The factor by which the predicted traffic of a small step may grow."""


# --- The steps -------------------------------------------------------------------------------


class Problem(NamedTuple):
    """A task whose rivals' times are predicted."""

    name: str
    title: str
    task: Callable[[], Task]


def _products(rival: Rival) -> dict[str, Rival]:
    """Returns a step in float32, and the same with TF32 products, a GPU's default."""
    return {"float32": rival._replace(products=HIGHEST), "TF32": rival._replace(products=TF32)}


FORWARD = ("bfloat16_x3", "float32")
"""Precisions of the forward pass above half precision."""


def of_cavity(width: int, depth: int, points: int) -> Problem:
    def task() -> Task:
        whole, layers = pinn_step.task(width, depth, points), pinn_step.initial_layers(width, depth)
        rivals = {
            **_products(whole.rivals["plain JAX, nested jvp, float32"]),
            "mpx_pde float32": whole.rivals["mpx_pde, partials, float32"],
            "mpx_pde float16": whole.rivals["mpx_pde, partials, float16"],
            "mpx_pde float16, laplacian": whole.rivals["mpx_pde, laplacian, float16"],
        }
        for forward, half in itertools.product(FORWARD, ("float16", "bfloat16")):
            rival = pinn_step.by_library(layers, "partials", half, 2, forward)
            rivals[f"mpx_pde {half}, forward {forward}"] = rival
        return whole._replace(rivals=rivals)

    title = f"cavity {width} × {depth}, {points:,} points"
    return Problem(f"cavity-{width}", title, task)


def of_network(name: str, width: int, points: int) -> Problem:
    title = f"{name}, width {width}, {points:,} points"
    task = partial(foreign_step.task, name, width, points, gpu=True)
    return Problem(f"network-{name}", title, task)


def of_operator(resolution: int, modes: int = 32, channels: int = 64, batch: int = 32) -> Problem:
    def task() -> Task:
        size = fno_step.Size(resolution, modes, channels, batch)
        whole = fno_step.task(size)
        forward = fno_step.by_library(size, "float16", forward="float32")
        rivals = {
            **_products(whole.rivals["plain JAX float32"]),
            "mpx_pde float16": whole.rivals["mpx_pde dft float16"],
            "mpx_pde float16, remat=False": whole.rivals["mpx_pde dft float16, remat=False"],
            "mpx_pde float32": whole.rivals["mpx_pde dft float32"],
            "mpx_pde float16, forward float32": forward,
        }
        return whole._replace(rivals=rivals)

    title = f"FNO {resolution}², {modes} modes, batch {batch}"
    return Problem(f"fno-{resolution}", title, task)


def of_transformer(name: str, batch: int, **changes: Any) -> Problem:
    def task() -> Task:
        size = dataclasses.replace(vit_step.vit.SIZES[name], batch=batch, **changes)
        whole = vit_step.task(size, gpu=True)
        rivals = {
            **_products(whole.rivals["mpx_pde float32"]),
            "mpx_pde float16": whole.rivals["mpx_pde autocast-float16"],
            "MPX float16": whole.rivals["MPX float16"],
        }
        for forward in FORWARD:
            rival = vit_step.by_library("autocast-float16", forward=forward)
            rivals[f"mpx_pde float16, forward {forward}"] = rival
        return whole._replace(rivals=rivals)

    return Problem(f"vit-{name}", f"ViT-{name.title()}, batch {batch}", task)


PROBLEMS = (
    of_cavity(512, 6, 65_536),
    of_cavity(256, 6, 16_384),
    *(of_network(name, 512, 16_384) for name in foreign_step.FOREIGN),
    *map(of_operator, (128, 256, 512)),
    of_transformer("base", 64),
)
QUICK = (
    of_cavity(64, 3, 1024),
    of_network("LayerNorm", 64, 1024),
    of_operator(32, 8, 16, 4),
    of_transformer("base", 8, blocks=1),
)

# --- Predictions -----------------------------------------------------------------------------


def compiled(task: Task, name: str) -> tuple[Compiled, list[Kernel]]:
    """Compiles a rival's program, with XLA's own estimates in its text, and returns it with its
    kernels. XLA's own kernels compute split products."""
    options = {"xla_gpu_collect_cost_model_stats": True, **({} if "_x3" in name else CUBLAS)}
    program = task.compiled("h100", task.rivals[name], options)
    return program, Roofline(program.module).kernels()


def ideal_seconds(module: Module, kernels: Iterable[Kernel], chip: Chip) -> float:
    """Returns the time of a step's products in half precision and of its inputs and outputs."""
    products = sum(sum(k.products.values()) * k.times for k in kernels)
    entry = module.computations[module.entry]
    state = sum(i.bytes for i in entry if i.opcode == "parameter" or i.root)
    return products / chip.products["half"].kept + state / chip.memory.kept


def predict(report: Report, problem: Problem) -> None:
    """Compiles all rivals of a problem and records their predicted costs."""
    records, ideal, task = [], None, problem.task()
    about = {"problem": problem.name, "title": problem.title}
    for name in task.there(report):
        program, kernels = compiled(task, name)
        if name == "mpx_pde float16":
            ideal = ideal_seconds(program.module, kernels, H100)
        told = {**summary(kernels, H100), "temp_bytes": program.temp_bytes}
        records.append(report.record("steps", **about, rival=name, **told))
    for record in records:
        record["ideal_seconds"] = ideal


def measured(problem: Problem) -> Task:
    """Returns the task whose steps `predict` compiles, to be run."""
    return problem.task()._replace(where={"problem": problem.name, "title": problem.title})


# --- The check in CI -------------------------------------------------------------------------


def small_traffic() -> dict[str, dict[str, float]]:
    """Returns the bytes and kernels of this library's small steps."""
    found = {}
    for problem in QUICK:
        task = problem.task()
        halves = [n for n in task.rivals if re.match("mpx_pde float16|.*forward bfloat16_x3$", n)]
        if problem.name.startswith("vit"):
            # XLA (JAX 0.10.2) finds no tiles for a product of the small transformer in full.
            halves = [n for n in halves if "forward" not in n]
        for name in halves:
            record = summary(compiled(task, name)[1], H100)
            found[f"{problem.name}, {name}"] = {k: record[k] for k in ("bytes", "kernels")}
            print(*list(found.items())[-1], flush=True)
    return found


def growth(before: dict[str, dict[str, float]], now: dict[str, dict[str, float]]) -> list[str]:
    """Lists the steps whose costs have grown too much, and those recorded or compiled only."""
    lines = [
        f"{name}: {key} grew from {old:,.0f} to {now[name][key]:,.0f}, by "
        f"{now[name][key] / old - 1:.1%}"
        for name, costs in before.items()
        for key, old in costs.items()
        if name in now and now[name][key] > old * GROWTH
    ]
    return lines + [
        f"{name}: recorded or compiled, not both" for name in before.keys() ^ now.keys()
    ]


def check(record: bool) -> int:
    version = jax.__version__
    if record:
        content = {"jax": version, "steps": small_traffic()}
        TRAFFIC.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        return 0
    recorded = json.loads(TRAFFIC.read_text(encoding="utf-8"))
    if recorded["jax"] != version:
        raise SystemExit(
            f"{TRAFFIC.name} was recorded with JAX {recorded['jax']}, but JAX {version} is here, "
            "which compiles to other programs. Install that version, or `--record` anew."
        )
    lines = growth(recorded["steps"], small_traffic())
    print(*lines, sep="\n")
    return int(bool(lines))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--problems", nargs="+", help="their names, such as cavity-512")
    parser.add_argument("--check", action="store_true", help=f"fail above {GROWTH} × the record")
    parser.add_argument("--record", action="store_true", help="record the traffic of small steps")
    parser.add_argument("--measure", action="store_true", help="run the steps on this machine")
    _steps.add_arguments(parser, rounds=10, minutes=None)


def run(report: Report, args: argparse.Namespace) -> bool:
    if args.check or args.record:
        raise SystemExit(check(args.record))
    problems = {problem.name: problem for problem in (QUICK if args.quick else PROBLEMS)}
    chosen = args.problems or list(problems)
    if args.measure:
        report.name = "measured"
        return run_sizes(report, args, (measured(problems[name]) for name in chosen))
    report.name = "predicted-h100"
    if args.problems and not args.quick:
        report.resume("steps")
    kept = report.sections.get("steps", [])
    steps = report.sections["steps"] = [r for r in kept if r["problem"] not in chosen]
    for rate, data_sheet, share in H100.assumptions():
        report.record("assumptions", rate=rate, data_sheet=data_sheet, share=share)
    for name in chosen:
        predict(report, problems[name])
    steps.sort(key=lambda r: list(problems).index(r["problem"]))
    return False

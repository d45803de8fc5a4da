"""The training steps whose time is predicted: those of `pinn_step`, `fno_step` and `vit_step`.

Each problem has the same step in float32 and in half precision. Nothing is made but shapes.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from . import fno_step, vit_step
from ._cavity import initial_layers
from ._deviceless import CUBLAS, Compiled, compile_for
from ._pinn_steps import by_library, cavity
from ._steps import HIGHEST, TF32, Rival, Task


class Program(NamedTuple):
    """A step to compile. Where it is `tiled`, XLA may multiply by its own kernels: those of split
    products are."""

    task: Task
    rival: Rival
    tiled: bool = False


class Problem(NamedTuple):
    """A task, the rivals of which a time is predicted, and the command that settles it."""

    name: str
    title: str
    command: str
    rivals: Callable[[], dict[str, Callable[[], Program]]]


def _programs(task: Task, rivals: Mapping[str, Rival]) -> dict[str, Callable[[], Program]]:
    return {name: partial(Program, task, rival) for name, rival in rivals.items()}


def _products(rival: Rival) -> dict[str, Rival]:
    """A step in float32, and in what a GPU makes of it."""
    return {
        "float32": rival._replace(products=HIGHEST),
        "TF32": rival._replace(products=TF32),
    }


def of_cavity(width: int, depth: int, points: int) -> Problem:
    def rivals() -> dict[str, Callable[[], Program]]:
        task = cavity(width, depth, points)
        ours = partial(by_library, initial_layers(width, depth), "partials", order=2)
        found = {
            **_products(task.rivals["jax", "nested jvp", "float32"]),
            "mpx_pde float32": task.rivals["mpx_pde", "partials", "float32"],
            "mpx_pde float16": task.rivals["mpx_pde", "partials", "float16"],
            "mpx_pde float16, laplacian": task.rivals["mpx_pde", "laplacian", "float16"],
        }
        programs = _programs(task, found)
        for forward in ("bfloat16_x3", "float32"):
            for half in ("float16", "bfloat16"):
                rival = ours(half, forward=forward)
                program = partial(Program, task, rival, tiled=forward == "bfloat16_x3")
                programs[f"mpx_pde {half}, forward {forward}"] = program
        return programs

    command = f"pinn_step --widths {width} --points {points} --depth {depth}"
    title = f"cavity {width} × {depth}, {points:,} points"
    return Problem(f"cavity-{width}", title, command, rivals)


def of_operator(resolution: int, modes: int = 32, channels: int = 64, batch: int = 32) -> Problem:
    def rivals() -> dict[str, Callable[[], Program]]:
        task = fno_step.task(size)
        found = {
            **_products(task.rivals["plain JAX float32"]),
            "mpx_pde float16": task.rivals["mpx_pde dft float16"],
            "mpx_pde float16, remat=False": task.rivals["mpx_pde dft float16, remat=False"],
            "mpx_pde float32": task.rivals["mpx_pde dft float32"],
            "mpx_pde float16, forward float32": fno_step.by_library(
                size, "float16", forward="float32"
            ),
        }
        return _programs(task, found)

    size = fno_step.Size(resolution, modes, channels, batch)
    title = f"FNO {resolution}², {modes} modes, batch {batch}"
    return Problem(f"fno-{resolution}", title, "fno_step", rivals)


def of_transformer(name: str, batch: int, **changes: Any) -> Problem:
    def rivals() -> dict[str, Callable[[], Program]]:
        size = dataclasses.replace(vit_step.vit.SIZES[name], batch=batch, **changes)
        task = vit_step.task(size)
        found = {
            **_products(task.rivals["mpx_pde float32"]),
            "mpx_pde float16": task.rivals["mpx_pde autocast-float16"],
        }
        if "MPX float16" in task.rivals:
            found["MPX float16"] = task.rivals["MPX float16"]
        programs = _programs(task, found)
        for forward in ("bfloat16_x3", "float32"):
            rival = vit_step.by_library("autocast-float16", forward=forward)
            program = partial(Program, task, rival, tiled=forward == "bfloat16_x3")
            programs[f"mpx_pde float16, forward {forward}"] = program
        return programs

    title, command = f"ViT-{name.title()}, batch {batch}", f"vit_step --batches {batch}"
    return Problem(f"vit-{name}", title, command, rivals)


PROBLEMS = (
    of_cavity(512, 6, 65_536),
    of_cavity(256, 6, 16_384),
    of_operator(128),
    of_operator(256),
    of_operator(512),
    of_transformer("base", 64),
)
QUICK = (
    of_cavity(64, 3, 1024),
    of_operator(32, 8, 16, 4),
    of_transformer("base", 8, blocks=1),
)


def compile_program(target: str, program: Program) -> Compiled:
    """For an H100 with XLA's own estimates in its text."""
    task, rival, tiled = program
    options = {"xla_gpu_collect_cost_model_stats": True, **({} if tiled else CUBLAS)}
    args = task.step(rival), task.shapes(rival), task.batch
    return compile_for(target, *args, donate=(0,), compiler_options=options)

"""The training steps whose time is predicted: those of `pinn_step`, `fno_step` and `vit_step`.

Each problem has the same step in float32 and in half precision. Nothing is made but shapes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from . import fno_step, pinn_step, vit_step
from ._cavity import initial_layers
from ._steps import HIGHEST, TF32, Rival, Task


class Problem(NamedTuple):
    """A task with the rivals of which a time is predicted, and the command that settles it."""

    name: str
    title: str
    command: str
    task: Callable[[], Task]


def _products(rival: Rival) -> dict[str, Rival]:
    """A step in float32, and in what a GPU makes of it."""
    return {
        "float32": rival._replace(products=HIGHEST),
        "TF32": rival._replace(products=TF32),
    }


FORWARD = ("bfloat16_x3", "float32")
"""Precisions of the forward pass above half."""


def of_cavity(width: int, depth: int, points: int) -> Problem:
    def task() -> Task:
        whole, layers = pinn_step.task(width, depth, points), initial_layers(width, depth)
        rivals = {
            **_products(whole.rivals["jax", "nested jvp", "float32"]),
            "mpx_pde float32": whole.rivals["mpx_pde", "partials", "float32"],
            "mpx_pde float16": whole.rivals["mpx_pde", "partials", "float16"],
            "mpx_pde float16, laplacian": whole.rivals["mpx_pde", "laplacian", "float16"],
        }
        for forward in FORWARD:
            for half in ("float16", "bfloat16"):
                rival = pinn_step.by_library(layers, "partials", half, 2, forward)
                rivals[f"mpx_pde {half}, forward {forward}"] = rival
        return whole._replace(rivals=rivals)

    command = f"pinn_step --widths {width} --points {points} --depth {depth}"
    title = f"cavity {width} × {depth}, {points:,} points"
    return Problem(f"cavity-{width}", title, command, task)


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
    return Problem(f"fno-{resolution}", title, "fno_step", task)


def of_transformer(name: str, batch: int, **changes: Any) -> Problem:
    def task() -> Task:
        size = dataclasses.replace(vit_step.vit.SIZES[name], batch=batch, **changes)
        whole = vit_step.task(size)
        rivals = {
            **_products(whole.rivals["mpx_pde float32"]),
            "mpx_pde float16": whole.rivals["mpx_pde autocast-float16"],
            "MPX float16": whole.rivals["MPX float16"],
        }
        for forward in FORWARD:
            rival = vit_step.by_library("autocast-float16", forward=forward)
            rivals[f"mpx_pde float16, forward {forward}"] = rival
        return whole._replace(rivals=rivals)

    title, command = f"ViT-{name.title()}, batch {batch}", f"vit_step --batches {batch}"
    return Problem(f"vit-{name}", title, command, task)


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

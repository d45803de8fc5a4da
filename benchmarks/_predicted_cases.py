"""The training steps whose time is predicted: those of `pinn_step`, `fno_step` and `vit_step`.

Each problem has the same step in float32 and in half precision. Nothing is made but shapes.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from . import fno_step
from ._cavity import initial_layers
from ._deviceless import CUBLAS, Compiled, compile_for
from ._pinn_steps import library_step, nested_loss
from ._steps import hand_scaling, optimizer, step_in_float32


class Program(NamedTuple):
    """A step to compile.

    - `step`: from its state and a batch to the new state and whatever else.
    - `products`: what JAX makes of its products of float32 arrays.
    - `tiled`: whether XLA may multiply by its own kernels; those of split products are.
    """

    step: Callable
    state: Any
    batch: Any
    products: str | None = None
    tiled: bool = False


HIGHEST, TF32 = "highest", "tensorfloat32"


class Cavity(NamedTuple):
    width: int
    depth: int
    points: int

    def __str__(self) -> str:
        return f"cavity {self.width} × {self.depth}, {self.points:,} points"

    @property
    def name(self) -> str:
        return f"cavity-{self.width}"

    def rivals(self) -> dict[str, Callable[[], Program]]:
        plain = partial(step_in_float32, partial(nested_loss, order=2))

        def float32(products):
            layers = initial_layers(self.width, self.depth)
            return self._program(plain, layers, hand_scaling(1.0), products)

        def ours(method, precision, forward="half"):
            layers = initial_layers(self.width, self.depth)
            program = self._program(*library_step(method, precision, layers, 2, forward))
            return program._replace(tiled=forward == "bfloat16_x3")

        return {
            "float32": partial(float32, HIGHEST),
            "TF32": partial(float32, TF32),
            "mpx_pde float32": partial(ours, "partials", "float32"),
            "mpx_pde float16": partial(ours, "partials", "float16"),
            "mpx_pde float16, laplacian": partial(ours, "laplacian", "float16"),
            **{
                f"mpx_pde {half}, forward {forward}": partial(ours, "partials", half, forward)
                for forward in ("bfloat16_x3", "float32")
                for half in ("float16", "bfloat16")
            },
        }

    def _program(self, step: Callable, model: Any, scaling: Any, products: Any = None) -> Program:
        def run(state, points):
            *state, value = step(*state, points, jnp.zeros(()))
            return tuple(state), value

        opt_state = eqx.filter_eval_shape(optimizer.init, eqx.filter(model, eqx.is_inexact_array))
        points = jax.ShapeDtypeStruct((self.points, 2), jnp.float32)
        return Program(run, (model, opt_state, scaling), points, products)


class Operator(NamedTuple):
    resolution: int
    modes: int = 32
    channels: int = 64
    batch: int = 32

    def __str__(self) -> str:
        return f"FNO {self.resolution}², {self.modes} modes, batch {self.batch}"

    @property
    def name(self) -> str:
        return f"fno-{self.resolution}"

    def rivals(self) -> dict[str, Callable[[], Program]]:
        size = fno_step.Size(*self)
        shape = jax.ShapeDtypeStruct((self.batch, 1, *(self.resolution,) * 2), jnp.float32)

        def program(rival):
            state = eqx.filter_eval_shape(rival.state, size)
            return Program(rival.step, state, (shape, shape), rival.products)

        plain, ours = fno_step.plain_step, fno_step.our_step
        rivals = {
            "float32": fno_step.Rival(partial(plain, fno_step.plain)),
            "TF32": fno_step.Rival(partial(plain, fno_step.plain), products=TF32),
            "mpx_pde float16": fno_step.Rival(partial(ours, "float16"), "dft"),
            "mpx_pde float16, remat=False": fno_step.Rival(
                partial(ours, "float16"), "dft", remat=False
            ),
        }
        return {name: partial(program, rival) for name, rival in rivals.items()}


class Transformer(NamedTuple):
    size: str
    batch: int
    blocks: int | None = None

    def __str__(self) -> str:
        return f"ViT-{self.size.title()}, batch {self.batch}"

    @property
    def name(self) -> str:
        return f"vit-{self.size}"

    def rivals(self) -> dict[str, Callable[[], Program]]:
        from . import vit_step

        size = dataclasses.replace(vit_step.vit.SIZES[self.size], batch=self.batch)
        if self.blocks is not None:
            size = dataclasses.replace(size, blocks=self.blocks)
        rivals = _Silent.of(vit_step.jax_rivals)

        def program(rival, products):
            adam, state, batch = vit_step.abstract_step(vit_step.vit, size)
            state = state._replace(scaling=eqx.filter_eval_shape(rival.scaling))
            return Program(partial(rival.step, adam), state, batch, products)

        found = {
            "float32": partial(program, rivals["mpx_pde float32"], HIGHEST),
            "TF32": partial(program, rivals["mpx_pde float32"], TF32),
            "mpx_pde float16": partial(program, rivals["mpx_pde autocast-float16"], None),
        }
        if "MPX float16" in rivals:
            found["MPX float16"] = partial(program, rivals["MPX float16"], None)
        return found


class _Silent:
    """A report that keeps nothing: which rivals are missing is seen from the table."""

    @classmethod
    def of(cls, rivals: Callable) -> dict[str, Any]:
        return rivals(cls(), gpu=False)

    def note(self, text: str) -> None:
        del text


Problem = Cavity | Operator | Transformer

PROBLEMS: tuple[Problem, ...] = (
    Cavity(512, 6, 65_536),
    Cavity(256, 6, 16_384),
    Operator(128),
    Operator(256),
    Operator(512),
    Transformer("base", 64),
)
QUICK: tuple[Problem, ...] = (
    Cavity(64, 3, 1024),
    Operator(32, 8, 16, 4),
    Transformer("base", 8, 1),
)


def compile_program(target: str, program: Program) -> Compiled:
    """For an H100 with XLA's own estimates in its text."""
    options: dict[str, Any] = {}
    if target.startswith("h100"):
        options = {"xla_gpu_collect_cost_model_stats": True}
        if not program.tiled:
            options |= CUBLAS
    with jax.default_matmul_precision(program.products):
        return compile_for(
            target,
            program.step,
            program.state,
            program.batch,
            donate=(0,),
            compiler_options=options,
        )

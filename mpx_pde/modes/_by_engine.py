"""The modes in which the engine evaluates the loss: autocast, and a full forward pass."""

import functools as ft
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import jmp

from .._util._types import PyTree
from ..engine import InForward, linearized
from ..precision._dtypes import highest_precision, is_half
from ..precision._forward import Forward
from ._autocast import autocast
from ._mode import AbstractMode, AbstractUncast, output_of


class Autocast(AbstractUncast):
    """Evaluates a loss by [`mpx_pde.autocast`][]. Nothing is cast beforehand.

    **Attributes:**

    - `overrides`: pairs of the name of an override of `autocast` and its patterns.
    """

    policy: jmp.Policy | None = eqx.field(static=True)
    keep_full: PyTree
    overrides: tuple[tuple[str, Any], ...] = eqx.field(static=True)

    scales: ClassVar = True
    is_autocast: ClassVar = True
    least: ClassVar = 0.5
    alternatives: ClassVar = ("`forward='float32'`",)
    advice: ClassVar = (
        "`autocast` leaves float64 as it is, and what is kept in float32 by `FullPrecision` or by "
        "a `precision` or `dtype` of its own."
    )

    @property
    def forward(self) -> None:
        return None

    @property
    def rung(self) -> str:
        return "half" if self.in_half else "full"

    def evaluated(self, func: Callable) -> Callable:
        return autocast(func, self.dtype, **dict(self.overrides)) if self.in_half else func

    def around_loss(self) -> AbstractContextManager:
        return nullcontext()

    def around_gradient(self) -> AbstractContextManager:
        return nullcontext()

    def value_and_grad(self, loss: Callable, args: tuple, kwargs: dict) -> Callable:
        return eqx.filter_value_and_grad(loss, has_aux=True)

    def output(self, tree: PyTree) -> PyTree:
        return output_of(self.policy, tree)

    def without_overrides(self) -> AbstractMode | None:
        return Autocast(self.policy, self.keep_full, ()) if self.overrides else None


class FullForward(AbstractUncast):
    """Evaluates a loss in full, and its gradient in half. Nothing is cast beforehand.

    **Attributes:**

    - `precision`: the precision of the forward pass, as `forward=` names it.
    """

    policy: jmp.Policy | None = eqx.field(static=True)
    keep_full: PyTree
    precision: str = eqx.field(static=True)

    scales: ClassVar = True
    is_autocast: ClassVar = False
    # Three eighths of the backward pass are a quarter of the work. A network with one hidden layer
    # and one output, the first layer of which meets the point, has half of that.
    least: ClassVar = 1 / 8
    alternatives: ClassVar = ()
    advice: ClassVar = (
        "With `forward=` the forward pass stays in full, and of the backward pass the products of "
        "complex numbers, those for which the loss asks for a precision (as `FullPrecision` does), "
        "those with arrays of `keep_full`, those with values that numbers in the loss take beyond "
        "float16's range, those with fixed matrices that make a residual, as in an energy, and the "
        "product in which derivatives by `partials` and its kin meet the point."
    )

    @property
    def forward(self) -> Forward:
        return Forward(self.precision, self.dtype.name)

    @property
    def rung(self) -> str:
        return "full" if self.precision == "float32" and not is_half(self.dtype) else self.precision

    def evaluated(self, func: Callable) -> Callable:
        return InForward(func, self.forward)

    def around_loss(self) -> AbstractContextManager:
        return nullcontext()

    def around_gradient(self) -> AbstractContextManager:
        # For products that ask for no precision: they are true float32 too.
        return highest_precision("highest")

    def value_and_grad(self, loss: Callable, args: tuple, kwargs: dict) -> Callable:
        full = self.full_paths(args, kwargs)
        leaves = jtu.tree_leaves_with_path((None, args, kwargs))
        held = {id(x) for path, x in leaves if path in full}
        return ft.partial(_value_and_grad, loss, self.forward, held)

    def output(self, tree: PyTree) -> PyTree:
        return output_of(self.policy, tree)


def _value_and_grad(
    loss: Callable, forward: Forward, held: Collection[int], model: PyTree, *others: Any
) -> tuple[tuple, PyTree]:
    out, pullback = linearized(loss, forward, model, *others, held=held)
    return out, pullback(jnp.ones_like(out[0]))

"""The interface of a mode, and the two modes that need no engine: full precision, and casts."""

import abc
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import jmp
import numpy as np

from .._util._notes import noting_the_cast
from .._util._types import PyTree
from ..precision._cast import cast_except, cast_operands, full_paths, widen
from ..precision._dtypes import (
    asked_for_half,
    half_precision,
    half_precision_datatype,
    is_half,
    precision_gives_way,
    true_float32,
)
from ..precision._forward import Forward, without_halves


class AbstractMode(eqx.Module):
    """A way to evaluate a loss and its gradient. [`mpx_pde.filter_value_and_grad`][] explains the
    options that select one.

    **Attributes:**

    - `policy`: the policy of the user, or `None`.
    - `keep_full`: the prefix of the arguments that stay in full precision.
    - `scales`: whether the loss is scaled, and its gradient unscaled and checked.
    - `casts`: whether arguments are cast before the function sees them.
    - `is_autocast`: whether [`mpx_pde.autocast`][] evaluates the loss.
    - `forward`: the precisions of forward and backward pass, or `None` if they are the same.
    - `advice`: the text that tells what keeps products out of half precision in this mode.
    - `least`: the share of the work of all products that should be in half precision.
    - `alternatives`: the options that compute more of the loss in float32.
    """

    policy: eqx.AbstractVar[jmp.Policy | None]
    keep_full: eqx.AbstractVar[PyTree]
    scales: ClassVar[bool]
    casts: ClassVar[bool]
    is_autocast: ClassVar[bool]
    advice: ClassVar[str]
    least: ClassVar[float]
    alternatives: ClassVar[tuple[str, ...]]

    @property
    def dtype(self) -> np.dtype:
        """Returns the dtype to compute in, which is a half type unless the policy has another."""
        if self.policy is None:
            return half_precision_datatype()
        return jnp.dtype(self.policy.compute_dtype)

    @property
    def in_half(self) -> bool:
        """Returns whether anything is computed in half precision."""
        return self.scales and is_half(self.dtype)

    @property
    @abc.abstractmethod
    def forward(self) -> Forward | None: ...

    @property
    @abc.abstractmethod
    def rung(self) -> str:
        """Returns the name of the precision in a [`mpx_pde.PrecisionLadder`][]."""

    @abc.abstractmethod
    def asked(self) -> AbstractContextManager:
        """Returns a context in which *half precision* means the compute dtype, a half type."""

    def context(self) -> AbstractContextManager:
        """Returns a context in which *half precision* means the compute dtype, so that the function
        itself and the cap of the scaling use it."""
        return self.asked() if is_half(self.dtype) else nullcontext()

    def full_paths(self, args: tuple, kwargs: dict) -> frozenset:
        """Returns the paths in `(fun, args, kwargs)` of leaves that stay in full precision."""
        return full_paths(self.keep_full, args, kwargs)

    @abc.abstractmethod
    def cast(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Casts the arguments of a loss if this mode does. Raises errors of `keep_full` anyway."""

    @abc.abstractmethod
    def evaluated(self, func: Callable) -> Callable:
        """Returns a loss that is evaluated in this mode."""

    @abc.abstractmethod
    def around_loss(self) -> AbstractContextManager:
        """Returns the context to evaluate a loss in."""

    @abc.abstractmethod
    def around_gradient(self) -> AbstractContextManager:
        """Returns the context to evaluate a loss and its gradient in."""

    @abc.abstractmethod
    def value_and_grad(self, loss: Callable, args: tuple, kwargs: dict) -> Callable:
        """Differentiates a loss with auxiliary output as `eqx.filter_value_and_grad` does. `args`
        and `kwargs` are those that the user passed."""

    @abc.abstractmethod
    def output(self, tree: PyTree) -> PyTree:
        """Casts auxiliary output to the output dtype."""

    def without_overrides(self) -> "AbstractMode | None":
        """Returns this mode without exceptions that the user named, or `None` if there are none."""
        return None


@contextmanager
def meaning(dtype: np.dtype):
    """A context manager in which *half precision* means `dtype`, and no cast has asked for it."""
    with half_precision(dtype), precision_gives_way():
        yield


def output_of(policy: jmp.Policy | None, tree: PyTree) -> PyTree:
    """Casts auxiliary output as a policy says; without one, half-precision arrays to float32."""
    return widen(tree) if policy is None else cast_operands(tree, jnp.dtype(policy.output_dtype))


class AbstractUncast(AbstractMode):
    """A mode that casts no arguments before the function sees them."""

    casts: ClassVar = False

    def asked(self) -> AbstractContextManager:
        return meaning(self.dtype)

    def cast(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        self.full_paths(args, kwargs)
        return args, kwargs


class Full(AbstractUncast):
    """Evaluates a loss as it is, in true float32. Nothing is cast, scaled or checked."""

    policy: jmp.Policy | None = eqx.field(static=True)
    keep_full: PyTree

    scales: ClassVar = False
    is_autocast: ClassVar = False
    advice: ClassVar = ""
    least: ClassVar = 0.0
    alternatives: ClassVar = ()

    @property
    def forward(self) -> None:
        return None

    @property
    def rung(self) -> str:
        return "full"

    def evaluated(self, func: Callable) -> Callable:
        return func

    def around_loss(self) -> AbstractContextManager:
        return without_halves()

    def around_gradient(self) -> AbstractContextManager:
        return true_float32()

    def value_and_grad(self, loss: Callable, args: tuple, kwargs: dict) -> Callable:
        return eqx.filter_value_and_grad(loss, has_aux=True)

    def output(self, tree: PyTree) -> PyTree:
        return tree


class Casts(AbstractMode):
    """Casts the arguments of a loss to the compute dtype, inside of what is differentiated."""

    policy: jmp.Policy | None = eqx.field(static=True)
    keep_full: PyTree

    scales: ClassVar = True
    casts: ClassVar = True
    is_autocast: ClassVar = False
    least: ClassVar = 0.5
    alternatives: ClassVar = ("`forward='float32'`", "`autocast=True`")
    advice: ClassVar = (
        "A product with one float32 operand is float32, and so is all that follows it. Wrap a "
        "layer that returns float32 (in `FullPrecision`, or because it gets float32 points) as "
        '`FullPrecision(layer, out_dtype="half")`. Or pass `autocast=True`, which decides by '
        'operation, or `forward="float32"`: a network that takes no such wrapper, as in Flax, '
        "needs one of them."
    )

    @property
    def forward(self) -> None:
        return None

    @property
    def rung(self) -> str:
        return "half" if self.in_half else "full"

    def asked(self) -> AbstractContextManager:
        return asked_for_half("cast", self.dtype)

    def cast(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return cast_except(self.keep_full, args, kwargs, self.dtype)

    def evaluated(self, func: Callable) -> Callable:
        return func

    def around_loss(self) -> AbstractContextManager:
        return noting_the_cast(self.dtype) if self.in_half else nullcontext()

    def around_gradient(self) -> AbstractContextManager:
        return noting_the_cast(self.dtype, True) if self.in_half else nullcontext()

    def value_and_grad(self, loss: Callable, args: tuple, kwargs: dict) -> Callable:
        return eqx.filter_value_and_grad(loss, has_aux=True)

    def output(self, tree: PyTree) -> PyTree:
        return output_of(self.policy, tree)

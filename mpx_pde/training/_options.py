"""The options that all gradient transformations share: read and checked here, once."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import jmp
import numpy as np

from .._cast import cast_except, cast_operands, widen
from .._dtypes import (
    asked_for_half,
    half_precision,
    half_precision_datatype,
    is_half,
    precision_gives_way,
)
from .._forward import check_forward
from .._tree import in_a_line
from .._types import PyTree
from ..autocast import parse_patterns
from ._policy import parse_policy


class Options(eqx.Module):
    """How a loss is differentiated.

    What each of them means is told by [`mpx_pde.filter_value_and_grad`][]. Make one with
    [`parse_options`][].

    **Attributes:**

    - `call`: the public function that they were given to, in whose name errors speak.
    - `autocast`: the overrides to run `autocast` with; `None` to cast the arguments instead.
    """

    call: str = eqx.field(static=True)
    has_aux: bool = eqx.field(static=True)
    use_mixed_precision: bool = eqx.field(static=True)
    policy: jmp.Policy | None = eqx.field(static=True)
    keep_full: PyTree
    autocast: tuple[tuple[str, Any], ...] | None = eqx.field(static=True)
    forward: str = eqx.field(static=True)
    axis_name: Any = eqx.field(static=True, default=None)
    search: bool = eqx.field(static=True, default=True)

    @property
    def in_full(self) -> bool:
        """Whether the forward pass is in another precision than the backward pass."""
        return self.use_mixed_precision and self.forward != "half"

    @property
    def compute_dtype(self) -> np.dtype:
        if self.policy is None:
            return half_precision_datatype()
        return jnp.dtype(self.policy.compute_dtype)

    @property
    def casts(self) -> bool:
        """Whether arguments are cast before the function sees them."""
        return self.use_mixed_precision and self.autocast is None and not self.in_full

    @property
    def in_half(self) -> bool:
        """Whether anything is to be in half precision."""
        return self.use_mixed_precision and is_half(self.compute_dtype)

    def check_called_with(self, args: tuple) -> None:
        """A `TypeError` where there is no model among the arguments of the function, or nothing in
        it to differentiate with respect to."""
        if not args:
            raise TypeError(
                f"`{self.call}` differentiates with respect to the first positional argument, but "
                "the function was called without one. Pass the model first."
            )
        if not any(map(eqx.is_inexact_array, jtu.tree_leaves(args[0]))):
            raise TypeError(
                f"`{self.call}` differentiates with respect to the floating-point arrays of the "
                f"first positional argument, but {in_a_line(args[0])} has none. Pass the model "
                "first, with its parameters as arrays: numbers of Python and integers are none."
            )

    def in_context(self, thunk: Callable) -> Any:
        """Runs `thunk` where *half precision* means the dtype that this transformation computes
        in, so that the function itself and the cap of the scaling see it."""
        if not is_half(self.compute_dtype):
            return thunk()
        asked = partial(asked_for_half, "cast") if self.casts else half_precision
        with asked(self.compute_dtype), precision_gives_way():
            return thunk()

    def cast(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments as the function gets them."""
        if not self.casts:
            return args, kwargs
        dtype = self.compute_dtype
        args = cast_except(self.keep_full, args, dtype, self.call)
        return args, kwargs if self.keep_full is True else cast_operands(kwargs, dtype)

    def output(self, tree: PyTree) -> PyTree:
        """Auxiliary output in the dtype that the caller is promised."""
        if self.policy is None:
            return widen(tree)
        return cast_operands(tree, jnp.dtype(self.policy.output_dtype))


_FLAGS = {
    "has_aux": "whether the function returns `(loss, aux)`",
    "use_mixed_precision": "whether anything is done in half precision (in which, says `policy`)",
    "search": "whether to find the first scales on the first batch",
}


def parse_options(call: str, arguments: Mapping[str, Any]) -> Options:
    """The options among the arguments of the public function `call`, by name.

    **Raises:** `ValueError` and `TypeError`, in the name of `call`, for what makes no sense.
    """
    given = {f.name: arguments[f.name] for f in dataclasses.fields(Options) if f.name in arguments}
    for name, meaning in _FLAGS.items():
        if not isinstance(given.get(name, True), bool | np.bool_):
            raise TypeError(
                f"`{call}` takes a bool as `{name}`, {meaning}, but got {in_a_line(given[name])}. "
                "It decides which program is compiled: under `jit` it is static."
            )
    parsed = {
        "has_aux": bool(given["has_aux"]),
        "use_mixed_precision": bool(given["use_mixed_precision"]),
        "policy": parse_policy(given["policy"], call),
        "autocast": _parse_autocast(given["autocast"], call),
        "forward": check_forward(given["forward"], call),
    }
    options = Options(call=call, **{**given, **parsed})
    if options.in_full and options.autocast:
        raise ValueError(
            f"`{call}` takes either overrides of `autocast` or `forward={options.forward!r}`, "
            "which evaluates the loss in that precision and leaves nothing to cast. Drop one of "
            "them."
        )
    if options.in_full:
        options = dataclasses.replace(options, autocast=None)
    return options


def _parse_autocast(options: Any, call: str) -> tuple[tuple[str, Any], ...] | None:
    if options is False:
        return None
    options = {} if options is True else options
    if not isinstance(options, dict) or not options.keys() <= {"half", "full"}:
        raise TypeError(
            f"`{call}` takes a bool as `autocast`, or a dict of the overrides of "
            '`mpx_pde.autocast`, such as {"full": "readout"}. Got '
            f"{options!r}."
        )
    return tuple((name, parse_patterns(options[name], name)) for name in sorted(options))

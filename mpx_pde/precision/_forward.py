"""A precision of the forward pass that differs from that of the backward pass."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._util._calls import called
from ._dtypes import check_choice
from ._setting import setting, setting_with
from ._split import SPLIT_PRODUCTS


FORWARDS = ("half", "float32", *SPLIT_PRODUCTS, "float64")
"""The values that `forward=` takes."""

RUNGS = ("half", *SPLIT_PRODUCTS, "float32", "full", "float64")
"""Precisions of a training run, ordered by the error of its loss, the largest first. They are the
values of `forward=`, and `"full"`, which is the precision of the parameters throughout."""


def options_of(rung: str) -> dict[str, Any]:
    """Returns the options that select one of `RUNGS` in a gradient transformation."""
    return {"use_mixed_precision": False} if rung == "full" else {"forward": rung}


def check_rung(rung: Any, name: str) -> str:
    """Returns `rung`; raises a `ValueError` in the name of the called function unless it is one of
    `RUNGS`."""
    check_choice(rung, RUNGS, name)
    return rung if rung == "full" else check_forward(rung)


@dataclass(frozen=True)
class Forward:
    """The precisions of a loss while it is traced: one for its forward pass and one for its
    backward pass.

    **Attributes:**

    - `precision`: one of `FORWARDS`.
    - `backward`: the dtype of values kept for the backward pass, and of its products.
    """

    precision: str
    backward: str

    @property
    def dtype(self) -> np.dtype:
        return jnp.dtype(self.backward)

    @property
    def full(self) -> bool:
        """Returns whether the forward pass is in another precision than the backward pass."""
        return self.precision != "half"

    @property
    def algorithm(self) -> str | None:
        """Returns the split product of the forward pass, or `None` for the highest precision."""
        return self.precision if self.precision in SPLIT_PRODUCTS else None


def present_forward() -> Forward | None:
    """Returns the `Forward` of the loss that is being traced, or `None` outside of such a loss."""
    return setting().forward


def in_full_forward() -> bool:
    """Returns whether a loss is being traced whose forward pass is in full. It keeps values and
    orders its backward pass by itself."""
    forward = present_forward()
    return forward is not None and forward.full


def forward_in(forward: Forward | None) -> AbstractContextManager[Any]:
    """Traces its body under `forward`."""
    return setting_with(forward=forward)


def without_halves() -> AbstractContextManager[Any]:
    """Returns a context in which layers with a half `dtype` compute in that of their weights."""
    return setting_with(without_halves=True)


def asked_in_full() -> bool:
    """Returns whether a function around the present one is in full precision, forward and
    backward."""
    return setting().without_halves


def takes_halves() -> bool:
    """Returns whether layers that were given a half `dtype` compute in it. They do not if the
    forward pass, or a function around them, is in full precision."""
    return not (asked_in_full() or in_full_forward())


def check_forward(precision: Any) -> str:
    """Returns `precision`; raises a `ValueError` in the name of the called function unless it is
    one of `FORWARDS`.
    """
    name = getattr(precision, "__name__", str(precision))
    fix = 'A half forward pass is "half", in the compute dtype of `policy`.'
    fix = fix if name in ("float16", "bfloat16") else ""
    check_choice(precision, FORWARDS, "forward", fix)
    if precision == "float64" and jax.dtypes.canonicalize_dtype("float64") != jnp.float64:
        raise ValueError(
            f"`{called()}` cannot evaluate in float64 while JAX has 64-bit types switched off. "
            'Call `jax.config.update("jax_enable_x64", True)` at the start of the program, or take '
            "'float32' as `forward`."
        )
    return precision

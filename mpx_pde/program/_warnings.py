"""Warnings of lost precision, at the line of the user's code."""

import sys
import warnings
from typing import Any

import jax
import jax.tree_util as jtu
from jax.core import Tracer

from .._util._calls import called
from ..precision._dtypes import matmul_precision
from ._lines import installed


class PrecisionWarning(UserWarning):
    """A warning that a call for half precision multiplies (mostly) in full precision.

    To silence it, filter it like any warning:
    `warnings.simplefilter("ignore", mpx.PrecisionWarning)`.
    """


def warn_user(text: str, category: type[Warning] = PrecisionWarning) -> None:
    """Issues a warning at the line of the user's code, from any depth below it."""
    frame = sys._getframe(1)
    while frame.f_back is not None and installed(frame.f_code.co_filename):
        frame = frame.f_back
    warnings.warn_explicit(
        text,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def traced(tree: Any) -> bool:
    """Returns whether a program is being traced, which is so if a leaf of `tree` is a tracer."""
    return any(isinstance(x, Tracer) for x in jtu.tree_leaves(tree))


_LOW = ("DEFAULT", "TF32_TF32_F32", "BF16_BF16_F32", "BF16_BF16_BF16")
"""Names of JAX's presets that are not more precise than TF32, for float32 arrays."""


def tensorfloat32_by_default() -> bool:
    """Returns whether products of float32 arrays without a precision are taken in TF32 (on a GPU)
    or bfloat16 (on a TPU).
    """
    low = matmul_precision() in (None, "default", "high", "bfloat16", "tensorfloat32", *_LOW)
    return low and jax.default_backend() in ("gpu", "tpu")


def warn_of_tensorfloat32(what: str) -> None:
    """Issues a [`mpx_pde.PrecisionWarning`][] at the user's line that `what` is not computed in
    float32.
    """
    number = "bfloat16" if jax.default_backend() == "tpu" else "TF32"
    warn_user(
        f"`{called()}`: {what} in float32 are multiplied in {number} here, which keeps 3 of "
        "float32's 7 digits, or fewer. It has ruined trainings that end in small differences of "
        'large terms. Put `with jax.default_matmul_precision("highest"):` around it, or pass '
        "`forward='float32'`. If it is meant, filter `mpx.PrecisionWarning`."
    )

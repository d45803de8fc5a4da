"""Checks what people pass to `LevenbergMarquardt`."""

import math
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu

from .._util._calls import called
from .._util._repr import in_a_line
from .._util._types import PyTree
from ..precision._dtypes import is_real
from ..program._warnings import warn_user


def check_dampings(least: Any, first: Any, most: Any, acceleration: Any) -> None:
    values = {"min_damping": least, "damping": first, "max_damping": most}
    for name, x in {**values, "acceleration": acceleration}.items():
        if not is_real(x) or not math.isfinite(x):
            raise ValueError(f"`{called()}` needs a finite number as `{name}`, but got {x!r}.")
    if not 0 < least <= first <= most:
        raise ValueError(
            f"`{called()}` needs 0 < `min_damping` <= `damping` <= `max_damping`, but got "
            f"{least!r}, {first!r} and {most!r}."
        )
    if acceleration < 0:
        raise ValueError(f"`{called()}` needs `acceleration` >= 0, but got {acceleration!r}.")


def check_solver(solver: Any) -> None:
    if solver is not None and not (hasattr(solver, "init") and hasattr(solver, "compute")):
        raise TypeError(
            f"`{called()}` takes a solver of lineax as `solver`, such as `lineax.Cholesky()`, but "
            f"got {in_a_line(solver)}."
        )


def check_parameters(model: PyTree, dtype: Any) -> None:
    """Checks that there are parameters and that they are real. Warns if some have a narrower dtype
    than the residual."""
    leaves = jtu.tree_leaves_with_path(model)
    dtypes = {jtu.keystr(path): x.dtype for path, x in leaves if eqx.is_inexact_array(x)}
    if not dtypes:
        raise ValueError(f"`{called()}` needs a model with floating-point arrays.")
    if any(jnp.issubdtype(x, jnp.complexfloating) for x in dtypes.values()):
        raise ValueError(
            f"`{called()}` finds real parameters, but the model has complex arrays. Keep their "
            "real and imaginary parts in arrays of their own."
        )
    narrow = [f"{path} ({x})" for path, x in dtypes.items() if x.itemsize < dtype.itemsize]
    if narrow:
        warn_user(
            f"`{called()}` got parameters in less than {dtype}, the precision of the residual: "
            f"{narrow[0]}"
            + (f" and {len(narrow) - 1} more" if narrow[1:] else "")
            + ". Each step is rounded to their dtype. Cast all, those that `FullPrecision` keeps "
            "too: "
            f"`jax.tree.map(lambda x: mpx_pde.cast_tree(x, '{dtype}'), model)`.",
        )

"""Checks of `LevenbergMarquardt`: its numbers, its examples and the shape of its residuals."""

import math
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float

from .._dtypes import is_real
from .._repr import in_a_line
from .._types import PyTree


def check_dampings(call: str, least: Any, first: Any, most: Any, acceleration: Any) -> None:
    values = {"min_damping": least, "damping": first, "max_damping": most}
    for name, x in {**values, "acceleration": acceleration}.items():
        if not is_real(x) or not math.isfinite(x):
            raise ValueError(f"`{call}` needs a finite number as `{name}`, but got {x!r}.")
    if not 0 < least <= first <= most:
        raise ValueError(
            f"`{call}` needs 0 < `min_damping` <= `damping` <= `max_damping`, but got {least!r}, "
            f"{first!r} and {most!r}."
        )
    if acceleration < 0:
        raise ValueError(f"`{call}` needs `acceleration` >= 0, but got {acceleration!r}.")


def check_solver(solver: Any, call: str) -> None:
    if solver is not None and not (hasattr(solver, "init") and hasattr(solver, "compute")):
        raise TypeError(
            f"`{call}` takes a solver of lineax as `solver`, such as `lineax.Cholesky()`, but got "
            f"{in_a_line(solver)}."
        )


def check_parameters(model: PyTree, call: str) -> None:
    """Checks that there are parameters, and that they are real."""
    found = [x for x in jtu.tree_leaves(model) if eqx.is_inexact_array(x)]
    if not found:
        raise ValueError(f"`{call}` needs a model with floating-point arrays.")
    if any(jnp.iscomplexobj(x) for x in found):
        raise ValueError(
            f"`{call}` finds real parameters, but the model has complex arrays. Keep their real "
            "and imaginary parts in arrays of their own."
        )


def length_of(batch: PyTree, call: str) -> int:
    """Returns the number of examples in a batch."""
    lengths = {x.shape[0] if x.ndim else -1 for x in map(jnp.asarray, jtu.tree_leaves(batch))}
    if len(lengths) != 1 or -1 in lengths:
        raise ValueError(
            f"`{call}` needs examples stacked along a leading axis of one length, but got arrays "
            f"with leading axes of {sorted(map(str, lengths))}."
        )
    if lengths == {0}:
        raise ValueError(f"`{call}` needs at least one example of each residual, but got none.")
    return lengths.pop()


def as_vector(out: Any, call: str) -> Float[Array, " entries"]:
    """A residual at one example, as a vector."""
    if not eqx.is_array_like(out) or not jnp.issubdtype(jnp.result_type(out), jnp.floating):
        what = type(out).__name__
        if hasattr(out, "dtype"):
            what = f"an array of dtype {out.dtype.name}"
        raise TypeError(
            f"`{call}` needs residuals that return a real floating-point array at one example, but "
            f"one returned {what}. Stack several, or pass a function for each."
        )
    return jnp.ravel(out)

"""Access of the gradient transformations to the counts of a derivative scaling."""

import inspect
from collections.abc import Callable
from typing import Any

from jax import lax
from jaxtyping import Array, Float32

from .._varying import varying_axes


def check_takes_derivatives(func: Callable, call: str) -> None:
    """A `TypeError` in the name of `call` unless `func` takes a keyword `derivatives`."""
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):  # a built-in that does not tell
        return
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not any(p.name == "derivatives" and p.kind in named for p in parameters):
        raise TypeError(
            f"`{call}` with a `Scaling` passes its derivative scaling to the function as the "
            f"keyword argument `derivatives`, but {getattr(func, '__name__', func)!r} takes none. "
            "Write `def loss(model, points, *, derivatives)` and hand it on to `partials`, or pass "
            "a plain loss scaling."
        )


def sum_counts(
    counts: Float32[Array, "*rows columns"], axis_name: Any
) -> Float32[Array, "*rows columns"]:
    """The counts of all devices along mapped axes."""
    if axis_name is None:
        return counts
    for axis in axis_name if isinstance(axis_name, tuple | list) else (axis_name,):
        # Where JAX tracks what varies between devices, the transpose of the mark on the probe has
        # summed already.
        tracked = axis in varying_axes(lax.axis_index(axis))
        if not tracked or axis in varying_axes(counts):
            counts = lax.psum(counts, axis)
    return counts

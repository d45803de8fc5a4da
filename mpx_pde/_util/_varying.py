"""JAX's marks on values that may differ between the devices of a `shard_map`.

If an operand is the same on all devices and another one is not, JAX's own operations mark the
first; its primitives do not. The transpose of the mark is the sum over devices.
"""

from collections.abc import Iterable
from typing import Any

import jax
from jax import lax
from jax.core import ShapedArray

from ._calls import called


def size_of_axis(axis_name: Any) -> int:
    """Returns the number of devices along the mesh axes `axis_name`. Raises an error in the name of
    the called function unless these are axes of a surrounding `shard_map` or `pmap`."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"`{called()}` takes the name of a mesh axis as `axis_name`, or a tuple of names, but "
            f"got {axis_name!r}."
        )
    try:
        return lax.axis_size(axis_name)
    except NameError as e:
        raise ValueError(
            f"`{called()}` got `axis_name={axis_name!r}`, but is not inside of a `jax.shard_map` "
            "or `jax.pmap` over such an axis. Under `jax.jit` with sharded arrays, and on one "
            "device, there is nothing to do between devices: leave it out there."
        ) from e


def varying_axes(x: Any) -> frozenset[str]:
    """Returns the mesh axes along which an array, or an array of this type, may differ."""
    aval: Any = x if isinstance(x, ShapedArray) else jax.typeof(x)
    # JAX renamed the attribute between 0.10.0 and 0.10.2.
    return aval.manual_axis_type.varying if hasattr(aval, "manual_axis_type") else aval.vma


def mark_varying(x: Any, axes: Iterable[str]) -> Any:
    """Marks `x` as varying along these axes as well."""
    missing = tuple(sorted(frozenset(axes) - varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def match_varying_axes(*arrays: Any) -> list[Any]:
    """Marks arrays that meet in an operation so that all vary along the same axes."""
    every = frozenset().union(*map(varying_axes, arrays))
    return [mark_varying(x, every) for x in arrays] if every else list(arrays)

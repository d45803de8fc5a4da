"""Small arrays behind one another, for a loop to carry."""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ._varying import varying_axes


SMALL = 2**14
"""Up to this many entries arrays are put behind one another."""


def packing(
    types: Sequence[Any],
) -> tuple[Callable[[Sequence[Any]], list[Array]], Callable[[Sequence[Array]], list[Any]]]:
    """How arrays of these types are put behind one another, and how they are taken apart again.

    A GPU takes a kernel for each array that enters a loop, and mostly for each that one turn of it
    leaves to the next: for the biases of a network and the state of a scaling, more than for its
    products. Large arrays stay as they are, as do those on a mesh with explicit axes.
    """
    groups: dict[Hashable, list[int]] = {}
    for i, aval in enumerate(types):
        explicit = any(axis is not None for axis in aval.sharding.spec)
        keys = jnp.issubdtype(aval.dtype, jax.dtypes.extended)
        small = math.prod(aval.shape) <= SMALL and not explicit and not keys
        # JAX tracks which arrays are the same on all devices.
        groups.setdefault((aval.dtype, varying_axes(aval)) if small else i, []).append(i)

    def pack(arrays):
        return [
            arrays[where[0]]
            if len(where) == 1
            else jnp.concatenate([jnp.ravel(arrays[i]) for i in where])
            for where in groups.values()
        ]

    def unpack(packed):
        out: list[Any] = [None] * len(types)
        for where, array in zip(groups.values(), packed, strict=True):
            if len(where) == 1:
                out[where[0]] = array
                continue
            sizes = [math.prod(types[i].shape) for i in where]
            for i, part in zip(where, lax.split(array, sizes), strict=True):
                out[i] = part.reshape(types[i].shape)
        return out

    return pack, unpack

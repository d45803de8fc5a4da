"""Norms and relative errors of arrays of any sizes and dtypes.

They do not rely on JAX's dtype promotion, which may be set to `strict`.
"""

from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array

from .._util._types import PyTree
from ..precision._dtypes import wide


def wide_of(x: Array) -> Any:
    """Returns the dtype that norms of an array are taken in."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return x.dtype
    return wide(x.dtype)


def real_of(dtype: Any) -> Any:
    """Returns the dtype of the real part of a number."""
    return jnp.finfo(dtype).dtype


def _wider(*arrays: Array) -> tuple[Array, ...]:
    dtype = max(map(wide_of, arrays), key=lambda dtype: dtype.itemsize)
    return tuple(x.astype(dtype) for x in arrays)


def minus(x: Array, y: Array) -> Array:
    """Subtracts in the wider of the two dtypes."""
    x, y = _wider(x, y)
    return x - y


def norm(x: Array) -> Array:
    """Returns the Euclidean norm of all entries."""
    size = jnp.abs(x).astype(real_of(wide_of(x)))
    # Squares of small gradients underflow in float32.
    largest = jnp.max(size, initial=0)
    scale = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)
    return scale * jnp.sqrt(jnp.sum((size / scale) ** 2))


def total(norms: PyTree) -> Array:
    """Returns the norm of all arrays together, from the norm of each."""
    return norm(jnp.stack(_wider(*jtu.tree_leaves(norms))))


def share_of(part: Array, whole: Array) -> Array:
    """Returns `part / whole`, where 0/0 counts as 0."""
    part, whole = _wider(part, whole)
    none = jnp.where(part == 0, jnp.zeros_like(part), jnp.full_like(part, jnp.inf))
    return jnp.where(whole == 0, none, part / jnp.where(whole == 0, jnp.ones_like(whole), whole))


def relative_distance(tree: PyTree, true: PyTree) -> Array:
    """Returns the distance of a tree of arrays from `true`, relative to the norm of `true`."""
    off = jtu.tree_map(lambda x, y: norm(minus(x, y)), tree, true)
    return share_of(total(off), total(jtu.tree_map(norm, true)))

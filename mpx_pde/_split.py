"""Float32 products out of several products of halves or of TF32."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax


# By the name that `dtype` takes, the least exact first: JAX's name, bits of a mantissa, parts of an
# operand, and the largest sum of the numbers of two parts whose product is taken.
_SPLITS = {
    "tensorfloat32": (lax.DotAlgorithmPreset.TF32_TF32_F32, 10, 1, 0),
    "bfloat16_x3": (lax.DotAlgorithmPreset.BF16_BF16_F32_X3, 7, 2, 1),
    "tensorfloat32_x3": (lax.DotAlgorithmPreset.TF32_TF32_F32_X3, 10, 2, 1),
    "bfloat16_x6": (lax.DotAlgorithmPreset.BF16_BF16_F32_X6, 7, 3, 2),
    "bfloat16_x9": (lax.DotAlgorithmPreset.BF16_BF16_F32_X9, 7, 3, 4),
}
IN_HALVES, _SHORT = "bfloat16_x3", 256
"""The split product that a GPU takes as products of bfloat16 by themselves, of matrices whose axes
are all longer than this."""

SPLIT_PRODUCTS = {name: preset for name, (preset, *_) in _SPLITS.items()}


def is_taken_by_halves(*shapes: tuple[Any, ...], ndim: int = 1) -> bool:
    """Returns whether a GPU takes a product by `IN_HALVES` as several: that of matrices of these
    shapes, or one of many points of which each has vectors of these. An export may leave sizes
    open.

    On an H200 cuBLAS takes the parts at three times the rate of XLA's own kernel for all of them;
    of shorter matrices what is read and written more takes as long.
    """
    long = lambda n: isinstance(n, int) and n > _SHORT
    return all(len(shape) == ndim and all(map(long, shape)) for shape in shapes)


def split_by_hardware(product: Callable, x: Any, y: Any, algorithm: str) -> Any:
    """Takes a split product by the units of a GPU or TPU."""
    return product(x, y, precision=SPLIT_PRODUCTS[algorithm], preferred_element_type=x.dtype)


def split_product(
    product: Callable, x: Any, y: Any, algorithm: str, dtype: Any = jnp.float32
) -> Any:
    """Takes a split product of float32 arrays on any device, with the numbers that hardware for it
    computes, as products of `dtype`, which holds the parts.

    Operands are cut into parts of 8 (bfloat16) or 11 (TF32) significant bits, each the rest of what
    is before it, rounded to the nearest. Products of parts are exact in float32, and are summed
    there; of what `_x3` and `_x6` leave out is what is smaller than the last part of an operand.
    Products of bfloat16 but the first are written in bfloat16: they are smaller by 2⁻⁸, and the sum
    then is 1.6 times as far off as that of float32 products.
    """
    _, bits, parts, last = _SPLITS[algorithm]

    def cut(z):
        out = []
        for _ in range(parts):
            high = lax.reduce_precision(z, 8, bits)
            out.append(high if dtype == z.dtype else z.astype(dtype))
            # An infinity has no remainder.
            z = jnp.where(jnp.isfinite(high), z - high, jnp.zeros_like(z))
        return out

    def multiply(i, j):
        wanted = {"preferred_element_type": dtype if i + j else x.dtype}
        return product(xs[i], ys[j], precision=lax.Precision.HIGHEST, **wanted)

    xs, ys = cut(x), cut(y)
    order = sorted(
        ((i, j) for i in range(parts) for j in range(parts) if i + j <= last), key=sum, reverse=True
    )
    *rest, first = [multiply(i, j) for i, j in order]
    if not rest:
        return first
    if dtype != x.dtype:
        first = lax.optimization_barrier(first)
    low = sum(rest[1:], rest[0]).astype(x.dtype)  # small ones first
    # Infinity times a remainder of 0 is NaN.
    return first + jnp.where(jnp.isnan(low), jnp.zeros_like(low), low)

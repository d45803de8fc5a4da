"""Computes float32 products from several products of halves or of TF32."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax


# For each name that `dtype` takes, the least exact first: JAX's name, bits of a mantissa, parts of
# an operand, and the largest sum of the indices of two parts whose product is taken.
_SPLITS = {
    "tensorfloat32": (lax.DotAlgorithmPreset.TF32_TF32_F32, 10, 1, 0),
    "bfloat16_x3": (lax.DotAlgorithmPreset.BF16_BF16_F32_X3, 7, 2, 1),
    "tensorfloat32_x3": (lax.DotAlgorithmPreset.TF32_TF32_F32_X3, 10, 2, 1),
    "bfloat16_x6": (lax.DotAlgorithmPreset.BF16_BF16_F32_X6, 7, 3, 2),
    "bfloat16_x9": (lax.DotAlgorithmPreset.BF16_BF16_F32_X9, 7, 3, 4),
}
IN_HALVES, _SHORT = "bfloat16_x3", 256
"""The split product that is computed on a GPU by separate products of bfloat16, if all axes of the
matrices are longer than `_SHORT`."""

SPLIT_PRODUCTS = {name: preset for name, (preset, *_) in _SPLITS.items()}


def is_taken_by_halves(*shapes: tuple[Any, ...], ndim: int = 1) -> bool:
    """Returns whether a GPU computes a product by `IN_HALVES` as several products. The `shapes` are
    those of matrices, or those of the vectors that each of many points has. An export may leave
    sizes open.

    On an H200 cuBLAS computes the parts three times as fast as XLA's own kernel for all of them.
    For shorter matrices the additional memory traffic takes up the gain.
    """
    long = lambda n: isinstance(n, int) and n > _SHORT
    return all(len(shape) == ndim and all(map(long, shape)) for shape in shapes)


def split_by_hardware(product: Callable, x: Any, y: Any, algorithm: str) -> Any:
    """Computes a split product by the units of a GPU or TPU."""
    return product(x, y, precision=SPLIT_PRODUCTS[algorithm], preferred_element_type=x.dtype)


def _parts(z: Any, algorithm: str, dtype: Any) -> list[Any]:
    """Splits a float32 array into parts of 8 (bfloat16) or 11 (TF32) significant bits. Each part is
    the remainder of the previous ones, rounded to the nearest."""
    _, bits, count, _ = _SPLITS[algorithm]
    out = []
    for _ in range(count):
        high = lax.reduce_precision(z, 8, bits)
        out.append(high if dtype == z.dtype else z.astype(dtype))
        # An infinity has no remainder.
        z = jnp.where(jnp.isfinite(high), z - high, jnp.zeros_like(z))
    return out


def _pairs(algorithm: str) -> list[tuple[int, int]]:
    """Returns the pairs of parts whose products are taken, small ones first."""
    _, _, count, last = _SPLITS[algorithm]
    pairs = ((i, j) for i in range(count) for j in range(count) if i + j <= last)
    return sorted(pairs, key=sum, reverse=True)


def split_product(product: Callable, x: Any, y: Any, algorithm: str) -> Any:
    """Computes a split product of float32 arrays on any device, with the same numbers as special
    hardware. Products of parts are exact in float32, and are summed in float32. `_x3` and `_x6`
    leave out products smaller than the last part of an operand.
    """
    xs, ys = (_parts(z, algorithm, z.dtype) for z in (x, y))
    options = {"precision": lax.Precision.HIGHEST, "preferred_element_type": x.dtype}
    *rest, first = [product(xs[i], ys[j], **options) for i, j in _pairs(algorithm)]
    return _sum(first, rest) if rest else first


def split_by_halves(product: Callable, x: Any, y: Any, axes: tuple[int, int]) -> Any:
    """Computes a product of matrices, contracted along `axes`, by `IN_HALVES` as products of
    bfloat16.

    A large result is written only once, by one product of concatenated parts. Otherwise the small
    products are written in bfloat16. They are smaller by 2⁻⁸, and the error of the sum is then 1.6
    times that with float32 products.
    """

    def by(x, y, dtype):
        return product(x, y, precision=lax.Precision.HIGHEST, preferred_element_type=dtype)

    rows, columns = (z.size // z.shape[axis] for z, axis in zip((x, y), axes, strict=True))
    if rows * columns > 2 * (x.size + y.size):
        left, right = halves_in_line(x, y, axes, IN_HALVES)
        return by(left, right, x.dtype)
    *small, (left, right) = zip(*_paired(x, y, IN_HALVES), strict=True)
    # Without the barrier, XLA fuses the sum into this product, with a copy of the others.
    first = lax.optimization_barrier(by(left, right, x.dtype))
    return _sum(first, [by(left, right, jnp.bfloat16) for left, right in small])


def halves_in_line(x: Any, y: Any, axes: tuple[int, int], algorithm: str) -> list[Any]:
    """Returns two matrices of bfloat16 whose product, contracted along `axes`, is the split product
    of two float32 matrices: their parts, concatenated along the contracted axis. If one of them
    holds an infinity, most of the product is NaN."""
    return [*map(jnp.concatenate, _paired(x, y, algorithm), axes)]


def _paired(x: Any, y: Any, algorithm: str) -> Any:
    """Returns the parts of `x`, in bfloat16, and the parts of `y` that each is multiplied by."""
    xs, ys = (_parts(z, algorithm, jnp.bfloat16) for z in (x, y))
    return zip(*((xs[i], ys[j]) for i, j in _pairs(algorithm)), strict=True)


def _sum(first: Any, small: list[Any]) -> Any:
    low = functools.reduce(jnp.add, small).astype(first.dtype)
    # Infinity times a remainder is NaN, or an infinity of any sign.
    return first + jnp.where(jnp.isfinite(low), low, jnp.zeros_like(low))

"""A cost model that chooses between truncated DFT matrices and the FFT."""

from collections.abc import Sequence
from math import log2, prod
from typing import Any, Literal

import jax.numpy as jnp

from ..precision._dtypes import is_half
from ._dft import frequencies


# Work per second on two cores of a CPU, fitted to the benchmark `spectral`. Only the ratios matter.
# They are used on every platform, because no other has been measured.
PRODUCTS = 6.5e10  # operations of matrix products
FFT = 5e9  # operations of FFTs, counted as 5 n log2(n) / 2 for n real points
MEMORY = 1.6e10  # bytes


def choose_method(
    channels: int, grid: Sequence[int], modes: Sequence[int], dtype: Any
) -> Literal["dft", "fft"]:
    """Chooses matrices in half precision, which the FFT cannot store. Otherwise chooses the method
    that is estimated to take less time from a grid to its modes."""
    if is_half(dtype):
        return "dft"
    dims, size = len(grid), jnp.dtype(dtype).itemsize
    counts = [len(frequencies(m, i == dims - 1)) for i, m in enumerate(modes)]
    matrices = 0.0
    points = channels * prod(grid)
    for axis in reversed(range(dims)):
        last = axis == dims - 1
        after = points // grid[axis] * counts[axis] * (2 if last else 1)
        products = 2 * points * counts[axis] * 2
        matrices += products / PRODUCTS + (points + after) * size / MEMORY
        points = after
    # One pass over complex float32 numbers for each axis, and one to cut out the modes.
    points = channels * prod(grid)
    fft = 2.5 * points * log2(prod(grid)) / FFT + points * 8 * dims / MEMORY
    return "dft" if matrices <= fft else "fft"

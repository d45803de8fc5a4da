"""Which transform is faster: truncated DFT matrices or the FFT."""

from collections.abc import Sequence
from math import log2, prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._dtypes import is_half
from ._dft import frequencies


class Rates(NamedTuple):
    """What a platform does in a second; only ratios matter here.

    **Attributes:**

    - `product`, `half_product`: operations of matrix products.
    - `fft`: operations of FFTs, counted as 5 n log2(n) / 2 for n real points.
    - `memory`: bytes.
    """

    product: float
    half_product: float
    fft: float
    memory: float


# The CPU's fit the benchmark `spectral` (two cores); the others are data sheets with the share that
# each kind of program gets of them, and have not been measured.
RATES = {
    "cpu": Rates(product=5e10, half_product=5e10, fft=5e9, memory=1.6e10),
    "gpu": Rates(product=5e13, half_product=4e14, fft=5e12, memory=3e12),
    "tpu": Rates(product=3e13, half_product=2e14, fft=1e12, memory=8e11),
}


HALF_PREFERENCE = 4


def transform_seconds(
    channels: int, grid: Sequence[int], modes: Sequence[int], dtype: np.dtype, rates: Rates
) -> tuple[float, float]:
    """One way from a grid to its modes, by matrices and by FFT."""
    dims = len(grid)
    kept = [len(frequencies(m, i == dims - 1)) for i, m in enumerate(modes)]
    rate = rates.half_product if is_half(dtype) else rates.product
    matrices = 0.0
    points = channels * prod(grid)
    for axis in reversed(range(dims)):
        last = axis == dims - 1
        after = points // grid[axis] * kept[axis] * (2 if last else 1)
        products = 2 * points * kept[axis] * 2
        matrices += products / rate + (points + after) * dtype.itemsize / rates.memory
        points = after
    # A pass over complex float32 numbers for each axis, then the modes are cut out.
    points = channels * prod(grid)
    fft = 2.5 * points * log2(prod(grid)) / rates.fft + points * 8 * dims / rates.memory
    return matrices, fft


def choose_method(
    channels: int,
    grid: Sequence[int],
    modes: Sequence[int],
    dtype: Any,
    platform: str | None = None,
) -> str:
    """`"dft"` or `"fft"`, whichever `transform_seconds` finds faster.

    In half precision only a transform by matrices stores half, so there the FFT has to be faster
    by a factor of `HALF_PREFERENCE`.
    """
    rates = RATES.get(platform or jax.default_backend(), RATES["gpu"])
    matrices, fft = transform_seconds(channels, grid, modes, jnp.dtype(dtype), rates)
    return "dft" if matrices <= fft * (HALF_PREFERENCE if is_half(dtype) else 1) else "fft"

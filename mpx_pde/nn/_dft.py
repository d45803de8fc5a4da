"""Discrete Fourier transforms between a grid and the modes that are kept, as real matrices.

XLA has no half-precision FFT and no half-precision complex numbers. A neural operator keeps only a
few modes, so its transforms are short sums. These are matrix products, where half precision gains
most. Complex numbers are stored as an axis of two, and each matrix holds the four real products of
a complex one.

The forward matrices include the factor 1/N, so no coefficient exceeds the largest value of the
field. The matrices are constants of the program. They are the same NumPy array each time, which
JAX stores once however many layers use it.
"""

from functools import cache

import numpy as np


def frequencies(modes: int, real: bool) -> np.ndarray:
    """Returns the frequencies of an axis that are kept. For the last axis, whose transform is real,
    they are 0 … m/2; for other axes -m/2 … m/2 - 1 (one more for odd m).
    """
    return np.arange(modes // 2 + 1) if real else np.arange(modes) - modes // 2


def _cos_sin(k: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns cos and sin of 2πkn/size, shape `[n, k]`.

    The angle is reduced to a quarter turn in integer arithmetic. Entries that should cancel
    therefore do so exactly, in half precision too, and a constant does not leak into other modes of
    an even grid.
    """
    turn = np.outer(np.arange(size), k) % size
    half = 2 * np.minimum(turn, size - turn)  # of `size`, which is half a turn
    quarter = np.minimum(half, size - half)
    cos, sin = np.cos(np.pi * quarter / size), np.sin(np.pi * quarter / size)
    cos = np.where(2 * quarter == size, 0, np.where(2 * half > size, -cos, cos))
    return cos, np.where(2 * turn > size, -sin, sin)


# The real form of a complex product, as an array [x, y, xy] of real and imaginary parts.
_PRODUCT = np.array([[[1, 0], [0, 1]], [[0, 1], [-1, 0]]])


def _blocks(real: np.ndarray, imag: np.ndarray) -> np.ndarray:
    """Returns the multiplication by complex numbers [a, b] as a real array [a, in, out, b]."""
    return np.einsum("wab,wio->aiob", np.stack([real, imag]), _PRODUCT)


def _nyquist(size: int, k: np.ndarray) -> np.ndarray:
    return 2 * k == size


@cache
def forward_matrix(size: int, modes: int, real: bool, dtype: np.dtype) -> np.ndarray:
    """Returns the matrix from a grid axis to its modes. Its shape is `[n, 2, k]` for the real axis,
    which is transformed first, and `[n, 2, 2, k]` (real and imaginary part before and after) for
    the others.

    On the real axis the Nyquist coefficient of the grid is halved, because its other half belongs
    to the negative frequency. Values on the same grid do not depend on this; values on another grid
    do.
    """
    k = frequencies(modes, real)
    cos, sin = (x / size for x in _cos_sin(k, size))
    if not real:
        return _blocks(cos, -sin).astype(dtype)
    weight = np.where(_nyquist(size, k), 0.5, 1.0)
    return np.stack([cos * weight, -sin * weight], 1).astype(dtype)


@cache
def inverse_matrix(size: int, modes: int, real: bool, pair: bool, dtype: np.dtype) -> np.ndarray:
    """Returns the matrix from modes to a grid axis. Its shape is `[k, 2, n]` for the real axis,
    which is transformed last, and `[k, 2, 2, n]` for the others.

    With `pair`, two axes of two replace the first axis of two. They take the four real products of
    complex weights with modes, and the transform adds these up.
    """
    k = frequencies(modes, real)
    cos, sin = (x.T for x in _cos_sin(k, size))
    if real:
        # Twice the real part accounts for the negative frequencies.
        weight = np.where(k == 0, 1.0, 2.0)[:, None]
        out = np.stack([cos * weight, -sin * weight], 1)
    else:
        out = _blocks(cos, sin)
    if pair:
        out = np.einsum("wxi,ki...->kwx...", _PRODUCT, out)
    return out.astype(dtype)


def regrid_factor(modes: int, size: int, output_size: int) -> np.ndarray | None:
    """Returns the factor that the modes of a real axis need between `rfft` on one grid and `irfft`
    to another, or `None` if they need none.
    """
    k = frequencies(modes, True)
    factor = np.where(_nyquist(size, k), 0.5, 1.0) * np.where(_nyquist(output_size, k), 2.0, 1.0)
    return None if np.all(factor == 1) else factor

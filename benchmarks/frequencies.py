"""Which frequencies does half precision lose? The error of a transform, frequency by frequency.

The experiment of Tu et al., Speeding up Fourier Neural Operators via Mixed Precision, appendix A:
a sum of sines and cosines of frequencies 1 to 10 with random amplitudes that decay exponentially,
here as exp(−k). Its spectrum is computed

- of the signal rounded to half precision, exactly: what storage alone costs;
- by a product with the DFT matrix: operands in half precision, sums in float32, as
  `mpx_pde.nn.SpectralConv` does it;
- by the same product with a float16 accumulator;
- by a radix-2 FFT whose every operation is rounded to float16.

The error is relative to the amplitude of the same frequency, and the median over many signals.
"""

import argparse
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._report import Report


SIZE, SIGNALS = 128, 1000  # points of each
FREQUENCIES = np.arange(1, 11)


def signals(count: int, seed: int = 0) -> np.ndarray:
    """Float64 signals, shape `[count, SIZE]`."""
    rng = np.random.default_rng(seed)
    amplitudes = rng.standard_normal((2, count, len(FREQUENCIES))) * np.exp(-FREQUENCIES)
    angles = 2 * np.pi * np.outer(FREQUENCIES, np.arange(SIZE) / SIZE)
    return amplitudes[0] @ np.cos(angles) + amplitudes[1] @ np.sin(angles)


def fourier_matrix() -> np.ndarray:
    """`[SIZE, 2, frequencies]`, real and imaginary part, with the factor 1/N of the forward
    transform. The phase is reduced in integers."""
    angles = 2 * np.pi * (np.outer(np.arange(SIZE), FREQUENCIES) % SIZE) / SIZE
    return np.stack([np.cos(angles), -np.sin(angles)], axis=1) / SIZE


def rounded(dtype: str) -> Callable[[np.ndarray], np.ndarray]:
    def spectrum(x):
        stored = np.asarray(jnp.asarray(x).astype(dtype).astype(jnp.float32), np.float64)
        return np.fft.rfft(stored, norm="forward")[:, FREQUENCIES]

    return spectrum


def by_products(dtype: str) -> Callable[[np.ndarray], np.ndarray]:
    def spectrum(x):
        matrix = jnp.asarray(fourier_matrix().reshape(SIZE, -1), jnp.float32)
        product = jax.jit(lambda x: mpx.mixed_matmul(x, matrix, dtype=dtype, out_dtype="float32"))
        parts = np.asarray(product(jnp.asarray(x, jnp.float32)), np.float64)
        real, imag = np.split(parts, 2, axis=1)
        return real + 1j * imag

    return spectrum


def half_accumulator(x: np.ndarray) -> np.ndarray:
    x, matrix = x.astype(np.float16), fourier_matrix().astype(np.float16)
    total = np.zeros((len(x), *matrix.shape[1:]), np.float16)
    for column, row in zip(x.T, matrix, strict=True):
        total += column[:, None, None] * row  # NumPy rounds each float16 operation
    return total[:, 0].astype(np.float64) + 1j * total[:, 1].astype(np.float64)


def half_fft(x: np.ndarray) -> np.ndarray:
    """Decimation in time, normalized by ½ in each stage. Real and imaginary parts are float16."""

    def transform(x):  # [signals, points]
        n = x.shape[1]
        if n == 1:
            return x, np.zeros_like(x)
        (even_re, even_im), (odd_re, odd_im) = transform(x[:, ::2]), transform(x[:, 1::2])
        angles = 2 * np.pi * np.arange(n // 2) / n
        cos, sin = np.cos(angles).astype(np.float16), np.sin(angles).astype(np.float16)
        re, im = odd_re * cos + odd_im * sin, odd_im * cos - odd_re * sin
        half = np.float16(0.5)
        return (
            np.concatenate([(even_re + re) * half, (even_re - re) * half], axis=1),
            np.concatenate([(even_im + im) * half, (even_im - im) * half], axis=1),
        )

    re, im = transform(x.astype(np.float16))
    return (re.astype(np.float64) + 1j * im.astype(np.float64))[:, FREQUENCIES]


METHODS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "float16 storage alone": rounded("float16"),
    "float16 products": by_products("float16"),
    "float16 FFT": half_fft,
    "float16 products, float16 accumulator": half_accumulator,
    "bfloat16 storage alone": rounded("bfloat16"),
    "bfloat16 products": by_products("bfloat16"),
}


def run(report: Report, args: argparse.Namespace) -> None:
    x = signals(10 if args.quick else SIGNALS)
    exact = np.fft.rfft(x, norm="forward")[:, FREQUENCIES]
    for name, method in METHODS.items():
        relative = np.median(np.abs(method(x) - exact) / np.abs(exact), axis=0)
        report.record(
            "methods",
            method=name,
            size=SIZE,
            signals=len(x),
            error={str(k): float(e) for k, e in zip(FREQUENCIES, relative, strict=True)},
        )

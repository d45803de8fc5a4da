"""When are DFT matrices faster than the FFT, and what does half precision save?

The benchmark compares a spectral convolution, forward and gradient, by truncated DFT matrices and
by FFT, in float32 and interleaved. It records seconds (also without the gradient of the field),
temporary memory, and the errors against float64, also of the matrices in half precision. `auto` is
the choice of the cost model. For the memory of whole networks see `fno_step`.
"""

import argparse
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx
from mpx_pde.nn._spectral_cost import choose_method

from ._report import Report, interleave


# Size, modes, channels, batch.
LAYERS = [
    (128, 16, 32, 8),
    *((n, m, 16, 2) for n in (64, 128, 256) for m in (8, 16, 32, 64, 128) if m <= n),
]
QUICK_LAYERS = [(16, 4, 4, 2), (16, 16, 4, 2)]
ROUNDS = 5


def _exact(layer: mpx.nn.SpectralConv, x: np.ndarray) -> np.ndarray:
    """Computes one sample in float64."""
    m = layer.modes[0]
    weight = np.asarray(layer.weight, np.float64) @ np.array([1, 1j])
    k = (np.arange(m) - m // 2) % x.shape[1]
    spectrum = np.fft.rfft2(x.astype(np.float64), norm="forward")
    out = np.zeros((weight.shape[-1], *spectrum.shape[1:]), complex)
    last = slice(m // 2 + 1)
    out[:, k, last] = np.einsum("ixy,xyio->oxy", spectrum[:, k, last], weight)
    return np.fft.irfft2(out, s=x.shape[1:], norm="forward")


def _loss(layer: mpx.nn.SpectralConv, x: jax.Array) -> jax.Array:
    return jnp.sum(jax.vmap(layer)(x) ** 2)


def _measure(report: Report, n: int, modes: int, channels: int, batch: int, rounds: int) -> None:
    """Records seconds, memory and errors of one size by method."""
    weights = eqx.filter_jit(eqx.filter_grad(_loss))
    gradient = eqx.filter_jit(eqx.filter_grad(lambda both: _loss(*both)))
    x = jax.random.normal(jax.random.key(1), (batch, channels, n, n))
    methods: tuple[Any, ...] = ("dft", "fft")
    given = channels, channels, (modes, modes)
    layers = {m: mpx.nn.SpectralConv(*given, key=jax.random.key(0), method=m) for m in methods}
    want = _exact(layers["dft"], np.asarray(x[0]))

    def error(layer):
        got = np.asarray(eqx.filter_jit(layer)(x[0]), np.float64)
        return float(np.linalg.norm(got - want) / np.linalg.norm(want))

    def memory(layer):
        compiled = gradient.lower((layer, x)).compile().compiled
        return compiled.memory_analysis().temp_size_in_bytes

    of_both = {f"seconds_{m}": partial(gradient, (layer, x)) for m, layer in layers.items()}
    of_weights = {f"seconds_weights_{m}": partial(weights, layer, x) for m, layer in layers.items()}
    compared = {
        **layers,
        "float16": mpx.cast_to_float16(layers["dft"]),
        "bfloat16": mpx.cast_to_bfloat16(layers["dft"]),
    }
    size = {"size": n, "modes": modes, "channels": channels, "batch": batch}
    report.record(
        "layers",
        **size,
        auto=choose_method(2 * channels, (n, n), (modes, modes), "float32"),
        **interleave(of_both, rounds=rounds, warmup=1),
        **interleave(of_weights, rounds=rounds, warmup=1),
        **{f"temp_bytes_{m}": memory(layer) for m, layer in layers.items()},
        **{f"error_{name}": error(layer) for name, layer in compared.items()},
    )


def run(report: Report, args: argparse.Namespace) -> None:
    for size in QUICK_LAYERS if args.quick else LAYERS:
        _measure(report, *size, rounds=1 if args.quick else ROUNDS)

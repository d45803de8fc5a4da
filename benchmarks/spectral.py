"""When are DFT matrices faster than the FFT, and what does half precision save?

A spectral convolution, forward and gradient, by truncated DFT matrices and by FFT in float32,
interleaved: seconds, also without the gradient of the field, temporary memory, and the error of
either against float64, with that of the matrices in half precision beside it. `auto` is what the
cost model picks. The memory of whole networks is told by `fno_step`.
"""

import argparse
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5)


def _layer(channels: int, modes: int, method: Any) -> mpx.nn.SpectralConv:
    key = jax.random.key(0)
    return mpx.nn.SpectralConv(channels, channels, (modes, modes), key=key, method=method)


def _exact(layer: mpx.nn.SpectralConv, x: np.ndarray) -> np.ndarray:
    """One sample in float64."""
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


def _layers(report: Report, sizes, rounds: int) -> None:
    weights = eqx.filter_jit(eqx.filter_grad(_loss))
    gradient = eqx.filter_jit(eqx.filter_grad(lambda both: _loss(*both)))
    for n, modes, channels, batch in sizes:
        x = jax.random.normal(jax.random.key(1), (batch, channels, n, n))
        layers = {method: _layer(channels, modes, method) for method in ("dft", "fft")}
        want = _exact(layers["dft"], np.asarray(x[0]))

        def error(layer, x=x, want=want):
            got = np.asarray(eqx.filter_jit(layer)(x[0]), np.float64)
            return float(np.linalg.norm(got - want) / np.linalg.norm(want))

        rivals = {name: (lambda m=m, x=x: gradient((m, x))) for name, m in layers.items()}
        of_weights = {name: (lambda m=m, x=x: weights(m, x)) for name, m in layers.items()}
        memory = {
            name: gradient.lower((m, x)).compile().compiled.memory_analysis().temp_size_in_bytes
            for name, m in layers.items()
        }
        times = interleave(rivals, rounds=rounds, warmup=1)
        weights_times = interleave(of_weights, rounds=rounds, warmup=1)
        report.record(
            "layers",
            size=n,
            modes=modes,
            channels=channels,
            batch=batch,
            auto=choose_method(2 * channels, (n, n), (modes, modes), "float32"),
            seconds_dft=times["dft"],
            seconds_fft=times["fft"],
            seconds_weights_dft=weights_times["dft"],
            seconds_weights_fft=weights_times["fft"],
            temp_bytes_dft=memory["dft"],
            temp_bytes_fft=memory["fft"],
            error_dft=error(layers["dft"]),
            error_fft=error(layers["fft"]),
            error_float16=error(mpx.cast_to_float16(layers["dft"])),
            error_bfloat16=error(mpx.cast_to_bfloat16(layers["dft"])),
        )


def run(report: Report, args: argparse.Namespace) -> int:
    _layers(report, QUICK_LAYERS if args.quick else LAYERS, 1 if args.quick else args.rounds)
    return 0

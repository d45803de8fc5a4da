"""What would float8 cost in accuracy? Derivatives of a coordinate network with rounded operands.

A 2→64×4→1 tanh network in float64, whose hidden products round their operands to a format and back,
each stream of derivatives by a scale of its own (the power of two that puts its largest entry just
below the largest number of the format: what *current scaling* does on hardware with float8). The
gradient of the residual u_xx + 9 u takes the backward pass in float64: on hardware it is worse.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ._report import Report


FORMATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
WIDTH, LAYERS, POINTS = 64, 4, 2048


def rounded(dtype: Any, x: jax.Array) -> jax.Array:
    """`x` in `dtype` and back, by the best power of two; its derivative is the identity."""
    largest = float(jnp.finfo(dtype).max)
    scale = jnp.exp2(jnp.floor(jnp.log2(largest / jnp.max(jnp.abs(x)))))
    near = (x * scale).astype(dtype).astype(x.dtype) / scale
    return x + jax.lax.stop_gradient(near - x)


def derivatives(
    weights: list[jax.Array], points: jax.Array, rounding: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """u, u_x and u_xx. The first and the last layer are full."""
    first, *hidden, last = weights
    h = points @ first
    streams = (h, jnp.broadcast_to(first[0], h.shape), jnp.zeros_like(h))
    for w in [*hidden, None]:
        h, d, dd = streams
        y = jnp.tanh(h)
        slope = 1 - y * y
        streams = (y, slope * d, slope * dd - 2 * y * slope * d * d)
        if w is not None:
            streams = tuple(rounding(x) @ rounding(w) for x in streams)
    u, u_x, u_xx = (x @ last for x in streams)
    return u, u_x, u_xx


def run(report: Report, args: argparse.Namespace) -> None:
    del args
    jax.config.update("jax_enable_x64", True)
    sizes = [2, *[WIDTH] * LAYERS, 1]
    keys = jax.random.split(jax.random.key(0), len(sizes))
    gains = [3.0, *[1.3] * (LAYERS - 1), 1.0]
    weights = [
        gain * jax.random.normal(k, (n, m)) / jnp.sqrt(n)
        for k, gain, n, m in zip(keys, gains, sizes, sizes[1:], strict=False)
    ]
    points = jax.random.uniform(keys[-1], (POINTS, 2), minval=-1, maxval=1)

    def residual(weights, rounding):
        u, _, u_xx = derivatives(weights, points, rounding)
        return jnp.mean((u_xx + 9 * u) ** 2)

    def everything(rounding):
        grads = jax.grad(residual)(weights, rounding)
        return *derivatives(weights, points, rounding), jnp.concatenate([g.ravel() for g in grads])

    exact = everything(lambda x: x)
    names = ("u", "u_x", "u_xx", "gradient")
    for dtype in FORMATS:
        results = everything(partial(rounded, dtype))
        errors = {
            name: float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))
            for name, a, b in zip(names, results, exact, strict=True)
        }
        report.record("errors", format=dtype, points=POINTS, **errors)

"""How close to float32 are products made of narrower ones? Error, and on a GPU time, per algorithm.

Each algorithm takes float32 operands and returns float32:

- `float32`: the highest precision of JAX;
- `tensorfloat32`, `float16`, `bfloat16`: operands rounded once, one product;
- `bfloat16_x3`, `_x6`, `_x9`: operands split into two or three bfloat16 parts, and three, six or
  nine products of these; `tensorfloat32_x3` splits into two parts in TF32.

The error is the relative L2 error against float64: of matrix products of standard normal entries,
and of u_xx of a tanh network of 4 × 256, by nested forward mode. It is that of the arithmetic as
defined, written out with roundings and float32 products, and the same on every machine. Times are
those of `jax.lax.DotAlgorithmPreset` on a GPU: a CPU has plain float32 or nothing.
"""

import argparse
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._report import Report, Timing, interleave


Preset = lax.DotAlgorithmPreset
Dot = Callable[[jax.Array, jax.Array], jax.Array]


class Algorithm(NamedTuple):
    """How a product of float32 operands is made."""

    name: str
    preset: lax.DotAlgorithmPreset
    bits: tuple[int, int] | None  # exponent and mantissa of the parts; `None`: not split
    parts: int = 1
    products: int = 1


ALGORITHMS = (
    Algorithm("float32", Preset.F32_F32_F32, None),
    Algorithm("tensorfloat32", Preset.TF32_TF32_F32, (8, 10)),
    Algorithm("float16", Preset.F16_F16_F32, (5, 10)),
    Algorithm("bfloat16", Preset.BF16_BF16_F32, (8, 7)),
    Algorithm("bfloat16_x3", Preset.BF16_BF16_F32_X3, (8, 7), 2, 3),
    Algorithm("bfloat16_x6", Preset.BF16_BF16_F32_X6, (8, 7), 3, 6),
    Algorithm("bfloat16_x9", Preset.BF16_BF16_F32_X9, (8, 7), 3, 9),
    Algorithm("tensorfloat32_x3", Preset.TF32_TF32_F32_X3, (8, 10), 2, 3),
)

SIZES = ((512, 512, 512), (4096, 512, 512), (64, 4096, 64))
GPU_SIZES = (*SIZES, (4096, 4096, 4096), (65536, 512, 512))
WIDTH, DEPTH, POINTS = 256, 4, 512


def emulated(algorithm: Algorithm) -> Dot:
    """The product as defined: exact products of parts, added up in float32, small ones first."""

    def split(x):
        if algorithm.bits is None:
            return [x]
        parts = []
        for _ in range(algorithm.parts):
            parts.append(lax.reduce_precision(x, *algorithm.bits))
            x = x - parts[-1]
        return parts

    @jax.custom_jvp
    def dot(x, y):
        pairs = [(i + j, a, b) for i, a in enumerate(split(x)) for j, b in enumerate(split(y))]
        largest = sorted(pairs, key=lambda p: p[0])[: algorithm.products]
        terms = [jnp.matmul(a, b, precision="highest") for _, a, b in reversed(largest)]
        return sum(terms[1:], terms[0])

    # Derivatives are the same products of tangents, not those of the rounding.
    dot.defjvp(lambda p, t: (dot(*p), dot(t[0], p[1]) + dot(p[0], t[1])))
    return dot


def on_device(algorithm: Algorithm) -> Dot:
    """The product as the backend computes it."""
    precision = "highest" if algorithm.bits is None else algorithm.preset
    return partial(jnp.matmul, precision=precision, preferred_element_type=jnp.float32)


def times(problem: "Problem", rounds: int) -> dict[str, Timing]:
    """Of the algorithms that the backend has."""
    compiled, arguments = {}, jax.device_put(problem.arguments)
    for algorithm in ALGORITHMS:
        fun = jax.jit(partial(problem.fun, on_device(algorithm)))
        with suppress(ValueError, jax.errors.JaxRuntimeError):
            jax.block_until_ready(fun(*arguments))
            compiled[algorithm.name] = partial(fun, *arguments)
    return interleave(compiled, rounds=rounds, calls=10)


def network(dot: Dot, layers, x):
    """A tanh network of one coordinate for all points at once, shape `[points, 1]`."""
    *hidden, last = layers
    for w in hidden:
        x = jnp.tanh(dot(x, w))
    return dot(x, last)


def second_derivative(dot: Dot, layers, x):
    one = jnp.ones_like(x)
    first = lambda x: jax.jvp(partial(network, dot, layers), (x,), (one,))[1]
    return jax.jvp(first, (x,), (one,))[1]


def normal(seed: int, shape: tuple[int, ...], scale: float = 1.0) -> np.ndarray:
    return np.asarray(scale * np.random.default_rng(seed).standard_normal(shape), np.float32)


class Problem(NamedTuple):
    """Something to compute by a product, and what comes out in float64."""

    name: str
    fun: Callable
    arguments: tuple
    want: np.ndarray


def problem(name: str, fun: Callable, *arguments: Any) -> Problem:
    """With what comes out in float64, by nested forward mode too."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), arguments)
        return Problem(name, fun, arguments, np.asarray(fun(jnp.matmul, *wide)))


def problems(sizes) -> list[Problem]:
    product = lambda dot, x, y: dot(x, y)
    out = [
        problem(f"{n} × {k} × {m}", product, normal(0, (n, k)), normal(1, (k, m)))
        for n, k, m in sizes
    ]
    shapes = [(1, WIDTH), *[(WIDTH, WIDTH)] * (DEPTH - 1), (WIDTH, 1)]
    layers = [normal(i, s, 3.0 if s[0] == 1 else s[0] ** -0.5) for i, s in enumerate(shapes)]
    x = np.float32(np.linspace(-1, 1, POINTS)[:, None])
    return [*out, problem(f"u_xx, tanh {DEPTH} × {WIDTH}", second_derivative, layers, x)]


def run(report: Report, args: argparse.Namespace) -> None:
    gpu = report.environment["backend"] == "gpu"
    sizes = GPU_SIZES if gpu else SIZES
    for problem in problems(sizes[:1] if args.quick else sizes):
        seconds = times(problem, 5 if args.quick else 50) if gpu else {}
        for algorithm in ALGORITHMS:
            by_definition = jax.jit(partial(problem.fun, emulated(algorithm)))
            wrong = np.float64(by_definition(*problem.arguments)) - problem.want
            report.record(
                "products",
                problem=problem.name,
                algorithm=algorithm.name,
                products=algorithm.products,
                emulated_error=float(np.linalg.norm(wrong) / np.linalg.norm(problem.want)),
                seconds=seconds.get(algorithm.name),
            )

"""A program of the collection, and small parts that several of them share."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Client(NamedTuple):
    """A training program: a loss of parameters and data, in the dtype of both. `plain` is the same
    loss without this library, where `loss` calls it."""

    loss: Callable[..., Any]
    params: Any
    data: tuple = ()
    plain: Callable[..., Any] | None = None


def normal(seed: int, shape: tuple[int, ...], scale: float = 1.0) -> jax.Array:
    return (scale * jax.random.normal(jax.random.key(seed), shape)).astype("float32")


def uniform(seed: int, shape: tuple[int, ...], low: float = 0.0, high: float = 1.0) -> jax.Array:
    return jax.random.uniform(jax.random.key(seed), shape, "float32", low, high)


def squared(x: Any) -> Any:
    return jnp.mean(x**2)


def evolved(step: Callable, state: Any, length: int) -> Any:
    """Returns the state after `length` steps."""
    return jax.lax.scan(lambda u, _: (step(u), None), state, length=length)[0]


def layers(seed: int, *sizes: int) -> tuple:
    """Draws pairs of a weight and a bias."""
    pairs = itertools.pairwise(sizes)
    shapes = [(normal(seed + i, (m, n), m**-0.5), (n,)) for i, (m, n) in enumerate(pairs)]
    return tuple((w, normal(seed + 50 + i, b, 0.1)) for i, (w, b) in enumerate(shapes))


def dense(params: Any, x: Any, activation: Callable = jnp.tanh) -> Any:
    """Evaluates layers, with an activation between them."""
    for w, b in params[:-1]:
        x = activation(x @ w + b)
    return x @ params[-1][0] + params[-1][1]

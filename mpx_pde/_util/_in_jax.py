"""Holds the meaning of this library's primitives in JAX's own."""

from collections.abc import Callable
from typing import Any

from jax.extend.core import Primitive


IN_JAX: dict[Primitive, Callable[..., Any]] = {}
"""For each primitive of this library, a function that computes the same with JAX's primitives."""

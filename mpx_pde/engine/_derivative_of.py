"""Gives a function the derivative of another."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero, zero_from_primal

from .._util._wrapper import of_some
from ..precision._forward import present_forward


def with_derivative_of(fun: Callable, other: Callable) -> Callable:
    """Returns `fun` with the derivative of `other` in forward and reverse mode.

    `fun` takes PyTrees of arrays and returns two PyTrees: its result, and intermediate values
    without a derivative, such as indices. `other` takes these intermediate values and then the same
    arrays, and returns a result of the same types. Arrays without tangents are not differentiated.
    A `custom_vjp` would forbid forward mode. Under `vmap` it would also sum the gradient of a
    weight over outer products; here `other` is transposed as a whole.
    """

    def call(*args: Any) -> Any:
        leaves, treedef = jtu.tree_flatten(jtu.tree_map(_traced, args))

        @jax.custom_jvp
        def value(*leaves):
            return fun(*jtu.tree_unflatten(treedef, leaves))

        def rule(primals, tangents):
            moving = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
            inside = present_forward() is not None
            out = None if inside else value(*primals)

            def derived(*leaves):
                args = jtu.tree_unflatten(treedef, leaves)
                return fun(*args) if out is None else other(out[1], *args)

            parts = [primals[i] for i in moving], [tangents[i] for i in moving]
            result, result_dot = jax.jvp(of_some(derived, primals, moving), *parts)
            if out is None:
                return result, result_dot
            return out, (result_dot, zero_from_primal(out[1]))

        value.defjvp(rule, symbolic_zeros=True)
        return value(*leaves)

    return call


def _traced(x: Any) -> Any:
    """Converts a NumPy array that a `vmap` maps over to a JAX array, as a `custom_jvp` needs it."""
    inside = x
    while isinstance(inside, Tracer):
        inside = getattr(inside, "val", None)
    return jnp.copy(x) if inside is not x and isinstance(inside, np.ndarray) else x

"""A function with the derivative of another."""

from collections.abc import Callable
from typing import Any

import jax
import jax.tree_util as jtu
from jax.custom_derivatives import SymbolicZero

from ._forward import present_forward


def with_derivative_of(fun: Callable, other: Callable) -> Callable:
    """`fun`, whose derivative in forward and reverse mode is that of `other`.

    Both take the same PyTrees of arrays and return PyTrees of the same types. What does not move is
    not differentiated. A `custom_vjp` would forbid forward mode, and under `vmap` sum the gradient
    of a weight over outer products; here it is that of `other`, transposed as a whole.
    """

    def call(*args: Any) -> Any:
        leaves, treedef = jtu.tree_flatten(args)

        @jax.custom_jvp
        def value(*leaves):
            return fun(*jtu.tree_unflatten(treedef, leaves))

        def rule(primals, tangents):
            moving = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]

            def moved(*parts):
                every = list(primals)
                for i, x in zip(moving, parts, strict=True):
                    every[i] = x
                return which(*jtu.tree_unflatten(treedef, every))

            inside = present_forward() is not None
            which = fun if inside else other
            out, out_dot = jax.jvp(
                moved, [primals[i] for i in moving], [tangents[i] for i in moving]
            )
            return out if inside else value(*primals), out_dot

        value.defjvp(rule, symbolic_zeros=True)
        return value(*leaves)

    return call

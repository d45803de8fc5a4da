"""Half precision without this library's help: everything in float16, including coordinates and the
first layer."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Float

import mpx_pde as mpx


class Plain(eqx.Module):
    """A network that computes its derivatives by itself, one order after the other, in the dtype of
    its weights, as nested `jax.jvp` of a cast model does."""

    network: Callable

    def __call__(self, point: Float[Array, " coords"]) -> Float[Array, "..."]:
        arrays, static = eqx.partition(self.network, eqx.is_array)
        evaluate = lambda arrays, point: eqx.combine(arrays, static)(point)
        alone = jax.custom_jvp(evaluate)
        alone.defjvp(lambda primals, tangents: jax.jvp(evaluate, primals, tangents))
        dtype = jax.tree.leaves(arrays)[0].dtype
        return alone(arrays, point.astype(dtype))


def without_protection(model: Any) -> Any:
    """Returns the model without the layers and activations that insist on float32."""
    safe = type(mpx.nn.tanh)

    def strip(x):
        if isinstance(x, mpx.FullPrecision):
            return x.module
        return x.fun if isinstance(x, safe) else x

    is_network = lambda x: isinstance(x, mpx.nn.CoordinateMLP)
    model = jax.tree.map(strip, model, is_leaf=lambda x: isinstance(x, mpx.FullPrecision | safe))
    return jax.tree.map(lambda x: Plain(x) if is_network(x) else x, model, is_leaf=is_network)

"""Layers of a neural operator that act on each grid point separately: linear layers on channels,
activations, and the choice of which of their values are written to memory.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from ..engine import broadcast_like
from ..precision._cast import widen
from ..precision._dtypes import is_half, wide
from ..precision._forward import in_full_forward
from ..products._order import batch_behind, rounded_cotangent, written_in
from ._arithmetic import (
    KEPT,
    Arithmetic,
    arithmetic_of,
    centered,
    separate,
    unscaled,
)


STORED = "mpx_pde.nn: stored between products"

_FEW = 8
"""The largest number of input channels for which the product is faster as sums in the kernel of the
activation. Only the result of the activation is stored then."""


class Pointwise(eqx.Module):
    """A linear layer on the channels of each grid point."""

    weight: Float[Array, "outputs inputs"]
    bias: Float[Array, " outputs"]
    arithmetic: Arithmetic | None = eqx.field(static=True)

    def __init__(
        self, inputs: int, outputs: int, arithmetic: Arithmetic | None, *, key: PRNGKeyArray
    ):
        weight_key, bias_key = jax.random.split(key)
        bound = 1 / np.sqrt(inputs)

        def uniform(key, shape):
            return jax.random.uniform(key, shape, jnp.float32, -bound, bound)

        self.weight = uniform(weight_key, (outputs, inputs))
        self.bias = uniform(bias_key, (outputs,))
        self.arithmetic = arithmetic

    @property
    def dtype(self) -> np.dtype:
        """Returns the dtype of stored values."""
        return arithmetic_of(self.arithmetic, self.weight).dtype

    def product(self, x: Array, out_dtype: Any = None) -> Array:
        arithmetic = arithmetic_of(self.arithmetic, self.weight)
        # With the weight on the left, a batch axis of `vmap` stays behind the channels, where
        # neither this product nor those of the transforms have to move it.
        return arithmetic.product(
            self.weight, x.astype(arithmetic.dtype), (((1,), (0,)), ((), ())), out_dtype=out_dtype
        )

    def from_input(self, x: Float[Array, "inputs *grid"]) -> tuple[Array, Array]:
        """Applies the layer to a float32 field. In half precision it first scales the field and
        rounds it without its mean.

        **Returns:** a field, and the shift that the caller has to add to it.
        """
        bias = widen(self.bias)
        if not is_half(self.dtype) or x.dtype == self.dtype:
            return self.product(x), bias
        x, mean, unscale = centered(x, self.dtype)
        weight = widen(self.weight)
        shift = jnp.sum(weight * jnp.broadcast_to(mean, weight.shape), axis=1)
        return unscaled(self.product(x), unscale), bias + separate(shift)


class ChannelMLP(eqx.Module):
    """Two layers on the channels of each grid point."""

    first: Pointwise
    last: Pointwise

    def __init__(
        self, sizes: tuple[int, int, int], arithmetic: Arithmetic | None, *, key: PRNGKeyArray
    ):
        first_key, last_key = jax.random.split(key)
        inputs, hidden, outputs = sizes
        self.first = Pointwise(inputs, hidden, arithmetic, key=first_key)
        self.last = Pointwise(hidden, outputs, arithmetic, key=last_key)

    def lift(self, x: Array, activation: Callable) -> Array:
        """Lifts the input field to the hidden channels, without the last bias."""
        first = self.first
        if is_half(first.dtype) and first.weight.shape[1] <= _FEW:
            hidden = _lifted(activation, x, first.weight, first.bias, first.dtype)
        else:
            y, shift = first.from_input(x)
            hidden = activate(activation, stored(y), shift)
        return stored(self.last.product(stored(hidden)))

    def project(self, x: Array, activation: Callable) -> Array:
        """Projects to the output field, in float32."""
        first, last = self.first, self.last
        y = stored(first.product(x))
        if last.weight.shape[0] > 1 or not is_half(y.dtype):
            y = stored(activate(activation, y, widen(first.bias)))
            return shifted(last.product(y, out_dtype=wide(y.dtype)), widen(last.bias))
        # XLA would compute this matrix-vector product on float32 arrays. A sum is fused with the
        # activation into one kernel, so the activation is never stored. (In float32 the product is
        # one kernel already, and on a CPU the sum would take several times as long.)
        weight = per_channel(last.weight[0], y)
        y = activation(widen(y) + per_channel(first.bias, y))
        y = jnp.sum(weight * y, axis=0, keepdims=True)
        return y + per_channel(last.bias, y)


# --- Functions of float32 values, which are rounded at the end -------------------------------


def per_channel(x: Array, like: Array) -> Array:
    """Broadcasts a value for each channel over the grid of a field, in float32."""
    (out,) = broadcast_like([widen(x)], like, leading=True)
    return out


def shifted(x: Array, shift: Array) -> Array:
    """Adds a constant for each channel, in float32."""
    return (widen(x) + per_channel(shift, x)).astype(x.dtype)


def _lifted(activation: Callable, x: Array, weight: Array, bias: Array, out_dtype: Any) -> Array:
    parts = [jnp.broadcast_to(p, (len(bias), *p.shape[1:])) for p in jnp.split(widen(x), len(x))]
    y = per_channel(bias, parts[0])
    for i, part in enumerate(parts):
        y = y + per_channel(weight[:, i], part) * part
    # Without this, each of the sums in the gradient of the weight would compute the cotangent anew.
    return activation(rounded_cotangent(y, out_dtype)).astype(out_dtype)


# --- What is stored, and what is evaluated again ---------------------------------------------


def stored(x: Array, name: str = STORED) -> Array:
    """Writes a field to memory in its dtype, and its cotangent too.

    On a GPU XLA removes a cast to half precision and back, and would write float32 instead. The
    barrier makes it write the rounded value.
    """
    if in_full_forward():
        return batch_behind(x)
    return checkpoint_name(lax.optimization_barrier(batch_behind(x)), name)


def kept(x: Array) -> Array:
    """Writes a field to memory, and keeps it for the backward pass."""
    return stored(x, KEPT)


def part(fun: Callable, again: bool) -> Callable:
    """Makes a part of a network evaluate itself again in its backward pass. Otherwise values that
    both passes need would be kept in float32. `fun` takes a layer, a field and further arguments.
    Values that are `kept` are not evaluated again. Those that are `stored` are, if `again` is true.

    Each part is wrapped separately, so that it is evaluated only once its cotangent is available.

    If the forward pass is in full precision, the loss around decides what is kept.
    """
    if in_full_forward():
        run = eqx.filter_checkpoint(fun) if again else fun
        return lambda *args: batch_behind(run(*args))
    names = (KEPT,) if again else (KEPT, STORED)
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    run = eqx.filter_checkpoint(fun, policy=policy)  # an activation may be any function
    return lambda *args: batch_behind(run(*args))


def activate(activation: Callable, x: Array, shift: Array) -> Array:
    """Applies an activation to a field, after adding a float32 constant for each channel."""
    return activation(widen(x) + per_channel(shift, x)).astype(x.dtype)


def enter(
    activation: Callable | None, x: Array, shift: Array | None, gate: Array, bias: Array
) -> tuple[Array, Array]:
    """Adds the constant for each channel to a field, if there is one, and applies an activation, if
    there is one. Returns the result, and `gate` times the result plus `bias`.
    """
    x = x if shift is None else shifted(x, shift)
    x = x if activation is None else activation(x)
    rest = per_channel(gate, x) * widen(x) + per_channel(bias, x)
    return stored(x), written_in(batch_behind(rest), x.dtype)

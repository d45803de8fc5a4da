"""The Fourier neural operator."""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from .._cast import widen
from .._dtypes import is_half, wide
from .._order import gradients_in_turn
from .._types import DTypeLike
from ._activations import SafeActivation, gelu, safe
from ._arithmetic import (
    KEPT,
    Arithmetic,
    arithmetic_of,
    centered,
    parse_arithmetic,
    separate,
    unscaled,
)
from ._spectral_conv import SpectralConv, check_field, parse_modes, positive


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
        uniform = lambda key, shape: jax.random.uniform(key, shape, jnp.float32, -bound, bound)
        self.weight = uniform(weight_key, (outputs, inputs))
        self.bias = uniform(bias_key, (outputs,))
        self.arithmetic = arithmetic

    @property
    def dtype(self) -> np.dtype:
        """What is stored."""
        return (self.arithmetic or arithmetic_of(self.weight)).dtype

    def __call__(self, x: Float[Array, "inputs *grid"]) -> Float[Array, "outputs *grid"]:
        return self.shifted(self.product(x))

    def product(self, x: Array, out_dtype: Any = None) -> Array:
        arithmetic = self.arithmetic or arithmetic_of(self.weight)
        # The weight on the left: a batch axis of `vmap` then stays behind the channels, where
        # neither this product nor those of the transforms have to move it.
        return arithmetic.product(
            self.weight, x.astype(arithmetic.dtype), (((1,), (0,)), ((), ())), out_dtype=out_dtype
        )

    def shifted(self, x: Array, shift: Array | None = None) -> Array:
        """With the bias, and perhaps more of its kind, added in float32."""
        bias = widen(self.bias) if shift is None else widen(self.bias) + shift
        bias = bias.reshape(-1, *(1 for _ in x.shape[1:]))
        return (widen(x) + bias).astype(x.dtype)

    def read_out(self, x: Array) -> Array:
        """In float32, for a last layer."""
        if self.weight.shape[0] > 1:
            return self.shifted(self.product(x, out_dtype=wide(x.dtype)))
        # XLA would make this product of a matrix with a vector one of float32 arrays. As a sum it
        # is one kernel with the activation, which then is never stored.
        weight = widen(self.weight).reshape(-1, *(1 for _ in x.shape[1:]))
        return self.shifted(jnp.sum(weight * widen(x.astype(self.dtype)), axis=0, keepdims=True))

    def from_input(self, x: Float[Array, "inputs *grid"]) -> Float[Array, "outputs *grid"]:
        """Of a field that came in float32 and is rounded here: without its mean, and scaled."""
        if not Arithmetic(self.dtype).half or x.dtype == self.dtype:
            return self(x)
        x, mean, unscale = centered(x, self.dtype)
        y = unscaled(self.product(x), unscale)
        weight = widen(self.weight)
        shift = jnp.sum(weight * jnp.broadcast_to(mean, weight.shape), axis=1)
        return self.shifted(y, separate(shift))


class ChannelMLP(eqx.Module):
    """Two layers on the channels of each grid point."""

    first: Pointwise
    last: Pointwise

    def __init__(
        self,
        inputs: int,
        hidden: int,
        outputs: int,
        arithmetic: Arithmetic | None,
        *,
        key: PRNGKeyArray,
    ):
        first_key, last_key = jax.random.split(key)
        self.first = Pointwise(inputs, hidden, arithmetic, key=first_key)
        self.last = Pointwise(hidden, outputs, arithmetic, key=last_key)


def _stored(x: Array) -> Array:
    """Written to memory in the dtype it has, as its cotangent is.

    On a GPU XLA takes a cast to half and back for nothing, and would write float32 instead. The
    barrier tells it that the value as such is wanted.
    """
    return lax.optimization_barrier(x)


def _kept(x: Array) -> Array:
    """Stored, for the backward pass too."""
    return checkpoint_name(_stored(x), KEPT)


def _shifted(activation: Callable, x: Array, bias: Array | None = None) -> Array:
    if bias is None:
        return activation(x)
    bias = widen(bias).reshape(-1, *(1 for _ in x.shape[1:]))
    return activation(widen(x) + bias).astype(x.dtype)


@ft.cache
def _evaluated_again(activation: SafeActivation) -> Callable:
    return jax.checkpoint(ft.partial(_shifted, activation))


def _activate(activation: Callable, x: Array, layer: Pointwise | None = None) -> Array:
    """The activation of a field; of the product of a `layer`, its bias is added on the way.

    The derivative evaluates it anew: what both need would be kept in float32.
    """
    if not is_half(x.dtype):
        return activation(x if layer is None else layer.shifted(x))

    args = (x,) if layer is None else (x, layer.bias)
    if isinstance(activation, SafeActivation):
        return _evaluated_again(activation)(*args)
    # One with parameters has no hash, by which `checkpoint` knows functions.
    return jax.checkpoint(lambda *args: _shifted(activation, *args))(*args)


class Block(eqx.Module):
    """Spectral convolution with a linear skip, then a channel MLP with a gated one."""

    spectral: SpectralConv
    skip: Pointwise
    mlp: ChannelMLP
    gate: Float[Array, " channels"]

    def __init__(
        self,
        channels: int,
        hidden: int,
        modes: tuple[int, ...],
        arithmetic: Arithmetic | None,
        *,
        key: PRNGKeyArray,
        **options: Any,
    ):
        spectral, skip, mlp = jax.random.split(key, 3)
        self.spectral = SpectralConv(channels, channels, modes, key=spectral, **options)
        self.skip = Pointwise(channels, channels, arithmetic, key=skip)
        self.mlp = ChannelMLP(channels, hidden, channels, arithmetic, key=mlp)
        self.gate = jnp.ones(channels, jnp.float32)

    def __call__(self, x: Array, activation: Callable) -> Array:
        # In the dtype of both, so that the one product is added onto the other where it stands.
        skip = self.skip.product(x)
        y = _kept(skip + self.spectral(x).astype(skip.dtype))
        y = _stored(_activate(activation, y, self.skip))
        y = _stored(self.mlp.first.product(y))
        y = _stored(_activate(activation, y, self.mlp.first))
        y = self.mlp.last.product(y)
        gate = widen(self.gate).reshape(-1, *(1 for _ in x.shape[1:]))
        y = self.mlp.last.shifted(widen(y)) + gate * widen(x)
        return _kept(y.astype(self.skip.dtype))


def _coordinates(grid: tuple[int, ...]) -> np.ndarray:
    """The coordinates of a grid on [0, 1), shape `[dims, *grid]`."""
    axes = [np.arange(n, dtype=np.float32) / n for n in grid]
    return np.stack(np.meshgrid(*axes, indexing="ij"))


def _parse_padding(padding: Any, dims: int, call: str) -> tuple[int | float, ...]:
    parsed = (padding,) * dims if isinstance(padding, int | float) else tuple(padding)
    if len(parsed) != dims or any(not 0 <= p < np.inf for p in parsed):
        raise ValueError(
            f"`{call}` takes `domain_padding` as a fraction of the domain that is not negative, or "
            f"one for each of its {dims} axes, but got {padding!r}."
        )
    return parsed


class FNO(eqx.Module):
    """A Fourier neural operator: a map of fields that can be evaluated on any grid.

    Lifting to hidden channels, blocks of a spectral convolution with a linear skip followed by a
    channel MLP with a gated one, and projection (Li et al., ICLR 2021; the blocks are those of
    neuraloperator 2.0). It takes one sample, channels first; use `jax.vmap` for a batch.

    The dtype of the weights decides what is multiplied in: a model that
    [`mpx_pde.cast_tree`][] or [`mpx_pde.filter_grad`][] has cast multiplies halves in the forward
    and in the backward pass, and evaluates activations in float32 and stores them in half. What is
    kept for the backward pass are the results of products in half, and the modes; activations are
    evaluated again. The field that comes out is float32, for a loss that is. Pass the field that
    goes in as float32 too, where its mean is not zero or its values may exceed 65504:
    `filter_grad(..., keep_full=(False, True))`.

    **Attributes:**

    - `lifting`, `projection`: channel MLPs of two layers.
    - `blocks`: each with a `spectral` convolution, a `skip`, an `mlp` and a `gate`.
    """

    lifting: ChannelMLP
    blocks: tuple[Block, ...]
    projection: ChannelMLP
    activation: Callable
    in_channels: int = eqx.field(static=True)
    out_channels: int = eqx.field(static=True)
    grid_embedding: bool = eqx.field(static=True)
    domain_padding: tuple[int | float, ...] = eqx.field(static=True)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        hidden_channels: int,
        num_layers: int,
        modes: int | Sequence[int],
        *,
        key: PRNGKeyArray,
        method: Literal["auto", "dft", "fft"] = "auto",
        factorization: Literal["cp"] | None = None,
        rank: int | float = 0.5,
        stabilizer: str | Callable[..., Any] | None = None,
        activation: Callable[..., Any] = gelu,
        lifting_ratio: int | float = 2.0,
        projection_ratio: int | float = 2.0,
        mlp_ratio: int | float = 0.5,
        grid_embedding: bool = True,
        domain_padding: int | float | Sequence[int | float] = 0.0,
        dtype: DTypeLike | None = None,
    ):
        """**Arguments:**

        - `in_channels`, `out_channels`: numbers of channels of the fields.
        - `hidden_channels`: the channels in between; a multiple of 8 keeps tensor cores busy.
        - `num_layers`: the number of blocks.
        - `modes`: as for [`mpx_pde.nn.SpectralConv`][].
        - `key`: a `jax.random.key`.
        - `method`, `factorization`, `rank`, `stabilizer`, `dtype`: as for
            [`mpx_pde.nn.SpectralConv`][]. `dtype` is that of all products.
        - `activation`: an elementwise function.
        - `lifting_ratio`, `projection_ratio`, `mlp_ratio`: hidden layers of the channel MLPs, over
            `hidden_channels`.
        - `grid_embedding`: whether the coordinates of the grid, on [0, 1), are channels too.
        - `domain_padding`: by which fraction of itself the domain is extended, with zeros beyond
            the end of each axis, for problems that are not periodic; one number, or one for each
            axis.

        **Raises:** `ValueError` for sizes below 1 or a negative padding, and what
        [`mpx_pde.nn.SpectralConv`][] raises.
        """
        call = "FNO"
        positive(
            call,
            in_channels=in_channels,
            out_channels=out_channels,
            hidden_channels=hidden_channels,
            num_layers=num_layers,
        )
        modes = parse_modes(modes, call)
        padding = _parse_padding(domain_padding, len(modes), call)
        arithmetic = parse_arithmetic(dtype, call)
        lift_key, project_key, *keys = jax.random.split(key, num_layers + 2)
        hidden = lambda ratio: max(1, round(ratio * hidden_channels))
        block = ft.partial(
            Block,
            hidden_channels,
            hidden(mlp_ratio),
            modes,
            arithmetic,
            method=method,
            factorization=factorization,
            rank=rank,
            stabilizer=stabilizer,
            dtype=dtype,
        )
        inputs = in_channels + (len(modes) if grid_embedding else 0)
        self.lifting = ChannelMLP(
            inputs, hidden(lifting_ratio), hidden_channels, arithmetic, key=lift_key
        )
        self.blocks = tuple(block(key=key) for key in keys)
        self.projection = ChannelMLP(
            hidden_channels, hidden(projection_ratio), out_channels, arithmetic, key=project_key
        )
        self.activation = safe(activation)
        self.in_channels, self.out_channels = int(in_channels), int(out_channels)
        self.grid_embedding, self.domain_padding = grid_embedding, padding

    def __call__(self, x: Float[Array, "inputs *grid"]) -> Float[Array, "outputs *grid"]:
        """**Arguments:**

        - `x`: a field, shape `[in_channels, *grid]`, with at least `modes[i]` points along axis i.

        **Returns:**

        A field, shape `[out_channels, *grid]`, in float32.

        **Raises:** as [`mpx_pde.nn.SpectralConv`][].
        """
        x = check_field(x, self.in_channels, len(self.domain_padding), "FNO")
        policy = jax.checkpoint_policies.save_only_these_names(KEPT)
        return jax.checkpoint(FNO._evaluate, policy=policy)(self, x)

    def _evaluate(self, x: Array) -> Array:
        grid = x.shape[1:]
        if self.grid_embedding:
            x = jnp.concatenate([x, jnp.asarray(_coordinates(grid), x.dtype)])
        x = _stored(_activate(self.activation, _stored(self.lifting.first.from_input(x))))
        x = _stored(self.lifting.last(x))
        ends = [round(p * n) for p, n in zip(self.domain_padding, grid, strict=True)]
        if any(ends):
            x = jnp.pad(x, [(0, 0), *((0, end) for end in ends)])
        for i, block in enumerate(self.blocks):
            block, x = gradients_in_turn(block, x)
            x = block(x if i == 0 else _stored(_activate(self.activation, x)), self.activation)
        if any(ends):
            x = x[:, *(slice(n) for n in grid)]
        first = self.projection.first
        x = _activate(self.activation, _stored(first.product(x)), first)
        return self.projection.last.read_out(x)

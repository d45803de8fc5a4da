"""The Fourier neural operator."""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from .._util._calls import called, public
from .._util._types import DTypeLike
from ..engine import KEPT_TERMS
from ..precision._cast import widen
from ..precision._dtypes import check_bool, check_integer, check_positive, is_half, is_real
from ..precision._tree import check_key
from ..products._order import add_product, batch_behind, gradients_in_turn, summed_apart
from ._activations import as_activation, gelu
from ._arithmetic import Arithmetic, parse_arithmetic
from ._pointwise import (
    ChannelMLP,
    Pointwise,
    activate,
    enter,
    kept,
    part,
    per_channel,
    shifted,
    stored,
)
from ._spectral_conv import DIMENSIONS, SpectralConv, check_field, parse_sizes


class Block(eqx.Module):
    """A spectral convolution with a linear skip connection, followed by a channel MLP with a gated
    one.
    """

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
        self.mlp = ChannelMLP((channels, hidden, channels), arithmetic, key=mlp)
        self.gate = jnp.ones(channels, jnp.float32)

    def __call__(
        self, x: Array, activation: Callable, entering: Callable | None, shift: Array | None
    ) -> Array:
        """Applies the block to a field. First adds the constant for each channel, if there is one,
        and applies the entering activation, if there is one.
        """
        gate, bias = self.gate, self.mlp.last.bias
        rest = None
        if is_half(x.dtype):
            x, rest = enter(entering, x, shift, gate, bias)
        else:
            x = x if shift is None else stored(shifted(x, shift))
            x = x if entering is None else stored(entering(x))
        # The user may have put another layer in its place.
        spectral = self.spectral
        known = isinstance(spectral, SpectralConv)
        y, constant = spectral.apart(x) if known else (spectral(x), None)
        # Both in one dtype, so that one product is accumulated onto the other in place.
        skip = self.skip.product(x)
        with jax.named_scope(KEPT_TERMS):
            y = skip + y.astype(skip.dtype)
        y = kept(y)
        skipped = jnp.asarray(widen(self.skip.bias))
        if constant is not None:
            # Stored, so that one sum over the grid gives the gradients of both.
            skipped = stored(skipped + constant)
        y = stored(activate(activation, y, skipped))
        y = stored(self.mlp.first.product(y))
        y = stored(activate(activation, y, widen(self.mlp.first.bias)))
        y = self.mlp.last.product(y)
        if rest is not None:
            return kept(add_product(rest, y.astype(x.dtype)))
        y, gated = shifted(widen(y), bias), per_channel(gate, x) * widen(x)
        with jax.named_scope(KEPT_TERMS):
            y = y + gated
        return kept(y.astype(self.skip.dtype))


def _parse_padding(padding: Any, dims: int) -> tuple[int | float, ...]:
    several = isinstance(padding, Sequence | np.ndarray) and not isinstance(padding, str)
    parsed: tuple[Any, ...] = tuple(padding) if several else (padding,) * dims
    if len(parsed) != dims or not all(is_real(p) and 0 <= p <= 1 for p in parsed):
        raise ValueError(
            f"`{called()}` takes `domain_padding` as a fraction of the domain, from 0 to 1, or one "
            f"for each of its {dims} axes, but got {padding!r}. Of 64 points, 8 are a fraction of "
            "8/64."
        )
    return parsed


def _hidden(channels: int, ratios: dict[str, Any]) -> dict[str, int]:
    """Returns the number of hidden channels of each channel MLP, by name."""
    fix = "It is the channels of a hidden layer over `hidden_channels`."
    return {
        name: max(1, round(check_positive(ratio, f"{name}_ratio", fix) * channels))
        for name, ratio in ratios.items()
    }


class FNO(eqx.Module):
    """A Fourier neural operator: a map of fields that can be evaluated on any grid.

    The network lifts the field to hidden channels, applies several blocks, and projects the result
    (Li et al., ICLR 2021). Each block is a spectral convolution with a linear skip connection,
    followed by a channel MLP with a gated one, as in neuraloperator 2.0. The network takes one
    sample, channels first; use `jax.vmap` for a batch.

    Products are computed in the dtype of the weights. A model that [`mpx_pde.cast_tree`][] or
    [`mpx_pde.filter_grad`][] has cast multiplies halves in the forward and in the backward pass. It
    evaluates activations in float32 and stores them in half precision. For the backward pass it
    keeps the modes and the results of products, in half precision. Activations are evaluated again
    (`remat=False` keeps more and takes less time).

    The output is float32, for a loss in float32. If values of the input may exceed 65504, pass the
    input as float32 too: `filter_grad(..., keep_full=(False, True))`. Normalize fields that have an
    offset: the hidden fields then have one as well, and are stored in half precision. With an
    offset of 300 times its variation, a field loses a sixth of the variation in float16.

    **Attributes:**

    - `lifting`, `projection`: channel MLPs of two layers.
    - `blocks`: the blocks, each with a `spectral` convolution, a `skip`, an `mlp` and a `gate`.
    """

    lifting: ChannelMLP
    blocks: tuple[Block, ...]
    projection: ChannelMLP
    activation: Callable
    in_channels: int = eqx.field(static=True)
    out_channels: int = eqx.field(static=True)
    grid_embedding: bool = eqx.field(static=True)
    domain_padding: tuple[int | float, ...] = eqx.field(static=True)
    remat: bool = eqx.field(static=True)

    @public
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
        remat: bool = True,
    ):
        """**Arguments:**

        - `in_channels`, `out_channels`: numbers of channels of the fields.
        - `hidden_channels`: the number of channels in between; a multiple of 8 suits tensor cores.
        - `num_layers`: the number of blocks.
        - `modes`: as for [`mpx_pde.nn.SpectralConv`][].
        - `key`: a `jax.random.key`.
        - `method`, `factorization`, `rank`, `stabilizer`, `dtype`: as for
            [`mpx_pde.nn.SpectralConv`][]. `dtype` applies to all products.
        - `activation`: an elementwise function.
        - `lifting_ratio`, `projection_ratio`, `mlp_ratio`: sizes of the hidden layers of the
            channel MLPs, divided by `hidden_channels`.
        - `grid_embedding`: whether to add the coordinates of the grid, on [0, 1), as channels.
        - `domain_padding`: the fraction by which the domain is extended, with zeros beyond the end
            of each axis, for problems that are not periodic; one number, or one for each axis.
        - `remat`: whether the backward pass evaluates activations again. `True` keeps two fields
            per block, which needs the least memory. `False` keeps the operands of all products, so
            that activations and products are not evaluated again. It takes the least time and
            about twice the memory. Results are the same.

        **Raises:** `ValueError` for sizes below 1, ratios that are not positive or a padding that
        is not a fraction, `TypeError` for a `remat` or a `grid_embedding` that is not a bool, and
        what [`mpx_pde.nn.SpectralConv`][] raises.
        """
        self.in_channels = check_integer(in_channels, "in_channels")
        self.out_channels = check_integer(out_channels, "out_channels")
        check_integer(hidden_channels, "hidden_channels")
        check_integer(num_layers, "num_layers")
        modes = parse_sizes(modes, DIMENSIONS, "modes")
        arithmetic = parse_arithmetic(dtype)
        check_key(key)
        lift_key, project_key, *keys = jax.random.split(key, num_layers + 2)
        ratios = {"lifting": lifting_ratio, "projection": projection_ratio, "mlp": mlp_ratio}
        hidden = _hidden(hidden_channels, ratios)
        spectral = {"method": method, "factorization": factorization, "rank": rank}
        spectral |= {"stabilizer": stabilizer, "dtype": dtype}
        block = ft.partial(Block, hidden_channels, hidden["mlp"], modes, arithmetic, **spectral)
        inputs = in_channels + (len(modes) if grid_embedding else 0)
        lift = inputs, hidden["lifting"], hidden_channels
        project = hidden_channels, hidden["projection"], out_channels
        self.lifting = ChannelMLP(lift, arithmetic, key=lift_key)
        self.blocks = tuple(block(key=key) for key in keys)
        self.projection = ChannelMLP(project, arithmetic, key=project_key)
        self.activation = as_activation(activation)
        self.domain_padding = _parse_padding(domain_padding, len(modes))
        again = "where `remat=False` keeps activations and `True` evaluates them again"
        self.remat = check_bool(remat, "remat", again)
        coordinates = "whether the coordinates of the grid are channels too"
        self.grid_embedding = check_bool(grid_embedding, "grid_embedding", coordinates)

    @public
    def __call__(
        self, x: Float[Array, "inputs *grid"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "outputs *grid"]:
        """**Arguments:**

        - `x`: a field, shape `[in_channels, *grid]`, with at least `modes[i]` points along axis i.
        - `key`: ignored; provided for compatibility with the layers of Equinox.

        **Returns:**

        A field, shape `[out_channels, *grid]`, in float32.

        **Raises:** as [`mpx_pde.nn.SpectralConv`][].
        """
        x = check_field(x, self.in_channels, len(self.domain_padding))
        ends = [round(p * n) for p, n in zip(self.domain_padding, x.shape[1:], strict=True)]
        grid = tuple(slice(n) for n in x.shape[1:])
        if self.grid_embedding:
            axes = [np.arange(n) / n for n in x.shape[1:]]
            coordinates = jnp.asarray(np.stack(np.meshgrid(*axes, indexing="ij")), x.dtype)
            # JAX repeats them for each sample, but not with the layout that the samples have on a
            # mesh with explicit axes.
            x = jnp.concatenate([x, summed_apart(coordinates, x)])
        x = batch_behind(x)
        x = part(ChannelMLP.lift, self.remat)(self.lifting, x, self.activation)
        shift, entering = widen(self.lifting.last.bias), None
        if any(ends):
            x = jnp.pad(shifted(x, shift), [(0, 0), *((0, end) for end in ends)])
            shift = None
        for block in self.blocks:
            block, x = gradients_in_turn(block, x)
            x = part(Block.__call__, self.remat)(block, x, self.activation, entering, shift)
            shift, entering = None, self.activation
        if any(ends):
            x = x[:, *grid]
        # The backward pass starts here, so values kept for it occupy no memory needed elsewhere.
        return part(ChannelMLP.project, again=False)(self.projection, x, self.activation)

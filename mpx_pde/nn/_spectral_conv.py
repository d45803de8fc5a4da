"""Convolution by a few Fourier modes, the main layer of a Fourier neural operator."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32, PRNGKeyArray

from .._util._calls import called, public
from .._util._types import DTypeLike
from ..precision._cast import widen
from ..precision._dtypes import check_choice, check_integer, is_integer
from ..precision._tree import check_key
from ._activations import parse_stabilizer
from ._arithmetic import KEPT, Arithmetic, arithmetic_of, centered, parse_arithmetic, unscaled
from ._dft import forward_matrix, frequencies, inverse_matrix, regrid_factor
from ._spectral_cost import choose_method
from ._spectral_weights import (
    CPWeight,
    constant_response,
    contract,
    cp_rank,
    cp_weight,
    dense_weight,
)


DIMENSIONS = (1, 2, 3)


def parse_sizes(sizes: Any, axes: Sequence[int], name: str) -> tuple[int, ...]:
    """Returns `sizes` as positive integers, one for each spatial axis. `axes` holds the numbers of
    axes that are allowed.
    """
    several = tuple(sizes) if isinstance(sizes, Sequence | np.ndarray) else (sizes,)
    if len(several) not in axes or not all(is_integer(n) and n > 0 for n in several):
        raise ValueError(
            f"`{called()}` takes a positive integer for each spatial axis as `{name}`, of which it "
            f"has {' or '.join(map(str, axes))}, but got {sizes!r}."
        )
    return tuple(map(int, several))


def check_field(x: Any, channels: int, dims: int) -> Array:
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        fix = "Cast it to float32."
        if jnp.iscomplexobj(x):
            fix = "Pass the real and imaginary parts of a complex field as channels."
        raise TypeError(
            f"`{called()}` takes a real floating-point field, but got dtype {x.dtype.name} and "
            f"shape {x.shape}. {fix}"
        )
    if x.ndim != dims + 1 or x.shape[0] != channels:
        raise ValueError(
            f"`{called()}` takes a field of shape [{channels} channels, {dims} spatial axes], but "
            f"got shape {x.shape}. It is one sample: use `jax.vmap` for a batch."
        )
    return x


class SpectralConv(eqx.Module):
    """A linear map of fields that acts on each of their lowest Fourier modes separately.

    The coefficients of each mode that is kept are multiplied by a complex matrix; all other modes
    are dropped (Li et al., *Fourier Neural Operator for Parametric Partial Differential
    Equations*, ICLR 2021). The grid may differ from call to call.

    Two methods compute the same answer. `"dft"` multiplies by truncated DFT matrices, with real
    matrix products by [`mpx_pde.mixed_dot_general`][]. In half precision these run on tensor cores,
    sum in float32, and store half precision between them, in the backward pass too. `"fft"` uses
    `rfftn` and `irfftn` in float32, whatever precision is stored around it.

    In half precision the mean of each channel is subtracted before the field is rounded, and its
    contribution is added in float32 at the end. This is exact, and gains one to two digits for
    fields with an offset. A float32 field that float16 cannot hold is scaled by a power of two.

    **Attributes:**

    - `weight`: the weights, shape `[*kept, in_channels, out_channels, 2]`, with real and imaginary
        parts along the last axis; or their factors. The frequencies of an axis are in ascending
        order, from -m//2 on; those of the last spatial axis are 0 … m//2.
    """

    weight: Float[Array, "*modes inputs outputs 2"] | CPWeight
    in_channels: int = eqx.field(static=True)
    out_channels: int = eqx.field(static=True)
    modes: tuple[int, ...] = eqx.field(static=True)
    stabilizer: Callable | None = eqx.field(static=True)
    method: Literal["auto", "dft", "fft"] = eqx.field(static=True)
    arithmetic: Arithmetic | None = eqx.field(static=True)

    @public
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        modes: int | Sequence[int],
        *,
        key: PRNGKeyArray,
        factorization: Literal["cp"] | None = None,
        rank: int | float = 0.5,
        stabilizer: str | Callable[..., Any] | None = None,
        method: Literal["auto", "dft", "fft"] = "auto",
        dtype: DTypeLike | None = None,
    ):
        """**Arguments:**

        - `in_channels`, `out_channels`: numbers of channels; multiples of 8 suit tensor cores.
        - `modes`: the number m of frequencies that are kept, for each of one to three spatial axes:
            -m/2 … m/2 - 1, and for the last axis the m//2 + 1 frequencies from zero on. They are
            counted as in `n_modes` of neuraloperator.
        - `key`: a `jax.random.key`.
        - `factorization`: `"cp"` for weights of low rank (Kossaifi et al., 2023), `None` for dense
            ones.
        - `rank`: with `"cp"`, the number of terms, or the number of parameters as a fraction of
            that of dense weights. Dense weights take no rank.
        - `stabilizer`: the function that bounds the field before the transform: `"tanh"`,
            `"hard_clip"` (to ±1), `"sigma_clip"` (to two standard deviations), `"soft_clip"`
            (8 tanh(x / 8)), or a function of a field such as `mpx_pde.nn.soft_clip(4.0)`.
        - `method`: `"dft"`, `"fft"`, or `"auto"` for the one that is faster according to a cost
            model fitted to a CPU.
        - `dtype`: the dtype of the products; by default the dtype of the weights. With a half type,
            float32 masters enter the products uncast, so their gradients come out in float32.
            `"bfloat16_x3"` and the other split products of [`mpx_pde.autocast`][] store float32,
            and compute each float32 product from several products of halves. Either gives way where
            full precision is asked for, as by `forward="float32"` or [`mpx_pde.FullPrecision`][].

        **Raises:** `ValueError` for sizes below 1, an unknown `factorization`, `stabilizer` or
        `method`, and a `rank` that fits no factorization; `TypeError` for a `key` that is not one.
        """
        self.in_channels = check_integer(in_channels, "in_channels")
        self.out_channels = check_integer(out_channels, "out_channels")
        check_key(key)
        self.modes = parse_sizes(modes, DIMENSIONS, "modes")
        dims = len(self.modes)
        counts = tuple(len(frequencies(m, i == dims - 1)) for i, m in enumerate(self.modes))
        if check_choice(factorization, (None, "cp"), "factorization") is None:
            self.weight = dense_weight(key, counts, in_channels, out_channels)
        else:
            rank = cp_rank(rank, (*counts, in_channels, out_channels))
            self.weight = cp_weight(key, counts, in_channels, out_channels, rank)
        self.stabilizer = parse_stabilizer(stabilizer)
        self.method = check_choice(method, ("auto", "dft", "fft"), "method")
        self.arithmetic = parse_arithmetic(dtype)

    @property
    def _weights(self) -> Array:
        return self.weight.inputs if isinstance(self.weight, CPWeight) else self.weight

    @public
    def __call__(
        self,
        x: Float[Array, "inputs *grid"],
        *,
        output_shape: int | Sequence[int] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "outputs *output_grid"]:
        """**Arguments:**

        - `x`: a field, shape `[in_channels, *grid]`, on a periodic grid (the end point left out)
            with at least `modes[i]` points along axis i.
        - `output_shape`: the grid of the result, which may sample the function at other points; by
            default the grid of `x`.
        - `key`: ignored; provided for compatibility with the layers of Equinox.

        **Returns:**

        A field, shape `[out_channels, *output_shape]`, in the dtype of the weights, or in `dtype`.

        **Raises:** `TypeError` for a field that is not real floating-point, `ValueError` for a
        wrong number of channels or axes, or a grid with fewer points than `modes`.
        """
        y, constant = self.apart(x, output_shape)
        if constant is None:
            return y
        constant = constant.reshape(-1, *(1 for _ in y.shape[1:]))
        return (widen(y) + constant).astype(y.dtype)

    def apart(
        self, x: Float[Array, "inputs *grid"], output_shape: int | Sequence[int] | None = None
    ) -> tuple[Float[Array, "outputs *output_grid"], Float32[Array, " outputs"] | None]:
        """Returns the result without the contribution of the field's mean, and that contribution
        (or `None`), for callers that add a constant anyway.
        """
        dims = len(self.modes)
        x = check_field(x, self.in_channels, dims)
        grid = x.shape[1:]
        output = grid
        if output_shape is not None:
            output = parse_sizes(output_shape, (dims,), "output_shape")
        for name, sizes in (("the field", grid), ("`output_shape`", output)):
            if any(m > n for m, n in zip(self.modes, sizes, strict=True)):
                raise ValueError(
                    f"`SpectralConv` keeps modes {self.modes}, which need a grid of at least as "
                    f"many points, but {name} has a grid of {sizes}. Take fewer modes or a finer "
                    "grid."
                )
        arithmetic = arithmetic_of(self.arithmetic, self._weights)
        if self.stabilizer is not None:
            x = self.stabilizer(x)
        method = self.method
        if method == "auto":
            channels = self.in_channels + self.out_channels
            method = choose_method(channels, grid, self.modes, arithmetic.dtype)
        if method == "fft":
            y, constant = self._by_fft(x, output).astype(arithmetic.dtype), None
        else:
            y, constant = self._by_matrices(x, output, arithmetic)
        # A dtype that `autocast` supplied is not part of the user's program, so it is not returned.
        return y.astype(arithmetic.dtype if arithmetic.given else self._weights.dtype), constant

    def _by_matrices(
        self, x: Array, output: tuple[int, ...], arithmetic: Arithmetic
    ) -> tuple[Array, Array | None]:
        dtype = arithmetic.dtype
        mean = unscale = None
        takes_mean = arithmetic.half and x.dtype == dtype
        if arithmetic.half and not takes_mean:
            x, mean, unscale = centered(x, dtype)
        y, taken = _forward(x.astype(dtype), self.modes, arithmetic, takes_mean)
        mean = taken if takes_mean else mean
        y = contract(self.weight, checkpoint_name(y, KEPT), arithmetic)
        # The scaling is undone last, because a mode of a smooth field is as large as the field.
        y = unscaled(_inverse(y, self.modes, output, arithmetic), unscale)
        if mean is None:
            return y, None
        zero = (*(m // 2 for m in self.modes[:-1]), 0)
        return y, constant_response(self.weight, zero, checkpoint_name(mean, KEPT))

    def _by_fft(self, x: Array, output: tuple[int, ...]) -> Array:
        x, weight = widen(x), widen(self.weight)
        arithmetic = Arithmetic(x.dtype)
        dims, grid = len(self.modes), x.shape[1:]
        axes = tuple(range(1, dims + 1))
        y = jnp.fft.rfftn(x, axes=axes, norm="forward")[..., : self.modes[-1] // 2 + 1]
        for axis, m in enumerate(self.modes[:-1], 1):
            y = lax.slice_in_dim(jnp.roll(y, m // 2, axis), 0, m, axis=axis)
        y = jnp.transpose(y, (0, *range(dims, 0, -1)))
        y = jnp.stack([y.real, y.imag], axis=-2)
        y = contract(weight, y, arithmetic)
        y = lax.complex(y[..., 0, 0] - y[..., 1, 1], y[..., 0, 1] + y[..., 1, 0])
        factor = regrid_factor(self.modes[-1], grid[-1], output[-1])
        y = jnp.moveaxis(y, -1, 0)
        if factor is not None:
            y = y * jnp.broadcast_to(jnp.asarray(factor, y.dtype), y.shape)
        sizes = (*output[:-1], output[-1] // 2 + 1)
        y = jnp.pad(y, [(0, 0), *((0, n - k) for n, k in zip(sizes, y.shape[1:], strict=True))])
        for axis, m in enumerate(self.modes[:-1], 1):
            y = jnp.roll(y, -(m // 2), axis)
        return jnp.fft.irfftn(y, s=output, axes=axes, norm="forward")


def _forward(
    x: Float[Array, "channels *grid"],
    modes: tuple[int, ...],
    arithmetic: Arithmetic,
    takes_mean: bool,
) -> tuple[Float[Array, "channels ..."], Float32[Array, " channels"] | None]:
    """Transforms a field to its modes, shape `[channels, k_d, …, k_2, 2, k_1]`. Returns them, and
    the mean of the field if `takes_mean` says that the transform subtracts it.

    The field itself is read only once. The transform of the last axis is linear, so the mean is
    computed from its result, and subtracted there before that is rounded.
    """
    dims, mean = len(modes), None
    matrix = forward_matrix(x.shape[dims], modes[-1], True, arithmetic.dtype)
    out_dtype = jnp.dtype("float32") if takes_mean else None
    x = arithmetic.product(x, matrix, (((dims,), (0,)), ((), ())), out_dtype=out_dtype)
    if takes_mean:
        # The rounded matrix maps a constant to one, and to zeros on an even grid.
        one = matrix.astype(np.float64).sum(axis=0)
        mean = jnp.mean(x[..., 0, 0], axis=tuple(range(1, dims))) / np.float32(one[0, 0])
        one = jnp.asarray(one, jnp.float32).reshape(*(1 for _ in range(dims)), *one.shape)
        x = x - mean.reshape(-1, *(1 for _ in x.shape[1:])) * one
        x = x.astype(arithmetic.dtype)
    for axis in range(dims - 1, 0, -1):
        matrix = forward_matrix(x.shape[axis], modes[axis - 1], False, arithmetic.dtype)
        x = arithmetic.product(x, matrix, (((axis, x.ndim - 2), (0, 1)), ((), ())))
    return x, mean


def _inverse(
    y: Float[Array, "... channels 2 2"],
    modes: tuple[int, ...],
    output: tuple[int, ...],
    arithmetic: Arithmetic,
) -> Float[Array, "channels *output"]:
    """Transforms the products that `contract` returns to a field."""
    dims = len(modes)
    for axis, (m, n) in enumerate(zip(modes, output, strict=True)):
        first, last = axis == 0, axis == dims - 1
        matrix = inverse_matrix(n, m, last, first, arithmetic.dtype)
        # Real and imaginary part are the last axes of the products, and the last axis but one after
        # each transform.
        parts = (y.ndim - 2, y.ndim - 1) if first else (y.ndim - 2,)
        contracted = tuple(range(1 + len(parts)))
        y = arithmetic.product(y, matrix, (((0, *parts), contracted), ((), ())))
    return y

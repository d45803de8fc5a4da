"""The weights of a spectral convolution: one complex matrix for each mode, dense or factorized.

Both multiply the modes of a field without adding up the products of real and imaginary parts. The
result has one axis of two for the weight and one for the mode, and the inverse transform adds the
products up. So each weight is read once, and the real and the imaginary part of a mode are two
columns of one product.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, PRNGKeyArray

from .._util._calls import called
from ..precision._cast import widen
from ..products._order import batch_behind
from ._arithmetic import Arithmetic, separate


def _normal(key: PRNGKeyArray, shape: tuple[int, ...], deviation: float) -> Float32[Array, "..."]:
    """Draws complex normal numbers as pairs."""
    return deviation / math.sqrt(2) * jax.random.normal(key, (*shape, 2), jnp.float32)


def dense_weight(
    key: PRNGKeyArray, counts: tuple[int, ...], inputs: int, outputs: int
) -> Float32[Array, "*modes inputs outputs 2"]:
    """Draws normal weights with a standard deviation that preserves the size of a mode, as in
    neuraloperator.
    """
    return _normal(key, (*counts, inputs, outputs), math.sqrt(2 / (inputs + outputs)))


def _product(x: Array, y: Array) -> Array:
    """Multiplies pairs along the last axis as complex numbers."""
    real = x[..., 0] * y[..., 0] - x[..., 1] * y[..., 1]
    return jnp.stack([real, x[..., 0] * y[..., 1] + x[..., 1] * y[..., 0]], axis=-1)


class CPWeight(eqx.Module):
    """Weights of low rank: the sum over r of input[i, r] · output[r, o] · Π_j modes[j][k_j, r].

    The factorization and its initialization follow Kossaifi et al., *Multi-Grid Tensorized Fourier
    Neural Operator* (2023). The weight itself is never built.
    """

    inputs: Float[Array, "inputs rank 2"]
    outputs: Float[Array, "rank outputs 2"]
    modes: tuple[Float[Array, "_ rank 2"], ...]

    def factor(self) -> Float[Array, "*modes rank 2"]:
        """Returns the factor of each mode in float32."""
        out, *factors = [widen(f) for f in self.modes]
        for f in factors:
            out = jnp.broadcast_to(out[..., None, :, :], (*out.shape[:-2], *f.shape))
            out = _product(out, jnp.broadcast_to(f, out.shape))
        return out

    def at(self, mode: tuple[int, ...]) -> "CPWeight":
        """Returns the weight of one mode, with an axis of length one for each of its indices."""
        modes = tuple(f[k : k + 1] for f, k in zip(self.modes, mode, strict=True))
        return CPWeight(self.inputs, self.outputs, modes)


def cp_weight(
    key: PRNGKeyArray, counts: tuple[int, ...], inputs: int, outputs: int, rank: int
) -> CPWeight:
    """Draws factors whose product has the standard deviation of dense weights."""
    deviation = math.sqrt(2 / (inputs + outputs) / rank) ** (1 / (len(counts) + 2))
    first, last, *keys = jax.random.split(key, len(counts) + 2)
    modes = [_normal(k, (m, rank), deviation) for k, m in zip(keys, counts, strict=True)]
    return CPWeight(
        _normal(first, (inputs, rank), deviation),
        _normal(last, (rank, outputs), deviation),
        tuple(modes),
    )


def contract(
    weight: Array | CPWeight, x: Float[Array, "inputs ..."], arithmetic: Arithmetic
) -> Float[Array, "..."]:
    """Multiplies the modes of a field by the weights.

    **Arguments:**

    - `weight`: dense or factorized.
    - `x`: the modes, shape `[inputs, k_d, …, k_2, 2, k_1]`.

    **Returns:**

    The four real products, shape `[k_1, …, k_d, outputs, 2, 2]`. The last axes are the parts of the
    weight and then the parts of the mode.
    """
    dims = x.ndim - 2
    modes = (dims + 1, *range(dims - 1, 0, -1))  # of axis 1, 2, … in x
    if not isinstance(weight, CPWeight):
        y = arithmetic.product(x, weight, (((0,), (dims,)), (modes, tuple(range(dims)))))
        # [k_1, …, k_d, outputs, 2, 2]
        return batch_behind(jnp.moveaxis(y, dims, -1), dims)
    y = arithmetic.product(weight.inputs, x, (((0,), (0,)), ((), ())))
    # [rank, 2, k_d, …, k_2, 2, k_1] to [k_1, …, k_d, rank], real and imaginary.
    y = widen(jnp.transpose(y, (*(i + 1 for i in modes), 0, 1, dims + 1)))
    y = jnp.stack([y[..., 0, 0] - y[..., 1, 1], y[..., 0, 1] + y[..., 1, 0]], axis=-1)
    y = _product(y, weight.factor()).astype(arithmetic.dtype)
    y = arithmetic.product(weight.outputs, y, (((0,), (dims,)), ((), ())))
    # [outputs, 2, k_1, …, k_d, 2]
    return jnp.transpose(y, (*range(2, dims + 2), 0, 1, dims + 2))


def constant_response(
    weight: Array | CPWeight, zero: tuple[int, ...], mean: Float32[Array, " inputs"]
) -> Float32[Array, " outputs"]:
    """Returns the image of a constant field: its mode times the real part of that mode's weight.

    It is computed by sums of float32 products, because a matrix product would be one of float32
    arrays.
    """
    if not isinstance(weight, CPWeight):
        real = widen(weight[zero][..., 0])
        return separate(jnp.sum(jnp.broadcast_to(mean[:, None], real.shape) * real, axis=0))
    inputs = widen(weight.inputs)
    y = jnp.sum(jnp.broadcast_to(mean[:, None, None], inputs.shape) * inputs, axis=0)
    y = _product(y, weight.at(zero).factor().reshape(y.shape))
    outputs = widen(weight.outputs)
    y = jnp.broadcast_to(y[:, None, :], outputs.shape)
    y = y[..., 0] * outputs[..., 0] - y[..., 1] * outputs[..., 1]
    return separate(jnp.sum(y, axis=0))


def cp_rank(rank: int | float, shape: tuple[int, ...]) -> int:
    """Returns the number of terms of a factorization of complex weights of this shape."""
    whole = isinstance(rank, int) and not isinstance(rank, bool) and rank >= 1
    if not whole and not (isinstance(rank, float) and 0 < rank <= 1):
        raise ValueError(
            f"`{called()}` takes `rank` as a positive integer or as a fraction of the dense "
            f"parameters between 0 and 1, but got {rank!r}."
        )
    return int(rank) if whole else max(1, round(rank * math.prod(shape) / sum(shape)))

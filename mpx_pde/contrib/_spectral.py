"""Converts the spectral layers of other libraries, with their weights."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._util._types import DTypeLike, PyTree
from ..nn import SpectralConv


def _is_pdequinox(layer: Any) -> bool:
    """Returns whether this is a spectral layer of pdequinox. The test looks at attributes, because
    pdequinox need not be installed.
    """
    names = ("num_spatial_dims", "num_modes", "weights_real", "weights_imag")
    return isinstance(layer, eqx.Module) and all(hasattr(layer, name) for name in names)


def _ascending(weights: Float[Array, "groups outputs inputs *modes"]) -> Float[Array, "..."]:
    """Joins the weights of all choices of signs to one array `[*kept, inputs, outputs]`, with
    frequencies ascending along each axis. Among the groups, the sign of the first axis changes
    fastest.
    """
    dims = weights.ndim - 3
    outputs, inputs, *modes, last = weights.shape[1:]
    # [sign of axis d - 1, …, of axis 1, outputs, inputs, modes of axis 1, …, of axis d]
    blocks = weights.reshape(*(2 for _ in modes), *weights.shape[1:])
    # Negative frequencies first.
    blocks = jnp.flip(blocks, range(dims - 1))
    along = [axis for i in range(dims - 1) for axis in (dims - 2 - i, dims + 1 + i)]
    blocks = jnp.transpose(blocks, (*along, 2 * dims, dims, dims - 1))
    return blocks.reshape(*(2 * m for m in modes), last, inputs, outputs)


def _converted(layer: Any, dtype: Any) -> SpectralConv:
    outputs, inputs = layer.weights_real.shape[1:3]
    *modes, last = layer.num_modes
    # Frequencies -m … m - 1 of each axis, and 0 … m - 1 of the last.
    kept = (*(2 * m for m in modes), max(2 * (last - 1), 1))
    like = SpectralConv(inputs, outputs, kept, key=jax.random.key(0), dtype=dtype)
    parts = [_ascending(jnp.asarray(w)) for w in (layer.weights_real, layer.weights_imag)]
    weight = jnp.stack(parts, axis=-1)
    return eqx.tree_at(lambda new: new.weight, like, weight)


def convert_spectral_layers(model: PyTree, dtype: DTypeLike | None = None) -> PyTree:
    """Replaces the spectral convolutions of pdequinox in a model by [`mpx_pde.nn.SpectralConv`][],
    with their weights.

    The new layers compute the same function, in half precision too, for which JAX has no FFT. They
    keep the same frequencies: -m … m - 1 of each axis, where m is its entry in `num_modes`, and
    0 … m - 1 of the last axis.

    **Arguments:**

    - `model`: any PyTree, such as `pdequinox.arch.ClassicFNO(…)`.
    - `dtype`: the dtype of the products of the new layers, as for `SpectralConv`.

    **Returns:**

    A PyTree with the new layers in place of the old ones.

    **Raises:** `ValueError` for a model without such a layer.
    """
    layers = [
        x for x in jax.tree_util.tree_leaves(model, is_leaf=_is_pdequinox) if _is_pdequinox(x)
    ]
    if not layers:
        raise ValueError(
            "`contrib.convert_spectral_layers` found no spectral convolution of pdequinox (a "
            "module with `num_modes`, `weights_real` and `weights_imag`) in the model."
        )

    def convert(x):
        return _converted(x, dtype) if _is_pdequinox(x) else x

    return jax.tree_util.tree_map(convert, model, is_leaf=_is_pdequinox)

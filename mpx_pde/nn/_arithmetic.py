"""The precision in which a layer multiplies and stores, and the cast of its input."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32

from ..precision._cast import widen
from ..precision._dtypes import as_floating_dtype, is_half, product_datatype
from ..precision._forward import takes_halves
from ..precision._split import SPLIT_PRODUCTS
from ..products._dot import mixed_dot_general, split_dot_general


KEPT = "mpx_pde.nn: kept for the backward pass"


@dataclass(frozen=True)
class Arithmetic:
    """The dtype that a layer stores between products, and how it computes products.

    **Attributes:**

    - `dtype`: the dtype of stored values.
    - `algorithm`: the algorithm that computes products of float32 arrays from several products of
        halves, or `None`.
    - `given`: whether the layer was given this dtype, rather than taking it from its weights.
    """

    dtype: np.dtype
    algorithm: str | None = None
    given: bool = True

    @property
    def half(self) -> bool:
        """Returns whether values are stored in half precision."""
        return is_half(self.dtype)

    def product(self, x: Array, y: Any, dimension_numbers: Any, *, out_dtype: Any = None) -> Array:
        """Multiplies as [`jax.lax.dot_general`][] does, in this arithmetic."""
        if self.algorithm is None:
            # Unless it was given, `dtype` need not be named: it is that of the narrowest operand.
            dtype = self.dtype if self.given else None
            return mixed_dot_general(x, y, dimension_numbers, dtype=dtype, out_dtype=out_dtype)
        x, y = jnp.asarray(x, self.dtype), jnp.asarray(y, self.dtype)
        return split_dot_general(x, y, dimension_numbers, self.algorithm)


def arithmetic_of(given: Arithmetic | None, weight: Any) -> Arithmetic:
    """Returns the `Arithmetic` that a layer was given, or else that of its weights."""
    narrow = given is not None and (given.half or given.algorithm is not None)
    if given is None or (narrow and not takes_halves()):
        return Arithmetic(product_datatype(weight.dtype), given=False)
    return given


def parse_arithmetic(dtype: Any) -> Arithmetic | None:
    """Parses a layer's `dtype`: a floating-point type, or the name of a split product."""
    if dtype is None:
        return None
    if isinstance(dtype, str) and dtype in SPLIT_PRODUCTS:
        return Arithmetic(jnp.dtype("float32"), dtype)
    return Arithmetic(as_floating_dtype(dtype))


def centered(
    x: Float[Array, "channels *grid"], dtype: np.dtype
) -> tuple[Float[Array, "channels *grid"], Float32[Array, " channels"], Float[Array, ""] | None]:
    """Rounds a field to half precision, without its mean, and scaled if it would overflow.

    Rounding errors are relative, so those of a large mean would bury the rest of the field. A
    float32 value above 65504 would become infinite in float16. The scale is a power of two, which
    is exact.

    **Returns:**

    `(y, mean, unscale)` such that `x` is `mean + unscale * y`. An `unscale` of `None` means 1.
    """
    grid = tuple(range(1, x.ndim))
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=grid, keepdims=True)
    wide = wide - mean
    unscale = None
    if dtype == jnp.float16 and x.dtype != jnp.float16:
        largest = lax.stop_gradient(jnp.max(jnp.abs(wide)))
        excess = jnp.maximum(jnp.frexp(largest)[1] - 15, 0)
        wide = wide * jnp.ldexp(jnp.ones_like(largest), -excess)
        unscale = jnp.ldexp(jnp.ones_like(largest), excess)
    return wide.astype(dtype), jnp.squeeze(mean, grid), unscale


def separate(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns the same values, computed in a kernel of their own.

    XLA's CPU backend (jaxlib 0.10.2) fuses a small sum of products into the addition of that sum to
    a field, and gets the sum wrong where the field is large (16 × 16 channels on 48² points).
    """
    digits = int(jnp.finfo(x.dtype).nmant)
    if x.dtype == jnp.float64:
        return lax.reduce_precision(x, int(jnp.finfo(x.dtype).nexp), digits)
    # With float32's exponents, since those of float16 alone would make its subnormal numbers zero.
    return lax.reduce_precision(x.astype(jnp.float32), 8, digits).astype(x.dtype)


def unscaled(x: Array, unscale: Array | None) -> Array:
    """Undoes the scaling of `centered` after a linear operation."""
    return x if unscale is None else (widen(x) * unscale).astype(x.dtype)

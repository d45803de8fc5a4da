"""The half-precision convolution, the counterpart of the product in `_dot.py`."""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching
from jaxtyping import Array, Float

from .._util._calls import public
from .._util._types import DTypeLike
from .._util._varying import match_varying_axes
from ..precision._dtypes import is_half
from ._bilinear import GPUS, as_operand, define_product, product_dtypes, rounded_product
from ._replay import replay, traced


mixed_conv_general_dilated_p = Primitive("mixed_conv_general_dilated")

_PRODUCTS = lax.conv_general_dilated_p, mixed_conv_general_dilated_p


def _conv(x, y, *, dtype, out_dtype, origin, platform, **window):
    def product(x, y, *, precision, **options):
        return _plain(window)(x, y, precision=(precision,) * 2, **options)

    # cuDNN returns only half results for halves: for a float32 one XLA would widen the operands.
    in_half = platform in GPUS and origin.cotangent and is_half(dtype)
    through = dtype if in_half else out_dtype
    out = rounded_product(product, x, y, dtype, through, platform == "cpu")
    return lax.convert_element_type(out, out_dtype)


def _plain(window: dict) -> Callable:
    return ft.partial(
        lax.conv_general_dilated_p.bind, precision=None, preferred_element_type=None, **window
    )


def _cotangent(place: int, g, x, y, *, dtype, out_dtype, origin, **window):
    """Returns the cotangent of the operand at a place, in that operand's own dtype. It is computed
    by another product of halves.
    """
    del out_dtype
    aval, other = (x.aval, y) if place == 0 else (y.aval, x)

    def cotangent(g, other):
        def convolved(z):
            return _plain(window)(*((z, other) if place == 0 else (other, z)))

        return jax.linear_transpose(convolved, aval.update(dtype=g.dtype, weak_type=False))(g)

    closed = traced(cotangent, jax.typeof(g), jax.typeof(other))
    origin = origin._replace(out_dtype=True, cotangent=True)
    return replay(closed, (g, other), *_PRODUCTS, dtype=dtype, out_dtype=aval.dtype, origin=origin)[
        0
    ]


def _batch(args, dims, *, dtype, out_dtype, origin, **window):
    # JAX's own rule folds the batch axis into channels, groups or the batch of the convolution.
    batched = jax.vmap(_plain(window), in_axes=dims, out_axes=0)
    closed = traced(batched, *map(jax.typeof, args))
    return replay(closed, args, *_PRODUCTS, dtype=dtype, out_dtype=out_dtype, origin=origin)[0], 0


_transposes = (ft.partial(_cotangent, i) for i in (0, 1))
define_product(mixed_conv_general_dilated_p, lax.conv_general_dilated_p, _conv, *_transposes)
batching.primitive_batchers[mixed_conv_general_dilated_p] = _batch


@public
def mixed_conv_general_dilated(
    lhs: Float[Array, "..."],
    rhs: Float[Array, "..."],
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    *,
    dtype: DTypeLike | None = None,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "..."]:
    """Convolves as [`jax.lax.conv_general_dilated`][] does, with operands rounded to `dtype`,
    products accumulated in float32, and a result of dtype `out_dtype`.

    The rounding is part of the operation, as in [`mpx_pde.mixed_dot_general`][]. So the cotangent
    of each operand has that operand's dtype, and the convolutions of the backward pass and of
    forward mode are again `dtype` × `dtype` with float32 accumulation. cuDNN returns a convolution
    of halves in half precision. On a GPU the gradient of a float32 master is therefore summed in
    float32 and then rounded to half. A result that you ask for in float32 by `out_dtype` is not
    rounded; for it a GPU widens the rounded operands and convolves float32.

    **Arguments:**

    - `lhs`: the input, by default of shape `[batch, channels, *spatial]`; any real floating
        dtype. Pass activations in half.
    - `rhs`: the kernel, by default of shape `[out_channels, in_channels, *spatial]`; any real
        floating dtype. Pass the float32 master.
    - `window_strides`, `padding`, `lhs_dilation`, `rhs_dilation`, `dimension_numbers`,
        `feature_group_count`, `batch_group_count`: as for [`jax.lax.conv_general_dilated`][].
    - `dtype`, `out_dtype`: as for [`mpx_pde.mixed_dot_general`][].

    **Returns:**

    An array of dtype `out_dtype`.

    **Raises:** `TypeError` for operands that are not real floating-point, `ValueError` for a
    `dtype` that is not a floating-point type; for shapes that do not fit, as
    [`jax.lax.conv_general_dilated`][].
    """
    lhs, rhs = match_varying_axes(as_operand(lhs), as_operand(rhs))
    dtypes = product_dtypes((lhs, rhs), dtype, out_dtype)
    window = (window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers)
    groups = (feature_group_count, batch_group_count)
    # Lets JAX resolve and check padding and dimension numbers.
    convolution = lambda x, y: lax.conv_general_dilated(x, y, *window, *groups)
    closed = traced(convolution, jax.typeof(lhs), jax.typeof(rhs))
    return replay(closed, (lhs, rhs), *_PRODUCTS, **dtypes)[0]

"""Mixed-precision versions of [`jax.numpy.matmul`][] and [`jax.numpy.einsum`][]."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from .._util._calls import called, public
from .._util._repr import in_a_line
from .._util._types import DTypeLike
from ._bilinear import as_operand, product_dtypes
from ._dot import mixed_dot_general_p
from ._replay import replay, traced


@public
def mixed_matmul(
    x: Float[Array | np.ndarray, "..."],
    y: Float[Array | np.ndarray, "..."],
    *,
    dtype: DTypeLike | None = None,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "..."]:
    """Multiplies as [`jax.numpy.matmul`][] does, by [`mpx_pde.mixed_dot_general`][].

    **Arguments:**

    - `x`: shape `[..., n, k]` or `[k]`, any real floating dtype.
    - `y`: shape `[..., k, m]` or `[k]`, any real floating dtype. Leading axes broadcast; an
        operand without any is not repeated.
    - `dtype`, `out_dtype`: as for [`mpx_pde.mixed_dot_general`][].

    **Returns:**

    An array of shape `[..., n, m]` (without `n` or `m` if an operand has one axis) and of dtype
    `out_dtype`.

    **Raises:** `TypeError` for scalars, wrong dtypes or shapes that do not fit.
    """
    x, y = as_operand(x), as_operand(y)
    dtypes = product_dtypes((x, y), dtype, out_dtype)
    try:
        return _mixed(jnp.matmul, (x, y), dtypes)
    except (TypeError, ValueError) as e:
        raise TypeError(
            f"`{called()}` contracts the last axis of `x` with the last but one of `y` (or its "
            f"only one), and broadcasts the axes before these, but got shapes {x.shape} and "
            f"{y.shape}."
        ) from e


@public
def mixed_einsum(
    subscripts: str,
    *operands: Float[Array | np.ndarray, "..."],
    dtype: DTypeLike | None = None,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "..."]:
    """Evaluates [`jax.numpy.einsum`][] by [`mpx_pde.mixed_dot_general`][].

    Every pairwise product (in the order that `jax.numpy.einsum_path` picks) is one mixed product.
    Sums over an index of a single operand are taken first, in float32.

    **Arguments:**

    - `subscripts`: as for [`jax.numpy.einsum`][], ellipses included. An axis of size 1 broadcasts
        against the axes of other operands with its index, under an ellipsis or with a letter.
    - `operands`: arrays of any real floating dtype, which may differ.
    - `dtype`, `out_dtype`: as for [`mpx_pde.mixed_dot_general`][].

    **Returns:**

    An array of dtype `out_dtype`.

    **Raises:** `TypeError` for wrong dtypes, `ValueError` for subscripts that do not fit the
    operands.
    """
    if not isinstance(subscripts, str) or not operands:
        raise TypeError(
            f"`{called()}` takes its subscripts as a string first, and then the operands, but got "
            f"{in_a_line(subscripts)} and {len(operands)} operands."
        )
    arrays = [as_operand(x) for x in operands]
    dtypes = product_dtypes(arrays, dtype, out_dtype)
    if len(arrays) == 1:
        arrays = [arrays[0].astype(dtypes["dtype"])]
    try:
        return _mixed(partial(jnp.einsum, subscripts), arrays, dtypes)
    except (TypeError, ValueError) as e:
        shapes = ", ".join(str(x.shape) for x in arrays)
        raise ValueError(f"`{called()}`: {subscripts!r} does not fit shapes {shapes}. {e}") from e


def _mixed(fun: Callable, arrays: Sequence[Array], dtypes: dict[str, Any]) -> Array:
    """Evaluates a function of JAX with mixed products."""
    closed = traced(fun, *map(jax.typeof, arrays))
    products = lax.dot_general_p, mixed_dot_general_p
    [out] = replay(closed, arrays, *products, algorithm=None, **dtypes)
    return out.astype(dtypes["out_dtype"])

"""[`jax.numpy.matmul`][] as a mixed product, and [`jax.numpy.einsum`][] as a chain of mixed
products.
"""

from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from ._bilinear import as_operand, product_dtypes
from ._dot import dot_general_as_given
from ._dtypes import wide
from ._types import DTypeLike


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

    An array of shape `[..., n, m]` (without `n` or `m` where an operand has one axis) and of
    dtype `out_dtype`.

    **Raises:** `TypeError` for scalars, wrong dtypes or shapes that do not fit.
    """
    call = "mixed_matmul"
    x, y = as_operand(x, call), as_operand(y, call)
    if x.ndim == 0 or y.ndim == 0 or x.shape[-1] != y.shape[max(y.ndim - 2, 0)]:
        raise TypeError(
            f"`{call}` contracts the last axis of `x` with the last but one of `y` (or its "
            f"only one), but got shapes {x.shape} and {y.shape}."
        )
    dot = partial(dot_general_as_given, **product_dtypes((x, y), dtype, out_dtype, call))
    y_contract = max(y.ndim - 2, 0)
    if x.ndim <= 2 or y.ndim <= 2:
        out = dot(x, y, ((x.ndim - 1, y_contract), ((), ())))
        return jnp.moveaxis(out, 0, -2) if x.ndim == 2 < y.ndim else out
    try:
        lead = jnp.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    except ValueError:
        raise TypeError(
            f"`{call}` broadcasts the leading axes of its operands, but got shapes {x.shape} and "
            f"{y.shape}."
        ) from None
    x = jnp.broadcast_to(x, lead + x.shape[-2:])
    y = jnp.broadcast_to(y, lead + y.shape[-2:])
    batch = tuple(range(len(lead)))
    return dot(x, y, ((x.ndim - 1, y.ndim - 2), (batch, batch)))


def _einsum_pair(x, x_axes: str, y, y_axes: str, kept: str, dot) -> tuple[Array, str]:
    """Contracts two operands whose letters are distinct; letters outside `kept` are summed."""
    batch = [c for c in x_axes if c in y_axes and c in kept]
    contract = [c for c in x_axes if c in y_axes and c not in kept]
    places = lambda letters: [[axes.index(c) for c in letters] for axes in (x_axes, y_axes)]
    out = dot(x, y, (places(contract), places(batch)))
    return out, "".join([*batch, *(c for c in x_axes + y_axes if c not in batch + contract)])


def _einsum_reduce(x, axes: str, kept: str) -> tuple[Array, str]:
    """Takes diagonals of repeated letters and sums, in float32 or wider, letters outside
    `kept`."""
    target = "".join(dict.fromkeys(c for c in axes if c in kept))
    if target == axes:
        return x, axes
    out = jnp.einsum(f"{axes}->{target}", x.astype(wide(x.dtype)), precision=lax.Precision.HIGHEST)
    return out, target


def mixed_einsum(
    subscripts: str,
    *operands: Float[Array | np.ndarray, "..."],
    dtype: DTypeLike | None = None,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "..."]:
    """Evaluates [`jax.numpy.einsum`][] by [`mpx_pde.mixed_dot_general`][].

    Every pairwise product (in the order that `jax.numpy.einsum_path` picks) is one mixed product;
    sums over an index of a single operand are taken in float32 first.

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
    call = "mixed_einsum"
    if not isinstance(subscripts, str):
        raise TypeError(f"`{call}` takes its subscripts as a string first, but got {subscripts!r}.")
    arrays = [as_operand(x, call) for x in operands]
    dtypes = product_dtypes(arrays, dtype, out_dtype, call)
    try:
        _, found = jnp.einsum_path(subscripts, *arrays, optimize="auto")
    except ValueError as e:
        shapes = ", ".join(str(x.shape) for x in arrays)
        raise ValueError(f"`{call}`: {subscripts!r} does not fit shapes {shapes}. {e}") from e
    output = found.output_subscript
    terms = _without_broadcasts(arrays, found.input_subscripts.split(","))
    arrays, inputs = [x for x, _ in terms], [axes for _, axes in terms]
    path, _ = jnp.einsum_path(f"{','.join(inputs)}->{output}", *arrays, optimize="auto")
    dot = partial(dot_general_as_given, **dtypes)
    for pair in path:
        picked = [terms.pop(i) for i in sorted(pair, reverse=True)]
        kept = output + "".join(axes for _, axes in terms)
        while len(picked) > 1:
            (x, x_axes), (y, y_axes) = picked.pop(), picked.pop()
            rest = kept + "".join(axes for _, axes in picked)
            x, x_axes = _einsum_reduce(x, x_axes, rest + y_axes)
            y, y_axes = _einsum_reduce(y, y_axes, rest + x_axes)
            picked.append(_einsum_pair(x, x_axes, y, y_axes, rest, dot))
        terms.append(picked[0])
    [(out, axes)] = terms
    if len(arrays) == 1:
        out, axes = _einsum_reduce(out.astype(dtypes["dtype"]), axes, output)
    return jnp.transpose(out, [axes.index(c) for c in output]).astype(dtypes["out_dtype"])


def _without_broadcasts(arrays: list[Array], inputs: list[str]) -> list[tuple[Array, str]]:
    """Operands with their letters, without the axes of size 1 that broadcast against others."""
    sizes: dict[str, int] = {}
    for x, axes in zip(arrays, inputs, strict=True):
        for c, n in zip(axes, x.shape, strict=True):
            sizes[c] = n if sizes.get(c, 1) == 1 else sizes[c]
    out = []
    for x, axes in zip(arrays, inputs, strict=True):
        dropped = tuple(i for i, c in enumerate(axes) if x.shape[i] == 1 and sizes[c] != 1)
        letters = "".join(c for i, c in enumerate(axes) if i not in dropped)
        out.append((jnp.squeeze(x, dropped), letters))
    return out

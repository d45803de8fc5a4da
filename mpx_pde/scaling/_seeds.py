"""Evaluates derivatives with scaled seeds, and powers of two."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int32

from .._util._calls import called, public
from .._util._repr import in_a_line
from .._util._types import PyTree, ScalarLike
from ..precision._cast import is_inexact
from ..precision._dtypes import LARGEST_SCALE, SMALLEST_SCALE
from ..precision._tree import check_same_structure
from ._checks import exponent_of
from ._loss import multiply, scaled_leaf


def power_of_two(exponent: Int32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Returns 2^exponent exactly, for exponents from -126 to 126. `jnp.exp2` is not exact.

    The result is the inverse of the number that has the opposite exponent in its bits.
    `jnp.ldexp` takes 40 operations, and XLA for CPUs repeats cheap operations in every kernel that
    scales anything. It does not repeat a quotient.
    """
    return 1 / lax.bitcast_convert_type((127 - exponent) << 23, jnp.float32)


def _scale_and_inverse(scale: Any) -> tuple[Any, Any]:
    if isinstance(scale, jax.Array):
        if scale.shape != () or not jnp.issubdtype(scale.dtype, jnp.floating):
            raise TypeError(
                f"`{called()}` needs a power of two as `scale`, a number or a floating-point "
                f"scalar, but got dtype {scale.dtype.name} and shape {scale.shape}."
            )
        scale = scale.astype(jnp.float32)
        return scale, 1 / scale
    exponent = exponent_of(scale, "scale")
    if not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
        raise ValueError(
            f"`{called()}` needs a `scale` from 2^-126 to 2^126, which float32 can divide by, but "
            f"got {scale!r}."
        )
    if 2.0**exponent != scale:
        raise ValueError(
            f"`{called()}` needs a power of two as `scale`, since others round every derivative, "
            f"but got {scale!r}. Take {2.0**exponent}."
        )
    return np.float32(2.0**exponent), np.float32(2.0**-exponent)


def _check_tangents(primals: Any, tangents: Any) -> None:
    for name, x in (("primals", primals), ("tangents", tangents)):
        if not isinstance(x, tuple | list):
            raise TypeError(
                f"`{called()}` takes `{name}` as a tuple with an entry for each argument of the "
                f"function, such as `(x,)`, but got {in_a_line(x)}."
            )
    check_same_structure("`primals`", tuple(primals), "`tangents`", tuple(tangents))

    def check(path, x, t):
        if jnp.shape(x) != jnp.shape(t):
            raise ValueError(
                f"`{called()}`: the tangent at {jtu.keystr(path)} has shape {jnp.shape(t)}, but "
                f"the primal there has shape {jnp.shape(x)}. A tangent is a direction for its "
                "primal."
            )
        if is_inexact(t) and not is_inexact(x):
            raise TypeError(
                f"`{called()}` differentiates in floating-point numbers, but the primal at "
                f"{jtu.keystr(path)} has dtype {jnp.result_type(x).name}. Cast it to float32."
            )

    jtu.tree_map_with_path(check, tuple(primals), tuple(tangents))


@public
def scaled_jvp(
    fun: Callable[..., Any],
    primals: Sequence[PyTree],
    tangents: Sequence[PyTree],
    scale: ScalarLike,
    *,
    unscale: bool = True,
) -> tuple[PyTree, PyTree]:
    """Evaluates [`jax.jvp`][] with tangents that are scaled on the way in and unscaled on the way
    out.

    To nest it, keep the inner results scaled (`unscale=False`) and multiply the outermost ones by
    the inverse of all scales together, in float32. Unscaling in between would undo the scale before
    the next order needs it (*deferred unscaling*: Xue et al., appendix B).

    **Arguments:**

    - `fun`, `primals`, `tangents`: as for [`jax.jvp`][].
    - `scale`: a power of two, as a number or a floating-point scalar.
    - `unscale`: whether to unscale the tangents.

    **Returns:**

    `(out, tangent_out)`. The tangents are unscaled in float32 (float64 for float64), or, with
    `unscale=False`, still scaled and in the dtype of `out`.

    **Raises:** `ValueError` for a number that is not a power of two and for tangents that do not
    match the primals; `TypeError` for an array that is not a floating-point scalar, for primals or
    tangents that are not tuples or lists, and for integer primals with floating-point tangents.
    """
    scale, inverse = _scale_and_inverse(scale)
    _check_tangents(primals, tangents)
    tangents = jtu.tree_map(lambda t: multiply(t, scale), tuple(tangents))
    out, out_dot = jax.jvp(fun, tuple(primals), tangents)
    if unscale:
        out_dot = jtu.tree_map(lambda t: scaled_leaf(t, inverse), out_dot)
    return out, out_dot


@public
def scaled_vjp(
    fun: Callable[..., Any], *primals: PyTree, scale: ScalarLike, unscale: bool = True
) -> tuple[PyTree, Callable[..., Any]]:
    """Evaluates [`jax.vjp`][] with cotangents that are scaled on the way in and unscaled on the way
    out.

    **Arguments:**

    - `fun`, `primals`: as for [`jax.vjp`][].
    - `scale`: a power of two, as a number or a floating-point scalar.
    - `unscale`: whether to unscale the cotangents; see [`mpx_pde.scaled_jvp`][] on nesting.

    **Returns:**

    `(out, vjp)`, where `vjp(cotangent)` returns a tuple with the cotangent of each primal. They are
    unscaled in float32 (float64 for float64), or, with `unscale=False`, still scaled and in the
    dtype of the primal.

    **Raises:** as [`mpx_pde.scaled_jvp`][] for its `scale`.
    """
    scale, inverse = _scale_and_inverse(scale)
    out, pullback = jax.vjp(fun, *primals)

    def vjp(cotangent: PyTree) -> tuple:
        grads = pullback(jtu.tree_map(lambda t: multiply(t, scale), cotangent))
        if not unscale:
            return grads
        return jtu.tree_map(lambda t: scaled_leaf(t, inverse), grads)

    return out, vjp

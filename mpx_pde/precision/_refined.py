"""Computes values in full precision and gradients in half precision, by two evaluations."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._util._calls import named, public
from .._util._wrapper import AbstractWrapper, check_callable
from ._cast import cast_except, cast_operands, is_inexact, widen
from ._dtypes import as_half_dtype, asked_for_half, half_precision_datatype, highest_precision
from ._forward import without_halves


@public
def refined(fun: Callable, *, dtype: Any = None, keep_full: PyTree = False) -> Callable:
    """Gives a function the value of float32 and the derivative of half precision.

    Each floating-point output is `half + stop_gradient(full - half)`. `full` comes from the
    arguments as they are, with products at the highest precision, and keeps nothing in memory.
    `half` comes from arguments cast to half precision, and reverse mode differentiates it. The
    gradient of a residual of such values has an *error relative to itself*, which vanishes as the
    residual does. A residual of half-precision values has an error floor instead (iterative
    refinement: Wilkinson 1963; Carson & Higham 2018).

    This works for any function, at the cost of a second forward pass. Apply it to the parts of a
    residual, such as the network or its derivative terms, and never to the loss. A loss that is
    refined as a whole has the gradient of the half-precision residual inside.

    ```python
    @eqx.filter_value_and_grad
    def loss(model, points):
        terms = lambda model, p: mpx.partials(model, ["u_xx"], coords="xy", outputs="u")(p)
        d = jax.vmap(mpx.refined(terms, keep_full=(False, True)), (None, 0))(model, points)
        return jnp.mean((d["u_xx"] - 1) ** 2)
    ```

    **Arguments:**

    - `fun`: a function of the float32 model and of any other arguments.
    - `dtype`: float16 or bfloat16; by default [`mpx_pde.half_precision_datatype`][].
    - `keep_full`: the arguments that are not cast for the half-precision evaluation: a bool for
        everything, or a prefix of the positional arguments, as for [`mpx_pde.filter_grad`][].

    **Returns:**

    A function of the same arguments that returns what `fun` returns, with floating-point arrays in
    float32 (float64 where `fun` returns that). Derivatives in forward mode also come from the
    half-precision evaluation.

    **Raises:** `TypeError` if `fun` cannot be called, `ValueError` for a `dtype` that is not a half
    type or a `keep_full` that does not fit.
    """
    check_callable(fun)
    dtype = None if dtype is None else as_half_dtype(dtype)
    return eqx.module_update_wrapper(_Refined(fun, dtype, keep_full))


class _Refined(AbstractWrapper):
    fun: Any
    dtype: Any = eqx.field(static=True)
    keep_full: PyTree

    def __call__(self, /, *args, **kwargs):
        dtype = half_precision_datatype() if self.dtype is None else self.dtype

        def stop(x):
            return jax.lax.stop_gradient(x) if is_inexact(x) else x

        fixed, fixed_args, fixed_kwargs = jtu.tree_map(stop, (self.fun, args, kwargs))
        with highest_precision(), without_halves():
            full = fixed(*fixed_args, **fixed_kwargs)
        with named("refined"):
            args, kwargs = cast_except(self.keep_full, args, kwargs, dtype)
        with asked_for_half("cast", dtype):
            half = cast_operands(self.fun, dtype)(*args, **kwargs)
        return jtu.tree_map(_refine, full, half)


def _refine(full: Any, half: Any) -> Any:
    if not is_inexact(full) or not eqx.is_array(full):
        return full
    half = widen(half).astype(full.dtype)
    # `half + (full - half)` would round, and be a NaN where half overflows. Here the value is
    # bit-identical to `full`, whatever half is.
    return _value_of(widen(full), half)


@jax.custom_jvp
def _value_of(full: jax.Array, half: jax.Array) -> jax.Array:
    del half
    return full


@_value_of.defjvp
def _value_of_jvp(primals, tangents):
    full, half = primals
    return _value_of(full, half), tangents[1].astype(full.dtype)

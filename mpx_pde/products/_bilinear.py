"""Code that all products of halves share: operands, dtypes, and the rules of primitives that are
linear in each of two operands.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.jet import jet_rules
from jax.interpreters import ad, mlir, xla
from jaxtyping import Array

from .._util._calls import called
from .._util._in_jax import IN_JAX
from .._util._varying import match_varying_axes
from ..precision._dtypes import as_floating_dtype, full_precision_asked, wide


GPUS = ("cuda", "rocm")


class Origin(NamedTuple):
    """The origin of a product.

    **Attributes:**

    - `dtype`, `out_dtype`: whether its caller named them. [`mpx_pde.autocast`][] supplies others.
    - `apart`: whether it must not be merged with others that have the same weight.
    - `cotangent`: whether it is the cotangent of an operand.
    - `turned`: whether the axes of its right operand are read first.
    """

    dtype: bool = True
    out_dtype: bool = True
    apart: bool = False
    cotangent: bool = False
    turned: bool = False


def as_operand(x: Any) -> Array:
    out = jnp.asarray(x)
    if not jnp.issubdtype(out.dtype, jnp.floating):
        raise TypeError(
            f"`{called()}` multiplies real floating-point arrays, but got an operand of dtype "
            f"{out.dtype.name} and shape {out.shape}. Cast it to a floating-point dtype; split a "
            "complex array into its real and imaginary parts."
        )
    return out


def _narrowest(operands: Sequence[Array]) -> np.dtype:
    smallest = min(x.dtype.itemsize for x in operands)
    dtypes = {x.dtype for x in operands if x.dtype.itemsize == smallest}
    if len(dtypes) > 1:
        names = " and ".join(sorted(d.name for d in dtypes))
        raise ValueError(
            f"`{called()}` without a `dtype` multiplies in the narrowest dtype of its operands, "
            f"but got {names}. Pass `dtype`."
        )
    return dtypes.pop()


def product_dtypes(operands: Sequence[Array], dtype: Any, out_dtype: Any) -> dict[str, Any]:
    """Returns the parameters of a product: the dtype that it multiplies in, the dtype of its
    result, and whether its caller asked for each of them.
    """
    origin = Origin(dtype is not None or full_precision_asked(), out_dtype is not None)
    canonical = lambda d: jax.dtypes.canonicalize_dtype(as_floating_dtype(d))
    dtype = _narrowest(operands) if dtype is None else canonical(dtype)
    out_dtype = dtype if out_dtype is None else canonical(out_dtype)
    return {"dtype": dtype, "out_dtype": out_dtype, "origin": origin}


def result_dtype(dtype: np.dtype, out_dtype: np.dtype) -> np.dtype:
    # Products of halves accumulate in float32 on every backend, whatever the dtype of the result.
    # We ask for a half result directly, because cuBLAS does not fold a cast of a float32 result:
    # the cast would cost a float32 array and another kernel.
    return dtype if out_dtype == dtype else wide(dtype)


def rounded_product(
    product: Callable, x: Any, y: Any, dtype: np.dtype, out_dtype: np.dtype, on_cpu: bool
) -> Any:
    """Multiplies operands rounded to `dtype`, and rounds the result to `out_dtype`.

    jaxlib's CPU backend has kernels for some products of halves and fails on others, most of them
    in bfloat16. So on a CPU the rounded operands are widened. This is exact: the results are the
    same, and it takes no longer than those kernels.
    """
    result = wide(dtype) if on_cpu else result_dtype(dtype, out_dtype)
    x, y = (lax.convert_element_type(z, dtype) for z in (x, y))
    if on_cpu:
        x, y = (lax.convert_element_type(z, result) for z in (x, y))
    # A product of halves is exact in float32. A product of float32 operands is TF32 (GPU) or
    # bfloat16 (TPU) unless the highest precision is asked for.
    half = x.dtype.itemsize < 4
    precision = lax.Precision.DEFAULT if half else lax.Precision.HIGHEST
    out = product(x, y, precision=precision, preferred_element_type=result)
    return lax.convert_element_type(out, out_dtype)


def define_product(primitive, plain, evaluate: Callable, *transposes: Callable) -> None:
    """Defines a product, a primitive that is linear in each of its two operands.

    **Arguments:**

    - `plain`: JAX's own product, which determines the shape of the result, its sharding and its
        varying mesh axes.
    - `evaluate`: the product as a function of its operands and parameters, and of the `platform`
        that it runs on.
    - `transposes`: the transpose rules of the left and of the right operand.

    This also defines its derivatives in forward mode and in `jax.experimental.jet`.
    """

    def abstract_eval(x, y, *, dtype, out_dtype, origin, algorithm=None, **params):
        del origin, algorithm
        x, y = (z.update(dtype=dtype, weak_type=False) for z in (x, y))
        params |= {"precision": None, "preferred_element_type": result_dtype(dtype, out_dtype)}
        out, _ = plain.abstract_eval(x, y, **params)
        return out.update(dtype=out_dtype)

    def jvp(primals, tangents, **params):
        # A tangent may be the same on all devices of a `shard_map` where its primal is not.
        tangents = [
            t if isinstance(t, ad.Zero) else match_varying_axes(p, t)[1]
            for p, t in zip(primals, tangents, strict=True)
        ]
        return bilinear(primals, tangents, **params)

    IN_JAX[primitive] = partial(evaluate, platform=None)
    primitive.def_abstract_eval(abstract_eval)
    # Compiled once for each set of parameters and types, like JAX's own operations.
    primitive.def_impl(partial(xla.apply_primitive, primitive))
    for platform in (None, "cpu", *GPUS):
        lowering = mlir.lower_fun(partial(evaluate, platform=platform), multiple_results=False)
        mlir.register_lowering(primitive, lowering, platform=platform)
    ad.defbilinear(primitive, *transposes)
    bilinear = ad.primitive_jvps[primitive]
    ad.primitive_jvps[primitive] = jvp
    jet_rules[primitive] = partial(_cauchy_product, primitive)


def _cauchy_product(
    primitive: Any, primals: Sequence, series: Sequence, **params: Any
) -> tuple[Array, list[Array]]:
    """Returns the Taylor coefficients of a product from those of its factors, summed in float32.
    This is the rule for JAX's Taylor mode, `jax.experimental.jet`.
    """
    xs, ys = ([primal, *terms] for primal, terms in zip(primals, series, strict=True))
    out_dtype = params["out_dtype"]
    params = {**params, "out_dtype": wide(out_dtype)}

    def coefficient(k: int) -> Array:
        out = primitive.bind(xs[0], ys[k], **params)
        for i in range(1, k + 1):
            out += primitive.bind(xs[i], ys[k - i], **params)
        return out.astype(out_dtype)

    value, *rest = map(coefficient, range(len(xs)))
    return value, rest

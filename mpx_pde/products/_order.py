"""Controls the order of a backward pass, and the values that it writes to memory."""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, partial_eval
from jaxtyping import Array

from .._util._in_jax import IN_JAX
from .._util._primitives import keep_used, lower, present, with_batch_at
from .._util._varying import match_varying_axes
from ..precision._forward import in_full_forward


def gradients_in_turn(layer: Any, x: Any) -> tuple[Any, Any]:
    """Returns a layer and its input unchanged. In the backward pass, the cotangent of the input is
    passed to the previous layer only after the gradient of this layer has been computed.

    Otherwise XLA, when it compiles for several GPUs, delays the weight gradients of all layers to
    the end, and activations and cotangents stay in memory until then. A data-parallel step of a
    Fourier neural operator then takes 1.6 times the memory of a step on one H100, and 1.1 times
    with this function. Sums over devices begin earlier too, layer by layer.

    Operands that are not differentiated get no cotangent. `jax.lax.optimization_barrier` by itself
    would compute one for each operand: for the points of a first layer, that is one more product.
    """
    if in_full_forward():
        return layer, x
    leaves, structure = jax.tree.flatten((layer, x))
    return jax.tree.unflatten(structure, _in_turn_p.bind(*leaves))


_in_turn_p = Primitive("in_turn")
_in_turn_p.multiple_results = True
_shared_p = Primitive("shared")
_shared_p.multiple_results = True
_rounded_p = Primitive("rounded_cotangent")
_written_p = Primitive("written")
_written_in_p = Primitive("written_in")
_add_product_p = Primitive("add_product")
_behind_p = Primitive("batch_behind")
_summed_apart_p = Primitive("summed_apart")
_forward_only_p = Primitive("forward_only")


def rounded_cotangent(x: Array, dtype: Any) -> Array:
    """Returns `x` unchanged. Its cotangent is rounded to `dtype`, and written to memory in that
    dtype.

    Use it on the sum of a product and a bias. The product takes its cotangent in half precision
    anyway. Without this function the bias takes it in float32, and XLA, which removes a cast to
    half and back, would write a float32 array for both. With it, the gradient of the bias is the
    float32 sum of the same rounded values that enter the gradient of the weights.
    """
    return _rounded_p.bind(x, dtype=jnp.dtype(dtype))


def shared(x: Any, count: int) -> list[Any]:
    """Returns `count` references to `x`, an array or a constant: one for each product with it.

    Its cotangents are added in an order in which a GPU accumulates each product onto the sum of the
    previous ones. In JAX's own order, XLA would run a separate kernel for every other one.
    """
    return _shared_p.bind(x, count=count) if count > 1 else [x]


def forward_only(x: Array, why: str) -> Array:
    """Returns `x` unchanged. Reverse mode through it raises a `ValueError` that says `why`."""
    return _forward_only_p.bind(x, why=why)


def written_in(x: Array, dtype: Any) -> Array:
    """Returns a float32 `x` rounded to `dtype` and back, and writes it to memory in `dtype`. On a
    CPU, which would widen the rounded array again, it returns `x` itself.
    """
    return _written_in_p.bind(x, dtype=jnp.dtype(dtype))


def add_product(x: Array, product: Array) -> Array:
    """Adds a product in half precision to a float32 array that is `written_in` that precision. The
    sum has the dtype of the product.

    On a GPU the product is accumulated onto the array in memory, in float32. Elsewhere the product
    is widened and added in float32.
    """
    return _add_product_p.bind(*match_varying_axes(x, product))


def summed_apart(x: Array, like: Array) -> Array:
    """Returns `x`, repeated along the axis of each `vmap` that maps `like` but not `x`. Its
    cotangent is written to memory before it is summed over these axes.

    Use it for a weight that meets each point of a batch. Otherwise XLA for GPUs fuses this sum over
    rows with everything else that the backward pass computes. On an H200 that kernel took eight
    times as long as its memory traffic, because its threads follow the columns.
    """
    if 0 in like.shape:
        return x
    one = jnp.ravel(lax.stop_gradient(like))[0]  # only this is kept for the backward pass
    return _summed_apart_p.bind(*match_varying_axes(x, one))


def batch_behind(x: Array, axis: int = 0) -> Array:
    """Returns `x` unchanged, but moves the axis of a `vmap` behind `axis`, the axis of the
    channels.

    JAX leaves the axis of a `vmap` where the previous operation put it, or moves it to the front
    (`jax.checkpoint`). If the next operation needs channels first, another order costs a copy of
    the field.
    """
    return _behind_p.bind(x, axis=axis)


def _transpose_shared(cotangents, x, *, count):
    del count
    nonzero = [c for c in cotangents if not isinstance(c, ad.Zero)]
    # XLA accumulates the product that comes first in a sum.
    return [ft.reduce(lambda total, c: c + total, nonzero[::-1]) if nonzero else ad.Zero(x.aval)]


def _barrier(*xs):
    return lax.optimization_barrier(xs)


def _moving_in_turn(xs):
    """Puts all tangents or cotangents that are not symbolic zeros into one barrier."""
    return present(_in_turn_p.bind, xs, lambda i: xs[i])


def _rounded(cotangent, *, dtype):
    half = _written_p.bind(lax.convert_element_type(cotangent, dtype))
    return lax.convert_element_type(half, cotangent.dtype)


def _batch_behind(args, dims, *, axis):
    return _behind_p.bind(jnp.moveaxis(args[0], dims[0], axis + 1), axis=axis), axis + 1


def _half_and_back(x, *, dtype):
    half = lax.optimization_barrier(lax.convert_element_type(x, dtype))
    return lax.convert_element_type(half, x.dtype)


def _transpose_add_product(cotangent, x, product):
    del product
    return [lax.convert_element_type(cotangent, x.aval.dtype), cotangent]


def _add_where_it_stands(x, product):
    return lax.convert_element_type(x, product.dtype) + product


def _add_widened(x, product):
    return lax.convert_element_type(x + lax.convert_element_type(product, x.dtype), product.dtype)


def _batch_add_product(args, dims):
    dim = dims[1] if dims[0] is None else dims[0]
    return _add_product_p.bind(*with_batch_at(dim, args, dims)), dim


def _transpose_summed_apart(cotangent, x, like):
    del x, like
    return [cotangent if isinstance(cotangent, ad.Zero) else _written_p.bind(cotangent), None]


def _refuse(_, *, why):
    raise ValueError(why)


def _identity(x, *_, **__):
    return x


def _define_identity(
    primitive: Primitive, of_cotangent: Callable, lowered: Callable = _identity, **on: Callable
) -> None:
    """Defines a primitive that returns its operand, and whose transpose applies `of_cotangent`. The
    other arguments are passed to [`lower`][].
    """

    def batch(args, dims, **params):
        return primitive.bind(*args, **params), dims[0]

    IN_JAX[primitive] = _identity
    primitive.def_impl(_identity)
    primitive.def_abstract_eval(_identity)
    ad.deflinear2(primitive, lambda cotangent, _, **params: [of_cotangent(cotangent, **params)])
    batching.primitive_batchers[primitive] = batch
    lower(primitive, lowered, **on)


def _repeated(x, *, count):
    return [x] * count


_shared_p.def_impl(_repeated)
_shared_p.def_abstract_eval(_repeated)
ad.deflinear2(_shared_p, _transpose_shared)
batching.primitive_batchers[_shared_p] = lambda args, dims, *, count: (
    _shared_p.bind(*args, count=count),
    dims * count,
)


IN_JAX[_in_turn_p] = lambda *xs: list(xs)
_in_turn_p.def_impl(jax.jit(_barrier))
_in_turn_p.def_abstract_eval(lambda *xs: list(xs))
ad.primitive_jvps[_in_turn_p] = lambda xs, tangents: (
    _in_turn_p.bind(*xs),
    _moving_in_turn(tangents),
)
ad.primitive_transposes[_in_turn_p] = lambda cotangents, *_: _moving_in_turn(cotangents)
partial_eval.dce_rules[_in_turn_p] = keep_used
batching.primitive_batchers[_in_turn_p] = lambda args, dims: (_in_turn_p.bind(*args), dims)
# A CPU widens rounded arrays anyway, and gains nothing by writing them.
_define_identity(_written_p, _written_p.bind, lax.optimization_barrier, cpu=_identity)
_define_identity(_written_in_p, _identity, _half_and_back, cpu=_identity)
_define_identity(_rounded_p, _rounded)
_define_identity(_behind_p, _behind_p.bind)
_define_identity(_forward_only_p, _refuse)
batching.primitive_batchers[_behind_p] = _batch_behind
_summed_apart_p.def_impl(_identity)
_summed_apart_p.def_abstract_eval(_identity)
ad.defjvp(_summed_apart_p, lambda tangent, x, like: _summed_apart_p.bind(tangent, like), None)
ad.primitive_transposes[_summed_apart_p] = _transpose_summed_apart
batching.primitive_batchers[_summed_apart_p] = lambda args, dims: (
    _summed_apart_p.bind(*with_batch_at(0, args, dims)),
    0,
)
_add_product_p.def_impl(jax.jit(_add_widened))
_add_product_p.def_abstract_eval(lambda x, product: product)
ad.deflinear2(_add_product_p, _transpose_add_product)
batching.primitive_batchers[_add_product_p] = _batch_add_product


lower(_shared_p, _repeated)
lower(_summed_apart_p, _identity)
lower(_in_turn_p, _barrier)
lower(_add_product_p, _add_widened, cuda=_add_where_it_stands, rocm=_add_where_it_stands)

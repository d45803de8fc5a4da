"""Sums all streams of a value in one pass over memory, and broadcasts the sums again.

A norm, a softmax or a mean sums every stream of a value over the same axes, and combines the sums
with every stream again. XLA for GPUs compiles one operation per stream to one kernel per stream,
and each kernel reads the arrays that the streams share. A sum of all streams together is one
kernel. Its derivative is one too, because the cotangents of a broadcast are summed together.
"""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.extend.core.primitives import broadcast_in_dim_p, concatenate_p, reduce_sum_p
from jax.interpreters import ad, batching, partial_eval
from jaxtyping import Array

from ..._util._primitives import keep_used, lower, present, repeated, with_batch_at
from ..._util._varying import match_varying_axes


def sum_together(arrays: Sequence[Any], axes: Sequence[int]) -> list[Array]:
    """Returns the sums of arrays over the same axes. Arrays may have more axes in front if these
    axes are negative. Arrays of different shapes or dtypes are summed in separate passes."""

    def add(_, group):
        of_all = tuple(i % group[0].ndim for i in axes)
        return _sum_p.bind(*match_varying_axes(*group), axes=of_all)

    return _grouped(add, list(map(jnp.asarray, arrays)))


def spread_together(arrays: Sequence[Any], shape: Sequence[Any], dims: Sequence[int]) -> list[Any]:
    """Broadcasts arrays to a shape, with their last axes as its axes `dims`, as in
    `lax.broadcast_in_dim`. Other axes stay in front. NumPy arrays stay NumPy arrays."""

    def spread(_, group):
        more = np.ndim(group[0]) - len(dims)
        full = *np.shape(group[0])[:more], *shape
        at = *range(more), *(i + more for i in dims)
        if isinstance(group[0], np.ndarray):
            inner = [i for i in range(len(full)) if i not in at]
            return [np.broadcast_to(np.expand_dims(x, inner), full) for x in group]
        group = match_varying_axes(*map(jnp.asarray, group))
        return _spread_p.bind(*group, shape=full, at=at)

    return _grouped(spread, arrays)


def broadcast_like(
    arrays: Sequence[Any], like: Any, *, leading: bool = False, summed: bool = True
) -> list[Array]:
    """Broadcasts arrays to the shape of `like`, for use with several streams. The cotangents of an
    array are added before they are summed over the axes that it was broadcast over, including
    points. Arrays that were broadcast over the same axes are summed in one pass. Without `summed`
    this is a plain broadcast.

    The axes of an array are the last ones of `like`, and a `vmap` adds one in front. If `leading`,
    they are the first ones, such as the channels of a field, and a `vmap` adds one after them."""
    if not summed:
        return _broadcast_like(*arrays, like, leading=leading)
    return _broadcast_like_p.bind(*match_varying_axes(*arrays, like), leading=leading)


def joined(arrays: Sequence[Any], dimension: int) -> Array:
    """Concatenates arrays along an axis, as `lax.concatenate` does."""
    return _joined_p.bind(*match_varying_axes(*arrays), dimension=dimension)


def _grouped(
    function: Callable[[Any, list], list], arrays: Sequence[Any], kinds: Sequence[Any] | None = None
) -> list[Any]:
    """Applies a function to all arrays of one kind (by default, one type) together."""
    if kinds is None:
        kinds = [(isinstance(x, np.ndarray), jnp.shape(x), jnp.result_type(x)) for x in arrays]
    groups: dict[Any, list[int]] = {}
    for i, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(i)
    out: list[Any] = [None] * len(arrays)
    for kind, places in groups.items():
        found = function(kind, [arrays[i] for i in places])
        for i, x in zip(places, found, strict=True):
            out[i] = x
    return out


_sum_p = Primitive("sum_together")
_spread_p = Primitive("spread_together")
_broadcast_like_p = Primitive("broadcast_like")
_joined_p = Primitive("joined")


def _sums(*arrays, axes):
    return [lax.reduce_sum(x, axes) for x in arrays]


def _sums_in_one(*arrays, axes):
    real = jnp.issubdtype(arrays[0].dtype, jnp.floating)
    # XLA fuses sums over the first axes with other operations that read the same arrays.
    if len(arrays) == 1 or not real or arrays[0].ndim - 1 not in axes:
        return _sums(*arrays, axes=axes)
    zeros = [np.zeros((), x.dtype) for x in arrays]
    add = lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True))
    return list(lax.reduce(arrays, tuple(zeros), add, axes))


def _spreads(*arrays, shape, at):
    return [lax.broadcast_in_dim(x, shape, at) for x in arrays]


def _abstract_each(primitive, avals, **params):
    """Returns the abstract results of a JAX primitive for each array, with their shardings."""
    return [primitive.abstract_eval(x.update(weak_type=False), **params)[0] for x in avals]


def _abstract_sums(*avals, axes):
    return _abstract_each(reduce_sum_p, avals, axes=axes, out_sharding=None)


def _abstract_spreads(*avals, shape, at):
    of = {"shape": shape, "broadcast_dimensions": at, "sharding": None}
    return _abstract_each(broadcast_in_dim_p, avals, **of)


def _broadcast_like(*args, leading):
    *arrays, like = args
    return [lax.broadcast_in_dim(x, like.shape, _axes_in(like, x, leading)) for x in arrays]


def _abstract_broadcast_like(*args, **_):
    *arrays, like = args
    return [like.update(dtype=x.dtype, weak_type=False) for x in arrays]


def _axes_in(like, x, leading: bool) -> range:
    first = 0 if leading else like.ndim - x.ndim
    return range(first, first + x.ndim)


def _jvp(primitive, primals, tangents, **params):
    out = primitive.bind(*primals, **params)
    bind = lambda *found: primitive.bind(*found, *primals[len(out) :], **params)
    zero = lambda i: ad.Zero(jax.typeof(out[i]).to_tangent_aval())
    return out, present(bind, tangents[: len(out)], zero)


def _transpose_sums(cotangents, *arrays, axes):
    shape = arrays[0].aval.shape
    dims = tuple(i for i in range(len(shape)) if i not in axes)
    bind = ft.partial(_spread_p.bind, shape=shape, at=dims)
    return present(bind, cotangents, lambda i: ad.Zero(arrays[i].aval))


def _transpose_spreads(cotangents, *arrays, shape, at):
    return _unspread(cotangents, arrays, shape, [at] * len(arrays))


def _transpose_broadcast_like(cotangents, *args, leading):
    *arrays, like = args
    places = [_axes_in(like, x.aval, leading) for x in arrays]
    return [*_unspread(cotangents, arrays, like.shape, places), None]


def _unspread(cotangents, arrays, shape, places) -> list[Any]:
    """Returns the cotangents of arrays that were broadcast to a shape, where their axes are at
    `places`. Arrays that were broadcast over the same axes are summed in one pass."""

    def over(x, at, cotangent):
        if isinstance(cotangent, ad.Zero):
            return ()
        whole = [k for k, n in zip(at, x.aval.shape, strict=True) if n == shape[k]]
        return tuple(k for k in range(len(shape)) if k not in whole)

    def shaped(x, found):
        return ad.Zero(x.aval) if isinstance(found, ad.Zero) else lax.reshape(found, x.aval.shape)

    add = lambda axes, group: sum_together(group, axes) if axes else group
    sums = _grouped(add, cotangents, list(map(over, arrays, places, cotangents)))
    return list(map(shaped, arrays, sums))


def _batch_each(primitive: Primitive, args, where, **params):
    """Binds arrays with a `vmap` axis, moved to the front, together, and those without one."""

    def bind(batched, group):
        if not batched:
            return primitive.bind(*group, **params)
        behind = lambda axes: tuple(i + 1 for i in axes)
        if "axes" in params:
            return primitive.bind(*group, **{**params, "axes": behind(params["axes"])})
        shape, at = (group[0].shape[0], *params["shape"]), (0, *behind(params["at"]))
        return primitive.bind(*group, shape=shape, at=at)

    moved = [jnp.moveaxis(x, d, 0) if d else x for x, d in zip(args, where, strict=True)]
    out = _grouped(bind, moved, [d is not None for d in where])
    return out, [None if d is None else 0 for d in where]


def _batch_broadcast_like(primitive: Primitive, args, where, *, leading):
    *arrays, like = args
    batched, dim = next((z, d) for z, d in zip(args, where, strict=True) if d is not None)
    size, axis = batched.shape[dim], int(leading)
    if where[-1] is None:
        # An array that all samples share does not tell how many there are.
        like = repeated(like, axis, batched, dim)
    else:
        like = jnp.moveaxis(like, where[-1], axis)

    def placed(x, d):
        if d is None:
            # The axis of an inner `vmap` stays behind the axis of this one.
            return jnp.expand_dims(x, axis) if leading and x.ndim > 1 else x
        x = jnp.moveaxis(x, d, axis)
        return x if leading else lax.reshape(x, (size, *(1,) * (like.ndim - x.ndim), *x.shape[1:]))

    arrays = [placed(x, d) for x, d in zip(arrays, where[:-1], strict=True)]
    return primitive.bind(*arrays, like, leading=leading), [axis] * len(arrays)


def _concatenated(*arrays, dimension):
    return lax.concatenate(arrays, dimension)


def _padded_sum(*arrays, dimension):
    """Concatenates by a sum. XLA for GPUs computes such sums of all streams in one kernel."""
    ends = np.cumsum([x.shape[dimension] for x in arrays])
    parts = []
    for x, end in zip(arrays, ends, strict=True):
        around = [(0, 0, 0)] * x.ndim
        around[dimension] = (int(end) - x.shape[dimension], int(ends[-1] - end), 0)
        parts.append(lax.pad(x, np.zeros((), x.dtype), around))
    return ft.reduce(lax.add, parts)


def _batch_joined(args, where, *, dimension):
    return joined(with_batch_at(0, args, where), dimension + 1), 0


_joined_p.def_impl(_concatenated)
_joined_p.def_abstract_eval(lambda *xs, **params: concatenate_p.abstract_eval(*xs, **params)[0])
ad.deflinear2(_joined_p, ad.primitive_transposes[concatenate_p])
batching.primitive_batchers[_joined_p] = _batch_joined
for _primitive, _function, _abstract, _batch in (
    (_sum_p, _sums, _abstract_sums, _batch_each),
    (_spread_p, _spreads, _abstract_spreads, _batch_each),
    (_broadcast_like_p, _broadcast_like, _abstract_broadcast_like, _batch_broadcast_like),
):
    _primitive.multiple_results = True
    _primitive.def_impl(_function)
    _primitive.def_abstract_eval(_abstract)
    partial_eval.dce_rules[_primitive] = keep_used
    batching.primitive_batchers[_primitive] = ft.partial(_batch, _primitive)
for _primitive, _transpose in (
    (_sum_p, _transpose_sums),
    (_spread_p, _transpose_spreads),
    (_broadcast_like_p, _transpose_broadcast_like),
):
    ad.primitive_jvps[_primitive] = ft.partial(_jvp, _primitive)
    ad.primitive_transposes[_primitive] = _transpose
lower(_spread_p, _spreads)
lower(_broadcast_like_p, _broadcast_like)
# On other platforms, one sum of several arrays is slower than one sum for each.
lower(_sum_p, _sums, cuda=_sums_in_one, rocm=_sums_in_one)
lower(_joined_p, _concatenated, cuda=_padded_sum, rocm=_padded_sum)

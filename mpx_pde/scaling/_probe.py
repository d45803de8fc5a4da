"""A histogram of values in the forward pass, reported as the gradient of a probe.

A derivative that overflows is found in the middle of the loss, where nothing can leak out of
`vmap`, `scan` or `shard_map`. So the histogram travels with the gradients. `tap(probe, values)`
returns `values` unchanged. Its derivative in the direction of the probe is a linear function whose
value is zero and whose transpose is a histogram. Reverse mode then sums the counts over batches,
loop iterations and devices as it sums every gradient, and forward mode sees nothing.

Both functions are primitives, because a `custom_vjp` would forbid forward mode through the loss.
"""

import functools as ft

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching
from jaxtyping import Array, Float, Float32

from .._util._primitives import lower, with_batch_at
from .._util._varying import match_varying_axes


LOWEST, HIGHEST = -32, 31
"""The exponents that have a bucket of their own. Values beyond are counted in the nearest one."""

COLUMNS = HIGHEST - LOWEST + 3
"""One column for zeros, one for each bucket of exponents, and one for non-finite values."""


def histogram(values: Float[Array, "..."], batch_dims: int = 0) -> Float32[Array, "... columns"]:
    """Counts zeros, values of each exponent (`floor(log2(abs(x)))`) and non-finite values.

    The first `batch_dims` axes are kept.
    """
    x = lax.stop_gradient(values).astype(jnp.float32)
    # Reads the bits of a float32, in a quarter of the operations of `jnp.frexp`.
    exponent = ((lax.bitcast_convert_type(x, jnp.int32) >> 23) & 0xFF) - 127
    column = jnp.clip(exponent, LOWEST, HIGHEST) - LOWEST + 1
    column = jnp.where(x == 0, 0, jnp.where(exponent < 128, column, COLUMNS - 1))
    columns = lax.broadcasted_iota(column.dtype, (1,) * x.ndim + (COLUMNS,), x.ndim)
    hits = lax.expand_dims(column, (x.ndim,)) == columns
    # Counts in float32 are exact up to 2^24 in a bucket, and rounded beyond.
    return jnp.sum(hits.astype(jnp.float32), axis=tuple(range(batch_dims, x.ndim)))


tap_p = Primitive("derivative_tap")
count_p = Primitive("derivative_count")


def _tap(probe, values, seen, *, batch_dims):
    return values


def _count(probe, seen, *, batch_dims):
    return jnp.zeros_like(seen)


def _abstract_eval(probe, values, *_, batch_dims):
    return values.update(weak_type=False)


def _batch(primitive, args, dims, *, batch_dims):
    if dims[0] is None:
        # One probe for a whole batch: its values are all counted together.
        arrays = with_batch_at(batch_dims, args[1:], dims[1:])
        return primitive.bind(args[0], *arrays, batch_dims=batch_dims), batch_dims
    return primitive.bind(*with_batch_at(0, args, dims), batch_dims=batch_dims + 1), 0


def _tap_jvp(primals, tangents, *, batch_dims):
    out = tap_p.bind(*primals, batch_dims=batch_dims)
    probe_dot, values_dot, _ = tangents
    if isinstance(probe_dot, ad.Zero):
        return out, values_dot
    counted = count_p.bind(probe_dot, primals[2], batch_dims=batch_dims)
    return out, ad.add_tangents(values_dot, counted)


def _count_jvp(primals, tangents, *, batch_dims):
    probe_dot = ad.instantiate_zeros(tangents[0])  # the result is zero for any probe
    out = count_p.bind(*primals, batch_dims=batch_dims)
    return out, count_p.bind(probe_dot, primals[1], batch_dims=batch_dims)


def _count_transpose(cotangent, probe, seen, *, batch_dims):
    del cotangent  # it only triggers this rule: counts are not scaled
    assert ad.is_undefined_primal(probe)
    assert not ad.is_undefined_primal(seen)
    return histogram(seen, batch_dims), None


for _primitive, _function in ((tap_p, _tap), (count_p, _count)):
    _primitive.def_impl(jax.jit(_function, static_argnames="batch_dims"))
    _primitive.def_abstract_eval(_abstract_eval)
    lower(_primitive, _function)
    batching.primitive_batchers[_primitive] = ft.partial(_batch, _primitive)
ad.primitive_jvps[tap_p] = _tap_jvp
ad.primitive_jvps[count_p] = _count_jvp
ad.primitive_transposes[count_p] = _count_transpose


def tap(
    probe: Float32[Array, "*rows columns"], values: Float[Array, "..."], seen: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Returns `values`, bit-identical. The cotangent of `probe` is the histogram of `seen`, with
    one row of counts for each row of `probe`.
    """
    # Inside `shard_map`, the mark on the probe makes JAX sum the counts over the devices.
    seen = lax.stop_gradient(seen)
    probe, values, seen = match_varying_axes(probe, values, seen)
    return tap_p.bind(probe, values, seen, batch_dims=probe.ndim - 1)

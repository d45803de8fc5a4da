"""Sums and gathers over devices, each in the precision that it needs."""

import functools as ft
import math
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32

from .._util._calls import called, public
from .._util._repr import in_a_line
from .._util._types import AxisName, DTypeLike, PyTree
from .._util._varying import size_of_axis, varying_axes
from ..precision._cast import map_operands, widen
from ..precision._dtypes import as_half_dtype


@ft.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _gather(
    x: Float[Array, "..."], dtype: np.dtype | None, sharding: NamedSharding
) -> Float[Array, "..."]:
    sent = x if dtype is None else x.astype(dtype)
    if _is_explicit(sharding):
        return jax.sharding.reshard(sent, sharding).astype(x.dtype)
    # Without this the compiler applies `sharding` to the operand of the cast, and gathers that.
    where_it_lies = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * x.ndim)
    sent = lax.with_sharding_constraint(sent, NamedSharding(sharding.mesh, where_it_lies))
    return lax.with_sharding_constraint(sent, sharding).astype(x.dtype)


@_gather.defjvp
def _gather_jvp(dtype, sharding, primals, tangents):
    # The derivative is the identity: a cotangent is neither rounded nor copied to all devices, but
    # goes from the sum over devices straight to the device that holds its parameter.
    (tangent,) = tangents
    if _is_explicit(sharding):
        tangent = jax.sharding.reshard(tangent, sharding)  # the layout is a part of the type
    return _gather(*primals, dtype, sharding), tangent


def _is_explicit(sharding: NamedSharding) -> bool:
    return AxisType.Explicit in sharding.mesh.axis_types


def _parts(x: Array) -> tuple[Array, ...]:
    """Returns `x`, or the real and the imaginary part of a complex `x`. No half type is complex."""
    return (jnp.real(x), jnp.imag(x)) if jnp.iscomplexobj(x) else (x,)


def _by_parts(fn: Callable, x: Array) -> Array:
    """Applies `fn` to each of the `_parts` of `x`, and joins the results."""
    real, *imaginary = map(fn, _parts(x))
    return lax.complex(real, *imaginary).astype(x.dtype) if imaginary else real


@public
def gather_parameters(
    tree: PyTree, sharding: NamedSharding, *, dtype: DTypeLike | None = None
) -> PyTree:
    """Gathers parameters that are split over devices, in half precision. For use under `jax.jit`.

    Call it first in the loss of a fully sharded model. Every parameter is then sent once per step.
    It is rounded *before* it is sent, which halves the bytes; products that round it again get
    bit-identical values. Gradients pass unchanged: they are summed in the dtype in which the
    backward pass computes them, and each device keeps only its own part. That dtype is float32 for
    masters that go through [`mpx_pde.mixed_dot_general`][].

    Without it the compiler decides by itself what to move, and may gather a parameter once for
    every product, or move the activations.

    **Arguments:**

    - `tree`: the model, float32 masters.
    - `sharding`: the layout of the parameters while they are used. Usually every device holds all
        of them: `NamedSharding(mesh, PartitionSpec())`.
    - `dtype`: the dtype in which arrays with two or more axes are sent, float16 or bfloat16.
        Vectors (biases, the scales of a norm) and arrays inside a [`mpx_pde.FullPrecision`][] are
        sent in their own dtype. With `None` all arrays are.

    **Returns:**

    A PyTree of the same structure, shapes and dtypes.

    **Raises:** `ValueError` for a `dtype` that is not a half type and for a mesh with both explicit
    and Auto axes, `TypeError` for a `sharding` that is not one.

    ```python
    def loss(model, batch):
        model = mpx.gather_parameters(model, NamedSharding(mesh, P()), dtype="float16")
        return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)
    ```
    """
    if not isinstance(sharding, NamedSharding):
        raise TypeError(
            f"`{called()}` needs a `jax.sharding.NamedSharding` as `sharding`, but got "
            f"{in_a_line(sharding)}."
        )
    if _is_explicit(sharding) and len(set(sharding.mesh.axis_types)) > 1:
        raise ValueError(
            f"`{called()}` needs a mesh whose axes are all explicit or all Auto, but got "
            f"{sharding.mesh}. Make it by `jax.make_mesh(..., axis_types=...)` with one type."
        )
    sent = None if dtype is None else as_half_dtype(dtype)

    def gathered(x, dtype, axes):
        if not eqx.is_inexact_array(x) or x.ndim < axes:
            return x
        return _by_parts(lambda part: _gather(part, dtype, sharding), x)

    tree = map_operands(lambda x: gathered(x, sent, 2), tree)
    return jtu.tree_map(lambda x: gathered(x, None, 0), tree)


def _exponent(x: Float[Array, "..."]) -> Int32[Array, ""]:
    """Returns the least `e` such that all finite entries are below 2^e."""
    largest = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0), initial=0)
    # Zeros on one device must not hide small values on another.
    return jnp.where(largest > 0, jnp.frexp(largest)[1], -10_000).astype(jnp.int32)


def _half_means(
    leaves: Sequence[Array], axis_name: AxisName | None, devices: int, dtype: np.dtype
) -> list[Array]:
    """Returns the mean of each array over devices, sent in half precision."""
    if not leaves:
        return []
    exponents = [_exponent(part) for x in leaves for part in _parts(x)]
    exponents = iter(lax.pmax(jnp.stack(exponents), axis_name))
    # Each entry is below 2^exponent, so the sum is below 2^(exponent + log2 devices).
    top = int(jnp.finfo(dtype).maxexp) - 1 - math.ceil(math.log2(devices))

    def mean(x):
        least = int(jnp.finfo(x.dtype).minexp)
        # The inverse scale, divided by the number of devices, must not be flushed to zero.
        shift = jnp.clip(top - next(exponents), least, -least - 16)
        scale = jnp.ldexp(jnp.ones((), x.dtype), shift)
        total = lax.psum((x * scale).astype(dtype), axis_name)
        return total.astype(x.dtype) / devices / scale

    return [_by_parts(mean, x) for x in leaves]


def _check_own(tree: PyTree, axis_name: AxisName | None) -> None:
    """Raises a `ValueError` for arrays that are the same on all devices, because JAX has summed
    them already: their mean would be that sum.
    """
    # Without marks (`check_vma=False`, `pmap`) we cannot tell, and JAX has summed nothing.
    names = varying_axes(lax.axis_index(axis_name))
    for path, x in jtu.tree_leaves_with_path(tree):
        same = sorted(names - varying_axes(x))
        if same:
            raise ValueError(
                f"`{called()}` takes the mean of arrays that differ between devices, but the array "
                f"at {jtu.keystr(path) or 'the root'} is the same on all of them along {same}. "
                "`jax.shard_map` sums the gradients of such parameters by itself. Mark the "
                f"parameters by `jax.lax.pcast(params, {axis_name!r}, to='varying')` before they "
                "are differentiated, or divide what has been summed by the number of devices."
            )


@public
def all_reduce_mean(tree: PyTree, axis_name: AxisName, *, dtype: DTypeLike | None = None) -> PyTree:
    """Takes the mean of gradients over devices, inside `jax.shard_map` or `jax.pmap`.

    By default sums are taken in float32. A half type halves the bytes that are sent, and no sum
    can overflow: each array is multiplied by a power of two such that the largest entry on any
    device, times the number of devices, stays within range, and is divided by it in float32
    afterwards. This costs one more small collective, for the exponents of the largest entries of
    all arrays. It also rounds the sums, by about log2 of the number of devices in unit roundoffs.
    The real and the imaginary part of a complex array are sent as two arrays.

    **Arguments:**

    - `tree`: a PyTree of arrays that differ between devices. Inside `jax.shard_map` the gradients
        of parameters that are the same on all devices do not differ, because JAX has summed them
        already. Mark the parameters as each device's own by `jax.lax.pcast` first.
    - `axis_name`: the mesh axis or axes.
    - `dtype`: the dtype to send: `None` for float32, or float16 or bfloat16.

    **Returns:**

    A PyTree of the same structure, shapes and dtypes, the same on all devices. Non-finite entries
    stay non-finite.

    **Raises:** `ValueError` for a `dtype` that is not a half type, for arrays that JAX knows to be
    the same on all devices, and for a call outside of such an axis; `TypeError` for an `axis_name`
    that is not a name.

    ```python
    params = jax.lax.pcast(params, "devices", to="varying")
    scaling, finite, grads = mpx.filter_grad(loss, scaling, axis_name="devices")(params, batch)
    grads = mpx.all_reduce_mean(grads, "devices", dtype="bfloat16")
    ```
    """
    devices = size_of_axis(axis_name)
    arrays, rest = eqx.partition(tree, eqx.is_inexact_array)
    _check_own(arrays, axis_name)
    leaves, structure = jtu.tree_flatten(arrays)
    wide = widen(leaves)
    if dtype is None:
        means = [lax.psum(x, axis_name) / devices for x in wide]
    else:
        means = _half_means(wide, axis_name, devices, as_half_dtype(dtype))
    means = [m.astype(x.dtype) for m, x in zip(means, leaves, strict=True)]
    return eqx.combine(jtu.tree_unflatten(structure, means), rest)

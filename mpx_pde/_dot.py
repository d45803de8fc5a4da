"""The half-precision product that everything else is built on.

Plain casts around `jnp.dot` leave precision to chance as soon as the product is
differentiated: the weight gradient leaves its GEMM rounded to half (and is summed over scan
steps and devices in half), and `preferred_element_type=float32` puts float32 × float32 GEMMs
into the backward pass. A primitive of our own settles both, in forward and in reverse mode.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from ._dtypes import as_floating_dtype, wide
from ._types import DTypeLike


DimensionNumbers = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], ...]]

# Products of float32 arrays out of several products of halves, by the name that `dtype` takes.
SPLIT_PRODUCTS = {
    "bfloat16_x3": lax.DotAlgorithmPreset.BF16_BF16_F32_X3,
    "bfloat16_x6": lax.DotAlgorithmPreset.BF16_BF16_F32_X6,
    "bfloat16_x9": lax.DotAlgorithmPreset.BF16_BF16_F32_X9,
    "tensorfloat32": lax.DotAlgorithmPreset.TF32_TF32_F32,
    "tensorfloat32_x3": lax.DotAlgorithmPreset.TF32_TF32_F32_X3,
}

mixed_dot_general_p = Primitive("mixed_dot_general")


def _result(dtype: np.dtype, out_dtype: np.dtype) -> np.dtype:
    # Products of halves accumulate in float32 on every backend, whatever the result. A GEMM with a
    # half result is asked for as such: cuBLAS does not fold a cast of a float32 result, which
    # would cost a float32 array and a kernel of its own.
    return dtype if out_dtype == dtype else wide(dtype)


def _precision(dtype: np.dtype) -> lax.Precision:
    # A product of halves is exact in float32. One of float32 operands is TF32 (GPU) or bfloat16
    # (TPU) unless the highest precision is asked for.
    return lax.Precision.HIGHEST if dtype.itemsize >= 4 else lax.Precision.DEFAULT


def _dot(x, y, *, dimension_numbers, dtype, out_dtype, out_sharding):
    out = lax.dot_general(
        lax.convert_element_type(x, dtype),
        lax.convert_element_type(y, dtype),
        dimension_numbers,
        precision=_precision(dtype),
        preferred_element_type=_result(dtype, out_dtype),
        out_sharding=out_sharding,
    )
    return lax.convert_element_type(out, out_dtype)


def _dot_on_cpu(x, y, *, dimension_numbers, **params):
    # jaxlib 0.10's CPU backend widens bfloat16 products with one contracted axis, takes those with
    # several to need no such thing, and then fails on them.
    (x_contract, y_contract), (x_batch, y_batch) = dimension_numbers

    def merged(x, contract, batch):
        kept = _axes(x.ndim, contract, batch)
        shape = [x.shape[i] for i in (*batch, *kept)]
        return lax.reshape(
            x, (*shape, math.prod(x.shape[i] for i in contract)), (*batch, *kept, *contract)
        )

    if params["dtype"] == jnp.bfloat16 and len(x_contract) > 1:
        x, y = merged(x, x_contract, x_batch), merged(y, y_contract, y_batch)
        batch = tuple(range(len(x_batch)))
        dimension_numbers = ((x.ndim - 1,), (y.ndim - 1,)), (batch, batch)
    return _dot(x, y, dimension_numbers=dimension_numbers, **params)


def _abstract_eval(x, y, *, dimension_numbers, dtype, out_dtype, out_sharding):
    # Shapes, shardings and varying mesh axes are those of JAX's own product.
    out, _ = lax.dot_general_p.abstract_eval(
        x.update(dtype=dtype, weak_type=False),
        y.update(dtype=dtype, weak_type=False),
        dimension_numbers=dimension_numbers,
        precision=None,
        preferred_element_type=_result(dtype, out_dtype),
        out_sharding=out_sharding,
    )
    return out.update(dtype=out_dtype)


def _axes(ndim: int, *without: tuple[int, ...]) -> list[int]:
    return [i for i in range(ndim) if not any(i in axes for axes in without)]


def _explicit(mesh) -> bool:
    return any(t == AxisType.Explicit for t in mesh.axis_types)


def _cotangent_sharding(x_aval, g, order: list[int]) -> NamedSharding | None:
    """The sharding of the cotangent of `x`, its axes in the given order: that of `x` itself.

    Needed on meshes with explicit axes, where a contraction over a sharded axis does not say by
    itself how its result is laid out.
    """
    sharding = x_aval.sharding
    if sharding.mesh.empty:
        mesh, spec = jax.typeof(g).sharding.mesh, ()
    else:
        mesh, spec = sharding.mesh, tuple(sharding.spec)
    if mesh.empty or not _explicit(mesh):
        return None
    spec = spec + (None,) * (x_aval.ndim - len(spec))
    return NamedSharding(mesh, PartitionSpec(*(spec[i] for i in order)))


def _transpose_lhs(g, x, y, *, dimension_numbers, dtype, out_dtype, out_sharding, swapped=False):
    """The cotangent of the left operand: half × half again, in the operand's own dtype."""
    del out_dtype, out_sharding
    (x_contract, y_contract), (x_batch, y_batch) = dimension_numbers
    x_kept = _axes(x.aval.ndim, x_contract, x_batch)
    y_kept = _axes(y.ndim, y_contract, y_batch)
    n = len(x_batch)
    first = n if swapped else n + len(x_kept)
    g_batch, g_y = tuple(range(n)), tuple(range(first, first + len(y_kept)))
    # What comes out has the axes: batch, kept, and contracted in the order of y's axes; swapped,
    # contracted before kept. So the gradient of a weight is `y.T @ g`: of `(g.T @ y).T` XLA makes
    # a transposed copy of g on a CPU. (Not in bfloat16, of which jaxlib 0.10's CPU backend refuses
    # outer products in that order.)
    operands = [(g, g_y, g_batch), (y, tuple(y_kept), tuple(y_batch))]
    axes = [x_kept, [x_contract[i] for i in np.argsort(y_contract)]]
    if swapped and dtype != jnp.bfloat16:
        operands, axes = operands[::-1], axes[::-1]
    (left, left_axes, left_batch), (right, right_axes, right_batch) = operands
    order = [*x_batch, *axes[0], *axes[1]]
    out = mixed_dot_general_p.bind(
        left,
        right,
        dimension_numbers=((left_axes, right_axes), (left_batch, right_batch)),
        dtype=dtype,
        out_dtype=x.aval.dtype,
        out_sharding=_cotangent_sharding(x.aval, g, order),
    )
    return lax.transpose(out, tuple(int(i) for i in np.argsort(order)))


def _transpose_rhs(g, x, y, *, dimension_numbers, **params):
    (x_contract, y_contract), (x_batch, y_batch) = dimension_numbers
    swapped = ((y_contract, x_contract), (y_batch, x_batch))
    return _transpose_lhs(g, y, x, dimension_numbers=swapped, swapped=True, **params)


def _batch(axis_data, args, dims, *, dimension_numbers, out_sharding, **params):
    x, y = args
    x_dim, y_dim = dims
    (x_contract, y_contract), (x_batch, y_batch) = dimension_numbers

    def shift(axes, dim):
        return axes if dim is None else tuple(i + (i >= dim) for i in axes)

    x_contract, x_batch = shift(x_contract, x_dim), shift(x_batch, x_dim)
    y_contract, y_batch = shift(y_contract, y_dim), shift(y_batch, y_dim)
    if x_dim is not None and y_dim is not None:
        x_batch, y_batch, out_dim = (x_dim, *x_batch), (y_dim, *y_batch), 0
    elif x_dim is not None:
        out_dim = len(x_batch) + _axes(x.ndim, x_contract, x_batch).index(x_dim)
    elif y_dim is not None:
        x_kept = x.ndim - len(x_contract)
        out_dim = x_kept + _axes(y.ndim, y_contract, y_batch).index(y_dim)
    else:
        out_dim = None
    if out_sharding is not None and out_dim is not None:
        spec = list(out_sharding.spec)
        spec.insert(out_dim, axis_data.explicit_mesh_axis)
        out_sharding = NamedSharding(out_sharding.mesh, PartitionSpec(*spec))
    out = mixed_dot_general_p.bind(
        x,
        y,
        dimension_numbers=((x_contract, y_contract), (x_batch, y_batch)),
        out_sharding=out_sharding,
        **params,
    )
    return out, out_dim


def define_bilinear(primitive, transpose_lhs: Callable, transpose_rhs: Callable) -> None:
    """JVP and transpose rules of a primitive that is linear in each of its two operands."""
    ad.defbilinear(primitive, transpose_lhs, transpose_rhs)
    bilinear = ad.primitive_jvps[primitive]

    def jvp(primals, tangents, **params):
        # A tangent may be the same on all devices of a `shard_map` where its primal is not.
        tangents = [
            t if isinstance(t, ad.Zero) else match_varying_axes(p, t)[1]
            for p, t in zip(primals, tangents, strict=True)
        ]
        return bilinear(primals, tangents, **params)

    ad.primitive_jvps[primitive] = jvp


mixed_dot_general_p.def_impl(
    jax.jit(_dot, static_argnames=("dimension_numbers", "dtype", "out_dtype", "out_sharding"))
)
mixed_dot_general_p.def_abstract_eval(_abstract_eval)
mlir.register_lowering(mixed_dot_general_p, mlir.lower_fun(_dot, multiple_results=False))
mlir.register_lowering(
    mixed_dot_general_p, mlir.lower_fun(_dot_on_cpu, multiple_results=False), platform="cpu"
)
define_bilinear(mixed_dot_general_p, _transpose_lhs, _transpose_rhs)
batching.fancy_primitive_batchers[mixed_dot_general_p] = _batch


def _operand(x: Any, call: str) -> Array:
    out = jnp.asarray(x)
    if not jnp.issubdtype(out.dtype, jnp.floating):
        raise TypeError(
            f"`{call}` multiplies real floating-point arrays, but got an operand of dtype "
            f"{out.dtype.name} and shape {out.shape}. Cast it to a floating-point dtype; split a "
            "complex array into its real and imaginary parts."
        )
    return out


def varying_axes(x: Array) -> frozenset[str]:
    aval = jax.typeof(x)
    # JAX renamed the attribute between 0.10.0 and 0.10.2.
    return aval.manual_axis_type.varying if hasattr(aval, "manual_axis_type") else aval.vma


def match_varying_axes(x: Array, y: Array) -> tuple[Array, Array]:
    # Inside `shard_map`, JAX's own operations mark an operand that is the same on all devices as
    # varying when it meets one that is not. The transpose of the mark is the sum over devices.
    x_axes, y_axes = varying_axes(x), varying_axes(y)

    def mark(z, axes):
        return lax.pcast(z, tuple(sorted(axes)), to="varying") if axes else z

    return mark(x, y_axes - x_axes), mark(y, x_axes - y_axes)


def mixed_dot_general(
    x: Float[Array | np.ndarray, "..."],
    y: Float[Array | np.ndarray, "..."],
    dimension_numbers: Any,
    *,
    dtype: DTypeLike,
    out_dtype: DTypeLike | None = None,
    out_sharding: NamedSharding | None = None,
) -> Float[Array, "..."]:
    """[`jax.lax.dot_general`][] with operands rounded to `dtype`, products accumulated in
    float32, and a result of dtype `out_dtype`.

    The rounding is part of the operation. So the cotangent of each operand comes back *in the
    dtype that the operand came in*, and every product of the backward pass (and of any nesting of
    forward and reverse mode) is again `dtype` × `dtype` with float32 accumulation. Pass weights
    as their float32 masters: their gradient leaves the GEMM in float32 and is summed in float32
    over scan steps and devices. Pass activations in half: then what is kept for the backward pass
    is half.

    **Arguments:**

    - `x`, `y`: arrays of any real floating dtype; their dtypes may differ.
    - `dimension_numbers`: `((x_contracting, y_contracting), (x_batch, y_batch))`, as for
        [`jax.lax.dot_general`][].
    - `dtype`: what the operands are rounded to, usually float16 or bfloat16. float32 multiplies
        at the highest precision (no TF32).
    - `out_dtype`: the dtype of the result; by default `dtype`.
    - `out_sharding`: the layout of the result, for meshes with explicit axes on which a
        contracted axis is sharded; as for [`jax.lax.dot_general`][].

    **Returns:**

    An array of dtype `out_dtype`: first the batch axes, then those left of `x`, then of `y`.

    **Raises:** `TypeError` for operands that are not real floating-point or whose shapes do not
    fit, `ValueError` for a `dtype` that is no floating-point type.
    """
    call = "mixed_dot_general"
    dtype = as_floating_dtype(dtype, call)
    out_dtype = dtype if out_dtype is None else as_floating_dtype(out_dtype, call)
    x, y = match_varying_axes(_operand(x, call), _operand(y, call))
    (x_contract, y_contract), (x_batch, y_batch) = dimension_numbers

    def canonical(axes, ndim):
        axes = [axes] if isinstance(axes, int) else axes
        return tuple(int(i) + ndim if -ndim <= i < 0 else int(i) for i in axes)

    return mixed_dot_general_p.bind(
        x,
        y,
        dimension_numbers=(
            (canonical(x_contract, x.ndim), canonical(y_contract, y.ndim)),
            (canonical(x_batch, x.ndim), canonical(y_batch, y.ndim)),
        ),
        dtype=dtype,
        out_dtype=out_dtype,
        out_sharding=out_sharding,
    )


def mixed_matmul(
    x: Float[Array | np.ndarray, "..."],
    y: Float[Array | np.ndarray, "..."],
    *,
    dtype: DTypeLike,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "..."]:
    """[`jax.numpy.matmul`][] by [`mpx_pde.mixed_dot_general`][].

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
    x, y = _operand(x, "mixed_matmul"), _operand(y, "mixed_matmul")
    if x.ndim == 0 or y.ndim == 0 or x.shape[-1] != y.shape[max(y.ndim - 2, 0)]:
        raise TypeError(
            "`mixed_matmul` contracts the last axis of `x` with the last but one of `y` (or its "
            f"only one), but got shapes {x.shape} and {y.shape}."
        )
    dot = partial(mixed_dot_general, dtype=dtype, out_dtype=out_dtype)
    y_contract = max(y.ndim - 2, 0)
    if y.ndim <= 2:
        return dot(x, y, ((x.ndim - 1, y_contract), ((), ())))
    if x.ndim <= 2:
        out = dot(x, y, ((x.ndim - 1, y_contract), ((), ())))
        return out if x.ndim == 1 else jnp.moveaxis(out, 0, -2)
    lead = jnp.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    x = jnp.broadcast_to(x, lead + x.shape[-2:])
    y = jnp.broadcast_to(y, lead + y.shape[-2:])
    batch = tuple(range(len(lead)))
    return dot(x, y, ((x.ndim - 1, y.ndim - 2), (batch, batch)))


def _einsum_pair(x, x_axes: str, y, y_axes: str, kept: str, dot) -> tuple[Array, str]:
    """Contracts two operands whose letters are distinct; letters outside `kept` are summed."""
    batch = [c for c in x_axes if c in y_axes and c in kept]
    contract = [c for c in x_axes if c in y_axes and c not in kept]
    out = dot(
        x,
        y,
        (
            ([x_axes.index(c) for c in contract], [y_axes.index(c) for c in contract]),
            ([x_axes.index(c) for c in batch], [y_axes.index(c) for c in batch]),
        ),
    )
    shared = batch + contract
    axes = [
        *batch,
        *(c for c in x_axes if c not in shared),
        *(c for c in y_axes if c not in shared),
    ]
    return out, "".join(axes)


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
    dtype: DTypeLike,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "..."]:
    """[`jax.numpy.einsum`][] by [`mpx_pde.mixed_dot_general`][].

    Every pairwise product (in the order that `jax.numpy.einsum_path` picks) is one mixed product;
    sums over an index of a single operand are taken in float32 first.

    **Arguments:**

    - `subscripts`: as for [`jax.numpy.einsum`][], ellipses included.
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
    dtype = as_floating_dtype(dtype, call)
    out_dtype = dtype if out_dtype is None else as_floating_dtype(out_dtype, call)
    arrays = [_operand(x, call) for x in operands]
    inputs, output = _einsum_letters(subscripts, [x.ndim for x in arrays], call)
    path, _ = jnp.einsum_path(f"{','.join(inputs)}->{output}", *arrays, optimize="auto")
    dot = partial(mixed_dot_general, dtype=dtype, out_dtype=out_dtype)
    terms = list(zip(arrays, inputs, strict=True))
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
        out, axes = _einsum_reduce(out.astype(dtype), axes, output)
    return jnp.transpose(out, [axes.index(c) for c in output]).astype(out_dtype)


def _einsum_letters(subscripts: str, ndims: list[int], call: str) -> tuple[list[str], str]:
    """The subscripts of each operand and of the result, ellipses and output spelled out."""
    text = subscripts.replace(" ", "")
    left, arrow, output = text.partition("->")
    inputs = left.split(",")
    if len(inputs) != len(ndims):
        raise ValueError(
            f"`{call}` got {len(ndims)} operands for the {len(inputs)} terms of {subscripts!r}."
        )
    free = (c for c in map(chr, range(0x100, 0x1000)))
    lengths = [n - len(t.replace("...", "")) for t, n in zip(inputs, ndims, strict=True)]
    dots = "".join(next(free) for _ in range(max(0, *lengths, 0)))
    spelled = []
    for term, ndim, length in zip(inputs, ndims, lengths, strict=True):
        if length < 0 or (length > 0 and "..." not in term):
            raise ValueError(
                f"`{call}`: the term {term!r} does not fit an operand with {ndim} axes."
            )
        spelled.append(term.replace("...", dots[len(dots) - length :]))
    if arrow:
        output = output.replace("...", dots)
    else:
        letters = left.replace(",", "").replace("...", "")
        output = dots + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    unknown = set(output) - set("".join(spelled))
    if unknown or len(set(output)) != len(output):
        raise ValueError(
            f"`{call}`: the result of {subscripts!r} has an index unknown or repeated."
        )
    return spelled, output

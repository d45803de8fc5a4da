"""The half-precision product that everything else is built on.

Plain casts around `jnp.dot` do not control precision once the product is differentiated. The weight
gradient comes out of its GEMM rounded to half precision, and is summed over scan steps and devices
in half precision. `preferred_element_type=float32` puts float32 × float32 GEMMs into the backward
pass. Our own primitive solves both problems, in forward and in reverse mode.
"""

from math import prod
from operator import index
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from .._util._calls import public
from .._util._types import DTypeLike
from .._util._varying import match_varying_axes
from ..precision._dtypes import is_integer
from ..precision._split import (
    IN_HALVES,
    is_taken_by_halves,
    split_by_halves,
    split_by_hardware,
    split_product,
)
from ._bilinear import GPUS, Origin, as_operand, define_product, product_dtypes, rounded_product


mixed_dot_general_p = Primitive("mixed_dot_general")

_APART = 2**21
"""The size of operands in bytes from which copies take longer on a GPU than another product."""

_ALIGNED, _NARROW = 8, 64
"""cuBLAS needs rows of a multiple of the first number of halves. Axes shorter than the second are
cheap to pad."""


def _dot(x, y, *, dimension_numbers, dtype, out_dtype, out_sharding, origin, algorithm, platform):
    on_cpu, on_gpu = platform == "cpu", platform in GPUS
    # An export may leave sizes open.
    known = all(isinstance(size, int) for size in (*x.shape, *y.shape))

    def product(x, y, **options):
        options["out_sharding"] = out_sharding
        numbers, sizes, shape = dimension_numbers, None, None
        whole = out_sharding is None and jax.typeof(x).sharding.mesh.empty
        apart = known and on_gpu and origin.apart
        first = known and (on_cpu or on_gpu) and _goes_first(x, y, numbers)
        turned = first or (on_cpu and origin.turned)
        of_rows = on_cpu and _sums_over_rows(x, y, numbers)
        if whole and (apart or of_rows):
            x, y, numbers, shape = _as_matrices(x, y, numbers)
        elif turned and whole and not numbers[1][0]:
            return _turned(x, y, numbers, on_cpu, **options)
        if apart:
            x, y, sizes = _padded(x, y, numbers)
            if max(x.size, y.size) * x.dtype.itemsize >= _APART:
                # XLA merges products with the same weight: it concatenates their operands and cuts
                # up the result, both with copies. The barrier prevents that.
                x, y = lax.optimization_barrier((x, y))
        out = lax.dot_general(x, y, numbers, **options)
        out = out if sizes is None else lax.slice(out, (0, 0), sizes)
        return out if shape is None else lax.reshape(out, shape)

    if algorithm is None:
        return rounded_product(product, x, y, dtype, out_dtype, on_cpu)
    x, y = (lax.convert_element_type(z, dtype) for z in (x, y))
    shapes = x.shape, y.shape
    if known and _is_by_vector(x, y, dimension_numbers):
        highest = {"precision": lax.Precision.HIGHEST, "preferred_element_type": dtype}
        out = product(x, y, **highest)
    elif on_cpu:
        out = split_product(product, x, y, algorithm)
    elif on_gpu and algorithm == IN_HALVES and is_taken_by_halves(*shapes, ndim=2):
        ((i, *_), (j, *_)), _ = dimension_numbers
        out = split_by_halves(product, x, y, (i, j))
    else:
        out = split_by_hardware(product, x, y, algorithm)
    return lax.convert_element_type(out, out_dtype)


def _is_by_vector(x, y, dimension_numbers) -> bool:
    """Returns whether, except for batch axes, one operand is a vector or nothing is summed over.

    XLA for GPUs turns such products into elementwise ones. For a split product these are products
    of halves, rounded to half precision: on an H200 the last layer made the output of a network by
    `bfloat16_x3` wrong by 2e-3. Float32 takes no longer, because memory bandwidth is the limit.
    """
    (x_contract, y_contract), (x_batch, y_batch) = dimension_numbers
    free = _axes(x.ndim, x_contract, x_batch), _axes(y.ndim, y_contract, y_batch)
    axes = [(x, x_contract), (x, free[0]), (y, free[1])]
    return any(prod(z.shape[i] for i in some) == 1 for z, some in axes)


def _sums_over_rows(x, y, dimension_numbers) -> bool:
    """Returns whether a product contracts several axes, which are the last of both operands. The
    gradient of a weight that acts on the channels of a field is such a product.
    """
    contracted, _ = dimension_numbers

    def last(z, axes):
        return tuple(axes) == tuple(range(z.ndim - len(axes), z.ndim))

    return len(contracted[0]) > 1 and last(x, contracted[0]) and last(y, contracted[1])


def _as_matrix(z, axes) -> tuple[Any, int, tuple[Any, ...]] | None:
    """Reshapes an array to a matrix if `axes`, in order, are its first or its last ones. Returns
    the matrix, the one of its two axes that replaces `axes`, and the sizes of the other axes.
    Returns `None` otherwise."""
    n, cut = len(axes), z.ndim - len(axes)
    if axes == tuple(range(n)):
        return lax.reshape(z, (prod(z.shape[:n]), prod(z.shape[n:]))), 0, z.shape[n:]
    if axes == tuple(range(cut, z.ndim)):
        return lax.reshape(z, (prod(z.shape[:cut]), prod(z.shape[cut:]))), 1, z.shape[:cut]
    return None


def _as_matrices(x, y, dimension_numbers) -> tuple[Any, Any, Any, tuple[Any, ...] | None]:
    """Reshapes two operands to matrices if their contracted axes are together at one end. Returns
    the matrices, their dimension numbers, and the shape of the product. Returns other operands and
    their dimension numbers unchanged, and `None`.

    For a product over several axes XLA makes a transposed copy of an operand. It does so on a CPU,
    and on a GPU after a barrier, which keeps XLA from writing a stacked operand in the order in
    which the product reads it.
    """
    pairs, left, right = sorted(zip(*dimension_numbers[0], strict=True)), None, None
    if pairs and not dimension_numbers[1][0]:
        left, right = map(_as_matrix, (x, y), zip(*pairs, strict=True))
    if left is None or right is None:
        return x, y, dimension_numbers, None
    (x, i, x_free), (y, j, y_free) = left, right
    return x, y, (((i,), (j,)), ((), ())), (*x_free, *y_free)


def _goes_first(x, y, dimension_numbers) -> bool:
    """Returns whether to put the right operand in front. It goes in front if it has more rows than
    the left one, as the points of a `vmap` have that meet a weight. If both are contracted along
    their first axes, the smaller one goes in front, because XLA for CPUs makes a transposed copy of
    that one."""
    (x_axes, y_axes), _ = dimension_numbers
    if x_axes and {*x_axes} == {*y_axes} == {*range(len(x_axes))}:
        return y.size < x.size
    if y.ndim < 2 or tuple(y_axes) != (y.ndim - 1,):
        return False
    return y.size // max(y.shape[-1], 1) > x.size // max(x.shape[x_axes[0]], 1)


def _turned(x, y, dimension_numbers, held, **options):
    """Evaluates a product with the axes of the right operand first in memory, where the operations
    that follow have the axis of a `vmap`. On a GPU this saves transposed copies in a ViT. A result
    that XLA for CPUs reads across its order in memory is computed entry by entry, which takes ten
    times as long. There the order must be `held` by a barrier, or it may be lost."""
    contracted, batch = dimension_numbers
    out = lax.dot_general(y, x, (contracted[::-1], batch), **options)
    axes, rows = range(out.ndim), y.ndim - len(contracted[1])
    out = lax.optimization_barrier(out) if held else out
    return lax.transpose(out, (*axes[rows:], *axes[:rows]))


def _padded(x, y, dimension_numbers) -> tuple[Any, Any, tuple[int, ...] | None]:
    """Pads the narrow axes of two matrices of halves to the lengths that cuBLAS needs. Returns the
    matrices and the unpadded shape of their product, or `None` if that shape does not change.

    XLA would pad too, but separately for each of several products with the same operand. A product
    over an axis of length 1 does not use tensor cores, so it is left alone.
    """
    ((x_axes, y_axes), (batch, _)) = dimension_numbers
    matrices = x.ndim == y.ndim == 2 and len(x_axes) == 1 and not batch
    if not matrices or x.dtype.itemsize != 2 or x.shape[x_axes[0]] == 1:
        return x, y, None
    sizes = x.shape[1 - x_axes[0]], y.shape[1 - y_axes[0]]

    def pad(z):
        wanted = [-n % _ALIGNED if n < _NARROW else 0 for n in z.shape]
        zero = jnp.zeros((), z.dtype)
        return lax.pad(z, zero, [(0, n, 0) for n in wanted]) if any(wanted) else z

    return pad(x), pad(y), sizes if any(n < _NARROW and n % _ALIGNED for n in sizes) else None


def _axes(ndim: int, *without: tuple[int, ...]) -> list[int]:
    return sorted({*range(ndim)}.difference(*without))


def _cotangent_sharding(x_aval, g, order: list[int]) -> NamedSharding | None:
    """Returns the sharding of the cotangent of `x`, which is that of `x` itself with axes in the
    given order.

    Meshes with explicit axes need it, because there a contraction over a sharded axis does not
    determine the layout of its result.
    """
    sharding = x_aval.sharding
    if sharding.mesh.empty:
        mesh, spec = jax.typeof(g).sharding.mesh, ()
    else:
        mesh, spec = sharding.mesh, tuple(sharding.spec)
    if mesh.empty or AxisType.Explicit not in mesh.axis_types:
        return None
    spec = spec + (None,) * (x_aval.ndim - len(spec))
    return NamedSharding(mesh, PartitionSpec(*(spec[i] for i in order)))


def _transpose_lhs(g, x, y, *, dimension_numbers, dtype, origin, algorithm, swapped=False, **_):
    """Returns the cotangent of the left operand, in that operand's own dtype. It is computed by
    another product of halves.
    """
    (x_contract, y_contract), (x_batch, y_batch) = dimension_numbers
    x_free = _axes(x.aval.ndim, x_contract, x_batch)
    y_free = _axes(y.ndim, y_contract, y_batch)
    n = len(x_batch)
    first = n if swapped else n + len(x_free)
    g_batch, g_y = tuple(range(n)), tuple(range(first, first + len(y_free)))
    # The result has the axes: batch, free, and contracted in the order of y's axes; if swapped,
    # contracted before free. So the gradient of a weight is `y.T @ g`. For `(g.T @ y).T` XLA would
    # make a transposed copy of g on a CPU.
    operands = [(g, g_y, g_batch), (y, tuple(y_free), tuple(y_batch))]
    axes = [x_free, [x_contract[i] for i in np.argsort(y_contract)]]
    if swapped:
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
        origin=origin._replace(out_dtype=True, turned=[*axes[1], *axes[0]] == sorted(order)),
        algorithm=algorithm,
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
        x_free = x.ndim - len(x_contract)
        out_dim = x_free + _axes(y.ndim, y_contract, y_batch).index(y_dim)
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


define_product(mixed_dot_general_p, lax.dot_general_p, _dot, _transpose_lhs, _transpose_rhs)
batching.fancy_primitive_batchers[mixed_dot_general_p] = _batch


@public
def mixed_dot_general(
    x: Float[Array | np.ndarray, "..."],
    y: Float[Array | np.ndarray, "..."],
    dimension_numbers: Any,
    *,
    dtype: DTypeLike | None = None,
    out_dtype: DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> Float[Array, "..."]:
    """Multiplies as [`jax.lax.dot_general`][] does, with operands rounded to `dtype`, products
    accumulated in float32, and a result of dtype `out_dtype`.

    The rounding is part of the operation. So the cotangent of each operand has *that operand's own
    dtype*, and every product of the backward pass (and of any nesting of forward and reverse mode)
    is again `dtype` × `dtype` with float32 accumulation. Pass weights as their float32 masters:
    their gradient comes out of the GEMM in float32 and is summed in float32 over scan steps and
    devices. Pass activations in half precision: then the values kept for the backward pass are
    half too.

    **Arguments:**

    - `x`, `y`: arrays of any real floating dtype; their dtypes may differ.
    - `dimension_numbers`: `((x_contracting, y_contracting), (x_batch, y_batch))`, as for
        [`jax.lax.dot_general`][].
    - `dtype`: the dtype to which the operands are rounded, usually float16 or bfloat16. float32
        multiplies at the highest precision (no TF32). The default is the narrowest dtype of the
        operands. Inside of [`mpx_pde.autocast`][] it is autocast's half precision.
    - `out_dtype`: the dtype of the result; by default `dtype`.
    - `out_sharding`: the layout of the result, for meshes with explicit axes on which a
        contracted axis is sharded; as for [`jax.lax.dot_general`][].

    **Returns:**

    An array of dtype `out_dtype`. Its axes are the batch axes, then the remaining axes of `x`, then
    those of `y`.

    **Raises:** `TypeError` for operands that are not real floating-point, and for
    `dimension_numbers` of another form or that do not fit the shapes; `ValueError` for a `dtype`
    that is not a floating-point type, and for operands of two different narrow types without a
    `dtype`.
    """
    x, y = as_operand(x), as_operand(y)
    dtypes = product_dtypes((x, y), dtype, out_dtype)
    if isinstance(out_sharding, PartitionSpec):
        out_sharding = NamedSharding(jax.sharding.get_abstract_mesh(), out_sharding)
    elif out_sharding is not None:
        out_sharding = NamedSharding(out_sharding.mesh.abstract_mesh, out_sharding.spec)
    return dot_general_as_given(x, y, dimension_numbers, out_sharding=out_sharding, **dtypes)


def dot_general_as_given(x: Array, y: Array, dimension_numbers: Any, **params: Any) -> Array:
    """Binds the product of [`mpx_pde.mixed_dot_general`][] once its dtypes are known."""
    x, y = match_varying_axes(x, y)
    axes = _axes_from_zero(x, y, dimension_numbers)
    params = {"out_sharding": None, "algorithm": None, "dimension_numbers": axes, **params}
    return mixed_dot_general_p.bind(x, y, **params)


def _axes_from_zero(x: Array, y: Array, dimension_numbers: Any) -> Any:
    """Returns the `dimension_numbers` of the caller with axes as tuples and no negative axis."""

    def canonical(axes, ndim):
        axes = [index(i) for i in ([axes] if is_integer(axes) else axes)]
        return tuple(range(ndim)[i] for i in axes)

    try:
        (x_contract, y_contract), (x_batch, y_batch) = dimension_numbers
        x_axes = canonical(x_contract, x.ndim), canonical(x_batch, x.ndim)
        y_axes = canonical(y_contract, y.ndim), canonical(y_batch, y.ndim)
        sizes = lambda z, axes: [[z.shape[i] for i in some] for some in axes]
        once = lambda axes: len({*sum(axes, ())}) == len(sum(axes, ()))
        fit = sizes(x, x_axes) == sizes(y, y_axes) and once(x_axes) and once(y_axes)
    except (TypeError, ValueError, IndexError):
        fit = False
    if not fit:
        raise TypeError(
            "`mixed_dot_general` takes `dimension_numbers` of the form ((contracting axes of x, "
            "of y), (batch axes of x, of y)), in pairs of the same size and each axis once, but "
            f"got {dimension_numbers} for shapes {x.shape} and {y.shape}."
        )
    return tuple(zip(x_axes, y_axes, strict=True))


def split_dot_general(x: Array, y: Array, dimension_numbers: Any, algorithm: str) -> Array:
    """Multiplies float32 arrays by several products of halves or TF32, as `algorithm`, one of
    `SPLIT_PRODUCTS`, says. Its derivatives do the same. A CPU has no such products, and computes
    the same numbers by several float32 products.
    """
    dtypes = dict.fromkeys(("dtype", "out_dtype"), jnp.dtype("float32"))
    params = {"origin": Origin(), "algorithm": algorithm, **dtypes}
    return dot_general_as_given(x, y, dimension_numbers, **params)

"""Operations of a training step on a whole PyTree."""

import functools as ft
import math
from collections.abc import Callable, Hashable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float

from .._util._calls import called, public
from .._util._repr import in_a_line
from .._util._types import BoolLike, PyTree, ScalarLike
from ._cast import is_inexact, widen


def _inexact_leaves(tree: PyTree) -> list[Array]:
    leaves = [x for x in jtu.tree_leaves(tree) if is_inexact(x)]
    return [jnp.asarray(x) for x in widen(leaves)]


def _all_of(tree: PyTree, holds: Callable[[Array], Bool[Array, "..."]]) -> Bool[Array, ""]:
    """Returns whether `holds` is true for all entries of the floating-point and complex arrays."""
    alike: dict[Hashable, list[Array]] = {}
    for x in _inexact_leaves(tree):
        # On a mesh with explicit axes, only arrays with the same layout can be combined.
        alike.setdefault((x.shape, jax.typeof(x).sharding.spec), []).append(x)
    # Combines arrays of the same shape entry by entry, so that one reduction reads all of them.
    flags = [jnp.all(ft.reduce(jnp.logical_and, map(holds, xs))) for xs in alike.values()]
    if not flags:
        return jnp.array(True)
    # XLA for CPUs would copy cheap operations into every kernel that reads them, but not a root.
    return jax.lax.sqrt(ft.reduce(jnp.logical_and, flags).astype(jnp.float32)) > 0


def all_finite(tree: PyTree) -> Bool[Array, ""]:
    """Returns whether no floating-point or complex array in a PyTree holds an infinity or a NaN.

    Arrays are checked in a few passes over all of them, not one by one. On a GPU that takes a few
    kernels for a model with any number of layers.

    **Arguments:**

    - `tree`: any PyTree; leaves that are not floating-point or complex count as finite.

    **Returns:**

    A scalar bool array; `True` for a PyTree without such leaves.
    """
    return _all_of(tree, jnp.isfinite)


def all_below(tree: PyTree, bound: ScalarLike) -> Bool[Array, ""]:
    """Returns whether the magnitudes in all floating-point and complex arrays in a PyTree are below
    a bound, as [`mpx_pde.all_finite`][] does for finite ones.
    """
    return _all_of(tree, lambda x: (size := jnp.abs(x)) < jnp.asarray(bound, size.dtype))


def all_zero(tree: PyTree) -> Bool[Array, ""]:
    """Returns whether all floating-point and complex arrays in a PyTree are zero, as
    [`mpx_pde.all_finite`][] does for finite ones.

    One maximum could tell all three. But an update waits for what is finite and not for the others,
    so XLA for GPUs (JAX 0.10.2) takes these in the kernels of the update, and joins them by shapes.
    And XLA for CPUs loses a NaN among thousands of numbers in a maximum.
    """
    return _all_of(tree, lambda x: x == 0)


def global_norm(tree: PyTree) -> Float[Array, ""]:
    """Returns the Euclidean norm of all floating-point and complex arrays in a PyTree together.

    Squares and sums are taken in float32 (float64 for float64 leaves): the square of 300 is
    infinite in float16.

    **Arguments:**

    - `tree`: any PyTree, usually gradients.

    **Returns:**

    A scalar of dtype float32 or float64.
    """
    squares = [jnp.sum(jnp.square(jnp.abs(x))) for x in _inexact_leaves(tree)]
    dtype = max((s.dtype for s in squares), key=lambda d: d.itemsize, default=jnp.float32)
    return jnp.sqrt(sum((s.astype(dtype) for s in squares), start=jnp.zeros((), dtype)))


def check_flag(pred: Any, name: str) -> Bool[Array, ""]:
    """Returns `pred` as a scalar bool array; raises a `TypeError` in the name of the called
    function if it is not one.
    """
    shape, dtype = np.shape(pred), getattr(pred, "dtype", type(pred))
    if shape != () or dtype not in (bool, jnp.bool_):
        raise TypeError(
            f"`{called()}` needs a scalar bool as `{name}`, as `mpx_pde.all_finite` returns it, "
            f"but got {in_a_line(pred)}."
        )
    return jnp.asarray(pred)


def is_key(x: Any) -> bool:
    """Returns whether a leaf is a typed key of `jax.random`, or the shape of one."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def check_key(key: Any) -> None:
    """Raises a `TypeError` in the name of the called function unless `key` is a key of
    `jax.random`."""
    raw = getattr(key, "dtype", None) == jnp.uint32 and np.ndim(key) == 1
    if not raw and not (is_key(key) and np.ndim(key) == 0):
        raise TypeError(
            f"`{called()}` takes one key of `jax.random` as `key`, such as `jax.random.key(0)`, "
            f"but got {in_a_line(key)}."
        )


def check_same_structure(a_name: str, a: PyTree, b_name: str, b: PyTree, fix: str = "") -> None:
    """Raises a `ValueError` in the name of the called function unless both trees have the same
    structure."""
    if jtu.tree_structure(a) != jtu.tree_structure(b):
        raise ValueError(
            f"`{called()}`: {a_name} and {b_name} must have the same structure. Of {a_name}, "
            f"{first_difference(b, a)}.{fix}"
        )


def first_difference(wanted: PyTree, got: PyTree) -> str | None:
    """Describes the first leaf or node in which `got` differs from `wanted`. Leaves, `None`
    included, differ by path, shape or dtype, or by value if they are not arrays; nodes differ by
    type or static fields. Returns `None` if there is no difference.
    """

    def describe(x):
        return f"{x.dtype}{[*x.shape]}" if hasattr(x, "shape") else repr(x)

    def leaves(tree):
        pairs = jtu.tree_leaves_with_path(tree, is_leaf=lambda x: x is None)
        return {jtu.keystr(path): describe(x) for path, x in pairs}

    should, has = leaves(wanted), leaves(got)
    for path in dict.fromkeys([*should, *has]):
        if should.get(path) != has.get(path):
            it, wants = (x.get(path, "nothing") for x in (has, should))
            return f"at {path or 'its root'} it has {it}, where there should be {wants}"
    try:
        jtu.tree_map(lambda *_: None, wanted, got)
    except ValueError as e:
        return f"a node differs ({' '.join(str(e).split())})"
    return None


@public
def select_tree(pred: BoolLike, a: PyTree, b: PyTree) -> PyTree:
    """Selects the PyTree `a` where `pred` is true and `b` where it is not, leaf by leaf.

    Use it to restore values that a skipped step must not change, such as the running statistics of
    a BatchNorm:

    ```python
    state = mpx.select_tree(grads_finite, new_state, state)
    ```

    **Arguments:**

    - `pred`: a scalar bool.
    - `a`, `b`: PyTrees of the same structure, with arrays of the same shapes and dtypes. Leaves
        that are neither arrays nor Python numbers (functions, strings) are taken from `a`.

    **Returns:**

    A PyTree of that structure; the arrays are bit-identical to those selected.

    **Raises:** `TypeError` if `pred` is not a scalar bool, `ValueError` if the trees do not match.
    """
    pred = check_flag(pred, "pred")
    check_same_structure("the first tree", a, "the second", b)

    def select(path, x, y):
        if not (eqx.is_array_like(x) and eqx.is_array_like(y)) or x is y:
            return x
        if jnp.shape(x) != jnp.shape(y) or jnp.result_type(x) != jnp.result_type(y):
            raise ValueError(
                f"`{called()}`: the leaves at {jtu.keystr(path) or 'the root'} must have the same "
                f"shape and dtype, but are {jax.typeof(x)} and {jax.typeof(y)}."
            )
        if isinstance(x, bool | int | float | complex) and x == y:
            return x
        return jnp.where(pred, x, y)

    return jtu.tree_map_with_path(select, a, b)


def dealt(x: Array, hands: int, axis: int = 0) -> Array:
    """Splits an array along an axis, for a scan. Entry `i` of the result's leading axis, a hand,
    gets the entries `i`, `i + hands`, … of the array.

    Entries are dealt in turn, not block by block. If the array is sharded along the axis, each
    device then has its part of every hand, so nothing is sent, and no device works for another. A
    hand that an explicit axis of a mesh does not divide is on all devices of that axis.
    """
    each = x.shape[axis] // hands
    sharding = jax.typeof(x).sharding
    mesh, spec = sharding.mesh, [*sharding.spec]
    names = spec[axis] if isinstance(spec[axis], tuple) else (spec[axis],)
    if each % math.prod(mesh.shape[name] for name in names if name is not None):
        spec[axis] = None
        x = jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*spec)))
    shape = (*x.shape[:axis], each, hands, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis + 1, 0)


def with_fields(module: Any, **fields: Any) -> Any:
    """Returns a module of the same structure with new values for some of its fields."""
    where = lambda m: [getattr(m, name) for name in fields]
    return eqx.tree_at(where, module, list(fields.values()))

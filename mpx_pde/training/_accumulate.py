"""Gradient accumulation over micro-batches."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, overload

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jaxtyping import Array

from .._util._calls import called, public
from .._util._types import AxisName, ForwardLike, GradientOptions, PolicyLike, PyTree
from ..precision._cast import widen
from ..precision._dtypes import check_integer, is_integer
from ..precision._tree import dealt
from ..program._warnings import warn_user
from ..scaling._loss import AbstractLossScaling
from ._gradient import Evaluated, Gradient, transformed
from ._options import refuses_argnums


_Scaling = TypeVar("_Scaling", bound=AbstractLossScaling | None)


def is_state(x: Any) -> bool:
    """Returns whether `x` holds running statistics: no batch axis, whatever their first axis is."""
    return isinstance(x, eqx.nn.State)


def _axes_of_leaves(in_axes: PyTree, args: tuple) -> list[int | None]:
    """Returns the batch axis of each leaf of `args`, from the prefix `in_axes`."""
    axes: list[int | None] = []

    def spread(axis, subtree):
        axes.extend([axis] * len(jtu.tree_leaves(subtree, is_leaf=is_state)))

    try:
        jtu.tree_map(spread, in_axes, args, is_leaf=lambda x: x is None)
    except ValueError as e:
        raise ValueError(
            f"`{called()}` takes `in_axes` as a prefix of the {len(args)} positional "
            "arguments after the model: an axis for all, or a tuple with an axis or `None` for "
            f"each. Got {in_axes!r}."
        ) from e
    return axes


def _entries(x: Any, axis: Any) -> int | None:
    """Returns the length of an axis, or `None` if `x` has no such axis."""
    shape = jnp.shape(x)
    return shape[axis] if is_integer(axis) and -len(shape) <= axis < len(shape) else None


def is_old_key(x: Any) -> bool:
    """Returns whether an array may be an old-style key, which is two integers."""
    return jnp.shape(x) == (2,) and jnp.result_type(x) == jnp.uint32


def _split(x: Array | np.ndarray, axis: Any, micro_batches: int, path: Any) -> Array:
    """Deals `x` out along `axis`. The result has shape `[micro_batches, ...]`."""
    shape, size = jnp.shape(x), _entries(x, axis)
    if size is None:
        raise ValueError(
            f"`{called()}` cannot split the array at {jtu.keystr(path)} of the arguments "
            f"after the model along the axis {axis!r} that `in_axes` names: its shape is {shape}."
        )
    if size % micro_batches:
        raise ValueError(
            f"`{called()}` cannot split the array at {jtu.keystr(path)} of the arguments "
            f"after the model into {micro_batches} micro-batches: it has {size} entries along "
            f"axis {axis}. Choose a batch size that is a multiple, or mark what is not a batch by "
            "`None` in `in_axes`."
        )
    return dealt(jnp.asarray(x), micro_batches, axis % len(shape))


def split_batch(
    rest: tuple, in_axes: PyTree, micro_batches: int
) -> tuple[dict[int, Array], Callable[[dict[int, Array]], tuple]]:
    """Splits the batched leaves of the arguments after the model into micro-batches.

    Returns a mapping from the number of each leaf to its array with a leading axis of
    micro-batches, and a function that rebuilds all of these arguments from one micro-batch.
    """
    paths, treedef = jtu.tree_flatten_with_path(rest, is_leaf=is_state)
    axes = _axes_of_leaves(in_axes, rest)
    leaves = [x for _, x in paths]
    arrays = {
        i: (x, axis, path)
        for i, ((path, x), axis) in enumerate(zip(paths, axes, strict=True))
        if axis is not None and eqx.is_array_like(x) and jnp.ndim(x) > 0
    }
    longest = max((_entries(x, axis) or 0 for x, axis, _ in arrays.values()), default=0)
    batched = {
        i: _split(x, axis, micro_batches, path)
        for i, (x, axis, path) in arrays.items()
        if not (is_old_key(x) and longest > 2)
    }
    return batched, lambda batch: treedef.unflatten([batch.get(i, x) for i, x in enumerate(leaves)])


def _warn_of_keywords(batched: dict[int, Array], kwargs: dict, micro_batches: int) -> None:
    """Issues a warning if keyword arguments are as long as a batch that is split into single
    examples. Each example would broadcast against all of them, so no shape error occurs.
    """
    if micro_batches == 1 or not batched or any(x.shape[1] != 1 for x in batched.values()):
        return

    def as_long(x):
        counts = eqx.is_array_like(x) and jnp.ndim(x) > 0 and not is_old_key(x)
        return counts and jnp.shape(x)[0] == micro_batches

    leaves = {name: jtu.tree_leaves(x, is_leaf=is_state) for name, x in kwargs.items()}
    names = [name for name, x in leaves.items() if x and all(map(as_long, x))]
    if names:
        warn_user(
            f"`{called()}` passes keyword arguments whole, but {', '.join(map(repr, names))} "
            f"{'is' if len(names) == 1 else 'are'} as long as the batch, of which each micro-batch "
            "has one example. Pass the batch by position. If it is meant to be whole, pass it by "
            "position too, with `None` in `in_axes`."
        )


def _run(
    gradient: Gradient, args: tuple, kwargs: dict, *, micro_batches: int, in_axes: PyTree
) -> tuple:
    model, *rest = args
    batched, whole = split_batch(tuple(rest), in_axes, micro_batches)

    # The parts that are not arrays, which could not leave the scan.
    statics = []

    def body(total, batch):
        evaluated = gradient.evaluate((model, *whole(batch)), kwargs)
        arrays, static = eqx.partition((evaluated.value, evaluated.aux), eqx.is_array)
        statics.append((static, evaluated.dtype, evaluated.depends))
        sums = [evaluated.grads, evaluated.counts]
        return jtu.tree_map(lambda t, x: t + widen(x), total, sums), arrays

    masters = eqx.filter(model, eqx.is_inexact_array)
    counts = None
    if gradient.mode.scales and gradient.derivatives is not None:
        counts = gradient.derivatives.counts
    # Widen leaf by leaf: a half array inside of a `FullPrecision` is narrow as well.
    zero = jtu.tree_map(lambda x: jnp.zeros_like(widen(x)), [masters, counts])
    (total, counts), arrays = lax.scan(body, zero, batched, length=micro_batches)
    # Checked only now, so that errors of the loss itself are raised first.
    if not batched and micro_batches > 1 and jtu.tree_leaves(in_axes):
        raise ValueError(
            f"`{called()}` found no array to split into {micro_batches} micro-batches among the "
            f"{len(rest)} positional arguments after the model: each would get all of the batch. "
            "Pass the batch by position, since keyword arguments are passed whole. If that is "
            "meant, say so by `in_axes=None`."
        )
    _warn_of_keywords(batched, kwargs, micro_batches)
    static, dtype, depends = statics[-1]
    values, aux = eqx.combine(arrays, static)
    value = jnp.mean(values)
    mean = jtu.tree_map(lambda g: g / micro_batches, total)
    state = gradient.finish(model, Evaluated(value, aux, mean, counts, dtype, depends))
    out = (value, gradient.mode.output(aux)) if gradient.has_aux else value
    return out, *state


if TYPE_CHECKING:

    @overload
    def filter_accumulated_value_and_grad(
        func: Callable[..., Any],
        scaling: _Scaling,
        micro_batches: int,
        has_aux: Literal[False] = False,
        use_mixed_precision: bool = True,
        *,
        in_axes: PyTree = 0,
        **options: Unpack[GradientOptions],
    ) -> Callable[..., tuple[Array, _Scaling, Array, PyTree]]: ...

    @overload
    def filter_accumulated_value_and_grad(
        func: Callable[..., Any],
        scaling: _Scaling,
        micro_batches: int,
        has_aux: Literal[True],
        use_mixed_precision: bool = True,
        *,
        in_axes: PyTree = 0,
        **options: Unpack[GradientOptions],
    ) -> Callable[..., tuple[tuple[Array, PyTree], _Scaling, Array, PyTree]]: ...


@public
@refuses_argnums
def filter_accumulated_value_and_grad(
    func: Callable[..., Any],
    scaling: AbstractLossScaling | None,
    micro_batches: int,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
    *,
    in_axes: PyTree = 0,
    policy: PolicyLike | None = None,
    keep_full: PyTree = False,
    axis_name: AxisName | None = None,
    autocast: bool | dict[str, Any] = False,
    forward: ForwardLike = "half",
) -> Callable[..., Any]:
    """Evaluates [`mpx_pde.filter_value_and_grad`][] for a large batch, one micro-batch at a time.

    A scan runs over the micro-batches, so memory holds the activations of only one of them.
    Micro-batch `i` holds the examples `i`, `i + micro_batches`, …. If the batch is sharded over
    devices, each device has its part of every micro-batch, and nothing is sent between them.
    All micro-batches share one loss scale. Gradients are summed in float32; there is one finite
    flag and one adjustment of the scaling. For a loss that is a mean over the batch, value and
    gradients equal those of the whole batch.

    **Arguments:**

    - `func`, `scaling`, `has_aux`, `use_mixed_precision`, `policy`, `keep_full`, `axis_name`,
        `autocast`, `forward`: as for [`mpx_pde.filter_value_and_grad`][].
    - `micro_batches`: the number of micro-batches, a positive integer that divides the batch size.
    - `in_axes`: the batch axis of the positional arguments after the model: one axis for all, or a
        prefix of the tuple of these arguments. `None` marks what every micro-batch gets whole.
        Scalars (such as a `jax.random.key`), non-arrays, `eqx.nn.State` and keyword arguments are
        always passed whole. So is a uint32 array of length two beside a longer batch, which is
        taken for an old-style key. One key therefore draws the same numbers in every micro-batch.
        To give each its own key, pass `jax.random.split(key, micro_batches)`: each micro-batch
        gets an array of one key, `keys[0]`. If each micro-batch has one example, keyword arrays as
        long as the batch are a [`mpx_pde.PrecisionWarning`][].

    **Returns:**

    A function that returns what the function of [`mpx_pde.filter_value_and_grad`][] returns.
    `value` is the mean over the micro-batches. The arrays of `aux` are stacked, with a leading axis
    of length `micro_batches`; other leaves of `aux` are returned unchanged.

    **Raises:** as [`mpx_pde.filter_value_and_grad`][], and `ValueError` for a batch size that
    `micro_batches` does not divide, arguments without an array to split, an `in_axes` that does not
    fit the arguments or a `micro_batches` below 1.

    ```python
    value_and_grad = mpx.filter_accumulated_value_and_grad(loss, scaling, 8)
    value, scaling, grads_finite, grads = value_and_grad(model, x, y)
    ```
    """
    micro_batches = check_integer(micro_batches, "micro_batches")
    # `eqx.Partial` is a PyTree, unlike `functools.partial`: one that is made anew at each step
    # still hits jit's cache.
    run = eqx.Partial(_run, micro_batches=micro_batches, in_axes=in_axes)
    return transformed(
        run,
        func,
        scaling,
        has_aux=has_aux,
        axis_name=axis_name,
        use_mixed_precision=use_mixed_precision,
        policy=policy,
        keep_full=keep_full,
        autocast=autocast,
        forward=forward,
    )

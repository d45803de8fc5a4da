"""Casts PyTrees and functions."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jaxtyping import Array

from .._util._calls import called, named, public
from .._util._notes import noting_the_cast
from .._util._repr import in_a_line
from .._util._types import DTypeLike, PyTree
from .._util._wrapper import AbstractWrapper, check_callable
from ._dtypes import (
    as_floating_dtype,
    asked_for_half,
    half_behind,
    half_precision_datatype,
    highest_precision,
    is_half,
    is_narrow,
    wide,
)
from ._forward import without_halves


_COMPLEX = {
    jnp.dtype("float32"): jnp.dtype("complex64"),
    jnp.dtype("float64"): jnp.dtype("complex128"),
}


_ARRAY_TYPES = jax.Array | np.ndarray | np.generic


def is_inexact(x: Any) -> bool:
    """Returns whether `x` is a floating-point or complex array or Python number."""
    if isinstance(x, _ARRAY_TYPES):
        return jnp.issubdtype(x.dtype, jnp.inexact)
    return isinstance(x, float | complex)


def convert(x: Array, dtype: Any, weak_type: bool) -> Array:
    """Casts `x` to `dtype`, with a weak type or without. `x.astype` would always make it strong."""
    if x.dtype == dtype and getattr(x, "weak_type", False) == weak_type:
        return x
    return lax.convert_element_type_p.bind(x, new_dtype=dtype, weak_type=weak_type, sharding=None)


def rounded_to(x: Array, dtype: Any) -> Array:
    """Rounds a float32 array to the numbers of a half type, in float32. XLA cannot leave it out, as
    it may leave out two casts.

    `reduce_precision` alone would turn float16's subnormal numbers, those below 2^-14, into zeros.
    """
    info = jnp.finfo(dtype)
    normal = lax.reduce_precision(x, int(info.nexp), int(info.nmant))
    if info.minexp == jnp.finfo(x.dtype).minexp:  # float32 flushes the same ones
        return normal
    step = 2.0 ** int(info.minexp - info.nmant)
    return jnp.where(jnp.abs(x) < 2.0 ** int(info.minexp), jnp.round(x / step) * step, normal)


def _cast_leaf(x: Any, to: np.dtype) -> Any:
    if not isinstance(x, _ARRAY_TYPES | jax.ShapeDtypeStruct):
        return x
    target = _COMPLEX.get(to) if jnp.issubdtype(x.dtype, jnp.complexfloating) else to
    if target is None or target == x.dtype or not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(dtype=target)
    if isinstance(x, jax.Array) and getattr(x, "weak_type", False):
        return convert(x, target, weak_type=True)
    # NumPy would warn of an overflow; JAX does not.
    with np.errstate(over="ignore"):
        return x.astype(target)


_HALF = "half"


def _parse_out_dtype(dtype: Any) -> Any:
    if dtype is None or (isinstance(dtype, str) and dtype == _HALF):
        return dtype
    with named("FullPrecision"):
        return as_floating_dtype(dtype)


if TYPE_CHECKING:  # type checkers take its abstract `__call__` for a field
    _Layer = eqx.Module
else:
    _Layer = eqx.nn.StatefulLayer


class FullPrecision(_Layer):
    """Keeps a layer in float32 inside a model that is cast to half precision.

    [`mpx_pde.cast_tree`][] never casts the parameters of the layer, so they stay the float32
    masters. Calling it runs the layer as [`mpx_pde.force_full_precision`][] does: inputs are cast
    to float32, matrix products take the highest precision (no TF32), and the outputs are returned
    in the dtype of the caller's inputs, or in `out_dtype`.

    ```python
    half_behind = lambda layer: mpx.FullPrecision(layer, out_dtype="half")
    model = eqx.tree_at(lambda m: m.layers[0], model, replace_fn=half_behind)
    ```

    Use it to keep a first layer, a normalisation or a Fourier embedding out of half precision. A
    layer that is called with float32 values (points that `keep_full` keeps) returns float32 by
    default, and JAX's type promotion would make all layers after it multiply in float32.
    `out_dtype="half"` prevents this.

    Attributes of the layer can be read through the wrapper (`model.layers[0].weight`). Methods
    other than a call run unchanged.

    It can also keep a single array, such as a coefficient of the equation that is trained with the
    network. Read the array by `value`; its gradient is in its own dtype:

    ```python
    class Inverse(eqx.Module):
        network: mpx.nn.CoordinateMLP
        viscosity: mpx.FullPrecision = mpx.FullPrecision(jnp.array(0.1))

    def residual(model, d):
        return d["u_t"] - model.viscosity.value * d["u_xx"]
    ```

    **Arguments:**

    - `module`: the layer, which is any callable PyTree; or a floating-point array.
    - `out_dtype`: the dtype of floating-point outputs; by default that of the caller's inputs.
        `"half"` is the half precision in which [`mpx_pde.filter_grad`][] and similar functions, or
        [`mpx_pde.cast_function`][], run the model at present. If none of them asks for half
        precision (with `use_mixed_precision=False`, or when a float32 model is evaluated),
        `"half"` acts as the default, so that no value is rounded. For a model that you cast by
        hand, name the dtype.
    """

    module: Any
    out_dtype: Any = eqx.field(static=True, default=None, converter=_parse_out_dtype)

    def __check_init__(self):
        if not callable(self.module) and not _is_floating(self.module):
            raise TypeError(
                "`FullPrecision` wraps a callable layer such as `eqx.nn.Linear`, or one "
                f"floating-point array, but got {in_a_line(self.module)}. Wrap each of several "
                "arrays, or mark their place by `keep_full`."
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _is_floating(self.module):
            raise TypeError(
                "`FullPrecision` around an array is read by its attribute `value`, and cannot be "
                "called."
            )
        out_dtype = half_behind() if self.out_dtype == _HALF else self.out_dtype
        return force_full_precision(self.module, out_dtype)(*args, **kwargs)

    def is_stateful(self) -> bool:
        """Returns whether the layer is stateful, so that `eqx.nn.Sequential` passes it a state."""
        return isinstance(self.module, eqx.nn.StatefulLayer) and self.module.is_stateful()

    def __getattr__(self, name: str) -> Any:
        # Called for names that the wrapper does not have. Private names are not forwarded, because
        # Python and JAX probe for them, and an object under construction has no module yet.
        if name.startswith("_") or name in ("module", "out_dtype"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name == "value" and _is_floating(self.module):
            return self.module
        return getattr(self.module, name)


class Fixed(FullPrecision):
    """Keeps a layer in float32, and untrained: [`mpx_pde.optimizer_update`][] never changes it.
    Otherwise an optimizer might change parameters without a gradient, for example by weight decay.
    """


def is_fixed(x: Any) -> bool:
    return isinstance(x, Fixed)


def _is_floating(x: Any) -> bool:
    return isinstance(x, _ARRAY_TYPES) and is_inexact(x)


def _map_arrays(fn: Callable, tree: PyTree, keep: tuple[type, ...]) -> PyTree:
    def is_excluded(x):
        return isinstance(x, keep)

    return jtu.tree_map(lambda x: x if is_excluded(x) else fn(x), tree, is_leaf=is_excluded)


# Running statistics are not operands of products. In float16 they would stop changing or overflow.
_KEPT_IN_CALLS = (FullPrecision, eqx.nn.State)


def arrays_in_full(tree: PyTree) -> frozenset[int]:
    """Returns the `id` of each array in a [`mpx_pde.FullPrecision`][]."""
    held = jtu.tree_leaves(tree, is_leaf=lambda x: isinstance(x, FullPrecision))
    inside = (jtu.tree_leaves(x) for x in held if isinstance(x, FullPrecision))
    return frozenset(id(x) for leaves in inside for x in leaves)


def map_operands(fn: Callable, tree: PyTree) -> PyTree:
    """Maps `fn` over the leaves outside of `FullPrecision`."""
    return _map_arrays(fn, tree, _KEPT_IN_CALLS)


def cast_operands(tree: PyTree, dtype: np.dtype) -> PyTree:
    """Casts the arguments or the results of a function as [`mpx_pde.cast_tree`][] does, but does
    not cast `eqx.nn.State` either.
    """
    return map_operands(lambda x: _cast_leaf(x, dtype), tree)


def cast_except(keep: PyTree, args: tuple, kwargs: dict, dtype: np.dtype) -> tuple[tuple, dict]:
    """Casts `args` where the prefix `keep` is false, and `kwargs` unless it is `True`."""

    def cast(k, subtree):
        return subtree if k else cast_operands(subtree, dtype)

    args = _by_prefix(cast, keep, args)
    return args, kwargs if keep is True else cast_operands(kwargs, dtype)


def full_paths(keep: PyTree, args: tuple, kwargs: dict) -> frozenset[tuple]:
    """Returns the paths in `(fun, args, kwargs)` of leaves that [`cast_except`][] does not cast."""
    marks = _by_prefix(lambda k, sub: jtu.tree_map(lambda _: k, sub), keep, args)
    every = (False, marks, jtu.tree_map(lambda _: keep is True, kwargs))
    return frozenset(path for path, full in jtu.tree_leaves_with_path(every) if full)


def _by_prefix(fun: Callable[[bool, PyTree], PyTree], keep: PyTree, args: tuple) -> Any:
    """Maps `fun` over the leaves of the prefix `keep`, each with the subtree of `args` there."""

    def checked(k, subtree):
        if not isinstance(k, bool):
            raise TypeError(
                f"`{called()}` takes bools as the leaves of `keep_full`, but got {in_a_line(k)}."
            )
        return fun(k, subtree)

    try:
        return jtu.tree_map(checked, keep, args)
    except ValueError as e:
        raise ValueError(
            f"`{called()}` takes `keep_full` as a prefix of its {len(args)} positional "
            "arguments: one bool for all, or a tuple with one entry each, such as (False, True). "
            f"Got {keep!r}."
        ) from e


def widen(tree: PyTree) -> PyTree:
    """Casts arrays narrower than float32 to float32, and nothing else."""

    def widen_leaf(x):
        return _cast_leaf(x, jnp.dtype("float32")) if is_narrow(getattr(x, "dtype", None)) else x

    return map_operands(widen_leaf, tree)


@public
def cast_tree(tree: PyTree, dtype: DTypeLike) -> PyTree:
    """Casts every real floating-point array in a PyTree to `dtype`.

    This covers arrays of JAX and NumPy and [`jax.ShapeDtypeStruct`][], of any width from float8 to
    float64. Complex arrays are cast to the complex type of the same precision (complex64 for
    float32, complex128 for float64), and are left alone if there is none. Integers, bools, PRNG
    keys, Python scalars, `None`, functions and everything inside a [`mpx_pde.FullPrecision`][] are
    left alone. Structure, sharding and weak types are preserved.

    **Arguments:**

    - `tree`: any PyTree.
    - `dtype`: a real floating-point dtype or its name.

    **Returns:**

    A PyTree of the same structure. Leaves that have the dtype already are the same objects.

    **Raises:** `ValueError` if `dtype` is not a real floating-point type.

    ```python
    half = mpx.cast_tree({"w": jnp.ones(3), "steps": jnp.arange(3)}, jnp.float16)
    ```
    """
    to = as_floating_dtype(dtype)
    return _map_arrays(lambda x: _cast_leaf(x, to), tree, (FullPrecision,))


def cast_to_half_precision(x: PyTree) -> PyTree:
    """Casts a PyTree to [`mpx_pde.half_precision_datatype`][], as [`mpx_pde.cast_tree`][] does."""
    return cast_tree(x, half_precision_datatype())


def cast_to_full_precision(x: PyTree) -> PyTree:
    """Casts a PyTree to float32, as [`mpx_pde.cast_tree`][] does."""
    return cast_tree(x, jnp.float32)


def cast_to_float16(x: PyTree) -> PyTree:
    """Casts a PyTree to float16, as [`mpx_pde.cast_tree`][] does."""
    return cast_tree(x, jnp.float16)


def cast_to_bfloat16(x: PyTree) -> PyTree:
    """Casts a PyTree to bfloat16, as [`mpx_pde.cast_tree`][] does."""
    return cast_tree(x, jnp.bfloat16)


def cast_to_float32(x: PyTree) -> PyTree:
    """Casts a PyTree to float32, as [`mpx_pde.cast_tree`][] does."""
    return cast_tree(x, jnp.float32)


def _widest(*trees: PyTree) -> np.dtype | None:
    """Returns the floating-point dtype that all arrays of the trees promote to, or `None` if there
    are no such arrays.
    """
    leaves = jtu.tree_leaves(trees, is_leaf=lambda x: isinstance(x, _KEPT_IN_CALLS))
    dtypes = {
        jnp.finfo(jax.dtypes.canonicalize_dtype(x.dtype)).dtype  # the real dtype of a complex one
        for x in leaves
        if isinstance(x, _ARRAY_TYPES) and is_inexact(x)
    }
    if len(dtypes) > 1:
        return max(map(wide, dtypes), key=lambda dtype: dtype.itemsize)
    return dtypes.pop() if dtypes else None


class _CastFunction(AbstractWrapper):
    fun: Any
    _dtype: np.dtype = eqx.field(static=True)
    _return_dtype: np.dtype = eqx.field(static=True)

    def __call__(self, /, *args, **kwargs):
        func, args, kwargs = cast_operands((self.fun, args, kwargs), self._dtype)
        with ExitStack() as stack:
            if is_half(self._dtype):
                stack.enter_context(asked_for_half("cast", self._dtype))
                stack.enter_context(named("cast_function"))
                stack.enter_context(noting_the_cast(self._dtype))
            out = func(*args, **kwargs)
        return cast_operands(out, self._return_dtype)


class _FullPrecisionFunction(AbstractWrapper):
    fun: Any
    _return_dtype: np.dtype | None = eqx.field(static=True)

    def __call__(self, /, *args, **kwargs):
        # Full precision never lowers a precision: float64 stays float64.
        dtype = wide(_widest(self.fun, args, kwargs) or "float32")
        return_dtype = self._return_dtype or _widest(args, kwargs) or _widest(self.fun)
        func, args, kwargs = cast_operands((self.fun, args, kwargs), dtype)
        with highest_precision(), without_halves():
            out = func(*args, **kwargs)
        return out if return_dtype is None else cast_operands(out, return_dtype)

    def __get__(self, instance: Any, owner: Any = None):
        if instance is None:
            return self
        # The instance belongs to the function, so only the arguments decide the caller's dtype.
        return _FullPrecisionFunction(eqx.Partial(self.fun, instance), self._return_dtype)


@public
def cast_function(
    func: Callable[..., Any], dtype: DTypeLike, return_dtype: DTypeLike | None = None
) -> Callable[..., Any]:
    """Makes a function run in another precision.

    Casts all floating-point arrays in its arguments, positional and by keyword, at any depth, to
    `dtype` as [`mpx_pde.cast_tree`][] does, and those in its output to `return_dtype`. If `func` is
    a PyTree with parameters (an Equinox module or a bound method of one), casts these as well.
    Leaves `eqx.nn.State` alone.

    **Arguments:**

    - `func`: a function, method or callable module.
    - `dtype`: the dtype to compute in.
    - `return_dtype`: the dtype of the outputs; by default `dtype`.

    **Returns:**

    A callable with the name, docstring and signature of `func`. It is an Equinox module that
    holds `func`, and binds as a method when it is assigned in a class body.

    **Raises:** `TypeError` if `func` cannot be called, `ValueError` for a `dtype` that is not a
    real floating-point type.
    """
    check_callable(func)
    to = as_floating_dtype(dtype)
    back = to if return_dtype is None else as_floating_dtype(return_dtype)
    return eqx.module_update_wrapper(_CastFunction(func, to, back))


@public
def force_full_precision(
    func: Callable[..., Any], return_dtype: DTypeLike | None = None
) -> Callable[..., Any]:
    """Makes a function run in float32, whatever its callers pass.

    Inputs (and the parameters of `func`, if it is a module) are cast to float32; matrix products
    and convolutions take the highest precision, since a plain float32 product is TF32 on an
    NVIDIA GPU and bfloat16 on a TPU. If one of the inputs is float64, all of it runs in float64.

    Use it around code that leaves the range of float16 on the way to a harmless result, such as
    sums over many elements, norms, softmax and exponentials.

    **Arguments:**

    - `func`: a function, method or callable module.
    - `return_dtype`: the dtype of the outputs; by default the dtype of the inputs (the widest, if
        they differ).

    **Returns:**

    A callable with the name, docstring and signature of `func`. It is an Equinox module that
    holds `func`, and binds as a method when it is assigned in a class body.

    **Raises:** `TypeError` if `func` cannot be called, `ValueError` for a `return_dtype` that is
    not a real floating-point type.

    ```python
    weights = mpx.force_full_precision(jax.nn.softmax)(scores.astype(jnp.float16))  # float16
    ```
    """
    check_callable(func)
    back = None if return_dtype is None else as_floating_dtype(return_dtype)
    return eqx.module_update_wrapper(_FullPrecisionFunction(func, back))

"""Floating-point formats, and the present meaning of *half precision*.

Nothing here starts a JAX backend: limits come from `jax.numpy.finfo`, which knows
`bfloat16` without a device.
"""

import math
import numbers
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._util._calls import called, named, public
from .._util._repr import in_a_line
from .._util._types import DTypeLike
from ._setting import setting, setting_with


FLOAT16_MAX: float = float(jnp.finfo("float16").max)
"""The largest finite float16, 65504."""

BFLOAT16_MAX: float = float(jnp.finfo("bfloat16").max)
"""The largest finite bfloat16, about 3.39e38."""

_HALF = {name: jnp.dtype(name) for name in ("float16", "bfloat16")}

# A user context is part of the keys of jit's caches, so a step that was compiled for one
# half-precision type is never reused for the other.
_half_context = jax.make_user_context("float16")


def as_floating_dtype(dtype: Any) -> np.dtype:
    """Returns `dtype` as a NumPy dtype; raises a `ValueError` in the name of the called function
    unless it is a real floating-point type.
    """
    try:
        if dtype is None or eqx.is_array(dtype):
            raise TypeError  # NumPy would read `None` as float64, and an array as its dtype.
        # Python's `float` means JAX's default, which is float64 only with `jax_enable_x64`.
        out = jax.dtypes.canonicalize_dtype(dtype) if dtype is float else jnp.dtype(dtype)
    except TypeError:
        out = None
    if out is None or not jnp.issubdtype(out, jnp.floating):
        got = f"{dtype!r}, which is not a dtype" if out is None else out.name
        raise ValueError(
            f"`{called()}` needs a real floating-point dtype such as jnp.float16 or 'bfloat16', "
            f"but got {got}."
        )
    return out


def as_half_dtype(dtype: Any) -> np.dtype:
    """Returns `dtype` as a NumPy dtype; raises a `ValueError` in the name of the called function
    unless it is float16 or bfloat16.
    """
    out = as_floating_dtype(dtype)
    if not is_half(out):
        raise ValueError(
            f"`{called()}` takes float16 or bfloat16 (a dtype or its name), but got {out.name}. "
            "For full precision pass `use_mixed_precision=False` to `filter_grad`, or a policy "
            "with 'compute=float32'."
        )
    return out


def is_integer(x: Any) -> bool:
    """Returns whether `x` is an integer of Python or NumPy, and not a bool."""
    return isinstance(x, int | np.integer) and not isinstance(x, bool)


def check_bool(value: Any, name: str, meaning: str) -> bool:
    """Returns a bool; raises a `TypeError` in the name of the called function unless it is one."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(
            f"`{called()}` takes a bool as `{name}`, {meaning}, but got {in_a_line(value)}. "
            "It decides which program is compiled: under `jit` it is static."
        )
    return bool(value)


def check_choice(value: Any, choices: Collection, name: str, fix: str = "") -> Any:
    """Returns `value`; raises a `ValueError` in the name of the called function unless it is a
    choice."""
    # Types are compared too, because NumPy's float16 equals "half".
    if not any(isinstance(value, type(choice)) and value == choice for choice in choices):
        known = ", ".join(map(repr, choices))
        message = f"`{called()}` takes {known} as `{name}`, but got {in_a_line(value)}. {fix}"
        raise ValueError(message.rstrip())
    return value


def check_integer(value: Any, name: str, least: int = 1) -> int:
    """Returns an integer; raises a `ValueError` in the name of the called function unless it is an
    integer of at least `least`.
    """
    if not is_integer(value) or value < least:
        what = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise ValueError(f"`{called()}` needs {what} as `{name}`, but got {in_a_line(value)}.")
    return int(value)


def is_real(x: Any) -> bool:
    """Returns whether `x` is a real number of Python or NumPy, and not a bool."""
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


def check_positive(value: Any, name: str, fix: str = "") -> float:
    """Returns a number; raises a `ValueError` in the name of the called function unless it is
    positive and finite.
    """
    if not is_real(value) or not 0 < value < math.inf:
        message = (
            f"`{called()}` needs a positive number as `{name}`, but got {in_a_line(value)}. {fix}"
        )
        raise ValueError(message.rstrip())
    return float(value)


def is_half(dtype: Any) -> bool:
    """Returns whether `dtype` is float16 or bfloat16."""
    return jnp.dtype(dtype) in _HALF.values()


def is_narrow(dtype: Any) -> bool:
    """Returns whether a dtype is a real floating-point type narrower than float32."""
    is_float = isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jnp.floating)
    return is_float and dtype.itemsize < 4


def wide(dtype: Any) -> np.dtype:
    """Returns the dtype in which values of `dtype` are accumulated: float32, or float64 for
    float64.

    Unlike `jnp.promote_types`, it works under strict promotion too.
    """
    return jnp.dtype("float64" if jnp.dtype(dtype) == jnp.float64 else "float32")


def half_precision_datatype() -> np.dtype:
    """Returns the dtype that *half precision* means at present: float16 (the default) or bfloat16.

    **Returns:**

    `jnp.dtype("float16")` or `jnp.dtype("bfloat16")`.
    """
    return _HALF[_half_context.value]


@public
def set_half_precision_datatype(datatype: DTypeLike) -> None:
    """Sets what *half precision* means from now on, in every thread.

    The setting is part of the key of `jax.jit`'s cache: a function that was compiled under
    the other setting is compiled anew at its next call. Inside a
    [`mpx_pde.half_precision`][] block the block wins.

    **Arguments:**

    - `datatype`: float16 or bfloat16, as a dtype or by name.

    **Raises:** `ValueError` for anything else.
    """
    name = as_half_dtype(datatype).name
    # In JAX 0.10.0 only the underlying object has the setter.
    context = _half_context if hasattr(_half_context, "set_global") else _half_context._obj
    context.set_global(name)


@contextmanager
def half_precision(datatype: DTypeLike) -> Iterator[None]:
    """A context manager that makes *half precision* mean `datatype`, in this thread.

    ```python
    with mpx.half_precision("bfloat16"):
        loss_scaling, grads_finite, grads = step(model, loss_scaling, batch)
    ```

    **Arguments:**

    - `datatype`: float16 or bfloat16, as a dtype or by name.

    **Raises:** `ValueError` for anything else.
    """
    with named("half_precision"):
        name = as_half_dtype(datatype).name
    with _half_context(name):
        yield


# The range of scales that float32 can multiply and divide by. XLA divides an array by a scalar by
# multiplying with the reciprocal, and flushes a subnormal one to zero: x / 2^127 would be 0.
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-126, 2.0**126


def largest_scale(dtype: Any) -> float:
    """Returns the largest power of two that `dtype` can hold and that is an allowed scale: 2^15 for
    float16, 2^126 for bfloat16.
    """
    return min(float(2.0 ** (int(jnp.finfo(dtype).maxexp) - 1)), LARGEST_SCALE)


@contextmanager
def asked_for_half(by: str, datatype: Any) -> Iterator[None]:
    """A context manager that records that half precision was asked for, by a `"cast"` of arguments
    or by `"autocast"`."""
    asked = by, jnp.dtype(datatype).name
    with half_precision(datatype), setting_with(asked=asked), precision_gives_way():
        yield


def asked_of_context() -> tuple[str, str] | None:
    """Returns how the surrounding context asks for half precision, and for which. Returns `None` if
    it does not.
    """
    return setting().asked


def half_behind() -> np.dtype | None:
    """Returns the half precision that the context asks for. Returns `None` if it asks for none, as
    in a float32 baseline or when a model is evaluated.
    """
    asked = setting().asked
    return None if asked is None else _HALF[asked[1]]


_ASKED = "asked for by name"
"""The present setting of `products` inside of code that insists on float32."""


def matmul_precision() -> str | None:
    """Returns the setting of `jax.default_matmul_precision`."""
    return getattr(jax.config, "jax_default_matmul_precision")  # noqa: B009  (set at runtime)


def default_precision() -> Any:
    """Returns the precision parameter of a product whose caller named none."""
    setting = matmul_precision()
    return None if setting is None else _precision_at(setting)


@cache
def _precision_at(setting: str) -> Any:
    with jax.default_matmul_precision(setting):
        (product,) = jax.make_jaxpr(jax.lax.dot)(np.zeros(1), np.zeros(1)).jaxpr.eqns
    return product.params["precision"]


@contextmanager
def highest_precision(by: str = _ASKED) -> Iterator[None]:
    """A context manager in which products take the highest precision."""
    with jax.default_matmul_precision("highest"), setting_with(products=by):
        yield


def true_float32() -> AbstractContextManager[Any]:
    """Returns a context in which float32 is true float32: products of float32 arrays take the
    highest precision, unless the user has set another. JAX's own default is TF32 on a GPU and
    bfloat16 on a TPU."""
    return highest_precision("highest") if matmul_precision() is None else nullcontext()


def precision_gives_way() -> AbstractContextManager[Any]:
    """Returns a context in which half precision is asked for. A default precision of products that
    was set outside of it does not apply inside. One that is set inside does.
    """
    asked = setting().products == _ASKED
    return nullcontext() if asked else setting_with(products=matmul_precision() or "")


def precision_of_user() -> AbstractContextManager[Any]:
    """Returns a context that traces a program without a default precision that gives way.
    Interpreters would otherwise treat the precision of its products as a choice of the program.
    """
    gives_way = setting().products == (matmul_precision() or "")
    return jax.default_matmul_precision(None) if gives_way else nullcontext()


def full_precision_asked() -> bool:
    """Returns whether products must be more precise here than JAX's default. They must inside of
    [`mpx_pde.FullPrecision`][], for example.
    """
    return matmul_precision() not in (None, "default", "fastest", "bfloat16", "DEFAULT")


def product_datatype(dtype: Any) -> np.dtype:
    """Returns the dtype in which a layer with weights of `dtype`, and no dtype of its own,
    multiplies.

    It is the dtype of the weights, since casting a model casts them. [`mpx_pde.autocast`][] casts
    nothing beforehand, and supplies its own dtype.
    """
    dtype, asked = jnp.dtype(dtype), setting().asked
    if asked is None or asked[0] != "autocast" or full_precision_asked() or dtype != jnp.float32:
        return dtype
    return _HALF[asked[1]]

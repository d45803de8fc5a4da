"""Activations, and bounds of fields, evaluated in float32 and stored in half precision.

The derivatives of an activation contain products that leave the range of float16 on the way to a
harmless result. Here they are computed in float32. XLA fuses the casts into one kernel that works
in registers, so no float32 array goes through memory (Xue et al., section 3.2, *fused activation
function*).
"""

import dataclasses
import functools as ft
import importlib
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float

from .._util._calls import called, public
from .._util._repr import in_a_line
from ..precision._cast import widen
from ..precision._dtypes import check_choice, check_positive


def _evaluate(fun: Callable, x: Any) -> Array:
    # A Python number has no dtype to cast back to, and the result for an integer is not an integer.
    x = x if hasattr(x, "dtype") else jnp.asarray(x)
    out = fun(widen(x))
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype != out.dtype
    return out.astype(x.dtype) if narrow else out


@dataclasses.dataclass(unsafe_hash=True, repr=False)
class SafeActivation:
    """A function that is computed in float32 and returns the dtype of its input.

    **Arguments:**

    - `fun`: an elementwise function.
    """

    fun: Callable

    def __post_init__(self):
        self.__name__ = getattr(self.fun, "__name__", type(self.fun).__name__).lstrip("_")
        self.__doc__ = getattr(self.fun, "__doc__", None)

    def __call__(self, x: ArrayLike) -> Array:
        return _evaluate(self.fun, x)

    def __repr__(self) -> str:
        return f"safe({self.__name__})"

    def __reduce__(self) -> tuple[Any, ...]:
        # `pickle` does not find compiled functions such as `jnp.tanh` under the name that they say.
        where = _public_name(self.fun)
        return (SafeActivation, (self.fun,)) if where is None else (_of_name, where)

    def __deepcopy__(self, memo: dict) -> "SafeActivation":
        # Functions are copied as themselves too. A deep copy of a compiled one, such as `jnp.tanh`,
        # would be another function.
        return self


def _public_name(fun: Callable) -> tuple[str, str] | None:
    """Returns the module and the name by which JAX offers a function; `None` for others."""
    name = getattr(fun, "__name__", None)
    modules = ("jax.numpy", "jax.nn", "jax.lax", "jax.scipy.special")
    matches = (m for m in modules if getattr(importlib.import_module(m), str(name), None) is fun)
    module = next(matches, None)
    return None if name is None or module is None else (module, name)


def _of_name(module: str, name: str) -> SafeActivation:
    return SafeActivation(getattr(importlib.import_module(module), name))


# `equinox.filter_jit` and the like treat it as a function: static, with nothing to differentiate.
jtu.register_static(SafeActivation)


class SafeLayer(eqx.Module):
    """An activation with parameters, such as [`equinox.nn.PReLU`][], that is computed in float32
    and returns the dtype of its input. The parameters are trained with the rest of the model.
    """

    fun: Callable

    def __call__(self, x: ArrayLike) -> Array:
        return _evaluate(lambda x: widen(self.fun)(x), x)


def _exact_gelu(x: ArrayLike) -> Array:
    """GELU without approximation, x (1 + erf(x / √2)) / 2.

    `jax.nn.gelu(x, approximate=False)` uses `erfc` instead, which takes twice the arithmetic of
    `erf`. That is enough to limit the speed of a kernel that reads and writes half precision. The
    purpose of `erfc`, digits of the negative tail, is below one unit of float32's rounding of
    values around 1: the absolute error stays below 1e-6.
    """
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        x = x.astype(float)
    half, root = (np.array(c, x.dtype) for c in (0.5, np.sqrt(0.5)))
    return x * (1 + lax.erf(x * root)) * half


@public
def safe(fun: Callable[..., Any]) -> Callable:
    """Wraps an elementwise function so that it is evaluated in float32 and returns the dtype of its
    input.

    The same holds for its derivatives of every order, in forward and reverse mode.

    **Arguments:**

    - `fun`: an elementwise function of one array, such as `jnp.tanh`, or a callable PyTree with
        parameters, such as `equinox.nn.PReLU()`. `partial(jax.nn.gelu, approximate=False)` becomes
        `mpx_pde.nn.exact_gelu`, the same function at less cost.

    **Returns:**

    An elementwise function; a PyTree with the same parameters if `fun` has any.
    """
    return as_activation(fun, "fun")


def as_activation(fun: Any, name: str = "activation") -> Callable:
    """Returns [`safe`][mpx_pde.nn.safe] of the argument `name` of the called function."""
    if not callable(fun):
        raise TypeError(
            f"`{called()}` takes an elementwise function such as `jnp.tanh` as `{name}`, but got "
            f"{in_a_line(fun)}."
        )
    if isinstance(fun, SafeActivation | SafeLayer):
        return fun
    parts = (fun.func, fun.args, fun.keywords) if isinstance(fun, ft.partial) else ()
    if parts == (jax.nn.gelu, (), {"approximate": False}):
        return exact_gelu
    parameters = any(map(eqx.is_array, jtu.tree_leaves(fun)))
    return SafeLayer(fun) if parameters else SafeActivation(fun)


tanh = safe(jnp.tanh)
silu = safe(jax.nn.silu)
sin = safe(jnp.sin)
gelu = safe(jax.nn.gelu)
exact_gelu = safe(_exact_gelu)
softplus = safe(jax.nn.softplus)


# Tu et al., *Speeding up Fourier Neural Operators via Mixed Precision*, section 3.2, bound a field
# by such a function before every transform.


def _hard_clip(x: Array) -> Array:
    return jnp.clip(x, -1, 1)


hard_clip = safe(_hard_clip)


def sigma_clip(x: Float[Array, "channels *grid"]) -> Float[Array, "channels *grid"]:
    """Clips each channel to two standard deviations around its mean."""
    grid = tuple(range(1, x.ndim))
    wide = lax.stop_gradient(widen(x))
    mean = jnp.mean(wide, axis=grid, keepdims=True)
    deviation = jnp.sqrt(jnp.mean((wide - mean) ** 2, axis=grid, keepdims=True))
    return jnp.clip(widen(x), mean - 2 * deviation, mean + 2 * deviation).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class _SoftClip:
    limit: float

    def __call__(self, x: Array) -> Array:
        return self.limit * jnp.tanh(x / self.limit)


@public
def soft_clip(limit: float) -> Callable[..., Any]:
    """Returns the function `limit * tanh(x / limit)`: the identity for small values, ±`limit` for
    large ones.

    **Arguments:**

    - `limit`: a positive number. With 8, a field of unit size is nearly unchanged; with 1, the
        function is the hyperbolic tangent.

    **Returns:**

    An elementwise function, evaluated in float32. Pass it as the `stabilizer` of
    [`mpx_pde.nn.SpectralConv`][].

    **Raises:** `ValueError` for a limit that is not a positive number.
    """
    fix = "It returns the function that clips: `stabilizer=soft_clip(4.0)`."
    limit = check_positive(limit, "limit", fix)
    return safe(_SoftClip(limit))


STABILIZERS = {
    "tanh": tanh,
    "hard_clip": hard_clip,
    "sigma_clip": sigma_clip,
    "soft_clip": soft_clip(8.0),
}


def parse_stabilizer(stabilizer: str | Callable | None) -> Callable | None:
    if stabilizer is None or callable(stabilizer):
        return stabilizer
    fix = "Others are functions of a field, or `None`."
    return STABILIZERS[check_choice(stabilizer, STABILIZERS, "stabilizer", fix)]

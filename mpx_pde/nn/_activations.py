"""Activations, and bounds of fields, evaluated in float32 and stored in half.

The derivatives of an activation hold products that leave the range of float16 on the way to a
harmless result. Here they are computed in float32, as one fused kernel does it in registers: XLA
fuses the casts, so that no float32 array goes through memory (Xue et al., section 3.2, *fused
activation function*).
"""

import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float

from .._cast import widen
from .._dtypes import check_choice, check_positive


def _evaluate(fun: Callable, x: Any) -> Array:
    # A Python number has no dtype to come back to, and what comes of an integer is not one.
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

    def __deepcopy__(self, memo: dict) -> "SafeActivation":
        # As functions are copied. A copy of one that is compiled, such as `jnp.tanh`, is another.
        return self


# A function, to `equinox.filter_jit` and the like: static, with nothing to differentiate.
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

    `jax.nn.gelu(x, approximate=False)` takes `erfc` instead, whose arithmetic is twice that of
    `erf`: enough to bound a kernel that reads and writes half precision. What `erfc` is for, digits
    of the negative tail, is below one unit of float32's rounding of values around 1: the absolute
    error stays below 1e-6.
    """
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        x = x.astype(float)
    half, root = (np.array(c, x.dtype) for c in (0.5, np.sqrt(0.5)))
    return x * (1 + lax.erf(x * root)) * half


def safe(fun: Callable[..., Any]) -> Callable:
    """Wraps an elementwise function so that it is evaluated in float32 and returns the dtype of its
    input.

    So are its derivatives of every order, in forward and reverse mode.

    **Arguments:**

    - `fun`: an elementwise function of one array, such as `jnp.tanh`, or a PyTree that is one and
        has parameters, such as `equinox.nn.PReLU()`. `partial(jax.nn.gelu, approximate=False)`
        becomes `mpx_pde.nn.exact_gelu`, the same by cheaper means.

    **Returns:**

    An elementwise function; a PyTree with the same parameters if `fun` has any.
    """
    if not callable(fun):
        raise TypeError(
            "The `activation` of a network, and what `safe` wraps, is an elementwise function such "
            f"as `jnp.tanh`, but got {fun!r}."
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


# Tu et al., *Speeding up Fourier Neural Operators via Mixed Precision*, section 3.2, put a function
# that bounds a field before every transform of it.


def _hard_clip(x: Array) -> Array:
    return jnp.clip(x, -1, 1)


hard_clip = safe(_hard_clip)


def sigma_clip(x: Float[Array, "channels *grid"]) -> Float[Array, "channels *grid"]:
    """Clips each channel to two standard deviations around its mean."""
    grid = tuple(range(1, x.ndim))
    full = lax.stop_gradient(widen(x))
    mean = jnp.mean(full, axis=grid, keepdims=True)
    deviation = jnp.sqrt(jnp.mean((full - mean) ** 2, axis=grid, keepdims=True))
    return jnp.clip(widen(x), mean - 2 * deviation, mean + 2 * deviation).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class _SoftClip:
    limit: float

    def __call__(self, x: Array) -> Array:
        return self.limit * jnp.tanh(x / self.limit)


def soft_clip(limit: float) -> Callable[..., Any]:
    """Returns the function `limit * tanh(x / limit)`: the identity for small values, ±`limit` for
    large ones.

    **Arguments:**

    - `limit`: a positive number; eight leaves a field of unit size nearly as it is, one is the
        hyperbolic tangent.

    **Returns:**

    An elementwise function, evaluated in float32, for `stabilizer` of
    [`mpx_pde.nn.SpectralConv`][].

    **Raises:** `ValueError` for a limit that is not a positive number.
    """
    mend = "It returns the function that clips: `stabilizer=soft_clip(4.0)`."
    limit = check_positive(limit, "soft_clip", "limit", mend)
    return safe(_SoftClip(limit))


STABILIZERS = {
    "tanh": tanh,
    "hard_clip": hard_clip,
    "sigma_clip": sigma_clip,
    "soft_clip": soft_clip(8.0),
}


def parse_stabilizer(stabilizer: str | Callable | None, call: str) -> Callable | None:
    if stabilizer is None or callable(stabilizer):
        return stabilizer
    mend = "Others are functions of a field, or `None`."
    return STABILIZERS[check_choice(stabilizer, STABILIZERS, call, "stabilizer", mend)]

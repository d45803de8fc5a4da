"""Activations evaluated in float32 and stored in half.

The derivatives of an activation hold products that leave the range of float16 on the way to a
harmless result. Here they are computed in float32, as one fused kernel does it in registers: XLA
fuses the casts, so that no float32 array goes through memory (Xue et al., section 3.2, *fused
activation function*).
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, ArrayLike

from .._cast import widen


def _evaluate(fun: Callable, x: Any) -> Array:
    # A Python number has no dtype to come back to, and what comes of an integer is none.
    x = x if hasattr(x, "dtype") else jnp.asarray(x)
    out = fun(widen(x))
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype != out.dtype
    return out.astype(x.dtype) if narrow else out


class SafeActivation:
    """A function that is computed in float32 and returns the dtype of its input.

    **Arguments:**

    - `fun`: an elementwise function.
    """

    def __init__(self, fun: Callable):
        self.fun = fun
        self.__name__ = getattr(self.fun, "__name__", type(self.fun).__name__)
        self.__doc__ = getattr(self.fun, "__doc__", None)

    def __call__(self, x: ArrayLike) -> Array:
        return _evaluate(self.fun, x)

    def __repr__(self) -> str:
        return f"safe({self.__name__})"

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, SafeActivation) and self.fun == other.fun

    def __hash__(self) -> int:
        return hash((SafeActivation, self.fun))


# A function, to `equinox.filter_jit` and the like: static, with nothing to differentiate.
jtu.register_static(SafeActivation)


class SafeLayer(eqx.Module):
    """The same for an activation with parameters, such as [`equinox.nn.PReLU`][], which are
    trained with the rest of the model."""

    fun: Callable

    def __call__(self, x: ArrayLike) -> Array:
        return _evaluate(lambda x: widen(self.fun)(x), x)


def safe(fun: Callable[..., Any]) -> Callable:
    """`fun`, evaluated in float32, with its result in the dtype of the input.

    So are its derivatives of every order, in forward and reverse mode.

    **Arguments:**

    - `fun`: an elementwise function of one array, such as `jnp.tanh`, or a PyTree that is one and
        has parameters, such as `equinox.nn.PReLU()`.

    **Returns:**

    An elementwise function; a PyTree with the same parameters if `fun` has any.
    """
    if not callable(fun):
        raise TypeError(f"`safe` wraps an elementwise function, but got {fun!r}.")
    if isinstance(fun, SafeActivation | SafeLayer):
        return fun
    parameters = any(map(eqx.is_array, jtu.tree_leaves(fun)))
    return SafeLayer(fun) if parameters else SafeActivation(fun)


tanh = safe(jnp.tanh)
silu = safe(jax.nn.silu)
sin = safe(jnp.sin)
gelu = safe(jax.nn.gelu)
softplus = safe(jax.nn.softplus)

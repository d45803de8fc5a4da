"""Activations evaluated in float32 and stored in half.

The derivatives of an activation hold products that leave the range of float16 on the way to a
harmless result. Here they are computed in float32, as one fused kernel does it in registers: XLA
fuses the casts, so that no float32 array goes through memory (Xue et al., section 3.2, *fused
activation function*).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float

from .._cast import widen


class SafeActivation:
    """A function that is computed in float32 and returns the dtype of its input.

    **Arguments:**

    - `fun`: an elementwise function.
    """

    def __init__(self, fun: Callable[..., Any]):
        if not callable(fun):
            raise TypeError(f"`safe` wraps an elementwise function, but got {fun!r}.")
        self.fun = fun.fun if isinstance(fun, SafeActivation) else fun
        self.__name__ = getattr(self.fun, "__name__", type(self.fun).__name__)
        self.__doc__ = getattr(self.fun, "__doc__", None)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return self.fun(widen(x)).astype(x.dtype)

    def __repr__(self) -> str:
        return f"safe({self.__name__})"

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, SafeActivation) and self.fun == other.fun

    def __hash__(self) -> int:
        return hash((SafeActivation, self.fun))


# A function, to `equinox.filter_jit` and the like: static, with nothing to differentiate.
jtu.register_static(SafeActivation)


def safe(fun: Callable[..., Any]) -> SafeActivation:
    """`fun`, evaluated in float32, with its result in the dtype of the input.

    So are its derivatives of every order, in forward and reverse mode.

    **Arguments:**

    - `fun`: an elementwise function of one array, such as `jnp.tanh`.

    **Returns:**

    An elementwise function.
    """
    return fun if isinstance(fun, SafeActivation) else SafeActivation(fun)


tanh = safe(jnp.tanh)
silu = safe(jax.nn.silu)
sin = safe(jnp.sin)
gelu = safe(jax.nn.gelu)
softplus = safe(jax.nn.softplus)

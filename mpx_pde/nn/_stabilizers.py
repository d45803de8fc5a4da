"""Functions that bound a field before it is transformed.

Tu et al., *Speeding up Fourier Neural Operators via Mixed Precision*, section 3.2, put one before
every transform. All are evaluated in float32.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .._cast import widen
from .._dtypes import is_real
from .._repr import in_a_line
from ._activations import safe, tanh


hard_clip = safe(lambda x: jnp.clip(x, -1, 1))


def sigma_clip(x: Float[Array, "channels *grid"]) -> Float[Array, "channels *grid"]:
    """Clips each channel to two standard deviations around its mean."""
    grid = tuple(range(1, x.ndim))
    full = lax.stop_gradient(widen(x))
    mean = jnp.mean(full, axis=grid, keepdims=True)
    deviation = jnp.sqrt(jnp.mean((full - mean) ** 2, axis=grid, keepdims=True))
    return jnp.clip(widen(x), mean - 2 * deviation, mean + 2 * deviation).astype(x.dtype)


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
    if not is_real(limit) or not 0 < limit < math.inf:
        raise ValueError(
            "`soft_clip` needs a positive limit, a number, and returns the function that clips: "
            f"`stabilizer=soft_clip(4.0)`. It got {in_a_line(limit)}."
        )
    return safe(lambda x: limit * jnp.tanh(x / limit))


STABILIZERS = {
    "tanh": tanh,
    "hard_clip": hard_clip,
    "sigma_clip": sigma_clip,
    "soft_clip": soft_clip(8.0),
}


def parse_stabilizer(stabilizer: str | Callable | None, call: str) -> Callable | None:
    if stabilizer is None or callable(stabilizer):
        return stabilizer
    if stabilizer not in STABILIZERS:
        raise ValueError(
            f"`{call}` takes {', '.join(map(repr, STABILIZERS))}, a function of a field or `None` "
            f"as `stabilizer`, but got {stabilizer!r}."
        )
    return STABILIZERS[stabilizer]

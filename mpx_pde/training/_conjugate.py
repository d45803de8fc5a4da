"""Least squares whose matrix is known by its products, and roughly as a decomposition."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


_CLOSE = 1e-6
"""Where conjugate gradients end, relative to where they begin: directions of small singular values
count for little in what they reduce."""

_Product = Callable[[Float[Array, " _"]], Float[Array, " _"]]


def refined(
    push: _Product,
    pull: _Product,
    solve: _Product,
    damping: Float[Array, ""],
    b: Float[Array, " rows"],
    *,
    most: int,
) -> Float[Array, " columns"]:
    """The solution of `(Jᵀ J + damping) x = Jᵀ b` for a Jacobian whose products are `push(x)`,
    `J x`, and `pull(b)`, `Jᵀ b`.

    By at most `most` conjugate gradients for least squares, which a `solve` with a rounded Jacobian
    preconditions (Carson, Higham and Pranesh, *Three-precision GMRES-based iterative refinement for
    least squares problems*, SIAM J. Sci. Comput. 42, 2020). Products are taken as they are: in the
    dtype of `b`. Rounded, directions are not conjugate for long: each is followed to where it is
    lowest, so that none leads up, and what it keeps of the one before is that of Polak and Ribière.
    """
    tiny = jnp.finfo(b.dtype).tiny

    def going(carry):
        i, _, _, _, _, gamma, first = carry
        return (i < most) & (gamma > _CLOSE**2 * first)

    def again(carry):
        i, x, b, s, p, gamma, first = carry
        q = push(p)
        along = (s @ p) / jnp.maximum(q @ q + damping * (p @ p), tiny)
        x, b = x + along * p, b - along * q
        old, s = s, pull(b) - damping * x
        z = solve(s)
        kept = jnp.maximum(z @ (s - old), 0) / jnp.maximum(gamma, tiny)
        return i + 1, x, b, s, z + kept * p, s @ z, first

    s = pull(b)
    z = solve(s)
    first = s @ z
    return lax.while_loop(going, again, (0, jnp.zeros_like(s), b, s, z, first, first))[1]

"""Least squares whose matrix is known by its products, and roughly as a decomposition."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32


_SURE = 1e-4
"""How much less than asked for must be left by the preconditioner, which may not see all of it."""

_Product = Callable[[Float[Array, " _"]], Float[Array, " _"]]


def refined(
    push: _Product,
    pull: _Product,
    solve: _Product,
    damping: Float[Array, ""],
    b: Float[Array, " rows"],
    *,
    most: int,
    close: float,
) -> tuple[Float[Array, " columns"], Int32[Array, ""]]:
    """Solves `(Jᵀ J + damping) x = Jᵀ b` for a Jacobian whose products are `push(x)`, `J x`, and
    `pull(b)`, `Jᵀ b`, and returns the solution and the number of iterations.

    Conjugate gradients for least squares, which a `solve` with a rounded Jacobian preconditions
    (Carson, Higham and Pranesh, *Three-precision GMRES-based iterative refinement for least squares
    problems*, SIAM J. Sci. Comput. 42, 2020). Products are taken as they are: in the dtype of `b`.
    Rounded directions are not conjugate for long: each is followed to where it is lowest, so that
    none leads up, and the part of the previous one that it keeps is that of Polak and Ribière.

    They end after `most` iterations, or once the quadratic model falls by less than `close` of
    what it has fallen, divided by the number of the iteration (Nash and Nocedal, *A numerical study
    of the limited memory BFGS method and the truncated-Newton method*, SIAM J. Optim. 1, 1991), or
    where by the preconditioner `_SURE` times as little is left to fall.
    """
    tiny = jnp.finfo(b.dtype).tiny

    def going(carry):
        i, *_, gamma, fell, total = carry
        times = i.astype(total.dtype)
        return (i == 0) | (i < most) & (times * fell > close * total) & (
            gamma > _SURE * close * total
        )

    def again(carry):
        i, x, b, s, p, gamma, _, total = carry
        i += 1
        q = push(p)
        along = (s @ p) / jnp.maximum(q @ q + damping * (p @ p), tiny)
        fell = along * (s @ p)
        x, b = x + along * p, b - along * q
        old, s = s, pull(b) - damping * x
        z = solve(s)
        kept = jnp.maximum(z @ (s - old), 0) / jnp.maximum(gamma, tiny)
        return i, x, b, s, z + kept * p, s @ z, fell, total + fell

    s = pull(b)
    z = solve(s)
    one = jnp.ones((), b.dtype)  # nothing has fallen yet
    start = (jnp.array(0, jnp.int32), jnp.zeros_like(s), b, s, z, s @ z, one, 0 * one)
    i, x, *_ = lax.while_loop(going, again, start)
    return x, i

"""Conjugate gradients preconditioned by leading directions: no matrix of rows² or parameters²."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import dtypes, lax
from jaxtyping import Array, Float

from ..precision._tree import select_tree
from ._gram import Reflector, conjugate_gradients
from ._residuals import Linearized
from ._search import CLOSE, Solve


_BLOCK, _ROWS = 2**21, 16
"""The number of entries in a block of the Jacobian, and the smallest number of its rows."""

_EXAMPLES, _WORK = 256, 2**25
"""The smallest number of examples that are evaluated at a time, and that of examples times
parameters. What is kept of an example is small compared with the directions."""


def examples_at_a_time(parameters: int) -> int:
    return max(_EXAMPLES, _WORK // parameters)


@dataclasses.dataclass(frozen=True)
class LowRank:
    """Approximates `Jᵀ J` by `F Fᵀ`, where `F Fᵀ = Jᵀ J V (Vᵀ Jᵀ J V)⁻¹ Vᵀ Jᵀ J` for leading
    directions `V` that are tracked from step to step (Nyström's approximation; Frangella, Tropp
    and Udell, *Randomized Nyström preconditioning*, SIAM J. Matrix Anal. Appl. 44, 2023).

    **Attributes:**

    - `squares`: the squared norms of the columns of `J`.
    - `factor`: `F`, which spans what `Jᵀ J V` does.
    - `vectors`, `values`: the eigenvectors of `Fᵀ F`, and its eigenvalues, which are those of
        `Jᵀ J`, approximately.
    """

    at: Linearized
    squares: Float[Array, " parameters"]
    factor: Float[Array, "parameters leading"]
    vectors: Float[Array, "leading leading"]
    values: Float[Array, " leading"]
    leading: Reflector
    refinements: int

    @classmethod
    def sketched(cls, at: Linearized, leading: Reflector, refinements: int) -> "LowRank":
        rows, columns = at.shape
        count = min(at.longest, math.ceil(rows / max(_BLOCK // columns, _ROWS)))
        compute, blocks = at.rows(
            count, "float64" if at.residuals.jacobian == "float64" else "float32"
        )
        directions = leading.spans()
        squares, powered, core = _sketch(compute, blocks, directions)
        size = jnp.diagonal(core)
        eps = jnp.finfo(core.dtype).eps
        with jax.default_matmul_precision("highest"):
            raised = core + jnp.diag(len(core) * eps * size + jnp.finfo(core.dtype).tiny)
            lower = jnp.linalg.cholesky(raised)
            turn = {"left_side": False, "lower": True, "transpose_a": True}
            factor = lax.linalg.triangular_solve(
                lower, powered, **turn
            )  # no transpose of `powered`
            values, vectors = jnp.linalg.eigh(factor.T @ factor)
        return cls(at, squares, factor, vectors, values, leading, refinements)

    def next_leading(self) -> Reflector:
        """Takes a step of the power method. If it is not finite, returns the directions before."""
        new = Reflector.spanning(self.factor.astype(self.leading.y.dtype))
        return select_tree(jnp.all(jnp.isfinite(new.t)), new, self.leading)

    def factored(self, damping: Float[Array, ""]) -> Solve:
        at, most = self.at, max(1, self.refinements)
        direct = self._direct(damping)
        return lambda b, s: conjugate_gradients(
            at.push,
            at.pull,
            direct,
            damping,
            b,
            s,
            self.squares,
            most=most,
            close=CLOSE[at.residuals.forward],
        )

    def _direct(self, damping: Float[Array, ""]) -> Callable[[Array], Array]:
        """Returns a function that multiplies by the inverse of `F Fᵀ + damping` along `F`, and of
        the smallest value plus `damping` elsewhere."""
        factor, values = self.factor, jnp.maximum(self.values, jnp.finfo(self.values.dtype).tiny)
        damping = damping.astype(values.dtype)
        rest = 1 / (values[0] + damping)
        share = (1 / (values + damping) - rest) / values
        spread = (self.vectors * share[None]) @ self.vectors.T

        def solve(s):
            x = s.astype(values.dtype)
            return (rest * x + factor @ (spread @ (x @ factor))).astype(s.dtype)

        return solve


def _sketch(compute: Callable, blocks: Any, directions: Float[Array, "columns leading"]):
    """Returns the squared norms of the columns of `J`, `Jᵀ J V` and `Vᵀ Jᵀ J V`."""
    wide = dtypes.canonicalize_dtype("float64")
    directions = directions.astype(wide)

    def add(sums, block):
        jac = compute(block)
        squares, powered, core = sums
        with jax.default_matmul_precision("highest"):
            along = jac.astype(wide) @ directions
            powered = powered + jac.astype(wide).T @ along
            core = core + along.T @ along
        return (squares + jnp.sum(jac**2, axis=0).astype(wide), powered, core), None

    columns, several = directions.shape
    start = (
        jnp.zeros(columns, wide),
        jnp.zeros((columns, several), wide),
        jnp.zeros((several,) * 2, wide),
    )
    return lax.scan(add, start, blocks)[0]

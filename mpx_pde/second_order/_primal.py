"""The system in the space of parameters: `Jᵀ J`, for no more parameters than residuals."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from ._gram import Reflector, Sums, conjugate_gradients, factored, next_leading, summed
from ._residuals import Linearized
from ._search import CLOSE, Solve


_BLOCK, _ROWS = 2**21, 1024
"""The number of entries in a block of the Jacobian, which a CPU's cache holds, and the smallest
number of rows, which keeps a GPU busy."""


def count(rows: int, columns: int, examples: int) -> int:
    """Returns the number of blocks of a Jacobian, of which each has at least one example."""
    return min(examples, max(1, math.ceil(rows / max(_BLOCK // columns, _ROWS))))


@dataclasses.dataclass(frozen=True)
class Primal:
    """Sums `Jᵀ J` over blocks of the examples, factorizes it, and solves by conjugate gradients if
    the Jacobian is narrower than float64."""

    at: Linearized
    sums: Sums
    leading: Reflector
    solver: Any
    refinements: int

    @classmethod
    def summed(cls, at: Linearized, leading: Reflector, solver: Any, refinements: int) -> "Primal":
        compute, blocks = at.rows(count(*at.shape, at.longest))
        sums = summed(compute, blocks, leading, at.residuals.jacobian)
        return cls(at, sums, leading, solver, refinements)

    @property
    def squares(self) -> Float[Array, " parameters"]:
        return self.sums.squares

    def next_leading(self) -> Reflector:
        return next_leading(self.sums, self.leading)

    def factored(self, damping: Float[Array, ""]) -> Solve:
        at, jacobian = self.at, self.at.residuals.jacobian
        narrow = damping.astype(self.squares.dtype)
        direct = factored(self.sums, self.leading, narrow, self.solver, jacobian)
        if jacobian == "float64" or not self.refinements:
            return lambda b, s: (direct(s), jnp.array(0, jnp.int32))
        most, close = self.refinements, CLOSE[at.residuals.forward]
        return lambda b, s: conjugate_gradients(
            at.push, at.pull, direct, damping, b, s, self.squares, most=most, close=close
        )

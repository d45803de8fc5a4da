"""Chooses the space that a step is solved in, by counted operations and memory."""

import dataclasses

from ._gram import WIDE


METHODS = ("primal", "dual", "low_rank")
MEMORY = 2.0**34
"""The memory in bytes that matrices of a step may take by default."""

_COPIES = 3
"""A matrix, its factor, and the next factor while the damping grows."""

_SLOWER = 1.5
"""The time of an operation of the primal method in float64, relative to the dual one, which adds no
blocks up. On a CPU 1.1 to 1.6, for 300 to 1,200 parameters and residuals."""

_LEADING, _LEADING_IN_DUAL, _LEADING_IN_LOW_RANK = 192, 128, 64
"""The number of leading directions of a Jacobian that are treated separately from the rest of it.
For a wave equation at 1e-5 (1,001 parameters, relative damping 1e-13), 64 directions leave 100
iterations of conjugate gradients in the primal system, and 192 leave 4."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """The method that steps of one size take, and why.

    **Attributes:**

    - `method`: `"primal"`, `"dual"` or `"low_rank"`.
    - `rows`, `parameters`: the size of the Jacobian.
    - `operations`: multiplications in the products and the factorization of a step, by method.
    - `memory`: bytes of the matrices that a step keeps at a time, by method.
    - `reason`: a sentence.
    """

    method: str
    rows: int
    parameters: int
    operations: dict[str, float]
    memory: dict[str, float]
    reason: str

    def __repr__(self) -> str:
        rows = [
            f"  {name:<9} {self.operations[name]:8.1e} operations, {_bytes(self.memory[name]):>8}"
            + ("  <- taken" if name == self.method else "")
            for name in METHODS
        ]
        size = f"{self.rows:,} residuals, {self.parameters:,} parameters"
        return "\n".join([f"{self.method}: {self.reason} ({size})", *rows])


def chosen(asked: str, jacobian: str, memory: float, rows: int, parameters: int) -> Choice:
    """Returns the method that was `asked` for, or for `"auto"` the one of the fewest operations
    whose matrices fit into `memory` bytes."""
    narrow = jacobian != "float64"
    operations = {
        "primal": rows * parameters**2 / 2 + parameters**3 / 6,
        "dual": rows**2 * parameters / 2 + rows**3 / 6,
        "low_rank": 3.0 * rows * parameters * _LEADING_IN_LOW_RANK,
    }
    space = {
        "primal": _space(parameters, narrow),
        "dual": _space(rows, narrow),
        "low_rank": 28.0 * parameters * _LEADING_IN_LOW_RANK,
    }
    if asked != "auto":
        return Choice(asked, rows, parameters, operations, space, "as asked for")
    slower = 1.0 if narrow else _SLOWER
    small = "primal" if slower * operations["primal"] <= operations["dual"] else "dual"
    few = "parameters" if small == "primal" else "residuals"
    if space[small] <= memory:
        method = small
        reason = f"of the two matrices, the one of {few}² takes fewer operations"
    else:
        method = "low_rank"
        reason = f"a matrix of {few}² takes more than {_bytes(memory)}"
    return Choice(method, rows, parameters, operations, space, reason)


def leading_columns(method: str, parameters: int, narrow: bool, memory: float = MEMORY) -> int:
    """Returns the number of leading directions that a state holds. The number of rows is not known
    yet, but if `JᵀJ` fits into `memory`, the smaller of the two matrices does."""
    most = {
        "primal": _LEADING * narrow,
        "dual": _LEADING_IN_DUAL * narrow,
        "low_rank": _LEADING_IN_LOW_RANK,
    }
    many = _space(parameters, narrow) > memory
    most["auto"] = (_LEADING_IN_DUAL if many else _LEADING) * narrow
    if many:  # `low_rank` may be needed
        most["auto"] = max(most["auto"], _LEADING_IN_LOW_RANK)
    return min(most[method], max(parameters // 4, method == "low_rank"))


def leading_in_dual(columns: int, rows: int) -> int:
    """Returns how many of the leading directions a dual system treats separately."""
    return min(columns, _LEADING_IN_DUAL, rows // 4)


def _space(size: int, narrow: bool) -> float:
    """Returns the bytes that a Gram matrix and its factors take."""
    entry = 4 if narrow and size >= WIDE else 8
    return float(_COPIES * entry * size**2)


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} GB"

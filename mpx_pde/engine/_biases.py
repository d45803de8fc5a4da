"""Recognizes equations in which a value meets an array that does not depend on the point, such as a
bias. The gradient of the array is a sum over points."""

from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from ..program import _tables as tables
from ._storage import DEEP, Storage
from .taylor._jets import Jet


def is_biased(eqn: JaxprEqn, operands: Sequence[Any], halves: Sequence[bool]) -> bool:
    """Returns whether an equation adds an array that does not depend on the point, such as a bias,
    to an operand that is half according to `halves`."""
    x = _met_by_an_array(eqn, operands, tables.ADDITIONS)
    return x is not None and any(h for y, h in zip(operands, halves, strict=True) if y is x)


def _met_by_an_array(eqn: JaxprEqn, operands: Sequence[Any], names: Collection[str]) -> Jet | None:
    """Returns the operand that depends on the point, in an equation named in `names` whose other
    operand is an array that does not; `None` for others. A scalar is not an array here."""
    moving = [x for x in operands if isinstance(x, Jet)]
    others = [x for x in operands if isinstance(x, jax.Array) and x.ndim]
    alike = len(operands) == 2 and len(moving) == len(others) == 1
    return moving[0] if alike and eqn.primitive.name in names else None


def is_weighted(
    eqn: JaxprEqn, operands: Sequence[Any], stages: Sequence[int | None], storage: Storage
) -> bool:
    """Returns whether an equation multiplies or adds a value of stage `DEEP` in the compute dtype
    and an array that does not depend on the point, as a norm does with its weight and its bias.
    `False` if values are not stored in another dtype than that."""
    x = _met_by_an_array(eqn, operands, tables.ADDITIONS | tables.MULTIPLICATIONS)
    narrows = storage.dtype not in (None, storage.compute)
    if not narrows or x is None or x.primal.dtype != storage.compute:
        return False
    return any(y is x and stage == DEEP for y, stage in zip(operands, stages, strict=True))

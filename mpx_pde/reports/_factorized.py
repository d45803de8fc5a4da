"""Finds factorizations of matrices in half precision, which JAX cannot compile."""

from collections.abc import Iterator
from typing import NamedTuple

from jax.extend.core import ClosedJaxpr, JaxprEqn

from ..program import _tables as tables
from ..program._jaxpr import bodies_of, close, jaxprs_in
from ..program._lines import line_of
from ..program._products import HALVES
from ._formulas import dtype_of


_COMPILED = {"triangular_solve", "custom_linear_solve"}
"""Solves that JAX compiles in half precision."""


class Factorized(NamedTuple):
    """A factorization or solve in half precision: its line, its primitive and the half type."""

    line: str
    name: str
    dtype: str


def factorizations(closed: ClosedJaxpr) -> list[Factorized]:
    """Returns the factorizations and solves in half precision, at any depth, each line once."""
    return list(dict.fromkeys(_factorizations(closed, ())))


def _factorizations(closed: ClosedJaxpr, around: tuple[JaxprEqn, ...]) -> Iterator[Factorized]:
    for eqn in closed.jaxpr.eqns:
        name, dtype = eqn.primitive.name, dtype_of(eqn.invars)
        if name in tables.SOLVES - _COMPILED and dtype in HALVES:
            yield Factorized(line_of(eqn, around), name, dtype)
        for body in bodies_of(eqn) or map(close, jaxprs_in(eqn)):
            yield from _factorizations(body, (*around, eqn))

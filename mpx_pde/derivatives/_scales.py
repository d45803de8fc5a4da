"""Access of a derivative function to its derivative scaling."""

import abc
from typing import Any

import equinox as eqx
from jaxtyping import Array, Float32, Int32

from ._rules import Rule
from ._strategies import AbstractStrategy


class AbstractScales(eqx.Module):
    """Scales as they are in one step, and a place for what is counted there.

    How they follow from step to step is the affair of [`mpx_pde.DerivativeScaling`][], which has
    methods that evaluate derivatives. So these ask for no more than this.
    """

    exponents: eqx.AbstractVar[Int32[Array, "*batch scalers"]]
    counts: eqx.AbstractVar[Float32[Array, "*batch rows columns"]]
    strategy: eqx.AbstractVar[AbstractStrategy]
    rule: eqx.AbstractVar[Rule]

    @property
    @abc.abstractmethod
    def active(self) -> bool:
        """Returns whether anything is scaled."""

    def shift(self, row: int) -> Any:
        """The exponent of two by which what a row counts is scaled."""
        return self.strategy.rows[row].shift(self.exponents)

"""Arrays of a program that are known while it is traced, because they depend on no argument."""

import functools as ft
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import JaxprEqn

from ..program import _tables as tables
from ..program._flat import Constant
from ..program._jaxpr import aval_of, is_key, own_bind


Known = Callable[[], np.ndarray]
"""A function that computes an array which depends on no argument of the program."""

LARGEST = 2**24
"""The largest known array that is looked at."""


def constant(x: Any) -> Known | None:
    """Returns an array as a known one, or `None` for a tracer and for keys of random numbers."""
    return None if isinstance(x, Tracer) or is_key(x) else lambda: np.asarray(x)


def value_of(x: int | Constant, known: Mapping[int, Known | None]) -> Known | None:
    """Returns an operand of an equation as a known array, given the variables that are `known`."""
    return constant(x.value) if isinstance(x, Constant) else known.get(x)


def results(eqn: JaxprEqn, given: Sequence[Known | None]) -> list[Known | None]:
    """Returns the results of an equation, which are known if all its operands are."""
    name = eqn.primitive.name
    unknown = any(x is None for x in given) or any(is_key(aval_of(v)) for v in eqn.outvars)
    if eqn.effects or unknown or name in tables.OPAQUE:
        return [None] * len(eqn.outvars)
    if name in tables.LAYOUT - tables.MOVES:
        return [*given]  # on other devices, and no other values

    @ft.cache
    def found():
        with jax.ensure_compile_time_eval():
            return own_bind(eqn, [jnp.asarray(x()) for x in given if x is not None])

    return [lambda i=i: np.asarray(found()[i]) for i in range(len(eqn.outvars))]

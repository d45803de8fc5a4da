"""Finds exponentials of complex numbers whose phases were rounded to half precision before."""

import jax.numpy as jnp
import numpy as np

from ..precision._dtypes import is_half
from ..program import _tables as tables
from ..program._flat import Flat
from ..program._jaxpr import aval_of
from ..program._lines import line_of


_POWERS = {"exp", "exp2", "pow", "integer_pow", "cumprod"}


def rounded_phase(flat: Flat) -> str | None:
    """Returns the line of the first exponential or power of complex numbers that were computed from
    half arguments without a product, such as the poles of a state-space model; `None` if there is
    none.

    A phase is rounded relative to its size, and only its rest modulo 2π counts. The output of a
    network is not looked at: behind a product, phases are usually of order one.
    """
    dtype_of = lambda atom: getattr(aval_of(atom), "dtype", np.dtype(bool))
    rounded, behind = set[int](), set[int]()
    for step in flat.steps:
        if not behind.isdisjoint(step.variables) or step.name in tables.PRODUCTS:
            behind.update(step.outputs)
            continue
        narrows = step.name == "convert_element_type" and is_half(dtype_of(step.eqn.outvars[0]))
        if not narrows and rounded.isdisjoint(step.variables):
            continue
        base = step.eqn.invars[0]
        if step.name in _POWERS and jnp.issubdtype(dtype_of(base), jnp.complexfloating):
            return line_of(step.eqn, step.calls)
        rounded.update(step.outputs)
    return None

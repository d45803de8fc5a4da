"""Random roundings in float64, for the judge of random programs.

Each operation of a program and of its derivatives rounds in full. This reveals cancellation inside
a statement, a loop or a rule of JAX. The primitive `rounded` marks values that a program stores in
half.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from mpx_pde.program import _tables as tables


class Format(NamedTuple):
    """The size of a rounding: `unit` relative to the number, or `least`, but never beyond zero."""

    unit: float
    least: float = 0.0


def format_of(dtype):
    found = jnp.finfo(dtype)
    # Excludes subnormal numbers, which some devices round to zero.
    return Format(float(found.eps) / 2, float(found.tiny) / 2)


ROUNDS = tables.FULL | tables.PRODUCTS | tables.ARITHMETIC | tables.ELEMENTWISE | {"atan2"}
ROUNDS -= {"neg", "abs"}
"""Primitives whose results are rounded. Others move values or choose between them."""

DRAWN = 2**16


class Rounding:
    """Multiplies by 1 ± a rounding, with different signs each time.

    With `value`, what a model computes is rounded in that format, and only what the backward pass
    keeps is rounded in `half`. Cotangents are then full.
    """

    primitives = ROUNDS

    def __init__(self, rng, full, half, value=None):
        self.signs = rng.choice([-1.0, 1.0], DRAWN)
        self.formats = {"full": full, "kept": half}
        self.formats |= {"half": value or half, "cotangent": full if value else half}
        self.count = 0

    def __call__(self, x, kind="full"):
        if x.dtype.kind not in "fc":
            return x
        self.count += 1
        start = 7919 * self.count % max(DRAWN - x.size, 1)
        signs = np.resize(self.signs[start : start + x.size], x.shape)
        # With 64-bit types, a part of the program may be in float32. A change below a unit in the
        # last place would be rounded away.
        unit, least = self.formats[kind]
        unit = max(unit, float(jnp.finfo(x.dtype).eps))
        if least:
            unit = np.minimum(1.0, np.maximum(unit, least / np.maximum(np.abs(x), least)))
        return (x * (1 + unit * signs)).astype(x.dtype)


_rounded = Primitive("rounded")
_rounded.def_impl(lambda x, **_: x)
_rounded.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(_rounded, lambda _, x, **params: [x])
batching.primitive_batchers[_rounded] = lambda xs, dims, **ps: (_rounded.bind(*xs, **ps), dims[0])
# Derivatives and cotangents are stored and rounded on their own.
_BACK = {"half": "cotangent"}
ad.deflinear2(_rounded, lambda g, _, kind: [_rounded.bind(g, kind=_BACK.get(kind, kind))])


def rounded(x, kind="half"):
    """Marks a value that a program stores."""
    if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
        return x
    return _rounded.bind(jnp.asarray(x), kind=kind)

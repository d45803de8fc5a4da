"""How the magnitudes of an array are spread, as counts that add up over loops and devices.

Magnitudes are compared as bits: the order of non-negative floats is that of their bit patterns,
and a backend that flushes subnormals to zero does not flush integers.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def _bits(x: float) -> int:
    return int(np.float32(x).view(np.uint32))


_INFINITE = 0x7F800000

# By format: the smallest float32 that rounds to infinity, the smallest normal number, and the
# largest float32 that rounds to zero (half of the smallest subnormal: ties go to even).
_FORMATS = {
    "float16": (_bits(65520.0), _bits(2.0**-14), _bits(2.0**-25)),
    "bfloat16": (0x7F7F8000, _bits(2.0**-126), _bits(2.0**-134)),
}

# The exponents that the histogram tells apart: each binary order in the range of float16.
EDGES = (-126, -64, -48, -40, -32, *range(-28, 21), 24, 32, 48, 64, 96)

_THRESHOLDS = (
    1,
    _INFINITE,
    *(
        threshold
        for overflow, normal, zero in _FORMATS.values()
        for threshold in (overflow, normal, zero + 1)
    ),
    *(_bits(2.0**e) for e in EDGES),
)


def measure(x: Any) -> jax.Array:
    """A vector of uint32: size, largest finite and smallest non-zero magnitude (as bits), and for
    each threshold how many magnitudes reach it."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([jnp.real(x), jnp.imag(x)])
    x = lax.convert_element_type(x, np.dtype("float32"))
    bits = lax.bitcast_convert_type(x, np.dtype("uint32")) & np.uint32(0x7FFFFFFF)
    bits = bits.reshape(-1)
    finite = jnp.where(bits < np.uint32(_INFINITE), bits, np.uint32(0))
    present = jnp.where(bits > np.uint32(0), bits, np.uint32(_INFINITE))
    reached = jnp.sum(
        bits[:, None] >= np.asarray(_THRESHOLDS, np.uint32)[None, :], axis=0, dtype=np.uint32
    )
    head = jnp.stack(
        [
            jnp.full((), x.size, np.uint32),
            jnp.max(finite, initial=np.uint32(0)),
            jnp.min(present, initial=np.uint32(_INFINITE)),
        ]
    )
    return jnp.concatenate([head, reached])


def is_measured(aval: Any) -> bool:
    return jnp.issubdtype(getattr(aval, "dtype", np.int32), jnp.inexact) and aval.size > 0


def any_nonfinite(x: Any) -> jax.Array:
    return ~jnp.all(jnp.isfinite(x))


@dataclasses.dataclass(frozen=True)
class Loss:
    """The fractions of all values that a format loses.

    **Attributes:**

    - `overflow`: finite in float32, infinite in the format.
    - `subnormal`: below the smallest normal number, where digits are missing.
    - `zero`: not zero in float32, zero in the format.
    """

    overflow: float
    subnormal: float
    zero: float

    @property
    def total(self) -> float:
        return self.overflow + self.subnormal + self.zero


class Counts:
    """The sum of what `measure` returned for all executions of an equation."""

    def __init__(self):
        self.size = 0
        self.largest = 0
        self.smallest = _INFINITE
        self.reached = np.zeros(len(_THRESHOLDS), np.int64)
        self.sources = 0

    def add(self, vector: np.ndarray, source: bool) -> None:
        size, largest, smallest, *reached = (int(x) for x in vector)
        self.size += size
        self.largest = max(self.largest, largest)
        self.smallest = min(self.smallest, smallest)
        self.reached += np.asarray(reached, np.int64)
        self.sources += bool(source)

    @property
    def nonfinite(self) -> float:
        return self._fraction(self.reached[1])

    @property
    def zeros(self) -> float:
        return self._fraction(self.size - self.reached[0])

    def _fraction(self, count: Any) -> float:
        return float(count) / self.size if self.size else 0.0

    def loss(self, name: str) -> Loss:
        i = 2 + 3 * list(_FORMATS).index(name)
        overflow, normal, present = (int(x) for x in self.reached[i : i + 3])
        return Loss(
            overflow=self._fraction(overflow - self.reached[1]),
            subnormal=self._fraction(present - normal),
            zero=self._fraction(self.reached[0] - present),
        )

    def exponents(self) -> tuple[float, float] | None:
        """The base-2 logarithms of the smallest and of the largest magnitude; `None` if nothing
        is finite and non-zero."""
        if self.largest == 0:
            return None
        smallest, largest = (
            float(np.uint32(x).view(np.float32)) for x in (self.smallest, self.largest)
        )
        return math.log2(smallest), math.log2(largest)

    def histogram(self) -> np.ndarray:
        """Fractions per interval of exponents, between `EDGES`; those outside come first and
        last."""
        at_least = np.array([self.reached[0], *self.reached[-len(EDGES) :], self.reached[1]])
        return -np.diff(at_least) / max(self.size, 1)

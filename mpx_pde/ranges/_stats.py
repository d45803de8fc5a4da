"""The spread of the magnitudes of an array, as counts that add up over loops and devices.

Counted on the host. Magnitudes of float32 are compared as bits: the order of non-negative floats
is that of their bit patterns, and a thread that flushes subnormals to zero does not flush integers.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np


# By format: the smallest number that rounds to infinity, the smallest normal number, and the
# largest that rounds to zero (half of the smallest subnormal: ties go to even).
_FORMATS = {
    "float16": (65520.0, 2.0**-14, 2.0**-25),
    "bfloat16": (2.0**128 - 2.0**119, 2.0**-126, 2.0**-134),
}

# The exponents that the histogram tells apart: each binary order in the range of float16.
EDGES = (-126, -64, -48, -40, -32, *range(-28, 21), 24, 32, 48, 64, 96)

# The limits that a magnitude must exceed or reach to be counted.
_PRESENT, _INFINITE = 0, 1
_SPECIAL = (
    ("above", 0.0),
    ("from", math.inf),
    *(
        limit
        for overflow, normal, zero in _FORMATS.values()
        for limit in (("from", overflow), ("from", normal), ("above", zero))
    ),
)

# So that temporary arrays stay small beside those that are measured.
_BLOCK = 1 << 22


def _next(x: float, dtype: type) -> float:
    return float(np.nextafter(dtype(x), dtype(math.inf)))


def _limits(dtype: type) -> np.ndarray:
    """Returns the smallest numbers of a dtype that pass `_SPECIAL`."""
    return np.array([_next(x, dtype) if how == "above" else x for how, x in _SPECIAL], dtype)


# The smallest subnormal is written as bits: a thread may flush the result of `nextafter`.
_BITS = _limits(np.float32).view(np.uint32)
_BITS[_PRESENT] = 1
_WIDE = _limits(np.float64)


def _counts_of_bits(magnitudes: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Counts the magnitudes that reach each of `_SPECIAL` and each of `EDGES`, and the NaNs."""
    special, edges, nans = np.zeros(len(_BITS), np.int64), np.zeros(len(EDGES), np.int64), 0
    for start in range(0, magnitudes.size, _BLOCK):
        bits = magnitudes[start : start + _BLOCK].view(np.uint32)
        special += [np.count_nonzero(bits >= limit) for limit in _BITS]
        nans += int(np.count_nonzero(bits > _BITS[_INFINITE]))
        exponents = np.bincount(bits >> np.uint32(23), minlength=256)
        reached = np.cumsum(exponents[::-1])[::-1]
        edges += reached[np.array(EDGES) + 127]
    return special, edges, nans


def _counts_of_values(magnitudes: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Counts the same for float64. NaNs are sorted behind infinity."""
    ordered = np.sort(magnitudes)
    reached = lambda limits: ordered.size - np.searchsorted(ordered, limits)
    edges = reached(np.array([2.0**e for e in EDGES]))
    return reached(_WIDE), edges, int(np.count_nonzero(np.isnan(ordered)))


def is_measured(aval: Any) -> bool:
    return jnp.issubdtype(getattr(aval, "dtype", np.int32), jnp.inexact) and aval.size > 0


def is_finite(x: Any) -> bool:
    """Returns whether all of an array on the host is finite."""
    x = np.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return True
    exotic = x.dtype.kind not in "fc"
    return bool(np.all(np.isfinite(x.astype(np.float32) if exotic else x)))


def percent(fraction: float) -> str:
    """Formats a fraction as a percentage."""
    if fraction in (0, 1):
        return f"{100 * fraction:.0f} %"
    if fraction < 1e-3:
        return "<0.1 %"
    if fraction > 1 - 1e-3:
        return ">99.9 %"
    return f"{100 * fraction:.1f}".removesuffix(".0") + " %"


@dataclasses.dataclass(frozen=True)
class Lost:
    """The fractions of all values that a format loses.

    **Attributes:**

    - `overflow`: finite as measured, infinite in the format.
    - `subnormal`: below the smallest normal number, where digits are missing.
    - `zero`: not zero as measured, zero in the format.
    """

    overflow: float
    subnormal: float
    zero: float

    @property
    def total(self) -> float:
        return self.overflow + self.subnormal + self.zero


class Counts:
    """The sum of what all executions of an equation gave."""

    def __init__(self):
        self.size = 0
        self.largest = 0.0
        self.smallest = math.inf
        self.special = np.zeros(len(_SPECIAL), np.int64)
        self.edges = np.zeros(len(EDGES), np.int64)
        self.nan_count = 0
        self.sources = 0

    def add(self, array: Any, source: bool = False) -> None:
        """Counts the values of an array; `source` if it is not finite and its operands are."""
        x = np.asarray(array)
        if x.dtype.kind == "c":
            x = np.stack([np.real(x), np.imag(x)])
        if x.dtype not in (np.float32, np.float64):
            x = x.astype(np.float32)
        magnitudes = np.abs(np.ascontiguousarray(x).reshape(-1))
        count = _counts_of_values if x.dtype == np.float64 else _counts_of_bits
        special, edges, nans = count(magnitudes)
        present = magnitudes[(magnitudes > 0) & (magnitudes < np.inf)]
        self.size += magnitudes.size
        self.special += special
        self.edges += edges
        self.nan_count += nans
        self.sources += bool(source)
        if present.size:
            self.largest = max(self.largest, float(present.max()))
            self.smallest = min(self.smallest, float(present.min()))

    def merge(self, other: "Counts") -> None:
        self.size += other.size
        self.largest = max(self.largest, other.largest)
        self.smallest = min(self.smallest, other.smallest)
        self.special += other.special
        self.edges += other.edges
        self.nan_count += other.nan_count
        self.sources += other.sources

    @property
    def nonfinite(self) -> float:
        return self._fraction(self.special[_INFINITE])

    @property
    def nans(self) -> float:
        return self._fraction(self.nan_count)

    @property
    def zeros(self) -> float:
        return self._fraction(self.size - self.special[_PRESENT])

    def _fraction(self, count: Any) -> float:
        return float(count) / self.size if self.size else 0.0

    def loss(self, name: str) -> Lost:
        i = 2 + 3 * list(_FORMATS).index(name)
        overflow, normal, present = (int(x) for x in self.special[i : i + 3])
        return Lost(
            overflow=self._fraction(overflow - self.special[_INFINITE]),
            subnormal=self._fraction(present - normal),
            zero=self._fraction(self.special[_PRESENT] - present),
        )

    def exponents(self) -> tuple[float, float] | None:
        """Returns the base-2 logarithms of the smallest and of the largest magnitude, or `None` if
        nothing is finite and non-zero.
        """
        if self.largest == 0:
            return None
        return math.log2(self.smallest), math.log2(self.largest)

    def histogram(self) -> np.ndarray:
        """Fractions per interval of exponents, between `EDGES`; those outside come first and
        last."""
        at_least = np.array([self.special[_PRESENT], *self.edges, self.special[_INFINITE]])
        return -np.diff(at_least) / max(self.size, 1)

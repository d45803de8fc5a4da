"""Counts the magnitudes in an array. The counts can be added up over loops and devices.

Counting happens on the host. Magnitudes are compared by their bits. Non-negative floats have the
same order as their bit patterns, and a thread that flushes subnormals to zero does not flush
integers.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np


# For each format: the smallest number that rounds to infinity, the smallest normal number, and the
# largest number that rounds to zero (half of the smallest subnormal: ties go to even).
_FORMATS = {
    "float16": (65520.0, 2.0**-14, 2.0**-25),
    "bfloat16": (2.0**128 - 2.0**119, 2.0**-126, 2.0**-134),
}

# The exponents between the intervals of the histogram. In float16's range each has its own.
EDGES = (-126, -64, -48, -40, -32, *range(-28, 21), 24, 32, 48, 64, 96)

# The limits by which magnitudes are counted, and whether a magnitude must be above the limit to
# count, or may be equal to it. NaNs are above infinity.
_LIMITS = [0.0, math.inf, math.inf, *itertools.chain(*_FORMATS.values())]
_ABOVE = [True, False, True, *[False, False, True] * len(_FORMATS)]


def _bits(dtype: str) -> np.ndarray:
    """Returns the bits of the smallest numbers of a dtype that pass each of `_LIMITS`. The next
    larger number has the next larger bits.
    """
    values = np.array(_LIMITS, dtype)
    return values.view(f"u{values.itemsize}") + np.array(_ABOVE)


# Computed on import, because a thread may flush subnormal numbers.
_BITS = {dtype: _bits(dtype) for dtype in ("float32", "float64")}

# The number of values counted at a time, so that temporary arrays stay small.
_BLOCK = 1 << 22


def is_measured(aval: Any) -> bool:
    return jnp.issubdtype(getattr(aval, "dtype", np.int32), jnp.inexact) and aval.size > 0


def is_finite(x: Any) -> bool:
    """Returns whether all entries of an array on the host are finite."""
    x = np.asarray(x)
    return not jnp.issubdtype(x.dtype, jnp.inexact) or bool(np.all(np.isfinite(x)))


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

    - `overflow`: values that are finite as measured and infinite in the format.
    - `subnormal`: values below the smallest normal number, which lose digits.
    - `zero`: values that are not zero as measured and zero in the format.
    """

    overflow: float
    subnormal: float
    zero: float

    @property
    def total(self) -> float:
        return self.overflow + self.subnormal + self.zero


def _cancels(squares: Any) -> float:
    """Returns by how many powers of two the terms of a sum are larger than the sum, or 0 for what
    is no sum, or is zero or not finite."""
    terms, total = np.broadcast_to(squares, 2)
    if total == 0 or not np.isfinite(terms):
        return 0.0
    return float(max(0.0, np.log2(terms / total) / 2))


@dataclasses.dataclass(frozen=True)
class Counts:
    """Counts of the values of an equation. They can be added up over its executions. They hold the
    numbers of values that pass each of `_LIMITS` and that reach each of `EDGES`. `first` holds the
    times at which each format first overflowed, and at which finite operands first gave a result
    that is not finite (`"nonfinite"`).
    """

    size: int = 0
    passed: Any = 0
    edges: Any = 0
    sources: int = 0
    largest: float = 0.0
    smallest: float = math.inf
    first: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    squares: Any = 0.0

    def __add__(self, other: "Counts") -> "Counts":
        both = self.first.keys() | other.first.keys()
        found = {k: [x.first[k] for x in (self, other) if k in x.first] for k in both}
        return Counts(
            self.size + other.size,
            self.passed + other.passed,
            self.edges + other.edges,
            self.sources + other.sources,
            max(self.largest, other.largest),
            min(self.smallest, other.smallest),
            {k: min(times) for k, times in found.items()},
            self.squares + other.squares,
        )

    @classmethod
    def of(
        cls, array: Any, time: tuple[int, ...], source: bool = False, squares: Any = None
    ) -> "Counts":
        """Counts the values of an array, float32 or wider, at a `time`. `source` says that the
        array is not finite although its operands are. `squares` are those of a sum, in float32.
        """
        x = np.asarray(array)
        if x.dtype.kind == "c":
            x = np.stack([np.real(x), np.imag(x)])
        magnitudes = np.abs(np.ascontiguousarray(x).reshape(-1))
        info = np.finfo(x.dtype)
        limits = _BITS[x.dtype.name]
        passed = np.zeros(len(limits), np.int64)
        exponents = np.zeros(2 * info.maxexp, np.int64)
        for start in range(0, magnitudes.size, _BLOCK):
            bits = magnitudes[start : start + _BLOCK].view(limits.dtype)
            passed += [np.count_nonzero(bits >= limit) for limit in limits]
            found = (bits >> info.nmant).astype(np.int64)
            exponents += np.bincount(found, minlength=len(exponents))
        reached = np.cumsum(exponents[::-1])[::-1]
        edges = reached[np.array(EDGES) + info.maxexp - 1]
        present = magnitudes[(magnitudes > 0) & (magnitudes < np.inf)]
        largest = float(present.max(initial=0.0))
        smallest = float(present.min(initial=math.inf))
        over = dict(zip(_FORMATS, passed[3::3] > passed[1], strict=True))
        first = {name: time for name, does in {**over, "nonfinite": source}.items() if does}
        sums = 0.0 if squares is None else np.asarray(squares, np.float64)
        return cls(magnitudes.size, passed, edges, int(source), largest, smallest, first, sums)

    def summary(self) -> dict[str, Any]:
        """Returns the statistics for a row of the report. Its histogram has the fractions in the
        intervals of exponents between `EDGES`; the fractions outside come first and last.
        """
        present, infinite, nans, *limits = self.passed.tolist()

        def fraction(count):
            return count / self.size if self.size else 0.0

        of_formats = zip(_FORMATS, np.reshape(limits, (-1, 3)).tolist(), strict=True)
        lost = {
            name: Lost(
                fraction(over - infinite), fraction(nonzero - normal), fraction(present - nonzero)
            )
            for name, (over, normal, nonzero) in of_formats
        }
        exponents = (math.log2(self.smallest), math.log2(self.largest)) if self.largest else None
        at_least = [present, *self.edges, infinite]
        return {
            "size": self.size,
            "exponents": exponents,
            "zeros": fraction(self.size - present),
            "nonfinite": fraction(infinite),
            "nans": fraction(nans),
            "creates_nonfinite": self.sources > 0,
            "first": self.first,
            "cancels": _cancels(self.squares),
            "histogram": tuple(fraction(n) for n in (-np.diff(at_least)).tolist()),
            **lost,
        }

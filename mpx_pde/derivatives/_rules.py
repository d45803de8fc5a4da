"""The update rule of derivative scales.

Everything is an exponent of two: int32 vectors with an entry for each scaler, or for each row of
histograms.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from .._dtypes import FLOAT16_MAX
from ._probe import HIGHEST, LOWEST


_TOP = int(np.log2(FLOAT16_MAX))
"""The largest exponent in float16, 15."""

SMALLEST_NORMAL = -14
"""The smallest exponent at which float16 has all of its digits."""


class State(NamedTuple):
    """The state that is carried from step to step, with an entry for each scaler."""

    exponents: Int32[Array, "*batch scalers"]
    tracker: Int32[Array, "*batch scalers"]
    caution: Int32[Array, "*batch scalers"]


class Rule(NamedTuple):
    """The constants of an update rule."""

    step: int
    lowest: tuple[int, ...]
    highest: tuple[int, ...]
    growth_interval: int
    recover_threshold: int
    recover_growth_interval: int
    margin: int
    members: tuple[tuple[bool, ...], ...]
    """Which scalers enter each row."""
    orders: tuple[int, ...]
    """How many factors of scale each row carries."""

    def of_scalers(self, rows: Bool[Array, "*batch rows"]) -> Bool[Array, "*batch scalers"]:
        """Returns, for each scaler, whether this holds for any row that it enters."""
        members = np.array(self.members, bool)[(None,) * (rows.ndim - 1)]
        return jnp.any(rows[..., None] & members, axis=-2)


class _Seen(NamedTuple):
    """The overflows and underflows that a histogram shows for each scaler."""

    lost: Bool[Array, " scalers"]
    seen: Bool[Array, " scalers"]
    starved: Bool[Array, " scalers"]
    """Whether derivatives vanish below float16 that a larger scale would save, and nothing comes
    near overflow by it."""
    crowded: Bool[Array, " scalers"]
    """Whether derivatives are nearer to overflow than the margin."""


def _look(rule: Rule, counts: Float32[Array, "rows columns"]) -> _Seen:
    buckets = counts[:, 1:-1] > 0
    exponent = np.arange(LOWEST, HIGHEST + 1, dtype=np.int32)[None, :]
    top = jnp.max(jnp.where(buckets, exponent, LOWEST - 1), axis=1)
    known, any_seen = jnp.any(buckets, axis=1), jnp.any(counts > 0, axis=1)
    lost_rows = counts[:, -1] > 0
    # The largest values of a row decide: beside them, what else vanishes is rounding. A row of
    # zeros may have underflowed as a whole.
    below = any_seen & ~lost_rows & (top < SMALLEST_NORMAL + rule.margin)
    raised = top + np.array(rule.orders, np.int32) * rule.step
    full = known & (raised > _TOP - rule.margin)
    lost = rule.of_scalers(lost_rows)
    starved = rule.of_scalers(below) & ~rule.of_scalers(full) & ~lost
    crowded = rule.of_scalers(known & (top > _TOP - rule.margin))
    return _Seen(lost, rule.of_scalers(any_seen), starved, crowded)


def _clean_steps(rule: Rule, exponents, tracker, seen, lost):
    """The tracker, and whether it is time to grow."""
    interval = jnp.where(
        exponents <= rule.recover_threshold, rule.recover_growth_interval, rule.growth_interval
    )
    # A scaler that nothing was computed with has shown nothing.
    counted = tracker + (seen & ~lost).astype(jnp.int32)
    # Not `==`: a tracker that was restored beyond the interval fires as well.
    due = seen & ~lost & (counted >= interval)
    return jnp.where(lost | due, 0, counted), due


def adjusted(rule: Rule, counts: Float32[Array, "rows columns"], state: State) -> State:
    """Backoff on overflow, growth after an interval of clean steps, a shorter one where the scale
    is small (Xue et al., section 3.2).

    The paper stops at a scale of 1. Beyond it a scale follows the histogram: up, a step at a time,
    while derivatives vanish below float16, and back before they come near overflow. After an
    overflow `caution` keeps it from rising so for an interval of clean steps.
    """
    exponents, tracker, caution = state
    lowest, highest = np.array(rule.lowest, np.int32), np.array(rule.highest, np.int32)
    see = _look(rule, counts)
    tracker, due = _clean_steps(rule, exponents, tracker, see.seen, see.lost)
    wary = caution > 0
    caution = jnp.where(see.lost, 1, jnp.where(due, 0, caution))
    shrunk = jnp.maximum(exponents - rule.step, jnp.minimum(exponents, lowest))
    grown = jnp.minimum(exponents + rule.step, jnp.maximum(exponents, highest))
    # Growth by the clock ends at 1.
    clocked = jnp.minimum(grown, jnp.maximum(exponents, 0))
    new = jnp.where(due, clocked, exponents)
    new = jnp.where(see.starved & ~wary, grown, new)
    new = jnp.where(see.crowded & (exponents > 0), jnp.maximum(shrunk, jnp.maximum(0, lowest)), new)
    return State(jnp.where(see.lost, shrunk, new), tracker, caution)

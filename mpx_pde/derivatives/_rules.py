"""How derivative scales follow what they see.

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

State = tuple[
    Int32[Array, "*batch scalers"], Int32[Array, "*batch scalers"], Int32[Array, "*batch scalers"]
]


class Rule(NamedTuple):
    """The constants of an update rule."""

    mode: str
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

    def of_scalers(self, rows: Bool[Array, " rows"]) -> Bool[Array, " scalers"]:
        """For each scaler, whether this holds for any row that it enters."""
        return jnp.any(rows[:, None] & np.array(self.members, bool), axis=0)


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


def paper(
    rule: Rule,
    counts: Float32[Array, "rows columns"],
    shifts: Int32[Array, " rows"],
    exponents: Int32[Array, " scalers"],
    tracker: Int32[Array, " scalers"],
    caution: Int32[Array, " scalers"],
) -> State:
    """Backoff on overflow, growth after an interval of clean steps, a shorter one where the scale
    is small (Xue et al., section 3.2)."""
    del shifts
    lowest, highest = np.array(rule.lowest, np.int32), np.array(rule.highest, np.int32)
    lost = rule.of_scalers(counts[:, -1] > 0)
    seen = rule.of_scalers(jnp.any(counts > 0, axis=1))
    tracker, due = _clean_steps(rule, exponents, tracker, seen, lost)
    shrunk = jnp.maximum(exponents - rule.step, jnp.minimum(exponents, lowest))
    grown = jnp.minimum(exponents + rule.step, jnp.maximum(exponents, highest))
    return jnp.where(lost, shrunk, jnp.where(due, grown, exponents)), tracker, caution


def predictive(
    rule: Rule,
    counts: Float32[Array, "rows columns"],
    shifts: Int32[Array, " rows"],
    exponents: Int32[Array, " scalers"],
    tracker: Int32[Array, " scalers"],
    caution: Int32[Array, " scalers"],
) -> State:
    """The largest scale at which last step's largest derivative would have stayed `margin` powers
    of two below overflow.

    Values inside the network can be larger than those that come out of it. So after an overflow
    that the histogram did not foretell, `caution` widens the margin, and an interval of clean
    steps narrows it again.
    """
    lowest, highest = np.array(rule.lowest, np.int32), np.array(rule.highest, np.int32)
    members = np.array(rule.members, bool)
    orders = np.array(rule.orders, np.int32)
    lost_rows = counts[:, -1] > 0
    lost = rule.of_scalers(lost_rows)
    seen = rule.of_scalers(jnp.any(counts > 0, axis=1))
    tracker, due = _clean_steps(rule, exponents, tracker, seen, lost)

    # The exponent of each row's largest value, unscaled; a row of zeros allows anything.
    buckets = counts[:, 1:-1] > 0
    exponent = np.arange(LOWEST, HIGHEST + 1, dtype=np.int32)[None, :]
    top = jnp.max(jnp.where(buckets, exponent, LOWEST - 1), axis=1)
    known = jnp.any(buckets, axis=1)
    widened = jnp.where(lost, caution + rule.step, jnp.where(due, caution - 1, caution))
    caution = jnp.maximum(widened, 0)
    # What each scaler may be for each row, if all scalers that enter the row share alike.
    free = _TOP - rule.margin - (top - shifts)
    allowed = jnp.floor_divide(free, orders)[:, None] - caution[None, :]
    anything = jnp.iinfo(jnp.int32).max
    allowed = jnp.min(jnp.where(known[:, None] & members, allowed, anything), axis=0)
    # Down at once, up by one step at a time.
    target = jnp.minimum(allowed, exponents + rule.step)
    target = jnp.where(lost, jnp.minimum(target, exponents - rule.step), target)
    target = jnp.clip(target, lowest, highest)
    return jnp.where(seen, target, exponents), tracker, caution

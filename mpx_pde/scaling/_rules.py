"""The update rule of derivative scales.

Scales are exponents of two: int32 vectors with an entry for each scaler, or for each row of
histograms.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, Shaped

from .._util._calls import called
from ..precision._dtypes import FLOAT16_MAX, check_integer
from ._checks import exponent_of, term_list
from ._probe import HIGHEST, LOWEST
from ._strategies import AbstractStrategy


_TOP = int(np.log2(FLOAT16_MAX))
"""The largest exponent in float16, 15."""

SMALLEST_NORMAL = -14
"""The smallest exponent at which float16 has all of its digits."""


_BELOW, _FINE, _FULL, _NEAR, _LOST = (1 << i for i in range(5))
"""Levels of values: near float16's subnormal numbers or zero; neither low nor high; so high that
the next step of the scale brings them near overflow; near overflow; not finite."""


@dataclass(frozen=True)
class Rule:
    """The constants of an update rule."""

    step: int
    lowest: tuple[int, ...]
    highest: tuple[int, ...]
    growth_interval: int
    recover_threshold: int
    recover_growth_interval: int
    margin: int
    members: tuple[tuple[bool, ...], ...]
    """For each row, flags of the scalers that enter it."""
    orders: tuple[int, ...]
    """The number of factors of scale that each row carries."""

    @property
    def levels(self) -> np.ndarray:
        """Returns the level of the values in each column of the histogram of each row."""
        exponents = np.arange(LOWEST, HIGHEST + 1)
        raised = exponents + self.step * np.array(self.orders)[:, None]
        room = _TOP - self.margin
        low = exponents < SMALLEST_NORMAL + self.margin
        levels = np.select([exponents > room, raised > room, low], [_NEAR, _FULL, _BELOW], _FINE)
        levels = np.pad(levels, ((0, 0), (1, 1)), constant_values=((0, 0), (_BELOW, _LOST)))
        return levels.astype(np.int32)

    def of_scalers(self, rows: Shaped[Array, "*batch rows"]) -> Shaped[Array, "*batch scalers"]:
        """Returns for each scaler the bits that are set in any of the `rows` that it enters."""
        members = np.array(self.members, rows.dtype)[(None,) * (rows.ndim - 1)]
        return lax.reduce_or(rows[..., None] * members, (rows.ndim - 1,))


def adjusted(
    rule: Rule,
    counts: Float32[Array, "rows columns"],
    exponents: Int32[Array, " scalers"],
    tracker: Int32[Array, " scalers"],
    caution: Int32[Array, " scalers"],
) -> tuple[Bool[Array, " scalers"], dict[str, Int32[Array, " scalers"]]]:
    """Shrinks a scale after an overflow, and grows it after an interval of clean steps. The
    interval is shorter if the scale is small (Xue et al., section 3.2).

    The paper stops at a scale of 1. Beyond it a scale follows the histogram. It rises a step at a
    time while derivatives vanish below float16, and falls back when they come near overflow. After
    an overflow, `caution` prevents this rise for an interval of clean steps.

    **Returns:** a flag for each scaler, true if it overflowed, and the new `exponents`, `tracker`
    and `caution`.
    """
    lowest, highest = np.array(rule.lowest, np.int32), np.array(rule.highest, np.int32)
    # The largest values of a row decide, because smaller ones that vanish are rounding errors
    # relative to them. A row of zeros may have underflowed as a whole.
    level = jnp.max(jnp.where(counts > 0, rule.levels, 0), axis=1)
    # A scaler for which nothing was counted has level 0: its step is not clean.
    bits = rule.of_scalers(level)
    lost, crowded, clean = bits >= _LOST, bits >= _NEAR, (bits > 0) & (bits < _LOST)
    # A larger scale would save derivatives that vanish, and would bring none near overflow.
    starved = (bits < _FULL) & (bits & _BELOW > 0)

    interval = jnp.where(
        exponents <= rule.recover_threshold, rule.recover_growth_interval, rule.growth_interval
    )
    counted = tracker + clean.astype(jnp.int32)
    # Not `==`, so that a restored tracker beyond the interval fires as well.
    due = clean & (counted >= interval)

    shrunk = jnp.maximum(exponents - rule.step, jnp.minimum(exponents, lowest))
    grown = jnp.minimum(exponents + rule.step, jnp.maximum(exponents, highest))
    # Growth after an interval ends at 1.
    clocked = jnp.minimum(grown, jnp.maximum(exponents, 0))
    new = jnp.where(due, clocked, exponents)
    new = jnp.where(starved & (caution <= 0), grown, new)
    new = jnp.where(crowded & (exponents > 0), jnp.maximum(shrunk, jnp.maximum(0, lowest)), new)
    return lost, {
        "exponents": jnp.where(lost, shrunk, new),
        "tracker": jnp.where(lost | due, 0, counted),
        "caution": jnp.where(lost, 1, jnp.where(due, 0, caution)),
    }


DEFAULTS = {
    "init_scale": 2.0**0,
    "max_scale": 2.0**15,
    "min_scale": 2.0**-24,
    "factor": 2,
    "growth_interval": 1000,
    "recover_threshold": 2.0**-6,
    "recover_growth_interval": 100,
    "margin": 6,
}
"""The options of every scaler. The bounds are those of a scaler for first derivatives."""

_SCALES = ("init_scale", "max_scale", "min_scale")
"""The options that can be set for each scaler."""

_LOWEST_TOTAL, _HIGHEST_TOTAL = -120, 120
"""Bounds of the exponent of any product of scales, because its inverse must be a float32."""


def parse_special(special: Any) -> dict[str, dict[str, Any]]:
    """Returns the options of each special term."""
    if not isinstance(special, Mapping):
        special = {name: {} for name in term_list(special, empty=True)}
    out = {}
    for name, value in special.items():
        term_list([name])
        if value is not None and not isinstance(value, Mapping):
            value = {"max_scale": value}
        out[name] = dict(value or {})
        unknown = sorted(set(out[name]) - set(_SCALES))
        if unknown:
            raise ValueError(
                f"`{called()}` takes 'init_scale', 'max_scale' and 'min_scale' for the special "
                f"term {name!r}, but got {', '.join(map(repr, unknown))}."
            )
    return out


def _ranges(
    options: Mapping[str, Any], strategy: AbstractStrategy, special: Mapping[str, Any]
) -> list[tuple[int, int, int]]:
    """Returns the lowest, the first and the highest exponent of each scaler."""
    common = [n for n in strategy.names if n not in special]
    for key in _SCALES:
        if isinstance(options[key], Mapping) and set(options[key]) != set(common):
            raise ValueError(
                f"`{called()}` needs `{key}` as one number or as a mapping with a number for each "
                f"of its scalers, {', '.join(common)}, but got {options[key]!r}."
            )
    most = max(row.order for row in strategy.rows)
    out = []
    for i, name in enumerate(strategy.names):
        exponents, defaults = {}, []
        for key in _SCALES:
            value = special.get(name, {}).get(key, options[key])
            value = value.get(name, DEFAULTS[key]) if isinstance(value, Mapping) else value
            exponents[key] = exponent_of(value, key)
            if value is DEFAULTS[key]:
                # The default is for one coordinate's scale, which the derivatives carry so often.
                exponents[key] *= strategy.order_of(i)
                defaults.append(key)
        low = max(exponents["min_scale"], math.ceil(_LOWEST_TOTAL / most))
        high = min(exponents["max_scale"], _HIGHEST_TOTAL // most)
        init = exponents["init_scale"]
        if "init_scale" in defaults:
            # Without an initial scale a scaler starts at 1, or at its cap if that is lower.
            init = min(init, high)
        if not low <= init <= high:
            raise ValueError(
                f"`{called()}` needs `init_scale` between `min_scale` and `max_scale`, but got "
                f"2^{init} outside of [2^{low}, 2^{high}] for {name!r}."
            )
        out.append((low, init, high))
    return out


def parse_rule(
    options: Mapping[str, Any], strategy: AbstractStrategy, special: Mapping[str, Any]
) -> tuple[Rule, tuple[int, ...]]:
    """Returns the update rule for these options, and the exponents that the scalers start with."""
    unknown = sorted(set(options) - set(DEFAULTS))
    if unknown:
        raise TypeError(
            f"`{called()}` got the unknown options {', '.join(unknown)}; it knows "
            f"{', '.join(sorted(DEFAULTS))}."
        )
    options = {**DEFAULTS, **options}
    lowest, start, highest = zip(*_ranges(options, strategy, special), strict=True)
    factor = exponent_of(options["factor"], "factor")
    if factor < 1 or 2.0**factor != options["factor"]:
        raise ValueError(
            f"`{called()}` needs a power of two above 1 as `factor`, since other factors round "
            f"every derivative, but got {options['factor']!r}."
        )
    interval = lambda name, least=1: check_integer(options[name], name, least)
    rule = Rule(
        step=factor,
        lowest=lowest,
        highest=highest,
        growth_interval=interval("growth_interval"),
        recover_threshold=exponent_of(options["recover_threshold"], "recover_threshold"),
        recover_growth_interval=interval("recover_growth_interval"),
        margin=interval("margin", least=0),
        members=tuple(
            tuple(i in dict(row.weights) for i in range(len(start))) for row in strategy.rows
        ),
        orders=tuple(row.order for row in strategy.rows),
    )
    return rule, start

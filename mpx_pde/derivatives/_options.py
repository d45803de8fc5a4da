"""The options of scalers, and the update rule that they make."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ._names import exponent_of, positive_integer, term_list
from ._rules import Rule
from ._strategies import AbstractStrategy, Row


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
"""The options of every scaler, with the bounds of one for first derivatives."""

_SCALES = ("init_scale", "max_scale", "min_scale")
"""Those that each scaler may have for itself."""

_LOWEST_TOTAL, _HIGHEST_TOTAL = -120, 120
"""No product of scales leaves these powers of two: its inverse must be a float32."""


def parse_special(special: Any, call: str) -> dict[str, dict[str, Any]]:
    """The options that special terms have for themselves."""
    if not isinstance(special, Mapping):
        special = {name: {} for name in term_list(special, call, empty=True)}
    out = {}
    for name, value in special.items():
        term_list([name], call)
        if value is not None and not isinstance(value, Mapping):
            value = {"max_scale": value}
        out[name] = dict(value or {})
        unknown = sorted(set(out[name]) - set(_SCALES))
        if unknown:
            raise ValueError(
                f"`{call}` takes 'init_scale', 'max_scale' and 'min_scale' for the special "
                f"term {name!r}, but got {', '.join(map(repr, unknown))}."
            )
    return out


def _spread(value: Any, names: tuple[str, ...], call: str, name: str) -> tuple[int, ...]:
    """The exponents of one value for all scalers, or of a mapping from names to values."""
    if not isinstance(value, Mapping):
        return (exponent_of(value, call, name),) * len(names)
    unknown = sorted(set(value) - set(names))
    missing = [n for n in names if n not in value]
    if unknown or missing:
        raise ValueError(
            f"`{call}` needs `{name}` as one number or as a mapping with a number for each of its "
            f"scalers, {', '.join(names)}, but got {value!r}."
        )
    return tuple(exponent_of(value[n], call, name) for n in names)


def _range(
    i: int, name: str, rows: Sequence[Row], scales: Mapping[str, Mapping], given: bool, call: str
) -> tuple[int, int, int]:
    """The exponents of a scaler: the lowest, the first and the highest."""
    low, init, high = (scales[key][name] for key in ("min_scale", "init_scale", "max_scale"))
    most = max((w for r in rows for j, w in r.weights if j == i), default=1)
    most = max(most, *(r.order for r in rows))
    low, high = max(low, math.ceil(_LOWEST_TOTAL / most)), min(high, _HIGHEST_TOTAL // most)
    # Without a start of its own a scaler starts at 1, or at its cap if that is lower.
    init = init if given else min(init, high)
    if not low <= init <= high:
        raise ValueError(
            f"`{call}` needs `init_scale` between `min_scale` and `max_scale`, but got "
            f"2^{init} outside of [2^{low}, 2^{high}] for {name!r}."
        )
    return low, init, high


def _ranges(
    options: Mapping[str, Any], strategy: AbstractStrategy, special: Mapping[str, Any], call: str
) -> list[tuple[int, int, int]]:
    """Returns the range of each scaler."""
    common = tuple(n for n in strategy.names if n not in special)
    scales = {}
    for key in _SCALES:
        # The bounds of a coordinate's scale, as often as the derivatives carry it.
        default = exponent_of(DEFAULTS[key], call, key)
        found = {n: default * strategy.order_of(i) for i, n in enumerate(strategy.names)}
        if options[key] is not DEFAULTS[key]:
            names = common if isinstance(options[key], Mapping) else strategy.names
            found |= zip(names, _spread(options[key], names, call, key), strict=True)
        own = {n: exponent_of(x[key], call, key) for n, x in special.items() if key in x}
        scales[key] = found | own
    given = options["init_scale"] is not DEFAULTS["init_scale"]
    return [
        _range(i, n, strategy.rows, scales, given or "init_scale" in special.get(n, {}), call)
        for i, n in enumerate(strategy.names)
    ]


def parse_options(
    options: Mapping[str, Any], strategy: AbstractStrategy, special: Mapping[str, Any], call: str
) -> tuple[Rule, tuple[int, ...]]:
    """The update rule of these options, and the exponents that the scalers start with."""
    unknown = sorted(set(options) - set(DEFAULTS))
    if unknown:
        raise TypeError(
            f"`{call}` got the unknown options {', '.join(unknown)}; it knows "
            f"{', '.join(sorted(DEFAULTS))}."
        )
    options = {**DEFAULTS, **options}
    lowest, start, highest = zip(*_ranges(options, strategy, special, call), strict=True)
    factor = exponent_of(options["factor"], call, "factor")
    if factor < 1 or 2.0**factor != options["factor"]:
        raise ValueError(
            f"`{call}` needs a power of two above 1 as `factor`, since other factors round "
            f"every derivative, but got {options['factor']!r}."
        )
    interval = lambda name, least=1: positive_integer(options[name], call, name, least)
    rule = Rule(
        step=factor,
        lowest=lowest,
        highest=highest,
        growth_interval=interval("growth_interval"),
        recover_threshold=exponent_of(options["recover_threshold"], call, "recover_threshold"),
        recover_growth_interval=interval("recover_growth_interval"),
        margin=interval("margin", least=0),
        members=tuple(
            tuple(i in dict(row.weights) for i in range(len(start))) for row in strategy.rows
        ),
        orders=tuple(row.order for row in strategy.rows),
    )
    return rule, start

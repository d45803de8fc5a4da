"""Streams through an equation that has no rule: by nested forward mode."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._plan import Index, Plan
from ._rules import Rules
from ._streams import DEEP, Jet, is_inexact, primal_of


def nested(fun: Callable[..., list], operands: Sequence[Any], rules: Rules) -> list[Jet]:
    """The results of `fun`, a function of arrays, with their streams.

    The operands that depend on the point are polynomials in one parameter for each direction,
    whose coefficients are their streams; the derivatives in the parameters are those of the
    results.
    """
    plan = rules.plan
    at = [i for i, x in enumerate(operands) if isinstance(x, Jet) and is_inexact(x.primal)]
    jets = [operands[i] for i in at]

    def whole(moved):
        full = list(map(primal_of, operands))
        for i, x in zip(at, moved, strict=True):
            full[i] = x
        return list(fun(*full))

    out = whole([x.primal for x in jets])
    live = [i for i, x in enumerate(out) if is_inexact(x)]

    def function(*moved):
        results = whole(moved)
        return [results[i] for i in live]

    streams: list[dict[Index, Any]] = [{} for _ in out]
    for key in plan.keys:
        parts = _stream(function, jets, key, rules)
        if parts is not None:
            for i, x in zip(live, parts, strict=True):
                streams[i][key] = x
    return [Jet(x, s, DEEP) for x, s in zip(out, streams, strict=True)]


def _stream(function, jets, key, rules) -> list | None:
    """`None` where it vanishes: no operand moves in these directions."""
    plan: Plan = rules.plan
    if key not in rules.weights:
        return _derivative(function, jets, key, plan, own=True) if _move(jets, key) else None
    # The linear part of a sum, and what its summands add to it.
    total = None
    if any(key in x.streams for x in jets):
        tangents = [x.streams.get(key, jnp.zeros_like(x.primal)) for x in jets]
        total = jax.jvp(function, [x.primal for x in jets], tangents)[1]
    for weight, index in rules.weights[key]:
        if not _move(jets, index):
            continue
        parts = _derivative(function, jets, index, plan, own=False)
        parts = [rules.weighted(weight, x, index) for x in parts]
        total = parts if total is None else [x + y for x, y in zip(total, parts, strict=True)]
    return total


def _move(jets, index: Index) -> bool:
    return any(set(k) <= set(index) for x in jets for k in x.streams)


def _derivative(function, jets, index: Index, plan: Plan, own: bool) -> list:
    """A derivative along the polynomials, with or without the term of that order itself."""
    size = plan.size(index)
    below = {
        k: [x.streams.get(k) for x in jets]
        for k in plan.indices
        if set(k) <= set(index) and (own or k != index)
    }

    def evaluate(below):
        def curve(parameters):
            values = []
            for n, x in enumerate(jets):
                value = x.primal
                for k, streams in below.items():
                    if streams[n] is not None:
                        value = value + _monomial(k, parameters, value.dtype) * streams[n]
                values.append(value)
            return function(*values)

        directions = sorted(set(index))

        def along(inner, i):
            def outer(parameters):
                step = {j: jnp.ones(()) if j == i else jnp.zeros(()) for j in directions}
                return jax.jvp(inner, (parameters,), (step,))[1]

            return outer

        out = curve
        for i in index:
            out = along(out, i)
        return out({i: jnp.zeros(()) for i in directions})

    return evaluate(below) if size is None else jax.vmap(evaluate)(below)


def _monomial(index: Index, parameters: dict[int, Any], dtype: Any) -> Any:
    out, counts = 1.0, {}
    for i in index:
        counts[i] = counts.get(i, 0) + 1
        out = out * parameters[i] / counts[i]
    return jnp.asarray(out, dtype)

"""Streams through an equation that has no rule: by nested forward mode."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._plan import Index, Plan, chains
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

    curves: dict[Index, Any] = {}
    streams: list[dict[Index, Any]] = [{} for _ in out]
    for key in plan.keys:
        parts = _linear(function, jets, key, plan)
        for weight, index in rules.weights.get(key, ((None, key),)):
            if not _bends(jets, index):
                continue
            if index not in curves:
                curves[index] = _curved(function, jets, index, plan)
            bent = curves[index]
            if weight is not None:
                bent = [rules.weighted(weight, x, index) for x in bent]
            parts = bent if parts is None else [x + y for x, y in zip(parts, bent, strict=True)]
        if parts is not None:
            for i, x in zip(live, parts, strict=True):
                streams[i][key] = x
    return [Jet(x, s, DEEP) for x, s in zip(out, streams, strict=True)]


def _linear(function, jets, key: Index, plan: Plan) -> list | None:
    """Returns what a stream adds to itself; `None` where no operand has it."""
    at = [i for i, x in enumerate(jets) if key in x.streams]
    if not at:
        return None
    primals = [x.primal for x in jets]

    def some(*moved):
        full = list(primals)
        for i, x in zip(at, moved, strict=True):
            full[i] = x
        return function(*full)

    def push(*tangents):
        return jax.jvp(some, tuple(primals[i] for i in at), tangents)[1]

    tangents = [jets[i].streams[key] for i in at]
    return push(*tangents) if plan.size(key) is None else jax.vmap(push)(*tangents)


def _bends(jets, index: Index) -> bool:
    """Returns whether streams of lower order add up to this one."""
    present = {k for x in jets for k in x.streams}
    terms = (blocks for order in chains(index).values() for _, blocks in order)
    return any(present.issuperset(blocks) for blocks in terms)


def _curved(function, jets, index: Index, plan: Plan) -> list:
    """The derivative along the polynomials without the term of that order itself."""
    below = {
        k: [x.streams.get(k) for x in jets]
        for k in plan.indices
        if set(k) <= set(index) and len(k) < len(index)
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

    return evaluate(below) if plan.size(index) is None else jax.vmap(evaluate)(below)


def _monomial(index: Index, parameters: dict[int, Any], dtype: Any) -> Any:
    out, counts = 1.0, {}
    for i in index:
        counts[i] = counts.get(i, 0) + 1
        out = out * parameters[i] / counts[i]
    return jnp.asarray(out, dtype)

"""Streams through an equation that has no rule: by nested forward mode."""

import functools as ft
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from .._wrapper import of_some
from ._plan import Index, chains
from ._rules import Rules
from ._streams import Jet, Streams, is_inexact, primal_of, total


def nested(fun: Callable[..., list], operands: Sequence[Any], rules: Rules) -> list[Jet]:
    """The results of `fun`, a function of arrays, with their streams: by the formula of Faà di
    Bruno, whose derivatives along streams of the operands are taken by forward mode, one in the
    other."""
    at = [i for i, x in enumerate(operands) if isinstance(x, Jet) and is_inexact(x.primal)]
    jets = [operands[i] for i in at]
    primals = [x.primal for x in jets]
    whole = of_some(fun, list(map(primal_of, operands)), at)
    out = whole(*primals)
    live = [i for i, x in enumerate(out) if is_inexact(x)]

    def function(*moved: Any) -> list[Any]:
        results = whole(*moved)
        return [results[i] for i in live]

    @ft.cache
    def along(*blocks: Index) -> list[Any] | None:
        """The derivative of `function` along streams; `None` where there is none of a name."""
        directions = [[x.streams.get(block) for x in jets] for block in blocks]
        if any(all(x is None for x in tangents) for tangents in directions):
            return None
        derivative = lambda directions: ft.reduce(_pushed, directions, function)(*primals)
        return rules.plan.each(derivative, blocks[:1])(directions)

    def curved(index: Index, k: int) -> Iterator[tuple[int, Any]]:
        for count, blocks in (term for terms in chains(index).values() for term in terms):
            found = along(*blocks)
            if found is not None:
                yield count, found[k]

    streams: list[Streams] = [{} for _ in out]
    for key in rules.plan.keys:
        straight = along(key)
        for k, i in enumerate(live):
            rest = rules.gather(key, ft.partial(curved, k=k))
            both = total([straight and straight[k], rest])
            if both is not None:
                streams[i][key] = both
    return [Jet(x, s) for x, s in zip(out, streams, strict=True)]


def _pushed(function: Callable, tangents: Sequence[Any]) -> Callable[..., list]:
    """The derivative of a function along the tangents of those operands that have one."""
    at = [i for i, x in enumerate(tangents) if x is not None]

    def derivative(*primals):
        some = of_some(function, primals, at)
        return jax.jvp(some, [primals[i] for i in at], [tangents[i] for i in at])[1]

    return derivative

"""Overrides: names of primitives, and patterns of scopes."""

import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Primitive


def parse_patterns(patterns: Any, name: str) -> tuple[str, ...]:
    """Names of primitives and patterns of scopes, from one of them or several."""
    if isinstance(patterns, str | Primitive) or not isinstance(patterns, Iterable):
        patterns = (patterns,)
    out = []
    for pattern in patterns:
        if isinstance(pattern, Primitive):
            out.append(pattern.name)
        elif isinstance(pattern, str) and pattern.strip("/"):
            out.append(pattern.strip("/"))
        else:
            raise TypeError(
                f"`autocast` takes names of primitives (such as 'exp') and patterns of "
                f"`jax.named_scope`s (such as 'decoder/norm*') as `{name}`, but got {pattern!r}."
            )
    return tuple(out)


def match(patterns: Sequence[str], eqn: JaxprEqn, scopes: tuple[str, ...]) -> str | None:
    """The first of `patterns` that names the primitive or a run of consecutive scopes."""
    for pattern in patterns:
        parts = pattern.split("/")
        runs = (scopes[i : i + len(parts)] for i in range(len(scopes) - len(parts) + 1))
        if any(all(map(fnmatch.fnmatchcase, run, parts)) for run in runs):
            return pattern
        if len(parts) == 1 and fnmatch.fnmatchcase(eqn.primitive.name, pattern):
            return pattern
    return None

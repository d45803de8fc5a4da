"""What is decided for one equation: from the tables, the overrides and the kinds of operands."""

import dataclasses
import fnmatch
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Primitive

from ..interpret import _tables as tables
from ..interpret._asks import asks_for_more, says_its_dtype


class Kind(NamedTuple):
    """What is known of a value while tracing, besides its shape."""

    governed: bool = True
    """Whether the value is float32, or the half type, in the program; everything else (integers,
    bools, keys, float64, complex, references) passes through as it is."""
    half: bool = False
    """Whether it counts as half where an operation follows its operands."""
    master: bool = False
    """Whether it is held in float32 until the product: a parameter or input, or a value that
    enters a loop from outside, and whatever only moves those."""
    const: float | None = None
    """The value, where it is a scalar that is known while tracing."""
    exact: bool = False
    """Whether every dtype holds it as it is, and no cotangent comes back: a mask."""
    asked: str | None = None
    """The operation that an override keeps in float32, where this is its result, moved or changed
    by cheap operations."""


OPAQUE = Kind(governed=False)


class Rule(NamedTuple):
    name: str
    """product, mixed, full, half, follow, layout, convert or own."""
    reason: str
    known: bool = True
    asked: bool = False
    """True where an override asks for float32."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """The half type and the overrides of one call."""

    dtype: np.dtype
    algorithm: lax.DotAlgorithmPreset | None = None
    half: tuple[str, ...] = ()
    full: tuple[str, ...] = ()

    def governs(self, aval: Any) -> bool:
        dtype = getattr(aval, "dtype", None)
        # References and other values that are no arrays have their own rules.
        is_array = hasattr(aval, "weak_type")
        return is_array and (dtype == jnp.float32 or dtype == self.dtype)

    def fits(self, const: float) -> bool:
        """Whether a constant keeps its meaning in half: no overflow, no underflow."""
        info = jnp.finfo(self.dtype)
        size = abs(const)
        normal = float(info.tiny) <= size <= float(info.max)
        return normal or size == 0 or not math.isfinite(size)


def parse_patterns(patterns: Any, name: str) -> tuple[str, ...]:
    """Names of primitives and patterns of scopes, from one of them or several."""
    if isinstance(patterns, str | Primitive):
        patterns = (patterns,)
    if not isinstance(patterns, Iterable):
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


def match(patterns: Sequence[str], primitive: str, scopes: tuple[str, ...]) -> str | None:
    """The first of `patterns` that names the primitive or a run of consecutive scopes."""
    for pattern in patterns:
        parts = pattern.split("/")
        runs = (scopes[i : i + len(parts)] for i in range(len(scopes) - len(parts) + 1))
        if any(all(map(fnmatch.fnmatchcase, run, parts)) for run in runs):
            return pattern
        if len(parts) == 1 and fnmatch.fnmatchcase(primitive, pattern):
            return pattern
    return None


_RULES = {"half": "product", "itself": "mixed", "float32": "full", "operands": "follow"}
"""By the precision that an operation has in the table."""


def _tabled(name: str, eqn: JaxprEqn, feeds: str | None) -> Rule:
    if name in tables.JAX_PRODUCTS and asks_for_more(eqn):
        return Rule("full", "the program asks for this precision itself")
    if name in tables.MIXED and not says_its_dtype(eqn):
        return Rule("mixed", "a mixed product without a dtype of its own: it is given one")
    if feeds and name not in tables.PRODUCTS:
        return Rule("full", feeds)
    if name not in tables.TABLE:
        return Rule("own", "unknown to autocast", known=False)
    row = tables.TABLE[name]
    engines = {"layout": "layout", "cast": "convert"}
    return Rule(engines.get(row.engine, _RULES.get(row.precision, "own")), row.reason)


def decide(
    policy: Policy,
    eqn: JaxprEqn,
    kinds: Sequence[Kind],
    scopes: tuple[str, ...],
    feeds: str | None,
) -> Rule:
    """The rule for an equation that is no container. `feeds` is why what its result goes into
    wants it in float32, if it does."""
    name = eqn.primitive.name
    full = match(policy.full, name, scopes)
    if not any(k.governed for k in kinds):
        return Rule("own", "none of its operands is float32 or half", asked=full is not None)
    rule = _tabled(name, eqn, feeds)
    foreign = any(
        not k.governed and jnp.issubdtype(getattr(v.aval, "dtype", np.int32), jnp.inexact)
        for k, v in zip(kinds, eqn.invars, strict=True)
    )
    if foreign or rule.name in ("own", "convert"):
        return rule._replace(name="own", asked=full is not None) if foreign else rule
    if full:
        return Rule("full", f"full={full!r}", asked=True)
    if pattern := match(policy.half, name, scopes):
        halved = "product" if name in tables.JAX_PRODUCTS else "half"
        return Rule(halved, f"half={pattern!r}")
    if rule.name in ("follow", "layout") and (mend := _why_full(policy, eqn, kinds)):
        return Rule("full", mend)
    return rule


def _yields(eqn: JaxprEqn, kind: Kind) -> bool:
    """Whether a float32 operand gives way to a half one."""
    # The difference of a prediction and its target is a residual, not a bias.
    return kind.master and (kind.const is not None or eqn.primitive.name not in ("sub", "div"))


def _why_full(policy: Policy, eqn: JaxprEqn, kinds: Sequence[Kind]) -> str | None:
    """Why an operation that follows its operands is computed in float32; `None` if it is half,
    or has no half operand to begin with and only moves values."""
    governed = [k for k in kinds if k.governed]
    if not any(k.half for k in governed):
        return None if all(k.master for k in governed) else "its operands are float32"
    for kind in governed:
        if not kind.half and not _yields(eqn, kind):
            return "one of its operands is float32"
        if kind.const is not None and not policy.fits(kind.const):
            return f"{kind.const:g} is outside of the range of {policy.dtype.name}"
    return None

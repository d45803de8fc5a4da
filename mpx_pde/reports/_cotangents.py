"""Finds backward rules of the user's that are not linear in their cotangent, which is scaled."""

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from ..program._flat import Constant, Step
from ..program._jaxpr import is_again
from ..program._lines import in_custom_vjp
from ._survey import Seen, Survey


_COMPARES = {"clamp", "max", "min", "gt", "lt", "ge", "le"}
"""Operations that compare sizes. A scale changes what they return, unless it is on each side."""


def compared_cotangents(survey: Survey) -> list[str]:
    """Returns the lines of calls of `jax.custom_vjp` functions whose backward rules compare a
    cotangent with a number or an array that is not 0 or infinite, or take its sign. Rules that
    iterate, such as that of a differential equation, compare with a tolerance, and are left out.
    """
    if not any(map(_in_rule, survey.seen)):
        return []
    found = list(_compared(survey))
    iterate = {line for line, name in found if name == "while"}
    return list(dict.fromkeys(line for line, _ in found if line not in iterate))


def _compared(survey: Survey) -> Iterator[tuple[str, str]]:
    """Yields lines and names of operations in backward rules that depend on the scale of a
    cotangent."""
    cotangents = set[int]()
    for seen in survey.seen:
        step, site, in_rule = seen.step, seen.site, _in_rule(seen)
        reached = not cotangents.isdisjoint(step.variables)
        if in_rule and reached and _depends_on_scale(step, cotangents):
            yield site.line or "unknown", step.name
        if reached or (site.backward and not in_rule and not _again(step)):
            cotangents.update(step.outputs)
        cotangents.update(inner for outer, inner in seen.entered if outer in cotangents)


def _in_rule(seen: Seen) -> bool:
    return in_custom_vjp(seen.step.eqn.source_info)


def _again(step: Step) -> bool:
    return any(map(is_again, (*step.calls, step.eqn)))


def _depends_on_scale(step: Step, cotangents: Collection[int]) -> bool:
    if step.name in ("sign", "while"):
        return True
    others = [x for x in step.inputs if isinstance(x, Constant) or x not in cotangents]
    return step.name in _COMPARES and any(not _is_neutral(x) for x in others)


def _is_neutral(x: Any) -> bool:
    """Returns whether an operand is known to be 0 or infinite in each entry."""
    if not isinstance(x, Constant):
        return False
    values = np.asarray(x.value, np.float64)
    return bool(np.all((values == 0) | ~np.isfinite(values)))

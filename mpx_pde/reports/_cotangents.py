"""Finds backward rules of the user's that are not linear in their cotangent, which is scaled."""

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr

from ..program._flat import Constant, Step, flatten
from ..program._jaxpr import bodies_of, equations_in
from ..program._lines import NOWHERE, Site, in_custom_vjp, site_inside, site_within
from ..program._rebind import bodies_in


_COMPARES = {"clamp", "max", "min", "gt", "lt", "ge", "le"}
"""Operations that compare sizes. A scale changes what they return, unless it is on each side."""

_AGAIN = "rematted_computation"
"""The scope in which JAX evaluates a checkpoint again."""


def compared_cotangents(closed: ClosedJaxpr) -> list[str]:
    """Returns the lines of calls of `jax.custom_vjp` functions whose backward rules compare a
    cotangent with a number or an array that is not 0 or infinite, or take its sign. Rules that
    iterate, such as that of a differential equation, compare with a tolerance, and are left out.
    """
    if not any(in_custom_vjp(eqn.source_info) for eqn in equations_in(closed)):
        return []
    found = list(_compared(closed, set(), NOWHERE))
    iterate = {line for line, name in found if name == "while"}
    return list(dict.fromkeys(line for line, _ in found if line not in iterate))


def _compared(
    closed: ClosedJaxpr, scaled: Collection[int], outer: Site
) -> Iterator[tuple[str, str]]:
    """Yields lines and names of operations in a jaxpr whose operands at the positions `scaled` are
    cotangents."""
    flat = flatten(closed, forward_mode=False)
    cotangents = {flat.inputs[i] for i in scaled}
    for step in flat.steps:
        site = site_within(step.eqn, step.calls, outer)
        in_rule = in_custom_vjp(step.eqn.source_info)
        reached = not cotangents.isdisjoint(step.variables)
        if in_rule and reached and _depends_on_scale(step, cotangents):
            yield site.line or "unknown", step.name
        if reached or (site.backward and not in_rule and not _is_again(step)):
            cotangents.update(step.outputs)
        if bodies_of(step.eqn):
            yield from _inside(step, cotangents, site)


def _inside(step: Step, cotangents: Collection[int], site: Site) -> Iterator[tuple[str, str]]:
    for body, start, _ in bodies_in(step.eqn):
        given = enumerate(step.inputs[start:])
        moving = {i for i, x in given if not isinstance(x, Constant) and x in cotangents}
        yield from _compared(body, moving, site_inside(step.eqn, site))


def _is_again(step: Step) -> bool:
    return any(_AGAIN in str(x.source_info.name_stack) for x in (*step.calls, step.eqn))


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

"""Values of which little is left in a result if they are rounded before: what lies near a number
whose distance is taken."""

import math
from collections.abc import Collection, Iterable, Mapping

import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from ..interpret import _tables as tables
from ..interpret._flat import Constant, Flat, Step, flatten, variables
from ..interpret._jaxpr import aval_of, bodies_of
from ..interpret._rebind import scan_counts
from ._roles import still_in


_LEAST = 0.25
"""Numbers below are no values that activations saturate at."""


def summed_in(flat: Flat, stage: Collection[int]) -> set[int]:
    """Returns the results of products, and the sums of these alone."""
    out, adds = set[int](), tables.ADDITIONS | tables.LAYOUT | {"convert_element_type"}
    for step in flat.steps:
        moving = [x for x in step.variables if x in stage]
        sums = step.name in adds and moving and out.issuperset(moving)
        if step.name in tables.PRODUCTS or sums:
            out.update(step.outputs)
    return out


def near_numbers(
    flat: Flat, outputs: Iterable[int] = (), carried: Iterable[tuple[int, int]] = ()
) -> set[int]:
    """Returns the variables of which little is left in a result if they were rounded before.

    So it is where their distance to a number is computed, as in 1 - x of a saturated activation x,
    by arithmetic or by a function; and where the largest is picked, which rounding makes equal to
    others. The results at some places, `outputs`, count too, and where the operand of a loop does,
    the result that is `carried` on to it: positions of both."""
    carried, still, sizes = list(carried), still_in(flat), _numbers(flat)
    positive = {x for s in flat.steps if s.name in tables.POSITIVE for x in s.outputs}
    out = set(variables([x for i, x in enumerate(flat.outputs) if i in {*outputs}]))
    inside: dict[tuple, list[int]] = {}
    while True:
        for step in reversed(flat.steps):
            reaches = step.name in tables.DISTANCES and not out.isdisjoint(step.outputs)
            picks = step.name in tables.EXTREMES and not still.issuperset(step.outputs)
            takes = step.name in tables.NEAR or _leaves_little(step, sizes, positive)
            if reaches or picks or takes:
                out.update(step.variables)
            places = tuple(i for i, x in enumerate(step.outputs) if x in out)
            if (key := (id(step), places)) not in inside:
                inside[key] = _near_inside(step, places)
            out.update(inside[key])
        more = variables([flat.outputs[i] for i, j in carried if flat.inputs[j] in out])
        if out.issuperset(more):
            return out
        out.update(more)


def _near_inside(step: Step, places: Collection[int]) -> list[int]:
    """The operands of an equation that little is left of in what it holds, if the results at some
    `places` count."""
    found: list[int] = []
    for body, start, (first, stop) in bodies_entered(step.eqn) or _whole_bodies(step.eqn):
        flat = flatten(body, forward_mode=True)
        inside = near_numbers(flat, places, ((i, first + i) for i in range(stop - first)))
        pairs = zip(flat.inputs, step.inputs[start:], strict=False)
        found += variables([x for k, x in pairs if k in inside])
    return found


def _numbers(flat: Flat) -> dict[int, float]:
    """The variables that are one number, known or not (NaN), made of no other variables."""
    found = {k: math.nan for k, c in flat.constants.items() if np.ndim(c.value) == 0}
    for step in flat.steps:
        alone = step.inputs and found.keys() >= {*step.variables}
        if alone and all(aval_of(v).shape == () for v in step.eqn.invars):
            moves = step.name in tables.LAYOUT or step.name == "convert_element_type"
            values = [_number_of(x, found) for x in step.inputs]
            value = values[0] if moves and len(values) == 1 else math.nan
            found.update(dict.fromkeys(step.outputs, math.nan if value is None else value))
    return found


def _number_of(x: int | Constant, numbers: Mapping[int, float]) -> float | None:
    if not isinstance(x, Constant):
        return numbers.get(x)
    if np.ndim(x.value):
        return None
    known = isinstance(x.value, np.ndarray | np.generic | int | float)
    return complex(x.value).real if known else math.nan


def _leaves_little(step: Step, numbers: Mapping[int, float], positive: Collection[int]) -> bool:
    """Returns whether an equation takes the distance to a number that activations saturate at: a
    small one, such as that in a norm, is none. A sum of what is `positive` is none."""
    if step.name not in tables.ADDITIONS:
        return False
    known = [x for x in (_number_of(x, numbers) for x in step.inputs) if x is not None]
    near = any(not abs(x) < _LEAST for x in known)
    others = step.values - numbers.keys()
    return near and not (step.name == "add" and others <= {*positive} and min(known) > 0)


def _whole_bodies(eqn: JaxprEqn) -> list[tuple[ClosedJaxpr, int, tuple[int, int]]]:
    return [(body, 0, (0, 0)) for body in bodies_of(eqn)]


def bodies_entered(eqn: JaxprEqn) -> list[tuple[ClosedJaxpr, int, tuple[int, int]]]:
    """The programs in an equation that is entered, with the place of the first operand that each
    takes, and which of its operands it hands on to its next step, from and to."""
    name, bodies = eqn.primitive.name, bodies_of(eqn)
    if name == "scan":
        n_consts, n_carry = scan_counts(eqn)
        return [(bodies[0], 0, (n_consts, n_consts + n_carry))]
    if name == "while":
        start, n_consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        return [(bodies[1], start, (n_consts, len(bodies[1].in_avals)))]
    if name == "cond":
        return [(body, 1, (0, 0)) for body in bodies]
    return _whole_bodies(eqn) if name in ("remat2", "shard_map") else []

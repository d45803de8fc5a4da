"""From a function and a plan to its derivatives."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr
from jaxtyping import Array

from .._dtypes import asked_of_context, is_half, precision_of_user
from .._forward import Forward, forward_in, present_forward
from ..interpret import _tables as tables
from ..interpret._jaxpr import equations_in
from ._evaluate import Evaluator
from ._plan import Index, Plan
from ._products import Product
from ._rules import Rules
from ._streams import RAW, WITH_STREAMS, Jet, Storage, is_inexact, tell


class Equation(NamedTuple):
    """Tells what became of an equation that depends on the point.

    **Attributes:**

    - `primitive`, `line`: what it is, and where.
    - `rule`: how its derivatives were taken; `"nested"` where there is no rule.
    - `precision`: what a product was multiplied in.
    """

    primitive: str
    line: str
    rule: str
    precision: str


def half_of(closed: ClosedJaxpr) -> np.dtype | None:
    """The half type that a program computes in, by its arrays and its mixed products."""

    for eqn in equations_in(closed):
        own = [eqn.params["dtype"]] if eqn.primitive.name in tables.MIXED else []
        avals: list[Any] = [v.aval for v in (*eqn.invars, *eqn.outvars) if is_inexact(v.aval)]
        for dtype in filter(is_half, (*own, *(x.dtype for x in avals))):
            return np.dtype(dtype)
    return None


def _evaluator(
    closed: ClosedJaxpr,
    rules: Rules,
    scales: Callable,
    note: list[Equation] | None,
    lost: dict[Index, Array],
) -> Evaluator:
    """How a program is evaluated: as the loss around it says, else by its own arrays."""
    told: dict[str, Any] = {"caller": source_info_util.current()}
    if note is not None:
        told["note"] = lambda step, *how: note.append(Equation(step.name, *how))
    narrow = np.dtype(np.float32)
    forward, asked = present_forward(), asked_of_context()
    if forward is None and asked is not None and asked[0] == "autocast":
        forward = Forward("half", asked[1])
    if forward is not None and forward.inside:
        return Evaluator(rules, Storage(narrow), Product(open=True), **told)
    dtype = half_of(closed) if forward is None else forward.dtype
    scaled = {} if dtype is None else scales(dtype)
    # Of masters in float64 is asked less, of a program that says float64 it is not.
    storage = Storage(narrow, dtype, scaled, narrows=forward is not None)
    if forward is not None and forward.full:
        told["lost"] = partial(tell, lost)
        told["full"] = Storage(forward.registers), Product(algorithm=forward.algorithm)
    return Evaluator(rules, storage, Product(masters=forward is not None), **told)


def propagate(
    fun: Callable[[Array], Array],
    point: Array,
    plan: Plan,
    seeds: Sequence[Any],
    weights: Sequence[Sequence[Any]],
    scales: Callable[[np.dtype], Mapping[Index, tuple[Array, Array]]],
    note: list[Equation] | None = None,
) -> tuple[Array, dict[Index, Array], dict[Index, Array]]:
    """A function at a point, with the derivatives of a plan.

    The function is traced once, and its equations are evaluated on the value and its streams
    together (see `_rules.py`).

    **Arguments:**

    - `fun`: a function of one array that returns one array.
    - `point`: where, of any floating dtype.
    - `plan`: which derivatives; see [`make_plan`][].
    - `seeds`: for each direction of the plan a vector like `point`, or a matrix of several. Give
        those that are known as NumPy arrays: what vanishes by them is left out.
    - `weights`: for each sum the factors of its summands.
    - `scales`: the scales of stored streams, by the half type; see [`Storage`][].
    - `note`: a list to which every equation that depends on the point is added.

    **Returns:**

    The value; the streams that were asked for by their keys, in float32 or wider, of which those
    that vanish are missing; and, for every stream that is kept with a scale where the forward pass
    is in full, whether it did not fit in some layer.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        forward = present_forward()
        if forward is not None and forward.full:
            forward = forward._replace(inside=True)
        with precision_of_user(), forward_in(forward):
            closed = jax.make_jaxpr(fun)(point)
        rules, lost = Rules(plan, weights), dict[Index, Array]()
        evaluator = _evaluator(closed, rules, scales, note, lost)
        streams: dict[Index, Any] = {(i,): x for i, x in enumerate(seeds) if (i,) in plan.indices}
        for key in rules.weights:
            first = rules.gather(key, lambda i: [(1, seeds[i[0]])] if len(i) == 1 else ())
            if first is not None:
                streams[key] = first

        asked = {*plan.asked, *rules.weights}
        scope = nullcontext() if evaluator.full is None else jax.named_scope(WITH_STREAMS)
        with scope:
            (out,) = evaluator.program(closed, [Jet(point, streams, RAW)], asked)
        if not isinstance(out, Jet):
            return jnp.asarray(out), {}, lost
        out = evaluator.above.storage.loaded(out, closed.out_avals[0].dtype)
        shape = out.primal.shape
        full = {k: jnp.broadcast_to(x, plan.shape(k, shape)) for k, x in out.streams.items()}
    return jnp.asarray(out.primal), full, lost

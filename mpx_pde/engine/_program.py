"""Prepares the program of a loss before it is linearized."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, primitives

from ..program import _tables as tables
from ..program._flat import Flat, evaluated, flatten, merged
from ..program._jaxpr import aval_of, bodies_of, contains, with_jaxprs
from ..program._rebind import rebind
from ._custom import bind_recorded
from ._facts import RECOMPUTED


def without_checkpoints(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a program with calls in place of its checkpoints, which say what is kept. What is in
    one without a policy is marked: its products are computed again. A checkpoint of a loop stays,
    so that the steps of the loop keep nothing."""

    numbers = itertools.count()

    def entered(jaxpr: Jaxpr, region: str) -> Jaxpr:
        return jaxpr.replace(eqns=[one(e, region) for e in jaxpr.eqns])

    def one(eqn: JaxprEqn, region: str) -> JaxprEqn:
        name = eqn.primitive.name
        if name in tables.CHECKPOINTS and not contains(bodies_of(eqn)[0], tables.LOOPS):
            inner = region
            if not region and eqn.params["policy"] is None:
                inner = f"{RECOMPUTED}.{next(numbers)}"
            body = ClosedJaxpr(entered(eqn.params["jaxpr"], inner), ())
            call = {"call_jaxpr": body}
            return eqn.replace(primitive=primitives.closed_call_p, params=call)
        if name in tables.CONTAINERS - tables.CUSTOM:
            eqn = with_jaxprs(eqn, lambda x: entered(x, region))
        if not region:
            return eqn
        info = eqn.source_info
        return eqn.replace(source_info=info.replace(name_stack=info.name_stack.extend(region)))

    return closed.replace(jaxpr=entered(closed.jaxpr, ""))


_INSIDE = (tables.LOOPS | tables.ONCE | tables.CHECKPOINTS) - tables.UNBOUNDED


def bind_merged(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    """Binds an equation. What the programs in a loop, a branch or a checkpoint compute twice is
    computed once."""
    if once := _merged_inside(eqn):
        bind = lambda step, args: bind_merged(step.eqn, args)
        return rebind(eqn, operands, [partial(_evaluated, x, bind) for x in once])
    return bind_recorded(eqn, operands)


def _merged_inside(eqn: JaxprEqn) -> list[Flat]:
    """Returns the programs in an equation, each of which computes nothing twice; an empty list if
    they did not at any depth, or are not entered."""
    if eqn.primitive.name not in _INSIDE or eqn.effects:
        return []
    inner = [flatten(body, forward_mode=False) for body in bodies_of(eqn)]
    once = list(map(merged, inner))
    fewer = any(len(x.steps) < len(y.steps) for x, y in zip(once, inner, strict=True))
    return once if fewer or any(_merged_inside(s.eqn) for x in once for s in x.steps) else []


def _evaluated(flat: Flat, bind: Callable, *operands: Any) -> list[Any]:
    return evaluated(flat, operands, bind)


def orders_products() -> bool:
    """Returns whether products are written in the order in which their results are read: on a CPU.
    Compilers for other devices choose the order of axes in memory, also of what is kept; and XLA
    for GPUs (JAX 0.10.2) finds no tiles for some products in another order."""
    return jax.default_backend() == "cpu"


def exchanged(eqn: JaxprEqn) -> JaxprEqn:
    """Returns a `dot_general` with its operands exchanged. The free axes of the second operand then
    come first in the result."""
    params = eqn.params
    contracted, batched = params["dimension_numbers"]
    new = {**params, "dimension_numbers": (contracted[::-1], batched[::-1])}
    if isinstance(params["precision"], tuple):
        new["precision"] = params["precision"][::-1]
    return eqn.replace(invars=eqn.invars[::-1], params=new)


def with_products_in_order(jaxpr: Jaxpr) -> Jaxpr:
    """Returns a program whose products return their axes in the order in which they are read.

    A `vmap` over vectors that are multiplied by a matrix adds the second axis of the result, and
    moves it to the front for all that follows. XLA leaves such moves out by itself, but not if a
    value on the way is kept.
    """
    readers: dict[Any, list[JaxprEqn]] = {}
    for eqn in jaxpr.eqns:
        for x in _variables(eqn.invars):
            readers.setdefault(x, []).append(eqn)
    results = {*_variables(jaxpr.outvars)}
    moved: dict[Any, Any] = {}

    def named(atoms: Sequence[Any]) -> list[Any]:
        return [moved.get(x, x) if isinstance(x, Var) else x for x in atoms]

    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if not moved.keys().isdisjoint(eqn.outvars):
            continue
        eqn = eqn.replace(invars=named(eqn.invars))
        if eqn.primitive.name in tables.CONTAINERS - tables.CUSTOM:
            eqn = with_jaxprs(eqn, with_products_in_order)
        if eqn.primitive.name == "dot_general" and results.isdisjoint(eqn.outvars):
            moves = readers.get(eqn.outvars[0], [])
            if moves and all(_exchanges(eqn, move) for move in moves):
                moved.update((move.outvars[0], moves[0].outvars[0]) for move in moves)
                eqn = exchanged(eqn).replace(outvars=moves[0].outvars)
        eqns.append(eqn)
    return jaxpr.replace(eqns=eqns, outvars=named(jaxpr.outvars))


def _variables(atoms: Iterable[Any]) -> list[Var]:
    return [x for x in atoms if isinstance(x, Var)]


def _exchanges(product: JaxprEqn, move: JaxprEqn) -> bool:
    """Returns whether an equation moves the free axes of the second operand of a product before
    those of the first."""
    if move.primitive.name != "transpose" or product.params["out_sharding"] is not None:
        return False
    (contracted, _), (batched, _) = product.params["dimension_numbers"]
    first = len(batched)
    second = first + len(aval_of(product.invars[0]).shape) - len(contracted) - first
    count = len(aval_of(product.outvars[0]).shape)
    order = *range(first), *range(second, count), *range(first, second)
    return second < count and tuple(move.params["permutation"]) == order

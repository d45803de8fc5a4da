"""Marks values in the middle of a program with names, and collects them.

A loss returns one number. Its derivative terms are known where they are computed, under `vmap`. So
they are marked there by `checkpoint_name`, which changes nothing. The loss is traced, and all
marked values are collected from its program, as whole batches.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jaxtyping import Array

from ..precision._setting import setting, setting_with
from ..products._order import batch_behind
from ..program import _tables as tables
from ..program._jaxpr import (
    bodies_of,
    in_context_of,
    own_bind,
    trace_arrays,
    walk,
)


_MARK = "mpx_pde.partials: "


def marked(values: dict[str, Any]) -> dict[str, Any]:
    """Marks values with their names inside of `collecting`. Elsewhere returns them unchanged."""
    if not setting().marks:
        return values
    # In an order of axes that does not depend on the rules for batches.
    return {name: checkpoint_name(batch_behind(x, -1), _MARK + name) for name, x in values.items()}


def collecting(fun: Callable) -> Callable[..., tuple[Any, dict[str, Array]]]:
    """Makes a function also return the values that were marked in it, by name: one vector for all
    calls and batches together.

    Do not differentiate it. Marks in loops, branches or a `shard_map` are not collected.
    """

    def call(*args: Any, **kwargs: Any) -> tuple[Any, dict[str, Array]]:
        with setting_with(marks=True):
            closed, leaves, assemble = trace_arrays(fun, args, kwargs)
        collected: dict[str, list[Array]] = {}
        out = _collect(closed, [x for _, x in leaves], collected)
        return assemble(out), {name: _joined(parts) for name, parts in collected.items()}

    return call


def _joined(parts: list[Array]) -> Array:
    widest = max((x.dtype for x in parts), key=lambda dtype: dtype.itemsize)
    return jnp.concatenate([x.astype(widest).ravel() for x in parts])


# A `custom_jvp` is entered too, because nothing is differentiated here and its rule may hold values
# of a finished trace.
_ENTERED = tables.CALLS | tables.OF_REVERSE_MODE | tables.PUSHES


def _collect(closed: ClosedJaxpr, operands: Sequence, collected: dict[str, list[Array]]) -> list:
    """Evaluates a jaxpr, and adds the marked values in it to `collected` by their names."""

    def evaluate(_: int, eqn: JaxprEqn, args: list) -> Sequence:
        if eqn.primitive.name == "name" and eqn.params["name"].startswith(_MARK):
            collected.setdefault(eqn.params["name"].removeprefix(_MARK), []).append(args[0])
            return args
        with in_context_of(eqn):
            if eqn.primitive.name in _ENTERED:
                return _collect(bodies_of(eqn)[0], args, collected)
            return own_bind(eqn, args)

    return walk(closed.jaxpr, closed.consts, operands, lambda atom: atom.val, evaluate)

"""Evaluates a function by its program, which is traced once and shown to others."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from ._jaxpr import aval_of, trace_arrays


class Program(NamedTuple):
    """The results of [`trace_arrays`][]: a jaxpr, the arrays among the arguments by their paths,
    and a function that assembles the results of the function from those of the jaxpr."""

    closed: ClosedJaxpr
    leaves: list
    assemble: Callable

    def __call__(self) -> Any:
        """Evaluates the function."""
        # Derivatives of layers leave values that nothing reads.
        jaxpr, outvars = self.closed.jaxpr, self.closed.jaxpr.outvars
        jaxpr, _ = dce_jaxpr(jaxpr, [True] * len(outvars), instantiate=True)
        values = jaxpr_as_fun(ClosedJaxpr(jaxpr, self.closed.consts))(*(x for _, x in self.leaves))
        # Values that are known during tracing are returned as numbers.
        return self.assemble(
            [
                x if isinstance(x, jax.Array) else jnp.asarray(x, aval_of(v).dtype)
                for x, v in zip(values, outvars, strict=True)
            ]
        )


def shown(fun: Callable, args: tuple, look: Callable[[Program], None]) -> Any:
    """Evaluates `fun(*args)` in a program that is being traced, and calls `look` with the program
    of `fun`.

    Traces `fun` once, as a call does, unless it is in a `shard_map`. Does not call `look` if `fun`
    cannot be traced.
    """
    try:
        program = Program(*trace_arrays(fun, args, {}))
    except jax.errors.JAXTypeError:
        # The function needs values. Some are known in a call: those that a `jit` closes over, and
        # those outside of the batch in a `vmap` that is run eagerly.
        return fun(*args)
    look(program)
    # In a `shard_map`, JAX checks what varies over devices, and does not accept all that it has
    # traced itself. So the function is traced again there.
    return fun(*args) if jax.sharding.get_abstract_mesh().manual_axes else program()

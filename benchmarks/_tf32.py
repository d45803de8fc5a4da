"""TF32, the arithmetic of an NVIDIA GPU's default float32 product, on a CPU, which does not have
it: without its speed. Split products need no such emulation: the library's own are the same numbers
there.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr

from mpx_pde.interpret._jaxpr import bodies_of, is_container, own_bind, walk
from mpx_pde.interpret._rebind import rebind


PRODUCTS = ("dot_general", "mixed_dot_general")


def emulate_tf32(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun` of PyTrees of arrays, with the operands of all products rounded to the 10 bits of TF32.

    Derivatives are taken inside `fun`, so that their products are rounded like all others.
    """

    def emulated(*args):
        closed, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
        out = _evaluate(closed, *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return emulated


def _evaluate(closed: ClosedJaxpr, *args: Any) -> list[Any]:
    def evaluate(_, eqn, inputs):
        if is_container(eqn):
            return rebind(eqn, inputs, [partial(_evaluate, body) for body in bodies_of(eqn)])
        if eqn.primitive.name in PRODUCTS:
            inputs = [lax.reduce_precision(x, 8, 10) for x in inputs]
        return own_bind(eqn, inputs)

    return walk(closed.jaxpr, closed.consts, args, lambda literal: literal.val, evaluate)

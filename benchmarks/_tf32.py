"""TF32, the arithmetic of an NVIDIA GPU's default float32 product, on a CPU, which does not have
it: without its speed. Split products need no such emulation: the library's own are the same numbers
there.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from mpx_pde._jaxpr import bodies_of, is_container, own_bind, rebind


PRODUCTS = ("dot_general", "mixed_dot_general")

Product = Callable[[Callable[[Any, Any], Any], Any, Any], Any]
"""From a product of float32 operands, and the operands, to what takes its place."""


def emulate_tf32(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun` of PyTrees of arrays, with the operands of all products rounded to the 10 bits of TF32.

    Derivatives are taken inside `fun`, so that their products are rounded like all others.
    """
    rounded = lambda x: lax.reduce_precision(x, 8, 10)
    return emulate(fun, lambda eqn: True, lambda product, x, y: product(rounded(x), rounded(y)))


def emulate(
    fun: Callable[..., Any], chosen: Callable[[JaxprEqn], bool], product: Product
) -> Callable[..., Any]:
    """`fun` of PyTrees of arrays, with other products in place of those that are `chosen`."""

    def emulated(*args):
        closed, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
        out = _evaluate(closed, chosen, product, *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return emulated


def _evaluate(
    closed: ClosedJaxpr, chosen: Callable[[JaxprEqn], bool], product: Product, *args: Any
) -> list[Any]:
    values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    values |= dict(zip(closed.jaxpr.invars, args, strict=True))
    read = lambda atom: atom.val if isinstance(atom, Literal) else values[atom]
    for eqn in closed.jaxpr.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        if is_container(eqn):
            bodies = [
                lambda *xs, body=body: _evaluate(body, chosen, product, *xs)
                for body in bodies_of(eqn)
            ]
            outputs = rebind(eqn, inputs, bodies)
        elif eqn.primitive.name in PRODUCTS and chosen(eqn):
            multiply = lambda x, y, eqn=eqn: own_bind(eqn, [x, y])[0]
            outputs = [product(multiply, *inputs)]
        else:
            outputs = own_bind(eqn, inputs)
        values |= dict(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in closed.jaxpr.outvars]

"""Tools to walk a jaxpr, to search it, and to bind its equations.

`autocast`, `ranges` and the derivative engine (and with it `forward=`) interpret jaxprs with them.
They keep their knowledge of a value in a PyTree with it. Only this module and `_rebind.py` know how
JAX's containers are made.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxprs_in_params

from .._util._varying import mark_varying
from .._util._wrapper import of_some
from ..precision._dtypes import default_precision
from . import _tables as tables


def trace_arrays(fun: Callable, args: tuple, kwargs: dict) -> tuple[ClosedJaxpr, list, Callable]:
    """Traces a function to a jaxpr of all arrays in itself and its arguments.

    Also returns those arrays, each behind its path in `(fun, args, kwargs)`, and a function that
    assembles the output from the results of the jaxpr.
    """
    call = lambda fun, args, kwargs: fun(*args, **kwargs)
    closed, arrays, others = eqx.filter_make_jaxpr(call)(fun, args, kwargs)
    leaves = jtu.tree_leaves_with_path(eqx.filter((fun, args, kwargs), eqx.is_array))
    treedef = jtu.tree_structure(arrays)
    return closed, leaves, lambda out: eqx.combine(jtu.tree_unflatten(treedef, out), others)


# The parameters that hold the jaxprs of a container, in the order of [`rebind`][].
_BODIES = ("jaxpr", "call_jaxpr", "cond_jaxpr", "body_jaxpr", "branches")


def close(jaxpr: Any) -> ClosedJaxpr:
    """Closes a jaxpr without constants; returns a closed one unchanged."""
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


def bodies_of(eqn: JaxprEqn) -> list[ClosedJaxpr]:
    """Returns the jaxprs inside an equation that [`rebind`][] can enter, in its order."""
    if not is_container(eqn):
        return []
    bodies = [eqn.params[name] for name in _BODIES if name in eqn.params]
    return [close(x) for x in jax.tree.leaves(bodies)]


def is_container(eqn: JaxprEqn) -> bool:
    """Returns whether [`rebind`][] can enter the equation."""
    return eqn.primitive.name in tables.CONTAINERS


def equations_in(closed: ClosedJaxpr) -> Iterator[JaxprEqn]:
    """Yields the equations of a jaxpr, at any depth."""
    for eqn in closed.jaxpr.eqns:
        yield eqn
        for body in bodies_of(eqn):
            yield from equations_in(body)


def contains(closed: ClosedJaxpr, names: Collection[str]) -> bool:
    """Returns whether a jaxpr contains a primitive with one of these names, at any depth."""
    return any(eqn.primitive.name in names for eqn in equations_in(closed))


def jaxprs_in(eqn: JaxprEqn) -> list[Jaxpr]:
    """Returns all jaxprs in the parameters of an equation, even if [`rebind`][] cannot enter it."""
    return list(jaxprs_in_params(eqn.params))


def asks_what_moves(eqn: JaxprEqn) -> bool:
    """Returns whether the derivative of an equation, or of one in it, may depend on which operands
    have a tangent: a `custom_jvp` function with symbolic zeros."""
    inside = (inner for jaxpr in jaxprs_in(eqn) for inner in jaxpr.eqns)
    asks = eqn.primitive.name in tables.PUSHES and eqn.params.get("symbolic_zeros", True)
    return asks or any(map(asks_what_moves, inside))


def walk(
    jaxpr: Jaxpr,
    consts: Sequence,
    operands: Sequence,
    known: Callable[[Literal], Any],
    evaluate: Callable[[int, JaxprEqn, list], Sequence],
) -> list:
    """Evaluates a jaxpr on values of any kind, equation by equation.

    **Arguments:**

    - `consts`, `operands`: the values of its constants and of its inputs.
    - `known`: a function that returns the value of a literal.
    - `evaluate`: a function of the position of an equation, the equation and its operands. It
        returns the results of the equation.
    """
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *operands), strict=True))

    def read(atom):
        return known(atom) if isinstance(atom, Literal) else env[atom]

    for i, eqn in enumerate(jaxpr.eqns):
        out = evaluate(i, eqn, list(map(read, eqn.invars)))
        env.update(zip(eqn.outvars, out, strict=True))
    return list(map(read, jaxpr.outvars))


def own_bind(eqn: JaxprEqn, args: Sequence) -> list:
    """Binds the equation to `args`. Products without a precision take the default one, also in the
    programs that the equation holds. A cast to complex numbers keeps the digits of operands that
    are wider than in the program."""
    eqn = _at_precision(eqn, default_precision())
    if eqn.params.get("update_jaxpr") is not None:
        eqn = _updating(eqn, args[0].dtype)
    if eqn.primitive.name in tables.CASTS:
        new, dtype = eqn.params["new_dtype"], args[0].dtype
        if jnp.issubdtype(new, jnp.complexfloating) and dtype != aval_of(eqn.invars[0]).dtype:
            params = {**eqn.params, "new_dtype": jnp.promote_types(dtype, new)}
            eqn = eqn.replace(params=params)
    if eqn.primitive.name == "pvary":
        # A value that is evaluated again may have been marked when it was saved.
        return [mark_varying(x, eqn.params["axes"]) for x in args]
    out = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def with_products(eqn: JaxprEqn, changed: Callable[[JaxprEqn], JaxprEqn]) -> JaxprEqn:
    """Applies a function to each product in an equation, at any depth. The function may change the
    primitive and its parameters, but not the types of its operands and results."""
    if eqn.primitive.name in tables.PRODUCTS:
        return changed(eqn)
    return with_jaxprs(eqn, lambda x: x.replace(eqns=[with_products(e, changed) for e in x.eqns]))


def with_jaxprs(eqn: JaxprEqn, changed: Callable[[Jaxpr], Jaxpr]) -> JaxprEqn:
    """Applies a function to each jaxpr in the parameters of an equation."""

    def inside(x: Any) -> Any:
        if isinstance(x, Jaxpr):  # the only kind in JAX 0.12
            return changed(x)
        return x.replace(jaxpr=inside(x.jaxpr)) if is_jaxpr(x) else x

    is_jaxpr = lambda x: isinstance(x, Jaxpr | ClosedJaxpr)
    if not jaxprs_in(eqn):
        return eqn
    return eqn.replace(params=jax.tree.map(inside, eqn.params, is_leaf=is_jaxpr))


def _at_precision(eqn: JaxprEqn, precision: Any) -> JaxprEqn:
    """Sets the precision of each product in an equation, at any depth, that has none."""
    if precision is None:
        return eqn

    def precise(eqn: JaxprEqn) -> JaxprEqn:
        if eqn.primitive.name not in tables.JAX_PRODUCTS:
            return eqn
        return eqn.replace(params={**eqn.params, "precision": eqn.params["precision"] or precision})

    return with_products(eqn, precise)


def _updating(eqn: JaxprEqn, dtype: Any) -> JaxprEqn:
    """Returns a scatter for arrays of this dtype. A scatter holds a program for two scalars of its
    dtype.
    """
    update = eqn.params["update_jaxpr"]
    closed = close(update)
    if closed.in_avals[0].dtype == dtype:
        return eqn
    known = lambda atom: np.asarray(atom.val, dtype)
    bind = lambda i, eqn, args: own_bind(eqn, args)
    run = lambda *args: walk(closed.jaxpr, closed.consts, args, known, bind)
    new = jax.make_jaxpr(run)(*[jax.ShapeDtypeStruct((), dtype)] * len(closed.in_avals))
    new = new if isinstance(update, ClosedJaxpr) else new.jaxpr
    return eqn.replace(params={**eqn.params, "update_jaxpr": new})


@contextmanager
def in_context_of(eqn: JaxprEqn, source: Any = None):
    """A context in which new equations keep the name scopes, the settings and the source line of an
    equation. If `source` is given, its line is kept instead.
    """
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    lines = (source or eqn.source_info).traceback
    with source_info_util.user_context(lines, name_stack=stack), eqn.ctx.manager:
        yield


# A name stack holds scopes and transforms around them, such as "jvp".
_Scope = type(source_info_util.new_name_stack("scope").stack[0])


def scopes_of(eqn: JaxprEqn) -> tuple[str, ...]:
    """Returns the `jax.named_scope`s around an equation, outermost first, without transforms."""
    scopes = [x.name for x in eqn.source_info.name_stack.stack if isinstance(x, _Scope)]
    return tuple(name for scope in scopes for name in scope.split("/") if name)


def is_again(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is in a checkpoint that JAX evaluates again."""
    return "rematted_computation" in scopes_of(eqn)


def inner_scope(eqn: JaxprEqn) -> tuple[str, ...]:
    """Returns the scopes inside a container. A jitted function adds its name."""
    name = eqn.params.get("name")
    if eqn.primitive.name == "jit" and isinstance(name, str):
        return (*scopes_of(eqn), name)
    return scopes_of(eqn)


def aval_of(atom: Any) -> Any:
    """Returns the type of a variable or literal. The type of an array has a shape and a dtype."""
    return atom.aval


def is_key(x: Any) -> bool:
    """Returns whether an array holds keys of random numbers, which NumPy has not."""
    return jnp.issubdtype(getattr(x, "dtype", bool), jax.dtypes.extended)


def size_of(aval: Any) -> int:
    """Returns the number of entries of an array. Sizes that are symbols count as 1."""
    return math.prod(n for n in getattr(aval, "shape", ()) if isinstance(n, int))


def differentiable(atoms: Sequence) -> list[int]:
    """Returns the positions of the atoms that can have a tangent."""
    dtypes = [getattr(x.aval, "dtype", np.int32) for x in atoms]
    return [i for i, dtype in enumerate(dtypes) if jnp.issubdtype(dtype, jnp.inexact)]


def _moving(eqn: JaxprEqn, args: Sequence, moving: Sequence[int]) -> Callable[..., list]:
    """Returns the equation as a function of its `moving` operands. The custom rule of the equation
    sees that the others are fixed.
    """
    return of_some(lambda *operands: own_bind(eqn, operands), args, moving)


def pushforward(eqn: JaxprEqn, moving: Sequence[int]) -> ClosedJaxpr:
    """Traces the custom derivative of a `custom_jvp_call`, in the types of the equation.

    Returns a jaxpr from the operands and the tangents of the `moving` ones to the results and the
    tangents of the differentiable results.
    """
    avals = [x.aval for x in eqn.invars]

    def push(args, tangents):
        primals = tuple(args[i] for i in moving)
        out, out_tangents = jax.jvp(_moving(eqn, args, moving), primals, tuple(tangents))
        return out, [out_tangents[i] for i in differentiable(eqn.outvars)]

    return jax.make_jaxpr(push)(avals, [avals[i] for i in moving])


def pullback(eqn: JaxprEqn, moving: Sequence[int]) -> tuple[ClosedJaxpr, Callable[[], ClosedJaxpr]]:
    """Traces the custom derivative of a `custom_vjp_call`, in the types of the equation.

    Returns the forward rule, a jaxpr from the operands to the results and the residuals. Also
    returns a function that makes the backward rule, a jaxpr from the residuals and the cotangents
    of the differentiable results to the cotangents of the `moving` operands.
    """
    avals = [x.aval for x in eqn.invars]
    live = differentiable(eqn.outvars)

    def forward(*args):
        return jax.vjp(_moving(eqn, args, moving), *(args[i] for i in moving))

    forward_jaxpr, shapes = jax.make_jaxpr(forward, return_shape=True)(*avals)
    treedef = jax.tree.structure(shapes[1])
    residuals = forward_jaxpr.out_avals[len(eqn.outvars) :]

    def backward(residuals, cotangents):
        every = [np.zeros(aval_of(v).shape, jax.dtypes.float0) for v in eqn.outvars]
        for i, ct in zip(live, cotangents, strict=True):
            every[i] = ct
        return jax.tree.unflatten(treedef, residuals)(every)

    def backward_jaxpr():
        return jax.make_jaxpr(backward)(residuals, [eqn.outvars[i].aval for i in live])

    return forward_jaxpr, backward_jaxpr

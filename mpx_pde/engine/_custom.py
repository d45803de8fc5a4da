"""Evaluates functions with custom derivatives in a wider dtype than the program gives them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jax.extend.core import ClosedJaxpr, JaxprEqn

from ..program import _tables as tables
from ..program._flat import Step, evaluated, flatten
from ..program._jaxpr import (
    aval_of,
    bodies_of,
    differentiable,
    jaxprs_in,
    own_bind,
    pullback,
    pushforward,
)
from ..program._lines import line_of
from ..program._reverse import linear_by_pullback
from ._storage import Staged, Storage, Value, array_of, typed
from .taylor._jets import Jet, is_inexact


def own_in_compute_dtype(eqn: JaxprEqn, args: Sequence[Any], storage: Storage) -> list[Any]:
    """Binds an equation to values in the compute dtype.

    An equation that holds a program runs in the program's own dtypes, except for functions with
    custom derivatives and for scatters. An equation in float64 also keeps its own dtypes if the
    compute dtype is narrower.
    """
    name = eqn.primitive.name
    if name in _CUSTOM:
        return custom_in_compute_dtype(eqn, args)
    if name in tables.JAX_PRODUCTS and is_inexact(aval_of(eqn.outvars[0])):
        dtype = jnp.promote_types(aval_of(eqn.outvars[0]).dtype, storage.compute)
        eqn = eqn.replace(params={**eqn.params, "preferred_element_type": dtype})
    wide = {x.dtype for x in args if is_inexact(x)} - {storage.compute}
    programs = "update_jaxpr" not in eqn.params and bool(jaxprs_in(eqn))
    if not programs and not any(d.itemsize > 4 for d in wide if d.kind == "f"):
        return own_bind(eqn, args)
    return [storage.constant(x) for x in own_bind(eqn, typed(eqn, args))]


def custom_in_compute_dtype(eqn: JaxprEqn, args: Sequence[Any]) -> list:
    """Evaluates a function with a custom derivative on operands that are wider (or narrower) than
    it was traced with.

    The programs for its value and for its derivative are traced in its own dtypes and would not
    accept such operands. So they are evaluated in the dtype of the widest operand, at every order.
    """
    if all(aval_of(v).dtype == x.dtype for v, x in zip(eqn.invars, args, strict=True)):
        # Rules expect JAX arrays, which can be indexed with a traced index.
        out = own_bind(eqn, [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in args])
        return _as_recorded(eqn, out, eqn.outvars)
    parts = (jnp.finfo(x.dtype).dtype for x in args if is_inexact(x))
    storage = Storage(max(parts, key=lambda dtype: dtype.itemsize), narrows=True)
    evaluate = lambda closed, args: _evaluate(closed, list(map(array_of, args)), storage)
    return _CUSTOM[eqn.primitive.name](eqn, args, evaluate)


def bind_recorded(eqn: JaxprEqn, args: Sequence[Any]) -> list:
    """Binds an equation. Functions with a derivative of their own return arrays of the shapes that
    the equation records."""
    own = eqn.primitive.name in tables.CUSTOM
    return custom_in_compute_dtype(eqn, args) if own else own_bind(eqn, args)


def _as_recorded(eqn: JaxprEqn, out: Sequence[Any], of: Sequence[Any]) -> list[Any]:
    """Returns results, or tangents, in the shapes recorded for the results `of`.

    If a rule maps the tangent of an unmapped value, JAX gives the result the `vmap` axis too, and
    its entries are equal along that axis. Raises a `ValueError` if either of two axes could be it.
    """

    def recorded(x, v):
        want, found = aval_of(v).shape, np.shape(x)
        if found == want:
            return x
        without = lambda axis: found[:axis] + found[axis + 1 :]
        axes = [axis for axis in range(len(found)) if without(axis) == want]
        if len(axes) != 1:
            name = bodies_of(eqn)[0].jaxpr.debug_info.func_name
            raise ValueError(
                f"The `{eqn.primitive.name.removesuffix('_call')}` function `{name}` at "
                f"{line_of(eqn)} has a result of shape {want}, and {found} where it is "
                "differentiated: under `jax.vmap` its rule makes a tangent of what is mapped, for "
                "a result that is made of nothing mapped. Return it by a function of its own."
            )
        return lax.index_in_dim(x, 0, axes[0], keepdims=False)

    return list(map(recorded, out, of))


# The derivative is traced separately for each use, since it depends on which operands have tangents
# and on what that use keeps. Operands and results are arrays, or values without streams.

Evaluate = Callable[[ClosedJaxpr, Sequence[Value]], list[Value]]


def custom_jvp(eqn: JaxprEqn, operands: Sequence[Value], evaluate: Evaluate) -> list[Value]:
    """Returns the results of a `custom_jvp_call`. `evaluate` evaluates both the function and its
    derivative."""

    def push(primals, tangents, moving, like):
        moved = [
            Staged(Jet(tangents[i])) if isinstance(primals[i], Staged) else tangents[i]
            for i in moving
        ]
        out = evaluate(pushforward(eqn, moving), [*primals, *moved])
        live = [like[i] for i in differentiable(eqn.outvars)]
        return _in_dtypes(out[: len(like)], like), _in_dtypes(out[len(like) :], live)

    return _with_tangents(eqn, operands, evaluate, push)


def custom_vjp(eqn: JaxprEqn, operands: Sequence[Value], evaluate: Evaluate) -> list[Value]:
    """Returns the results of a `custom_vjp_call`. `evaluate` evaluates both of its rules."""

    def push(primals, tangents, moving, like):
        rule, backward_rule = pullback(eqn, moving)
        out, live = evaluate(rule, primals), differentiable(eqn.outvars)
        values = _in_dtypes(out[: len(like)], like)
        kept, treedef = jax.tree.flatten(out[len(like) :])

        def backward(residuals, cotangents):
            moved = (Staged(Jet(x)) for x in cotangents)
            given = [*jax.tree.unflatten(treedef, residuals), *moved]
            back = evaluate(backward_rule(), given)
            return _in_dtypes(back, [array_of(primals[i]) for i in moving])

        moved = [tangents[i] for i in moving], [values[i] for i in live]
        return values, linear_by_pullback(backward, kept, *moved)

    return _with_tangents(eqn, operands, evaluate, push)


_CUSTOM = {"custom_jvp_call": custom_jvp, "custom_vjp_call": custom_vjp}


def _with_tangents(
    eqn: JaxprEqn, operands: Sequence[Value], evaluate: Evaluate, push: Callable
) -> list[Value]:
    """Calls the function of an equation with `push` as its derivative. `push` takes the operands,
    their tangents, the positions of the operands with tangents, and the results' types."""
    (closed,) = bodies_of(eqn)

    def body(*values):
        return evaluate(closed, values)

    # The name under which it appears in jaxprs.
    body.__name__ = closed.jaxpr.debug_info.func_name
    function = jax.custom_jvp(body)

    def rule(primals, tangents):
        tangents = list(map(array_of, tangents))
        live = differentiable(eqn.invars)
        moving = [i for i in live if not isinstance(tangents[i], SymbolicZero)]
        like = jax.eval_shape(body, *primals)
        out, moved = push(primals, tangents, moving, list(map(array_of, like)))
        out = _as_recorded(eqn, out, eqn.outvars)
        places = differentiable(eqn.outvars)
        moved = _as_recorded(eqn, moved, [eqn.outvars[i] for i in places])
        found = dict(zip(places, moved, strict=True))
        dots = [found[i] if i in found else zero_from_primal(x) for i, x in enumerate(out)]
        treedef = jax.tree.structure(like)
        return jax.tree.unflatten(treedef, out), jax.tree.unflatten(treedef, dots)

    function.defjvp(rule, symbolic_zeros=True)
    return function(*operands)


def _in_dtypes(values: Sequence[Value], like: Sequence[Any]) -> list[Any]:
    pairs = zip(map(array_of, values), like, strict=True)
    return [jnp.asarray(x, y.dtype) if is_inexact(y) else x for x, y in pairs]


def _evaluate(closed: ClosedJaxpr, args: Sequence[Any], storage: Storage) -> list:
    """Evaluates a jaxpr with all numbers, real and complex, in the compute dtype."""

    def bind(step: Step, operands: list) -> list:
        eqn, operands = step.eqn, list(map(storage.constant, operands))
        if step.name in _CUSTOM:
            return custom_in_compute_dtype(eqn, operands)
        if step.name in tables.CASTS:
            dtypes = operands[0].dtype, eqn.params["new_dtype"]
            if all(jnp.issubdtype(d, jnp.floating) for d in dtypes):
                return operands
        if step.name in tables.PRODUCTS | tables.TYPED or jaxprs_in(eqn):
            operands = typed(eqn, operands)
        return list(map(storage.constant, own_bind(eqn, operands)))

    out = evaluated(flatten(closed, forward_mode=False), args, bind)
    return list(map(storage.constant, out))

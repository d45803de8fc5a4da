"""Named values in the middle of a program, brought out of it.

A loss returns one number. What its derivative terms are is known where they are made, under `vmap`
and in loops. So they are marked there by a primitive that does nothing, the loss is traced, and
what carries a mark is collected from the program: whole batches of values, as they are in it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from ._flat import Constant, flatten
from ._jaxpr import bodies_of, contains, in_context_of, own_bind, trace_arrays
from ._rebind import rebind


mark_p = Primitive("named_value")

# Part of the key of jit's caches: a function that was traced without marks has none.
_context = jax.make_user_context(False)


@contextmanager
def _marking() -> Iterator[None]:
    with _context(True):
        yield


def marked(values: dict[str, Any]) -> dict[str, Any]:
    """The same values, with their names while somebody collects them."""
    if not _context.value:
        return values
    return {name: mark_p.bind(x, name=name) for name, x in values.items()}


def _jvp(primals, tangents, *, name):
    (x,), (x_dot,) = primals, tangents
    return mark_p.bind(x, name=name), x_dot


def _batch(args, dims, *, name):
    (x,), (dim,) = args, dims
    # In an order that no rule for batches decides.
    return mark_p.bind(jnp.moveaxis(x, dim, 0), name=name), 0


mark_p.def_impl(lambda x, *, name: x)
mark_p.def_abstract_eval(lambda x, *, name: x)
mlir.register_lowering(mark_p, lambda ctx, x, *, name: [x])
batching.primitive_batchers[mark_p] = _batch
ad.primitive_jvps[mark_p] = _jvp


Found = list[tuple[str, Any]]


def collecting(fun: Callable) -> Callable[..., tuple[Any, dict[str, Array]]]:
    """`fun`, which also returns the values that were marked in it, by name: one vector for all
    calls, batches and steps of loops together.

    Not to be differentiated. What is marked in a `while` loop or a `shard_map` stays there.
    """

    def call(*args: Any, **kwargs: Any) -> tuple[Any, dict[str, Array]]:
        with _marking():
            closed, leaves, assemble = trace_arrays(fun, args, kwargs)
        out, found = _walk(closed, [x for _, x in leaves])
        named: dict[str, list] = {}
        for name, x in found:
            named.setdefault(name, []).append(jnp.ravel(x))
        return assemble(out), {n: _joined(xs) for n, xs in named.items()}

    return call


def _joined(parts: list[Array]) -> Array:
    widest = max((x.dtype for x in parts), key=lambda dtype: dtype.itemsize)
    return jnp.concatenate([x.astype(widest) for x in parts])


def _walk(closed: ClosedJaxpr, operands: list) -> tuple[list, Found]:
    flat = flatten(closed, forward_mode=True)
    env = {k: c.value for k, c in flat.constants.items()}
    env.update(zip(flat.inputs, operands, strict=True))
    read = lambda x: x.value if isinstance(x, Constant) else env[x]
    found: Found = []
    for step in flat.steps:
        args = [read(x) for x in step.inputs]
        with in_context_of(step.eqn):
            out = _step(step.eqn, args, found)
        env.update(zip(step.outputs, out, strict=True))
    return [read(x) for x in flat.outputs], found


def _step(eqn: Any, args: list, found: Found) -> list:
    name = eqn.primitive.name
    if eqn.primitive is mark_p:
        found.append((eqn.params["name"], args[0]))
        return args
    bodies = bodies_of(eqn)
    if name == "custom_jvp_call":
        # Nothing is differentiated here, and its rule may hold values of the trace that is over.
        out, inside = _walk(bodies[0], args)
        found.extend(inside)
        return out
    if not any(contains(body, {mark_p.name}) for body in bodies):
        return own_bind(eqn, args)
    if name in ("scan", "cond"):
        names = [[n for n, _ in x] for x in _marks_of(bodies)]
        enter = _in_scan if name == "scan" else _in_cond
        out = enter(eqn, bodies, args)
        ends = len(eqn.outvars)
        found.extend(zip([n for each in names for n in each], out[ends:], strict=True))
        return out[:ends]
    return own_bind(eqn, args)


def _marks_of(bodies: list[ClosedJaxpr]) -> list[Found]:
    """The marks in each body, as shapes."""
    out = []
    for body in bodies:
        found: Found = []

        def run(*xs, body=body, found=found):
            result, inside = _walk(body, list(xs))
            found.extend(inside)
            return result, [x for _, x in inside]

        _, shapes = jax.eval_shape(run, *body.in_avals)
        out.append([(n, s) for (n, _), s in zip(found, shapes, strict=True)])
    return out


def _in_scan(eqn: Any, bodies: list[ClosedJaxpr], args: list) -> list:
    (body,) = bodies

    def run(*xs):
        out, inside = _walk(body, list(xs))
        return [*out, *(x for _, x in inside)]

    return rebind(eqn, args, [run])


def _in_cond(eqn: Any, bodies: list[ClosedJaxpr], args: list) -> list:
    """The marks of all branches: zeros of those that do not run."""
    every = _marks_of(bodies)

    def branch(i, body):
        def run(*xs):
            out, inside = _walk(body, list(xs))
            marks = [
                [x for _, x in inside] if j == i else [jnp.zeros(s.shape, s.dtype) for _, s in of]
                for j, of in enumerate(every)
            ]
            return [*out, *jtu.tree_leaves(marks)]

        return run

    return rebind(eqn, args, [branch(i, b) for i, b in enumerate(bodies)])

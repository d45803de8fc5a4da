"""Binds containers again, around new bodies.

A container is an equation that holds jaxprs: a `jit`, a loop, a branch, or a function with its own
derivative. An interpreter passes to [`rebind`][] a Python function for each inner jaxpr, and gets
the same container around them. Types may change on the way. The number and order of operands and
results may not.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from ._jaxpr import bodies_of


Body = Callable[..., list]


def _jit(eqn: JaxprEqn, args: Sequence, body: Body) -> list:
    closed, out = jax.make_jaxpr(body, return_shape=True)(*args)
    results = eqn.primitive.bind(*jax.tree.leaves(args), **{**eqn.params, "jaxpr": closed})
    return jax.tree.unflatten(jax.tree.structure(out), results)


def _checkpoint(eqn: JaxprEqn, args: Sequence, body: Body) -> list:
    options = {k: eqn.params[k] for k in ("policy", "prevent_cse") if k in eqn.params}
    return jax.checkpoint(body, **options)(*args)


def carried_by(eqn: JaxprEqn) -> range:
    """Returns the positions of the operands that a loop carries from step to step. Before them come
    those that are the same in each step, and after them the arrays that a `scan` slices. No operand
    of other containers is carried."""
    params, every = eqn.params, range(len(eqn.invars))
    match eqn.primitive.name:
        case "while":
            return every[params["cond_nconsts"] + params["body_nconsts"] :]
        case "scan" if "num_consts" in params:
            return every[params["num_consts"] :][: params["num_carry"]]
        case "scan":  # JAX 0.11 keeps the operands in groups.
            consts, carry, _ = params["ft_in"].update(list(every)).unpack()
            return every[len(list(consts)) :][: len(list(carry))]
    return every[len(every) :]


def operands_in(eqn: JaxprEqn) -> list[Sequence[int]]:
    """Returns the positions of the operands that each program in an equation takes, in the order of
    [`bodies_of`][]."""
    bodies, every = bodies_of(eqn), range(len(eqn.invars))
    match eqn.primitive.name:
        case "while":
            test, body, carry = _cut(every, eqn.params["cond_nconsts"], eqn.params["body_nconsts"])
            return [[*test, *carry], [*body, *carry]]
        case "cond":
            return [every[1:]] * len(bodies)
    return [every] * len(bodies)


def _scan(eqn: JaxprEqn, args: Sequence, body: Body) -> list:
    params = eqn.params
    carried = carried_by(eqn)
    n_carry = len(carried)
    consts, init, xs = _cut(args, carried.start, n_carry)

    def step(carry, x):
        out = body(*consts, *carry, *x)
        return out[:n_carry], out[n_carry:]

    options = {k: params[k] for k in ("length", "reverse", "unroll")}
    carry, ys = lax.scan(step, init, xs, **options)
    return [*carry, *ys]


def bodies_in(eqn: JaxprEqn) -> list[tuple[ClosedJaxpr, int, range]]:
    """Returns the programs in an equation that compute its results, each with the position of its
    first operand, and with the places of its operands that a loop carries to the next step."""
    bodies, start, carried = bodies_of(eqn), 0, carried_by(eqn)
    match eqn.primitive.name:
        case "while":
            bodies, start = bodies[1:], eqn.params["cond_nconsts"]
        case "cond":
            start = 1
    inside = range(carried.start - start, carried.stop - start)
    return [(body, start, inside) for body in bodies]


def _while(eqn: JaxprEqn, args: Sequence, test: Body, body: Body) -> list:
    test_consts, body_consts, init = _cut(
        args, eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    )
    going = lambda carry: test(*test_consts, *carry)[0]
    step = lambda carry: body(*body_consts, *carry)
    if not bodies_of(eqn)[0].out_avals[0].shape:
        return lax.while_loop(going, step, init)

    # The loops of a batch end independently.
    def proceed(carry):
        on = going(carry)

        def chosen(v, new, old):
            # A stacked stream has an additional leading axis.
            first = new.ndim - v.aval.ndim
            there = lax.broadcast_in_dim(on, new.shape, range(first, first + on.ndim))
            return lax.select(there, new, old)

        choose = lambda v, new, old: jax.tree.map(partial(chosen, v), new, old)
        return list(map(choose, eqn.invars[-len(init) :], step(carry), carry))

    return lax.while_loop(lambda carry: jnp.any(going(carry)), proceed, init)


def _shard_map(eqn: JaxprEqn, args: Sequence, body: Body) -> Sequence:
    params = eqn.params
    # JAX renamed the parameter.
    axes = params.get("newly_manual_axes", params.get("manual_axes", ()))
    return jax.shard_map(
        lambda *args: tuple(body(*args)),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=set(axes),
        check_vma=params["check_vma"],
    )(*args)


def _cut(args: Sequence, first: int, second: int) -> tuple[list, list, list]:
    args = list(args)
    return args[:first], args[first : first + second], args[first + second :]


def _cond(eqn: JaxprEqn, args: Sequence, *branches: Body) -> Sequence:
    index, *operands = args
    platforms = eqn.params.get("branches_platforms")
    if platforms is None:
        return lax.switch(index, branches, *operands)
    # The branch is chosen, and the others dropped, when the program is lowered for a platform.
    named, default = {}, None
    for names, branch in zip(platforms, branches, strict=True):
        if names is None:
            default = branch
        else:
            named.update(dict.fromkeys(names, branch))
    return lax.platform_dependent(*operands, default=default, **named)


_BOUND: dict[str, Callable[..., Sequence]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
    "jit": _jit,
    "remat2": _checkpoint,
}


def rebind(eqn: JaxprEqn, args: Sequence, bodies: Sequence[Body]) -> list:
    """Binds a container to `args`, with `bodies` in place of its inner jaxprs.

    Each body takes the arrays that its jaxpr takes, and returns a list of its results. An array may
    be in a PyTree that tells more about it, except the index of a `cond`. In a loop the carry must
    keep its type, and branches must agree. The derivative of a `custom_jvp_call` or
    `custom_vjp_call` is not carried over: use [`pushforward`][] and [`pullback`][].
    """
    bind = _BOUND.get(eqn.primitive.name)
    return list(bodies[0](*args) if bind is None else bind(eqn, args, *bodies))

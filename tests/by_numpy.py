"""Evaluates traced programs with NumPy, one equation at a time.

A random program runs once, and compiling it takes a hundred times as long as running it. JAX binds
the primitives that are not listed here, and compiles each once for its shapes.
"""

import functools as ft
import operator

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from mpx_pde._util._in_jax import IN_JAX
from mpx_pde.program._jaxpr import bodies_of, own_bind
from mpx_pde.program._rebind import carried_by
from mpx_pde.program._tables import CALLS, CHECKPOINTS, CUSTOM


def _integer_pow(x, *, y):
    return 1 / np.power(x, -y) if y < 0 else np.power(x, y)


def _broadcast(x, *, shape, broadcast_dimensions, sharding=None):
    placed = [1] * len(shape)
    for size, i in zip(x.shape, broadcast_dimensions, strict=True):
        placed[i] = size
    return np.broadcast_to(x.reshape(placed), shape)


def _reshape(x, *, new_sizes, dimensions, **_):
    return (x if dimensions is None else x.transpose(dimensions)).reshape(new_sizes)


def _pad(x, value, *, padding_config):
    low, _, inner = zip(*padding_config, strict=True) if x.ndim else ((), (), ())
    spread = [n + max(n - 1, 0) * i for n, i in zip(x.shape, inner, strict=True)]
    before = [max(i, 0) for i in low]
    wide = [b + n + max(c[1], 0) for b, n, c in zip(before, spread, padding_config, strict=True)]
    out = np.full(wide, value, x.dtype)
    out[tuple(slice(b, b + n, i + 1) for b, n, i in zip(before, spread, inner, strict=True))] = x
    cuts = ((max(-i, 0), n - max(-j, 0)) for n, (i, j, _) in zip(wide, padding_config, strict=True))
    return out[tuple(slice(*cut) for cut in cuts)]


def _slice(x, *, start_indices, limit_indices, strides):
    return x[tuple(map(slice, start_indices, limit_indices, strides or (1,) * x.ndim))]


def _select(which, *cases):
    return np.choose(which.astype(int), cases) if len(cases) > 2 else np.where(which, *cases[::-1])


def _convert(x, *, new_dtype, **_):
    if np.iscomplexobj(x) and not np.issubdtype(new_dtype, np.complexfloating):
        x = x.real
    return x.astype(new_dtype)


def _dot(x, y, *, dimension_numbers, **_):
    (cx, cy), (bx, by) = dimension_numbers
    if x.dtype.itemsize < 4:  # halves are accumulated in float32
        x, y = x.astype(np.float32), y.astype(np.float32)
    free = lambda a, c, b: [i for i in range(a.ndim) if i not in (*c, *b)]
    fx, fy = free(x, cx, bx), free(y, cy, by)
    size = lambda a, axes: int(np.prod([a.shape[i] for i in axes]))
    shape = [a.shape[i] for a, axes in ((x, bx), (x, fx), (y, fy)) for i in axes]
    a = x.transpose(*bx, *fx, *cx).reshape(size(x, bx), size(x, fx), size(x, cx))
    b = y.transpose(*by, *cy, *fy).reshape(size(y, by), size(y, cy), size(y, fy))
    return (a @ b).reshape(shape)


def _reduce(ufunc):
    def reduced(x, *, axes, **_):
        if ufunc in (np.add, np.multiply) and x.dtype.itemsize < 4:  # as XLA accumulates halves
            return ufunc.reduce(x.astype(np.float32), axis=tuple(axes))
        return ufunc.reduce(x, axis=tuple(axes))

    return reduced


def _split(x, *, sizes, axis):
    return np.split(x, np.cumsum(sizes)[:-1], axis)


def _unstack(x, *, axis, **_):
    return list(np.moveaxis(x, axis, 0))


def _plain(function):
    return lambda *args, **_: function(*args)


_SAME_NAME = (
    "sin cos tan tanh sinh cosh exp exp2 expm1 log log1p sqrt cbrt square abs sign floor ceil "
    "real imag"
)

_PLAIN = {
    **{name: getattr(np, name) for name in _SAME_NAME.split()},
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **dict.fromkeys(("add", "add_any"), np.add),
    **dict.fromkeys(("copy", "stop_gradient"), np.asarray),
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "neg": np.negative,
    "max": np.maximum,
    "min": np.minimum,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "logistic": special.expit,
    "erf": special.erf,
    "erfc": special.erfc,
    "is_finite": np.isfinite,
    "pow": np.power,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.bitwise_not,
    "rem": np.fmod,
    "conj": np.conj,
    "select_n": _select,
}

_RULES = {
    **{name: _plain(function) for name, function in _PLAIN.items()},
    "integer_pow": _integer_pow,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": lambda x, *, permutation: x.transpose(permutation),
    "squeeze": lambda x, *, dimensions: x.squeeze(tuple(dimensions)),
    "rev": lambda x, *, dimensions: np.flip(x, dimensions),
    "slice": _slice,
    "pad": _pad,
    "stack": lambda *xs, axis: np.stack(xs, axis),
    "concatenate": lambda *xs, dimension: np.concatenate(xs, dimension),
    "convert_element_type": _convert,
    "dot_general": _dot,
    "reduce_sum": _reduce(np.add),
    "reduce_max": _reduce(np.maximum),
    "reduce_min": _reduce(np.minimum),
    "reduce_and": _reduce(np.bitwise_and),
    "reduce_or": _reduce(np.bitwise_or),
    "argmax": lambda x, *, axes, **_: np.argmax(x, *axes),
    "argmin": lambda x, *, axes, **_: np.argmin(x, *axes),
    "iota": lambda *, dtype, shape, dimension, **_: np.broadcast_to(
        np.expand_dims(np.arange(shape[dimension]), [*range(1, len(shape) - dimension)]), shape
    ),
}

# Rules with several results.
_LISTS = {
    "split": _split,
    "unstack": _unstack,
    "optimization_barrier": lambda *xs, **_: list(xs),
}

_FLOATS = {"div", "pow", "integer_pow", "rem"}
"""Primitives whose rules are for floating-point and complex numbers only, not for integers."""

_CALLS = CALLS | CUSTOM | CHECKPOINTS


def called(function, *args):
    """Returns the result of a function as NumPy arrays."""
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    return jax.tree.unflatten(jax.tree.structure(shape), evaluate(closed, jax.tree.leaves(args)))


def evaluate(closed, args, rounding=None):
    """Returns the results of a jaxpr, with each operation rounded by `rounding`."""
    with np.errstate(all="ignore"):
        return _run(closed, list(map(_held, args)), rounding)


def _held(x):
    """Converts to a NumPy array unless `x` is a random key."""
    return x if jnp.issubdtype(x.dtype, jax.dtypes.extended) else np.asarray(x)


def _run(closed, args, rounding):
    jaxpr = closed.jaxpr
    env = dict(zip(jaxpr.constvars, map(_held, closed.consts), strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    read = lambda v: np.asarray(v.val, v.aval.dtype) if hasattr(v, "val") else env[v]
    for eqn in _needed(jaxpr):
        found = _apply(eqn, list(map(read, eqn.invars)), rounding)
        if rounding is not None and eqn.primitive.name in rounding.primitives:
            found = list(map(rounding, found))
        env.update(zip(eqn.outvars, found, strict=True))
    return list(map(read, jaxpr.outvars))


@ft.lru_cache(1000)
def _needed(jaxpr):
    """Returns the equations that the results depend on. Layers draw weights that are not used."""
    read, out = {v for v in jaxpr.outvars if not hasattr(v, "val")}, []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not read.isdisjoint(eqn.outvars):
            read.update(v for v in eqn.invars if not hasattr(v, "val"))
            out.insert(0, eqn)
    return out


def _apply(eqn, args, rounding):
    name, params = eqn.primitive.name, eqn.params
    if name == "rounded":
        return args if rounding is None else [rounding(*args, **params)]
    plain = all(isinstance(x, np.ndarray | np.generic) for x in args)
    if name in _RULES and plain and (name not in _FLOATS or args[0].dtype.kind in "fcV"):
        x = np.asarray(_RULES[name](*args, **params))
        return [x.astype(eqn.outvars[0].aval.dtype, copy=False)]
    if name in _LISTS and plain:
        return _LISTS[name](*args, **params)
    if eqn.primitive in IN_JAX and plain:
        own = ft.partial(IN_JAX[eqn.primitive], **params)
        return _run(jax.make_jaxpr(own)(*args), args, rounding)
    if name in _CALLS:
        return _run(bodies_of(eqn)[0], args, rounding)
    if name == "scan" and params["length"]:
        return _scan(eqn, args, rounding)
    if name == "while":
        test, step = bodies_of(eqn)
        n, m = params["cond_nconsts"], params["body_nconsts"]
        carry = args[n + m :]
        while np.any(going := _run(test, [*args[:n], *carry], rounding)[0]):
            # Under `vmap`, carries of finished loops stay as they are.
            new = _run(step, [*args[n : n + m], *carry], rounding)
            going = [np.reshape(going, going.shape + (1,) * (x.ndim - going.ndim)) for x in new]
            carry = list(map(np.where, going, new, carry))
        return carry
    if name == "cond":
        branches = bodies_of(eqn)
        return _run(branches[min(max(int(args[0]), 0), len(branches) - 1)], args[1:], rounding)
    return list(map(_held, own_bind(eqn, list(map(_held_by_jax, args)))))


def _held_by_jax(x):
    return jax.device_put(x) if isinstance(x, np.ndarray) else x


def _scan(eqn, args, rounding):
    (body,) = bodies_of(eqn)
    places = carried_by(eqn)
    n_carry = len(places)
    consts, carry, xs = args[: places.start], [args[i] for i in places], args[places.stop :]
    steps, stacked = range(eqn.params["length"]), []
    for i in reversed(steps) if eqn.params["reverse"] else steps:
        out = _run(body, [*consts, *carry, *(x[i] for x in xs)], rounding)
        carry = out[:n_carry]
        stacked.append(out[n_carry:])
    if eqn.params["reverse"]:
        stacked.reverse()
    return [*carry, *map(np.stack, zip(*stacked, strict=True))]

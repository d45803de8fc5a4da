"""Tools to define primitives of JAX that take several arrays."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from ._in_jax import IN_JAX


def present(bind: Callable, xs: Sequence[Any], absent: Callable[[int], Any]) -> list[Any]:
    """Binds those of `xs` that are not symbolic zeros; `absent` makes the others by place."""
    places = [i for i, x in enumerate(xs) if not isinstance(x, ad.Zero)]
    results = iter(bind(*(xs[i] for i in places)) if places else ())
    return [next(results) if i in places else absent(i) for i in range(len(xs))]


def keep_used(used: Sequence[bool], *given: Any) -> tuple[list[bool], Any]:
    """Keeps the operands whose results are used, and the trailing operands that have no result.
    This matters because JAX cannot transpose a loop in which some outputs have symbolically zero
    cotangents and others have not. The equation is the last argument, since JAX 0.12 passes the
    live references before it."""
    eqn = given[-1]
    like = eqn.invars[len(used) :]
    needed = [*used, *(any(used) for _ in like)]
    if not any(used):
        return needed, None

    def of_used(xs):
        return [x for x, is_used in zip(xs, used, strict=False) if is_used]

    return needed, eqn.replace(invars=[*of_used(eqn.invars), *like], outvars=of_used(eqn.outvars))


def repeated(x: Array | np.ndarray, axis: int, like: Array, dim: int) -> Array:
    """Repeats an array along a new axis, with the length and sharding of axis `dim` of `like`."""
    shape = (*x.shape[:axis], like.shape[dim], *x.shape[axis:])
    sharding, spec = jax.typeof(like).sharding, jax.typeof(x).sharding.spec
    name, sharded = sharding.spec[dim], None
    if name is not None:
        sharded = NamedSharding(sharding.mesh, PartitionSpec(*spec[:axis], name, *spec[axis:]))
    others = [i for i in range(len(shape)) if i != axis]
    return lax.broadcast_in_dim(x, shape, others, out_sharding=sharded)


def with_batch_at(axis: int, args: Sequence[Any], dims: Sequence[int | None]) -> list[Array]:
    """Moves the batch axes of operands to `axis`, and repeats operands without one along it."""
    like, at = next((x, d) for x, d in zip(args, dims, strict=True) if d is not None)
    pairs = zip(args, dims, strict=True)
    return [
        repeated(x, axis, like, at) if d is None else jnp.moveaxis(x, d, axis) for x, d in pairs
    ]


def lower(primitive: Primitive, function: Callable, **on: Callable) -> None:
    """Defines how a primitive is lowered. `on` holds the functions for individual platforms."""
    IN_JAX.setdefault(primitive, function)
    for platform, lowered in {None: function, **on}.items():
        lowering = mlir.lower_fun(lowered, multiple_results=primitive.multiple_results)
        mlir.register_lowering(primitive, lowering, platform=platform)

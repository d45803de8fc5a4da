"""Evaluates residuals at a batch of examples, and the rows of their Jacobian a block at a time."""

import functools as ft
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from .._util._calls import named
from .._util._notes import noting, noting_the_terms
from .._util._types import PyTree
from ..engine import InForward, linearized
from ..precision._cast import arrays_in_full
from ..precision._forward import Forward, without_halves
from ..precision._split import SPLIT_PRODUCTS
from ..precision._tree import dealt
from ..program._tables import PRODUCTS
from ..program._warnings import traced, warn_user
from ..reports._diagnosis import LEAST_IN_FULL, OF_JACOBIANS, checked
from ..scaling._loss import DynamicLossScaling


CALL = "LevenbergMarquardt"


class Residuals(eqx.Module):
    """Functions of a model and one example, with the precision of their values (`forward`) and that
    of the derivatives that make a Jacobian (`jacobian`)."""

    functions: tuple[Callable[..., Any], ...]
    forward: str = eqx.field(static=True)
    jacobian: str = eqx.field(static=True)

    @property
    def dtype(self) -> Any:
        return jnp.dtype(self.forward)

    @property
    def jacobian_dtype(self) -> Any:
        """Returns the dtype of the rows of the Jacobian."""
        return jnp.dtype("float64" if self.jacobian == "float64" else "float32")

    def values(
        self, params: PyTree, static: PyTree, batches: tuple, most: int | None = None
    ) -> Float[Array, " rows"]:
        """Evaluates all residuals at all examples, each weighted by one over the square root of the
        number of its examples. Takes at most so many examples at a time, if `most` is given, and
        keeps only what products return for derivatives."""
        out = []
        for fun, batch in zip(self.functions, batches, strict=True):
            length = length_of(batch)
            one = ft.partial(self._residual, fun, params, static)
            count = 1 if most is None else math.ceil(length / most)
            with jax.default_matmul_precision("highest"):
                if count == 1:
                    r = jax.vmap(one)(batch)
                else:
                    block = jax.checkpoint(jax.vmap(one), policy=_is_product)
                    r = lax.map(block, _in_blocks(batch, count))
                    r = jnp.swapaxes(r, 0, 1).reshape(-1, r.shape[-1])[:length]
            out.append(jnp.ravel(r.astype(self.dtype)) * (1 / math.sqrt(length)))
        return jnp.concatenate(out)

    def shapes(self, params: PyTree, static: PyTree, examples: list) -> list[jax.ShapeDtypeStruct]:
        """Returns the shape and the dtype that each residual has at one example."""
        return [
            jax.eval_shape(ft.partial(self._residual, fun, params, static), x)
            for fun, x in zip(self.functions, examples, strict=True)
        ]

    def blocks(self, batches: tuple, sizes: list[int], count: int) -> tuple[tuple, tuple, tuple]:
        """Deals the residuals out into `count` blocks, whole examples or parts of the `sizes`
        entries at each. Returns examples, the weights of their residuals, which are 0 where they
        fill up, and the entries, or `None` for all. These are stacked along a leading axis.
        """

        def split(batch, size):
            length = length_of(batch)
            parts, each = parts_of(length, size, count)
            index = jnp.arange(math.ceil(length * parts / count) * count)
            weight = jnp.where(index < length * parts, 1 / math.sqrt(length), 0.0)
            entries = None
            if parts > 1:
                entries = (index % parts * each)[:, None] + jnp.arange(each)[None]
                entries = dealt(entries, count)
            examples = _in_blocks(batch, count, index // parts)
            return examples, dealt(weight.astype(self.dtype), count), entries

        examples, weights, entries = zip(*map(split, batches, sizes), strict=True)
        return examples, weights, entries

    def rows(
        self, params: PyTree, static: PyTree, scaling: DynamicLossScaling, block: tuple
    ) -> Float[Array, "rows parameters"]:
        """Returns the rows of the Jacobian that belong to a block, one of `blocks`."""
        args = (params, static, scaling, block)
        if not self._half or not traced(args):  # in eager mode there is no program to check
            return self._linearized(*args)
        with named(CALL):
            return checked(
                self._linearized,
                args,
                jnp.dtype(self.jacobian),
                OF_JACOBIANS,
                least=LEAST_IN_FULL,
                instead=f"jacobian={self.forward!r}",
            )

    @property
    def _half(self) -> bool:
        return self.jacobian in ("float16", "bfloat16")

    def _linearized(
        self, params: PyTree, static: PyTree, scaling: DynamicLossScaling, block: tuple
    ) -> Float[Array, "rows parameters"]:
        scale, dtype = scaling.loss_scaling, self.jacobian_dtype  # 1 except for float16
        jacs = []
        for fun, *parts in zip(self.functions, *block, strict=True):

            def one(x, weight, entries, fun=fun):
                r, pull = self._pulled(fun, params, static, x)
                seeds = unit_cotangents(entries, r) * scale.astype(r.dtype)
                (pulled,) = jax.vmap(pull)(seeds)
                rows = lambda g: g.reshape(len(g), math.prod(g.shape[1:]))  # `g` may be empty
                flat = [rows(g).astype(dtype) for g in jtu.tree_leaves(pulled)]
                return jnp.concatenate(flat, axis=1) * weight.astype(dtype)

            # As a context of the whole program, `highest` would apply to half products too.
            with nullcontext() if self._half else jax.default_matmul_precision("highest"):
                jac = jax.vmap(one)(*parts)
            jacs.append(jac.reshape(-1, jac.shape[-1]))
        return jnp.concatenate(jacs) / scale.astype(dtype)

    def _pulled(self, fun: Callable[..., Any], params: PyTree, static: PyTree, x: Any) -> Any:
        """Returns a residual at one example, in the precision `forward`, and its pullback to the
        parameters, in that of the `jacobian`."""
        backward = "float32" if self.jacobian in SPLIT_PRODUCTS else self.jacobian
        if backward == self.forward:
            return jax.vjp(lambda p: self._residual(fun, p, static, x), params)
        forward = Forward(self.forward, backward)
        in_forward = InForward(fun, forward)
        values = lambda p, static, x: (self._residual(in_forward, p, static, x), ())
        held = arrays_in_full(params)
        (r, _), pull = linearized(values, forward, params, static, x, held=held)
        return r, lambda cotangent: (pull(cotangent),)

    def _residual(self, fun: Callable[..., Any], params: PyTree, static: PyTree, x: Any) -> Array:
        """Evaluates one residual at one example, with the parameters in the residual's dtype."""
        wide = jtu.tree_map(lambda x: x.astype(self.dtype), params)
        note = (
            f"`{CALL}.update` calls each residual with the model and *one* example, here of shape "
            f"{jtu.tree_map(jnp.shape, x)}, and not with a batch. Leave `jax.vmap` and means over "
            "examples out of it."
        )
        with without_halves(), noting(note, Exception), noting_the_terms():
            out = fun(eqx.combine(wide, static), x)
        return _as_vector(out)


def unit_cotangents(entries: Array | None, residual: Any) -> Float[Array, "entries all"]:
    """Returns a cotangent for each of the entries of a residual at one example, or for all. It is
    zero for what fills up, an entry behind the last."""
    entries = jnp.arange(residual.size) if entries is None else entries
    return jax.nn.one_hot(entries, residual.size, dtype=residual.dtype)


class Linearized:
    """Residuals linearized at a model and a batch of examples.

    **Attributes:**

    - `r`: the residuals at all examples.
    - `start`: the parameters as a vector in the dtype of the residuals.
    - `push(v)`, `pull(b)`: `J v` and `Jᵀ b`, exactly.
    - `most`: the largest number of examples that are evaluated at a time, if there is one.
    """

    def __init__(
        self,
        residuals: Residuals,
        model: PyTree,
        batches: tuple,
        scaling: DynamicLossScaling,
        *,
        most: int | None = None,
    ):
        self.residuals, self.batches, self.scaling = residuals, batches, scaling
        self.params, self.static = eqx.partition(model, eqx.is_inexact_array)
        self.theta, self._unravel = ravel_pytree(self.params)
        self.start = self.theta.astype(residuals.dtype)
        self.most = most
        self.r, self.push = jax.linearize(self.values, self.start)
        if self.r.size == len(batches) and all(map(_is_whole_batch, batches)):
            warn_user(
                f"`{CALL}.update` got one number from {'each' if len(batches) > 1 else 'the'} "
                "residual, of arrays that look like many examples, "
                f"{jtu.tree_map(jnp.shape, batches)}, with a leading axis of 1. A residual takes "
                "*one* example and returns what should be zero there, not the loss of a batch: "
                "stack the examples along the leading axis, and leave squares and means to the "
                "optimizer. If it is meant, filter `mpx_pde.PrecisionWarning`."
            )
        self._tell_narrow()
        self._transposed = jax.linear_transpose(self.push, self.start)

    @property
    def shape(self) -> tuple[int, int]:
        """Returns the shape of the Jacobian."""
        return self.r.size, self.theta.size

    def parameters(self, flat: Float[Array, " parameters"]) -> PyTree:
        return self._unravel(flat.astype(self.theta.dtype))

    def values(self, flat: Float[Array, " parameters"]) -> Float[Array, " rows"]:
        params = self.parameters(flat)
        return self.residuals.values(params, self.static, self.batches, self.most)

    def pull(self, b: Float[Array, " rows"]) -> Float[Array, " parameters"]:
        return self._transposed(b)[0]

    def rows(
        self, count: int, jacobian: str | None = None
    ) -> tuple[Callable[[Any], Float[Array, "_ parameters"]], Any]:
        """Returns a function that computes rows of the Jacobian, and `count` blocks that it takes,
        stacked along a leading axis. The rows have the precision `jacobian`, by default that of the
        residuals' own."""
        of = self.residuals
        of = of if jacobian is None else Residuals(of.functions, of.forward, jacobian)

        def rows(block):
            return of.rows(self.params, self.static, self.scaling, block)

        return rows, of.blocks(self.batches, self.sizes, count)

    @ft.cached_property
    def examples(self) -> list[PyTree]:
        """Returns the shapes and the dtypes of one example of each residual."""
        first = lambda batch: jtu.tree_map(lambda x: jnp.asarray(x)[0], batch)
        return [jax.eval_shape(first, batch) for batch in self.batches]

    def gradients(self) -> list[Callable[[Any, Array], list[Array]]]:
        """Returns for each residual the function of an example and a cotangent that pulls the
        cotangent back to the arrays of the parameters."""

        def of(fun, x, cotangent):
            with jax.default_matmul_precision("highest"):
                _, pull = self.residuals._pulled(fun, self.params, self.static, x)
                return jtu.tree_leaves(pull(cotangent))

        return [ft.partial(of, fun) for fun in self.residuals.functions]

    @ft.cached_property
    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Returns the shape and the dtype of each residual at one example."""
        return self.residuals.shapes(self.params, self.static, self.examples)

    @property
    def sizes(self) -> list[int]:
        """Returns the number of entries that each residual has at one example."""
        return [x.size for x in self.shapes]

    def _tell_narrow(self) -> None:
        """Warns of residuals that return a narrower dtype than `forward`."""
        wide = self.residuals.dtype
        narrow = {x.dtype for x in self.shapes if x.size and x.dtype.itemsize < wide.itemsize}
        if narrow:
            names = " and ".join(sorted(x.name for x in narrow))
            warn_user(
                f"`{CALL}.update` got residuals in {names}, although `forward` is "
                f"{wide.name!r}: a loss below their rounding is never reached. Something in them "
                f"casts what it returns, or they do not depend on the model. Return {wide.name}. "
                "If it is meant, filter `mpx_pde.PrecisionWarning`."
            )

    @property
    def longest(self) -> int:
        """Returns the largest number of rows of a residual."""
        return max(length_of(x) * size for x, size in zip(self.batches, self.sizes, strict=True))

    def order(self, count: int) -> np.ndarray:
        """Returns the place in `r` of each row of `count` blocks. Rows that fill up get the place
        behind the last."""
        begin, places = 0, []
        for size, batch in zip(self.sizes, self.batches, strict=True):
            length = length_of(batch)
            parts, each = parts_of(length, size, count)
            unit = np.arange(math.ceil(length * parts / count) * count)
            unit = unit.reshape(-1, count).T[..., None]  # as `dealt` deals
            example, entry = unit // parts, unit % parts * each + np.arange(each)
            place = np.where(
                (example < length) & (entry < size), begin + example * size + entry, self.r.size
            )
            places.append(place.reshape(count, -1))
            begin += length * size
        return np.concatenate(places, axis=1).ravel()


_FILL = 8
"""Rows that fill up blocks may be one in so many."""


def parts_of(length: int, size: int, count: int) -> tuple[int, int]:
    """Returns in how many parts the `size` entries of a residual at one example are dealt out to
    `count` blocks, and the entries of a part. Few examples in many blocks would fill most of them
    up: takes the fewest parts for which one row in `_FILL` fills up."""
    for parts in range(1, size):
        each = math.ceil(size / parts)
        units = length * math.ceil(size / each)
        if math.ceil(units / count) * count * each * _FILL <= length * size * (_FILL + 1):
            return units // length, each
    return max(size, 1), min(size, 1)


def _in_blocks(batch: PyTree, count: int, index: Array | None = None) -> PyTree:
    """Deals the examples of a batch, or those at an `index`, out into `count` blocks. The last
    example fills them up."""
    length = length_of(batch)
    whole = math.ceil(length / count) * count
    index = jnp.arange(whole) if index is None else index

    def pick(x):
        return x if len(index) == length else x[jnp.minimum(index, length - 1)]

    return jtu.tree_map(lambda x: dealt(pick(jnp.asarray(x)), count), batch)


def _is_product(primitive: Any, *_: Any, **__: Any) -> bool:
    """Returns whether a primitive multiplies matrices; for `jax.checkpoint`."""
    return primitive.name in PRODUCTS


def length_of(batch: PyTree) -> int:
    """Returns the number of examples in a batch."""
    arrays = list(map(jnp.asarray, jtu.tree_leaves(batch)))
    if laid_out := [s for x in arrays if any((s := jax.typeof(x).sharding.spec)[:1])]:
        raise ValueError(
            f"`{CALL}.update` needs examples on Auto axes of a mesh, but got some on explicit "
            f"axes, {laid_out[0]}. Make the mesh by `jax.make_mesh(..., axis_types="
            "(jax.sharding.AxisType.Auto,))`, with one for each axis."
        )
    lengths = {x.shape[0] if x.ndim else -1 for x in arrays}
    if len(lengths) != 1 or -1 in lengths:
        raise ValueError(
            f"`{CALL}.update` needs examples stacked along a leading axis of one length, but got "
            f"arrays with leading axes of {sorted(map(str, lengths))}."
        )
    if lengths == {0}:
        raise ValueError(
            f"`{CALL}.update` needs at least one example of each residual, but got none."
        )
    return lengths.pop()


def _is_whole_batch(batch: PyTree) -> bool:
    """Returns whether the one example of a batch has an array of several rows, like a batch."""
    shapes = [jnp.shape(x) for x in jtu.tree_leaves(batch)]
    return all(s[0] == 1 for s in shapes) and any(len(s) > 2 and s[1] > 1 for s in shapes)


def _as_vector(out: Any) -> Float[Array, " entries"]:
    """Flattens a residual at one example to a vector, after checking that it is a real array."""
    if not eqx.is_array_like(out) or not jnp.issubdtype(jnp.result_type(out), jnp.floating):
        what = type(out).__name__
        if hasattr(out, "dtype"):
            what = f"an array of dtype {out.dtype.name}"
        raise TypeError(
            f"`{CALL}.update` needs residuals that return a real floating-point array at one "
            f"example, but one returned {what}. Stack several, or pass a function for each."
        )
    return jnp.ravel(out)

"""Gradients of weights as sums of outer products, whose Gram matrix needs no Jacobian."""

import dataclasses
import functools as ft
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from ..program._flat import Constant, Flat, Step, evaluated, flatten, merged, needed, read
from ..program._jaxpr import aval_of, own_bind
from ..program._plain import plain
from ._residuals import unit_cotangents


_TILE, _TILES = 2**9, 2**6
"""The number of factors whose products with as many others are taken at a time, which a cache
holds, and the largest number of such tiles along a side. On a CPU, tiles of 512 take half the time
of 2,048."""


class Factor(NamedTuple):
    """An operand of a product: a variable and its shape, the axes that are summed over, and the
    others in the order in which the weight has them."""

    variable: int | Constant
    shape: tuple[int, ...]
    summed: tuple[int, ...]
    kept: tuple[int, ...]

    @property
    def size(self) -> tuple[int, int]:
        """Returns the number of outer products that it is a factor of, and the entries in each."""
        terms, entries = (math.prod(self.shape[i] for i in x) for x in (self.summed, self.kept))
        return terms, entries

    def matrix(self, env: dict[Any, Any]) -> Float[Array, "terms entries"]:
        x = jnp.transpose(read(self.variable, env), self.summed + self.kept)
        return x.reshape(self.size)


class Term(NamedTuple):
    """The outer products of the rows of two factors. Several on a side are added."""

    left: tuple[Factor, ...]
    right: tuple[Factor, ...]


class Outer(NamedTuple):
    """A sum of outer products. Without terms it is zero.

    **Attributes:**

    - `axes`: the number of axes of the sum that the left factors have. They are the first ones.
    - `terms`: the outer products.
    """

    axes: int
    terms: tuple[Term, ...]


def outer_products(flat: Flat, output: int | Constant, ndim: int) -> Outer | None:
    """Returns the outer products that an output of a program is the sum of, or `None` if it is no
    such sum."""
    made, found = flat.made, []
    waiting = [(output, tuple(range(ndim)))]  # with the axis of it that each axis of the output is
    while waiting:
        x, axes = waiting.pop()
        step = None if isinstance(x, Constant) else made.get(x)
        if _is_zero(x, step):
            continue
        if step is None:
            return None
        if step.name in ("add_any", "add"):
            waiting += [(y, axes) for y in step.inputs]
        elif step.name == "convert_element_type" and _is_real(step.eqn.invars[0]):
            waiting.append((step.inputs[0], axes))
        elif step.name == "transpose":
            turned = step.eqn.params["permutation"]
            waiting.append((step.inputs[0], tuple(turned[i] for i in axes)))
        elif step.name == "dot_general":
            found.append(_outer_product(step, axes))
        else:
            return None
    if None in found or len({outer.axes for outer in found}) > 1:
        return None
    return Outer(found[0].axes if found else 0, _fewest([x.terms[0] for x in found]))


def _is_zero(x: int | Constant, step: Step | None) -> bool:
    """Returns whether a variable is zero, as is the gradient of what is not used."""
    if step is not None and step.name == "broadcast_in_dim":
        x = step.inputs[0]
    return isinstance(x, Constant) and x.number is not None and float(x.number) == 0


def _is_real(atom: Any) -> bool:
    """Returns whether a variable is real. The real part of a complex product is no product."""
    return jnp.issubdtype(aval_of(atom).dtype, jnp.floating)


def _outer_product(step: Step, axes: tuple[int, ...]) -> Outer | None:
    """Returns a product, whose axes the output has in the order `axes`, as an outer product."""
    summed, (batch, _) = step.eqn.params["dimension_numbers"]
    shapes = [aval_of(v).shape for v in step.eqn.invars]
    free = [
        [(side, i) for i in range(len(shape)) if i not in summed[side]]
        for side, shape in enumerate(shapes)
    ]
    if batch or not all(free):
        return None
    places = [(free[0] + free[1])[i] for i in axes]
    factors = [
        Factor(x, shape, tuple(summed[side]), tuple(i for s, i in places if s == side))
        for side, (x, shape) in enumerate(zip(step.inputs, shapes, strict=True))
    ]
    left = places[0][0]
    on_the_left = [side == left for side, _ in places]
    if on_the_left != sorted(on_the_left, reverse=True):
        return None
    return Outer(sum(on_the_left), (Term((factors[left],), (factors[1 - left],)),))


def _fewest(terms: list[Term]) -> tuple[Term, ...]:
    """Adds the factors that multiply the same one, as where a program uses a value twice. Begins
    with the factor that multiplies most others."""
    out = []
    while terms:
        counts = Counter((side, term[side]) for term in terms for side in (0, 1))
        (side, common), _ = counts.most_common(1)[0]
        others = tuple(x for term in terms if term[side] == common for x in term[1 - side])
        out.append(Term(others, common) if side else Term(common, others))
        terms = [term for term in terms if term[side] != common]
    return tuple(out)


class Size(NamedTuple):
    """The number of outer products of an array, and the entries of the factors of each."""

    terms: int
    left: int
    right: int

    @classmethod
    def of(cls, each: Sequence[Outer | None]) -> "Size | None":
        """Returns the largest size of an array in the rows of several residuals. Returns `None` if
        it is not a sum of outer products of the same axes in all of them, or zero."""
        sums = [outer for outer in each if outer is not None]
        if len(sums) < len(each) or len({outer.axes for outer in sums if outer.terms}) != 1:
            return None
        counts = [sum(term.left[0].size[0] for term in outer.terms) for outer in sums]
        left, right = next(outer.terms[0] for outer in sums if outer.terms)
        return cls(max(counts), left[0].size[1], right[0].size[1])

    @property
    def pays(self) -> bool:
        """Returns whether products of rows take fewer operations by factors than by entries."""
        return self.terms**2 * (self.left + self.right) < self.left * self.right


class Factors(NamedTuple):
    """An array in each of many rows, the sum of the outer products of the entries of `left` and of
    `right`."""

    left: Float[Array, "terms rows _"]
    right: Float[Array, "terms rows _"]

    def from_row(self, begin: Any, rows: int) -> "Factors":
        """Returns some of the rows."""
        return Factors(*(lax.dynamic_slice_in_dim(x, begin, rows, axis=1) for x in self))

    def products(self, other: "Factors") -> Float[Array, "rows others"]:
        """Returns the products of these rows with others."""

        def by_terms(x, y):
            flat = x.reshape(-1, x.shape[-1]) @ y.reshape(-1, y.shape[-1]).T
            return flat.reshape(*x.shape[:2], *y.shape[:2])

        products = by_terms(self.left, other.left) * by_terms(self.right, other.right)
        return jnp.sum(products, axis=(0, 2))

    def squares(self) -> Float[Array, "left right"]:
        """Returns the squares of each entry, summed over the rows."""
        i, j = np.triu_indices(len(self.left))
        twice = np.where(i == j, 1.0, 2.0)[:, None, None].astype(self.left.dtype)
        left, right = twice * self.left[i] * self.left[j], self.right[i] * self.right[j]
        left, right = (x.reshape(-1, x.shape[-1]) for x in (left, right))
        # A small one is a difference.
        return jnp.maximum(left.T @ right, 0.0)


@dataclasses.dataclass(frozen=True)
class RowProgram:
    """The program of a row of a Jacobian, the gradient of one entry of the residual.

    **Attributes:**

    - `flat`: takes the arrays of an example and a cotangent of the residual.
    - `shapes`: those of the arrays of the gradient.
    - `outer`: for each of them the outer products that it is the sum of, or `None`.
    """

    flat: Flat
    shapes: tuple[tuple[int, ...], ...]
    outer: tuple[Outer | None, ...]

    @classmethod
    def of(cls, gradient: Callable[..., Any], *args: Any) -> "RowProgram":
        """Traces the gradient. One with effects is not taken apart."""
        # Written out are checkpoints, too: what they would compute again are factors.
        closed = jax.make_jaxpr(plain(gradient))(*args)
        flat = merged(flatten(closed, forward_mode=False))
        shapes = tuple(aval.shape for aval in closed.out_avals)
        if closed.effects:
            return cls(flat, shapes, (None,) * len(shapes))
        pairs = zip(flat.outputs, shapes, strict=True)
        return cls(flat, shapes, tuple(outer_products(flat, x, len(s)) for x, s in pairs))

    def __call__(self, sizes: Sequence[Size | None], *args: Any) -> list[Any]:
        """Returns the arrays of the gradient. Those that have a size are pairs of matrices with a
        row for each outer product, and with rows of zeros if there are fewer."""
        pairs = list(zip(self.flat.outputs, self.outer, sizes, strict=True))
        wanted = [x for x, _, size in pairs if size is None]
        for _, outer, size in pairs:
            if outer is not None and size is not None:
                wanted += [f.variable for term in outer.terms for f in term.left + term.right]
        flat = self.flat._replace(steps=needed(self.flat.steps, wanted), outputs=tuple(wanted))
        bind = lambda step, operands: own_bind(step.eqn, operands)
        env = dict(zip(wanted, evaluated(flat, jtu.tree_leaves(args), bind), strict=True))

        def factors(outer, size):
            def matrix(side, entries):
                each = [ft.reduce(jnp.add, [f.matrix(env) for f in t[side]]) for t in outer.terms]
                found = jnp.concatenate(each) if each else jnp.zeros((0, entries))
                return jnp.pad(found, [(0, size.terms - len(found)), (0, 0)])

            return matrix(0, size.left), matrix(1, size.right)

        return [env[x] if size is None else factors(outer, size) for x, outer, size in pairs]


@dataclasses.dataclass(frozen=True)
class FactoredRows:
    """Rows of a Jacobian of several residuals. The gradients of some arrays are factors.

    **Attributes:**

    - `programs`: that of a row of each residual.
    - `seeds`: the shape of each residual at an example.
    - `sizes`: of the factors of each array, or `None` if it is computed as a whole.
    """

    programs: tuple[RowProgram, ...]
    seeds: tuple[jax.ShapeDtypeStruct, ...]
    sizes: tuple[Size | None, ...]

    @classmethod
    def of(
        cls, gradients: Sequence[Callable[..., Any]], examples: Sequence[Any], seeds: Sequence[Any]
    ) -> "FactoredRows | None":
        """Traces the gradient of each residual, a function of an example and of a cotangent that
        returns a list of arrays. Returns `None` if factors pay for none of them."""
        programs = tuple(map(RowProgram.of, gradients, examples, seeds))
        sizes = [Size.of(each) for each in zip(*(p.outer for p in programs), strict=True)]
        sizes = tuple(size if size is not None and size.pays else None for size in sizes)
        return cls(programs, tuple(seeds), sizes) if any(sizes) else None

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of the arrays of the gradient, the same for each residual."""
        return self.programs[0].shapes

    @property
    def whole(self) -> int:
        """Returns the number of entries of a row that are computed as a whole."""
        pairs = zip(self.shapes, self.sizes, strict=True)
        return sum(math.prod(shape) for shape, size in pairs if size is None)

    @property
    def entries(self) -> int:
        """Returns the number of entries of a row, of which some are factors."""
        factors = (x.terms * (x.left + x.right) for x in self.sizes if x is not None)
        return self.whole + sum(factors)

    def __call__(self, block: tuple) -> tuple[Float[Array, "rows whole"], list[Factors]]:
        """Computes the rows of a block, one of `Residuals.blocks`."""
        residuals = zip(self.programs, self.seeds, *block, strict=True)
        each = [self._of_residual(*residual) for residual in residuals]
        whole, factors = zip(*each, strict=True)
        below = lambda *x: jnp.concatenate(x)
        joined = jtu.tree_map(below, *factors)
        in_front = lambda x: jnp.moveaxis(x, 1, 0)
        return below(*whole), [Factors(*map(in_front, pair)) for pair in joined]

    def _of_residual(
        self, program: RowProgram, seed: Any, examples: Any, weights: Array, entries: Any
    ) -> tuple[Array, list[tuple[Array, Array]]]:
        """Returns the rows of a residual: entries, and factors with rows along the first axis."""

        def one(x, weight, entries):
            seeds = unit_cotangents(entries, seed) * weight
            return jax.vmap(lambda cotangent: program(self.sizes, x, cotangent))(seeds)

        with jax.default_matmul_precision("highest"):
            arrays = jax.vmap(one)(examples, weights, entries)
        rows = len(weights) * (seed.size if entries is None else entries.shape[1])
        line_up = lambda x: x.reshape(rows, *x.shape[2:]).astype(seed.dtype)
        pairs = list(zip(jtu.tree_map(line_up, arrays), self.sizes, strict=True))
        whole = [x.reshape(rows, math.prod(x.shape[1:])) for x, size in pairs if size is None]
        whole = jnp.concatenate([jnp.zeros((rows, 0), seed.dtype), *whole], axis=1)
        return whole, [x for x, size in pairs if size is not None]

    def in_line(self, whole: Float[Array, " whole"], factored: Sequence[Array]) -> Array:
        """Returns a value for each entry of a row, in the order of its arrays."""
        begin, values, others = 0, [], iter(factored)
        for shape, size in zip(self.shapes, self.sizes, strict=True):
            if size is None:
                values.append(whole[begin : begin + math.prod(shape)])
                begin += math.prod(shape)
            else:
                values.append(next(others).ravel())
        return jnp.concatenate(values)


def gram(factors: Sequence[Factors]) -> Float[Array, "rows rows"]:
    """Returns the products of all pairs of rows, summed over arrays. The lower triangle counts."""
    rows, terms = factors[0].left.shape[1], max(len(x.left) for x in factors)
    each = min(rows, max(_TILE // terms, math.ceil(rows / _TILES), 1))
    count = math.ceil(rows / each)
    fill = [(0, 0), (0, count * each - rows), (0, 0)]
    filled = [Factors(*(jnp.pad(x, fill) for x in pair)) for pair in factors]

    def tile(out, place):
        i, j = place[0] * each, place[1] * each
        pairs = [x.from_row(i, each).products(x.from_row(j, each)) for x in filled]
        return lax.dynamic_update_slice(out, sum(pairs), (i, j)), None

    start = jnp.zeros((count * each,) * 2, factors[0].left.dtype)
    with jax.default_matmul_precision("highest"):
        out, _ = lax.scan(tile, start, np.tril_indices(count))
    return out[:rows, :rows]

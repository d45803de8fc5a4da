"""The system in the space of residuals: `K = J Jᵀ`, for more parameters than residuals."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import dtypes, lax
from jaxtyping import Array, Float, Int32

from ..precision._tree import select_tree
from ._choice import leading_in_dual
from ._gram import (
    PATIENCE,
    WIDE,
    Lower,
    Reflector,
    first_leading,
    in_two_blocks,
    product_of_rows,
)
from ._outer import FactoredRows, Factors, gram
from ._residuals import Linearized
from ._search import CLOSE, Solve


_BLOCK, _ROWS = 2**23, 64
"""The number of entries in a block of the Jacobian, and the smallest number of its rows."""

_STRIP, _KERNELS = 2**28, 48
"""The rows of a strip, whose products with all rows before them are taken together, may take this
memory in bytes, or this many bytes for each entry of `J Jᵀ`."""

_SHARE = 8
"""A block may take one part in so many of the memory of a strip. The leading directions are read
for each block."""

_ALIGNED = 64
"""Columns of narrow rows come in multiples of this."""


class Rounded(eqx.Module):
    """Rows in the precision of products, each multiplied by a `scale`."""

    rows: Float[Array, "rows columns"]
    scale: Float[Array, " rows"]

    @classmethod
    def of(cls, rows: Float[Array, "rows columns"], precision: str) -> "Rounded":
        """Rounds rows to a half precision, or to float32 for a split product. For float16 each row
        is scaled to a largest entry of about one. Many columns are filled up with zeros to a
        multiple that tensor cores take: otherwise each product would copy the rows to do so."""
        scale = jnp.ones(len(rows), rows.dtype)
        if precision == "float16":
            size = jnp.max(jnp.abs(rows), axis=1)
            usual = (size > 0) & jnp.isfinite(size)
            # A power of two, by its bits: `exp2` is inexact on a CPU.
            _, exponent = jnp.frexp(jnp.where(usual, size, 1.0))
            scale = jnp.ldexp(scale, -exponent)
        stored = precision if precision in ("float16", "bfloat16", "float64") else "float32"
        columns = rows.shape[1]
        fill = -columns % _ALIGNED if stored != "float64" and columns >= WIDE else 0
        rounded = (rows * scale[:, None]).astype(stored)
        return cls(jnp.pad(rounded, [(0, 0), (0, fill)]), scale)

    @property
    def _summed(self) -> Any:
        """Returns the dtype that products are summed in."""
        return jnp.dtype("float64" if self.rows.dtype == jnp.float64 else "float32")

    def by(self, other: "Rounded", precision: str) -> Float[Array, "rows others"]:
        """Returns the products of these rows with others."""
        product = product_of_rows(self.rows, other.rows, precision, self._summed)
        product = product.astype(self.scale.dtype)
        return product / self.scale[:, None] / other.scale[None]

    def by_itself(self, precision: str) -> Float[Array, "rows rows"]:
        """Returns the lower triangle of the products of these rows with each other."""
        lower = Lower.of_products(self.rows, precision, self._summed, lambda x: x, axis=1)
        product = lower.matrix().astype(self.scale.dtype)
        return product / self.scale[:, None] / self.scale[None]


class Kernel(eqx.Module):
    """Sums over the columns of a Jacobian `J`. `V` denotes the leading directions, and `R` the rows
    without their parts along `V`.

    **Attributes:**

    - `rest`: `R Rᵀ`, of which the lower triangle counts, with products in the precision of the
        Jacobian.
    - `along`: `J V`.
    - `squares`: the squared norms of the columns of `J`.
    - `leading`: the reflector whose first columns are `V`.
    """

    rest: Float[Array, "rows rows"]
    along: Float[Array, "rows leading"]
    squares: Float[Array, " columns"]
    leading: Reflector


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a Jacobian `J`, computed a block at a time.

    **Attributes:**

    - `compute(block)`: computes the rows of a block, in float64 or, for a narrower Jacobian, in
        float32.
    - `blocks`: these, stacked along a leading axis.
    - `strips`: the number of strips that the blocks make, of as many blocks each. It is odd.
    - `precision`: that of products of rows.
    """

    compute: Callable[[Any], Float[Array, "rows columns"]]
    blocks: Any
    strips: int
    precision: str

    @property
    def count(self) -> int:
        """Returns the number of blocks."""
        return len(jax.tree.leaves(self.blocks)[0])

    @property
    def inner(self) -> int:
        """Returns the number of blocks in a strip."""
        return self.count // self.strips

    @property
    def shape(self) -> jax.ShapeDtypeStruct:
        """Returns the shape and the dtype of the rows of a block."""
        return jax.eval_shape(self.compute, self.block(0))

    def block(self, j: Any) -> Any:
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, j, keepdims=False), self.blocks)

    def kernel(self, before: Reflector) -> Kernel:
        """Sums `J Jᵀ = J V Vᵀ Jᵀ + R Rᵀ`. So the rounding of `R Rᵀ` is relative to what the leading
        directions leave.

        `V` spans `Jᵀ J U`, a step of the power method from the directions `U` of the step before.
        These are of another Jacobian: with `U` in place of `V`, late solves with a bfloat16 matrix
        take up to 37 iterations. Rows, `J V` and `R` are in float32. Their rounding is one of `J`:
        `J Jᵀ` is that of a Jacobian off by a millionth at most, which it would not be if its own
        entries were rounded.
        """
        if self.count == 1:
            jac = self.compute(self.block(0))
            leading = _spanned(lambda spans: _power(jac, spans.astype(jac.dtype)), before)
            along, rest = _separated(jac, leading.spans().astype(jac.dtype), self.precision)
            squares = jnp.sum(jac**2, axis=0)
            return Kernel(rest.by_itself(self.precision), along, squares, leading)
        leading = _spanned(self._power, before)
        return self._by_strips(leading)

    def _power(self, spans: Float[Array, "columns leading"]) -> Float[Array, "columns leading"]:
        narrow = spans.astype(self.shape.dtype)

        def add(power, block):
            return power + _power(self.compute(block), narrow).astype(power.dtype), None

        return lax.scan(add, jnp.zeros_like(spans), self.blocks)[0]

    def _by_strips(self, leading: Reflector) -> Kernel:
        """Keeps the rows of a strip, in the precision of their products, and computes those of half
        of the other strips again. Nothing else is as large as a Jacobian.

        The strips lie on a circle, and each takes its products with the half that follows it. So
        each pair is taken once, and all strips run loops of the same length.
        """
        (each, columns), dtype, inner = self.shape.shape, self.shape.dtype, self.inner
        spans, most = leading.spans().astype(dtype), self.count * each

        def row_block(squares, j):
            jac = self.compute(self.block(j))
            return squares + jnp.sum(jac**2, axis=0), _separated(jac, spans, self.precision)

        def strip(carry, i):
            out, squares = carry
            first = i * inner
            squares, (along, rest) = lax.scan(row_block, squares, first + jnp.arange(inner))
            rest = Rounded(rest.rows.reshape(inner * each, -1), rest.scale.ravel())
            own = jnp.tril(rest.by_itself(self.precision))
            out = lax.dynamic_update_slice(out, own, (first * each,) * 2)

            def off_diagonal(k, out):
                j = (first + inner + k) % self.count
                _, other = _separated(self.compute(self.block(j)), spans, self.precision)
                products = rest.by(other, self.precision)
                return lax.dynamic_update_slice(out, products, (first * each, j * each))

            return (lax.fori_loop(0, self.strips // 2 * inner, off_diagonal, out), squares), along

        start = jnp.zeros((most, most), dtype), jnp.zeros(columns, dtype)
        (out, squares), along = lax.scan(strip, start, jnp.arange(self.strips))
        if self.strips > 1:
            out = jnp.tril(out) + jnp.triu(out, 1).T
        return Kernel(out, along.reshape(most, spans.shape[1]), squares, leading)


def _power(
    jac: Float[Array, "rows columns"], spans: Float[Array, "columns leading"]
) -> Float[Array, "columns leading"]:
    with jax.default_matmul_precision("highest"):
        return jac.T @ (jac @ spans)


def _separated(
    jac: Float[Array, "rows columns"], spans: Float[Array, "columns leading"], precision: str
) -> tuple[Float[Array, "rows leading"], Rounded]:
    """Returns the parts of rows along the leading directions, and what these leave, rounded."""
    with jax.default_matmul_precision("highest"):
        along = jac @ spans
        rest = jac - along @ spans.T if spans.size else jac
    return along, Rounded.of(rest, precision)


def _spanned(power: Callable[[Array], Array], before: Reflector) -> Reflector:
    """Returns a reflector that spans the `power` of the directions `before`, or these if it is not
    finite."""
    if not before.y.size:
        return before
    new = Reflector.spanning(power(before.spans()).astype(before.y.dtype))
    return select_tree(jnp.all(jnp.isfinite(new.t)), new, before)


def _by_factors(factored: FactoredRows, blocks: Any, strips: int, before: Reflector) -> Kernel:
    """Sums `J Jᵀ` in float64, where no directions are leading, by the factors of gradients."""
    none = first_leading(factored.whole, 0, "float64")
    whole = Rows(lambda block: factored(block)[0], blocks, strips, "float64").kernel(none)
    factors = lax.map(lambda block: factored(block)[1], blocks)
    in_line = lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, x.shape[-1])
    factors = [Factors(*map(in_line, pair)) for pair in factors]
    squares = factored.in_line(whole.squares, [pair.squares() for pair in factors])
    return Kernel(whole.rest + gram(factors), whole.along, squares, before)


class Blocks(eqx.Module):
    """`J Jᵀ`, turned by `leading` so that the span of `J V` comes first. Its first block, `core`,
    contains `J V Vᵀ Jᵀ`, and the others are as small as what the leading directions leave."""

    others: Float[Array, "others others"]
    coupling: Float[Array, "leading others"]
    core: Float[Array, "leading leading"]
    leading: Reflector

    @classmethod
    def of(cls, sums: Kernel) -> "Blocks":
        rest, wide = sums.rest, dtypes.canonicalize_dtype("float64")
        along = sums.along.astype(wide)
        several, leading = along.shape[1], Reflector.spanning(along)
        if not several:
            return cls(rest, along.T, jnp.zeros((0, 0), rest.dtype), leading)
        rest = rest.astype(jnp.float32 if len(rest) >= WIDE else wide)
        turned = leading(leading(jnp.tril(rest) + jnp.tril(rest, -1).T).T)
        upper = leading(along.T)[:, :several]
        with jax.default_matmul_precision("highest"):
            core = turned[:several, :several].astype(wide) + upper.T @ upper
        coupling = turned[:several, several:].astype(wide)
        return cls(turned[several:, several:], coupling, core, leading)

    def factored(
        self, damping: Float[Array, ""], solver: Any, precision: str
    ) -> Callable[[Float[Array, " rows"]], Float[Array, " rows"]]:
        """Returns a function that solves with `J Jᵀ + damping`."""
        blocks = self.others, self.coupling, self.core, self.leading
        return in_two_blocks(*blocks, damping, solver, precision)


def cut(rows: int, columns: int, examples: int, precision: str) -> tuple[int, int]:
    """Returns the number of blocks, and of the strips that they make."""
    size = {"float64": 8, "float16": 2, "bfloat16": 2}.get(precision, 4)
    room = max(_STRIP, _KERNELS * rows**2)
    most = max(_BLOCK // columns, _ROWS, room // (_SHARE * columns * max(size, 4)))
    blocks = min(examples, math.ceil(rows / most))
    strips = min(blocks, math.ceil(rows * columns * size / room))
    strips += 1 - strips % 2 if strips < blocks else strips % 2 - 1
    return strips * math.ceil(blocks / strips), strips


@dataclasses.dataclass(frozen=True)
class Dual:
    """Sums `J Jᵀ` over blocks of the rows, factorizes it, and solves by conjugate gradients if
    it is narrower than float64."""

    at: Linearized
    sums: Kernel
    blocks: Blocks
    directions: int
    order: np.ndarray
    solver: Any
    refinements: int

    @classmethod
    def summed(cls, at: Linearized, leading: Reflector, solver: Any, refinements: int) -> "Dual":
        (rows, columns), jacobian = at.shape, at.residuals.jacobian
        directions = leading.y.shape[1]
        wide = dtypes.canonicalize_dtype("float64")
        before = leading.first(leading_in_dual(directions, rows), wide)
        factored = None
        if jacobian == "float64":
            factored = FactoredRows.of(at.gradients(), at.examples, at.shapes)
        blocks, strips = cut(rows, factored.entries if factored else columns, at.longest, jacobian)
        compute, stacked = at.rows(blocks, "float64" if jacobian == "float64" else "float32")
        if factored:
            sums = _by_factors(factored, stacked, strips, before)
        else:
            sums = Rows(compute, stacked, strips, jacobian).kernel(before)
        order = at.order(blocks)
        return cls(at, sums, Blocks.of(sums), directions, order, solver, refinements)

    @property
    def squares(self) -> Float[Array, " parameters"]:
        return self.sums.squares

    def next_leading(self) -> Reflector:
        """Returns the directions of this step."""
        narrow = jax.tree.map(lambda x: x.astype(jnp.float32), self.sums.leading)
        return narrow.padded(self.directions)

    def factored(self, damping: Float[Array, ""]) -> Solve:
        at, jacobian = self.at, self.at.residuals.jacobian
        inner = self.blocks.factored(damping, self.solver, jacobian)
        # Rows that fill up are behind the last.
        dealt = lambda b: jnp.append(b, 0.0)[self.order]

        def direct(b):
            return jnp.zeros_like(b).at[self.order].set(inner(dealt(b)), mode="drop")

        if jacobian == "float64" or not self.refinements:
            return lambda b, s: (at.pull(direct(b)), jnp.array(0, jnp.int32))
        most, close = self.refinements, CLOSE[at.residuals.forward]
        return lambda b, s: dual_conjugate_gradients(
            at.push, at.pull, direct, damping, b, most=most, close=close
        )


def dual_conjugate_gradients(
    push: Callable[[Array], Array],
    pull: Callable[[Array], Array],
    solve: Callable[[Array], Array],
    damping: Float[Array, ""],
    b: Float[Array, " rows"],
    *,
    most: int,
    close: float,
) -> tuple[Float[Array, " columns"], Int32[Array, ""]]:
    """Solves `(Jᵀ J + damping) x = Jᵀ b` for `x = Jᵀ y`, preconditioned by `solve`, which solves
    with a rounded `J Jᵀ + damping` for `y`. Returns `x` and the number of iterations.

    Runs conjugate gradients for `(J Jᵀ + damping) y = b`. So it is enough that the rounded matrix
    is that of a Jacobian near `J`, in which case the ratios of the two quadratic forms are near
    one. Rounded directions are not conjugate for long. So each is followed to its lowest point,
    with the factor of Polak and Ribière on the one before.

    The iterations end after `most` of them, or once the quadratic model of `x` is within `close` of
    its fall so far from its minimum. What is left to it is `rᵀ J Jᵀ (J Jᵀ + damping)⁻¹ r`, at most
    `rᵀ r`, for `r = b - (J Jᵀ + damping) y`. They also end after `PATIENCE` of them if the fall is
    below the rounding of `bᵀ b`.
    """
    tiny, least = jnp.finfo(b.dtype).tiny, jnp.finfo(b.dtype).eps * (b @ b)

    def left(i, x, r, w):
        """Returns whether the model may fall by more than the share `close` of its fall so far."""
        fell = b @ b - (b - w) @ (b - w) - damping * (x @ x)
        enough = r @ r > close * jnp.maximum(fell, 0)
        # Three products of `b`, each with a rounding of its own, and their sum.
        return enough & ((i < PATIENCE) | (fell > 4 * least))

    def again(carry):
        _, i, x, r, w, z, p = carry
        i += 1
        u = pull(p)
        q = push(u)
        along = (r @ p) / jnp.maximum(u @ u + damping * (p @ p), tiny)
        x, new, w = x + along * u, r - along * (q + damping * p), w + along * q

        def turned():
            better = solve(new)
            beta = jnp.maximum(better @ (new - r), 0) / jnp.maximum(r @ z, tiny)
            return better, better + beta * p

        more = (i < most) & left(i, x, new, w)
        z, p = lax.cond(more, turned, lambda: (z, p))
        return more, i, x, new, w, z, p

    z = solve(b)
    x, w, count = jnp.zeros_like(pull(b)), jnp.zeros_like(b), jnp.array(0, jnp.int32)
    start = jnp.array(True), count, x, b, w, z, z
    _, i, x, *_ = lax.while_loop(lambda carry: carry[0], again, start)
    return x, i

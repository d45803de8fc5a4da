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
from ._gram import WIDE, Lower, Reflector, in_two_blocks, product_of_rows
from ._residuals import Linearized
from ._search import CLOSE, Solve


_BLOCK, _ROWS = 2**23, 64
"""The number of entries in a block of the Jacobian, and the smallest number of its rows."""

_STRIP, _KERNELS = 2**28, 32
"""The rows of a strip, whose products with all rows before them are taken together, may take this
memory in bytes, or this many bytes for each entry of `J Jᵀ`."""

_SURE = 1e-4
"""The factor on `close` for estimates by the preconditioner, which may not see all that is left."""


class Rounded(eqx.Module):
    """Rows in the precision of products, each multiplied by a `scale`."""

    rows: Float[Array, "rows columns"]
    scale: Float[Array, " rows"]

    @classmethod
    def of(cls, rows: Float[Array, "rows columns"], precision: str) -> "Rounded":
        """Rounds rows to a half precision, or to float32 for a split product. For float16 each row
        is scaled to a largest entry of about one."""
        scale = jnp.ones(len(rows), rows.dtype)
        if precision == "float16":
            size = jnp.max(jnp.abs(rows), axis=1)
            usual = (size > 0) & jnp.isfinite(size)
            # A power of two, by its bits: `exp2` is inexact on a CPU.
            _, exponent = jnp.frexp(jnp.where(usual, size, 1.0))
            scale = jnp.ldexp(scale, -exponent)
        kept = precision if precision in ("float16", "bfloat16", "float64") else "float32"
        return cls((rows * scale[:, None]).astype(kept), scale)

    @property
    def _summed(self) -> Any:
        """Returns the dtype that products are summed in."""
        return jnp.dtype("float64" if self.rows.dtype == jnp.float64 else "float32")

    def by(self, other: "Rounded", precision: str) -> Float[Array, "rows others"]:
        """Returns the products of these rows with others."""
        found = product_of_rows(self.rows, other.rows, precision, self._summed)
        found = found.astype(self.scale.dtype)
        return found / self.scale[:, None] / other.scale[None]

    def by_itself(self, precision: str) -> Float[Array, "rows rows"]:
        """Returns the lower triangle of the products of these rows with each other."""
        lower = Lower.of_products(self.rows, precision, self._summed, lambda x: x, axis=1)
        found = lower.matrix().astype(self.scale.dtype)
        return found / self.scale[:, None] / self.scale[None]


class Kernel(eqx.Module):
    """Sums over the columns of a Jacobian `J`. `V` denotes the leading directions, and `R` the rows
    without their parts along `V`.

    **Attributes:**

    - `rest`: the lower triangle of `R Rᵀ`, with products in the precision of the Jacobian.
    - `along`: `J V`.
    - `squares`: the squared norms of the columns of `J`.
    - `leading`: the reflector whose first columns are `V`.
    """

    rest: Float[Array, "rows rows"]
    along: Float[Array, "rows leading"]
    squares: Float[Array, " columns"]
    leading: Reflector


def kernel(
    rows: Callable[[Any], Float[Array, "rows columns"]],
    blocks: Any,
    strips: int,
    before: Reflector,
    precision: str,
) -> Kernel:
    """Sums over `rows(block)` for each of the blocks, which are stacked along a leading axis. They
    make `strips` of as many blocks each.

    `J Jᵀ = J V Vᵀ Jᵀ + R Rᵀ`. So the rounding of `R Rᵀ` is relative to what the leading directions
    leave. `V` spans `Jᵀ J U`, a step of the power method from the directions `U` of the step
    before. These are of another Jacobian: with `U` in place of `V`, late solves with a bfloat16
    matrix take up to 37 iterations. The rows of a strip are kept, in the precision of their
    products. Those before it are computed again for each strip, and nothing else is as large as a
    Jacobian.
    """
    several, wide = before.y.shape[1], dtypes.canonicalize_dtype("float64")
    count = len(jax.tree.leaves(blocks)[0])
    inner = count // strips
    block = lambda j: jax.tree.map(lambda x: x[j], blocks)
    shape = jax.eval_shape(rows, block(0))
    (each, columns), dtype = shape.shape, shape.dtype
    spans = before.spans()

    def powered(sums, jac):
        squares, power = sums
        with jax.default_matmul_precision("highest"):
            power = power + jac.astype(wide).T @ (jac.astype(wide) @ spans)
        return squares + jnp.sum(jac**2, axis=0), power

    begin = jnp.zeros(columns, dtype), jnp.zeros((columns, several), wide)
    only = rows(block(0)) if count == 1 else None
    if only is not None:
        squares, power = powered(begin, only)
    else:
        add = lambda sums, block: (powered(sums, rows(block)), None)
        squares, power = lax.scan(add, begin, blocks)[0]
    leading = _spanned(power, before) if several else before

    def turned(jac):
        out = leading(jac.astype(wide)) if several else jac
        return out[:, :several], Rounded.of(out[:, several:], precision)

    if only is not None:
        along, rest = turned(only)
        return Kernel(rest.by_itself(precision), along, squares, leading)

    def strip(out, i):
        mine = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i * inner, inner), blocks)
        along, rest = lax.map(lambda block: turned(rows(block)), mine)
        rest = Rounded(rest.rows.reshape(inner * each, columns - several), rest.scale.ravel())
        first = i * inner * each
        out = lax.dynamic_update_slice(out, rest.by_itself(precision), (first, first))

        def before(j, out):
            _, other = turned(rows(block(j)))
            return lax.dynamic_update_slice(out, rest.by(other, precision), (first, j * each))

        return lax.fori_loop(0, i * inner, before, out), along

    held = wide if several else dtype
    start = jnp.zeros((count * each, count * each), held)
    out, along = lax.scan(strip, start, jnp.arange(strips))
    return Kernel(out, along.reshape(count * each, several), squares, leading)


def _spanned(power: Float[Array, "columns leading"], before: Reflector) -> Reflector:
    """Returns a reflector that spans `power`, or the one `before` if it is not finite."""
    new = Reflector.spanning(power)
    return select_tree(jnp.all(jnp.isfinite(new.t)), new, before)


class Blocks(eqx.Module):
    """`J Jᵀ`, turned by `leading` so that the span of `J V` comes first. Its first block, `core`,
    contains `J V Vᵀ Jᵀ`, and the others are as small as what the leading directions leave."""

    others: Float[Array, "others others"]
    coupling: Float[Array, "leading others"]
    core: Float[Array, "leading leading"]
    leading: Reflector

    @classmethod
    def of(cls, sums: Kernel) -> "Blocks":
        rest, along = sums.rest, sums.along
        several, leading = along.shape[1], Reflector.spanning(along)
        if not several:
            return cls(rest, along.T, jnp.zeros((0, 0), rest.dtype), leading)
        turned = leading(leading(jnp.tril(rest) + jnp.tril(rest, -1).T).T)
        upper = leading(along.T)[:, :several]
        with jax.default_matmul_precision("highest"):
            core = turned[:several, :several] + upper.T @ upper
        others = turned[several:, several:]
        others = others.astype(jnp.float32) if len(others) >= WIDE else others
        return cls(others, turned[:several, several:], core, leading)

    def factored(
        self, damping: Float[Array, ""], solver: Any, precision: str
    ) -> Callable[[Float[Array, " rows"]], Float[Array, " rows"]]:
        """Returns a function that solves with `J Jᵀ + damping`."""
        found = self.others, self.coupling, self.core, self.leading
        return in_two_blocks(*found, damping, solver, precision)


def cut(rows: int, columns: int, examples: int, precision: str) -> tuple[int, int]:
    """Returns the number of blocks, and of the strips that they make."""
    most = max(_BLOCK // columns, _ROWS)
    blocks = min(examples, math.ceil(rows / most))
    size = {"float64": 8, "float16": 2, "bfloat16": 2}.get(precision, 4)
    room = max(_STRIP, _KERNELS * rows**2)
    strips = min(blocks, math.ceil(rows * columns * size / room))
    return strips * math.ceil(blocks / strips), strips


@dataclasses.dataclass(frozen=True)
class Dual:
    """Sums `J Jᵀ` over blocks of the columns, factorizes it, and solves by conjugate gradients if
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
        first = leading.first(leading_in_dual(directions, rows), wide)
        blocks, strips = cut(rows, columns, at.longest, jacobian)
        compute, stacked = at.rows(blocks, at.residuals.forward)
        sums = kernel(compute, stacked, strips, first, jacobian)
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
        direct = lambda b: jnp.zeros_like(b).at[self.order].set(inner(dealt(b)), mode="drop")
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

    The quadratic model is that of the primal system, and so are the rules by which directions are
    taken and the iterations end (see `conjugate_gradients`). With `t = J Jᵀ z` for a direction `z`
    of the preconditioner, which takes the only products of an iteration, all else is sums:
    the direction `u` in the space of parameters and `q = J u` follow `Jᵀ z` and `t`.
    """
    tiny, eps = jnp.finfo(b.dtype).tiny, jnp.finfo(b.dtype).eps

    def going(carry):
        more, i, _, b, *_, t, total = carry
        gamma, lost = t @ b, eps * jnp.linalg.norm(t) * jnp.linalg.norm(b)
        return more & ((i == 0) | (gamma > _SURE * close * total) & (gamma > lost))

    def again(carry):
        _, i, x, b, u, y, q, t, total = carry
        i += 1
        along = (q @ b) / jnp.maximum(q @ q + damping * (u @ u), tiny)
        fell = along * (q @ b)
        gamma = t @ b
        x, new, total = x + along * u, b - along * (q + damping * y), total + fell

        def turned():
            z = solve(new)
            back = pull(z)
            t = push(back)
            kept = jnp.maximum(t @ (new - b), 0) / jnp.maximum(gamma, tiny)
            return back + kept * u, z + kept * y, t + kept * q, t

        more = (i < most) & (i.astype(total.dtype) * fell > close * total)
        u, y, q, t = lax.cond(more, turned, lambda: (u, y, q, t))
        return more, i, x, new, u, y, q, t, total

    z = solve(b)
    u = pull(z)
    t = push(u)
    zero, count = jnp.zeros((), b.dtype), jnp.array(0, jnp.int32)
    start = jnp.array(True), count, jnp.zeros_like(u), b, u, z, t, t, zero
    _, i, x, *_ = lax.while_loop(going, again, start)
    return x, i

"""Sums the Gram matrix of a Jacobian over blocks of its rows, factorizes it, and solves by
conjugate gradients, which the factorization preconditions."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import dtypes, lax
from jax.scipy.linalg import cho_solve, solve_triangular
from jaxtyping import Array, Float, Int32

from ..precision._split import SPLIT_PRODUCTS, halves_in_line
from ..precision._tree import select_tree
from ..products._dot import mixed_dot_general, split_dot_general


_PANELS, _NARROW = 8, 64
"""The largest number of panels, and the smallest number of columns if there are several."""

WIDE, _STEPS = 4096, 32
"""From `WIDE` columns on, panels end at multiples of `_NARROW`, which suits tensor cores, and the
Gram matrix of a narrow Jacobian is factorized in `_STEPS` steps by split products."""

_SURE = 1e-4
"""The factor on `close` for estimates by the preconditioner, which may not see all that is left."""

PATIENCE = 8
"""The number of conjugate gradients after which a solve ends if the fall of the quadratic model is
below the rounding of the loss, as where a residual that does not vanish is at its minimum."""

_Product = Callable[[Float[Array, " _"]], Float[Array, " _"]]

_OVER_ROWS = (((0,), (0,)), ((), ()))
_SHIFT = 1.0
"""The shift of a diagonal before it is factorized, in units of its rounding `eps * size`."""

_TRIES, _MORE = 6, 16.0
"""The largest number of factorizations tried, and the factor on the shift from one to the next."""


def _edges(columns: int, panels: int = _PANELS) -> list[int]:
    """Returns the edges of the panels. The last edge may lie behind the last column."""
    panels = max(1, min(panels, columns // _NARROW))
    unit = _NARROW if columns >= WIDE else 1
    units = -(-columns // unit)
    return [units * i // panels * unit for i in range(panels + 1)]


def _product(x: Array, y: Array, precision: str, dtype: Any, numbers: Any = _OVER_ROWS) -> Array:
    """Computes `xᵀ y` with operands in `precision`, accumulated in float32 or in float64."""
    if precision in SPLIT_PRODUCTS:
        return split_dot_general(x, y, numbers, precision)
    return mixed_dot_general(x, y, numbers, dtype=precision, out_dtype=dtype)


def product_of_rows(x: Array, y: Array, precision: str, dtype: Any) -> Array:
    """Computes `x yᵀ` with operands in `precision`, accumulated in float32 or in float64."""
    return _product(x, y, precision, dtype, (((1,), (1,)), ((), ())))


class Lower(eqx.Module):
    """The lower triangle of a symmetric matrix, as rows of blocks up to the diagonal.

    The blocks above the diagonal are not computed, because they are transposes of those below. The
    Jacobian is cut into panels once, so that no product copies a part of it.
    """

    rows: tuple[tuple[Float[Array, "_ _"], ...], ...]
    columns: int = eqx.field(static=True)

    @classmethod
    def gram(cls, x: Float[Array, "rows columns"], precision: str) -> "Lower":
        """Computes `xᵀ x`. For float16 the entries are scaled into its range."""
        scale, dtype = 1.0, x.dtype
        if precision == "float16":
            size = jnp.maximum(jnp.max(jnp.abs(x)), jnp.finfo(x.dtype).tiny)
            scale = jnp.exp2(-jnp.ceil(jnp.log2(size)))
            x = x * scale
        return cls.of_products(x, precision, dtype, lambda xx: xx / scale**2)

    @classmethod
    def of_products(
        cls, x: Array, precision: str, dtype: Any, then: Callable[[Array], Array], axis: int = 0
    ) -> "Lower":
        """Computes the sums over an axis of a matrix of products of its columns, or of its rows if
        the axis is 1. Applies `then` to each block."""
        columns = x.shape[1 - axis]
        edges, numbers = _edges(columns), (((axis,), (axis,)), ((), ()))
        pad = [(0, 0), (0, edges[-1] - columns)]
        x = jnp.pad(x, pad if axis == 0 else pad[::-1])
        left = right = x
        if precision.startswith("bfloat16_x"):
            left, right = halves_in_line(x, x, (axis, axis), precision)
            precision = "bfloat16"
        elif precision in ("float16", "bfloat16"):
            left = right = x.astype(precision)
        left, right = (jnp.split(z, edges[1:-1], axis=1 - axis) for z in (left, right))

        def by(y, z):
            # Without barriers, XLA for GPUs merges the products that share an operand into one.
            y, z = lax.optimization_barrier((y, z))
            return then(_product(y, z, precision, dtype, numbers))

        rows = (tuple(by(y, z) for z in right[: i + 1]) for i, y in enumerate(left))
        return cls(tuple(rows), columns)

    @classmethod
    def zeros(cls, columns: int, dtype: Any) -> "Lower":
        sizes = [b - a for a, b in pairwise(_edges(columns))]
        rows = (
            tuple(jnp.zeros((m, n), dtype) for n in sizes[: i + 1]) for i, m in enumerate(sizes)
        )
        return cls(tuple(rows), columns)

    def matrix(self) -> Float[Array, "columns columns"]:
        """Returns the matrix, with zeros in place of most entries above the diagonal."""
        last = sum(x.shape[1] for x in self.rows[-1])
        wide = [jnp.concatenate(row, axis=1) for row in self.rows]
        wide = [jnp.pad(x, ((0, 0), (0, last - x.shape[1]))) for x in wide]
        return jnp.concatenate(wide)[: self.columns, : self.columns]


class Reflector(eqx.Module):
    """The orthogonal matrix `H = I - Y T Yᵀ`. Its first columns span the directions of large
    singular values of a Jacobian, and its other columns are orthogonal to these directions.

    `H` is a product of Householder reflections, the columns of `Y` (Schreiber and Van Loan, *A
    storage efficient WY representation for products of Householder transformations*, SIAM J. Sci.
    Stat. Comput. 10, 1989). Without columns it is the identity.
    """

    y: Float[Array, "columns leading"]
    t: Float[Array, "leading leading"]

    @classmethod
    def spanning(cls, x: Float[Array, "columns leading"]) -> "Reflector":
        """Returns the reflector whose first columns span those of `x`."""
        eye = jnp.eye(*x.shape, dtype=x.dtype)
        y = jnp.tril(jnp.linalg.qr(x, mode="raw")[0].T, -1) + eye
        with jax.default_matmul_precision("highest"):
            inner = jnp.triu(y.T @ y)
        inverse = inner - jnp.diag(jnp.diagonal(inner)) / 2
        return cls(y, solve_triangular(inverse, eye[: x.shape[1]]))

    def first(self, several: int, dtype: Any) -> "Reflector":
        """Returns the product of the first `several` reflections, orthogonal to the rounding of
        `dtype`."""
        y = self.y[:, :several].astype(dtype)
        with jax.default_matmul_precision("highest"):
            inner = jnp.triu(y.T @ y)
        # A reflection of norm zero is the identity.
        half = jnp.diagonal(inner) / 2
        inverse = inner - jnp.diag(jnp.where(half > 0, half, -1.0))
        eye = jnp.eye(several, dtype=dtype)
        return Reflector(y, jnp.where((half > 0)[None], solve_triangular(inverse, eye), 0.0))

    def spans(self) -> Float[Array, "columns leading"]:
        """Returns the first columns of `H`."""
        y, t = self.y, self.t
        with jax.default_matmul_precision("highest"):
            return jnp.eye(*y.shape, dtype=y.dtype) - y @ (t @ y[: y.shape[1]].T)

    def padded(self, columns: int) -> "Reflector":
        """Returns a reflector of as many `columns`, whose new reflections are the identity."""
        more = columns - self.y.shape[1]
        y, t = jnp.pad(self.y, [(0, 0), (0, more)]), jnp.pad(self.t, [(0, more)] * 2)
        return Reflector(y, t)

    def __call__(self, x: Array, *, transposed: bool = False) -> Array:
        """Returns `x H`, or `x Hᵀ` if `transposed`, in the dtype of `x`."""
        y, t = self.y.astype(x.dtype), self.t.astype(x.dtype)
        with jax.default_matmul_precision("highest"):
            return x - x @ y @ (t.T if transposed else t) @ y.T if y.size else x


class Sums(eqx.Module):
    """Sums over the rows `J` of a Jacobian. `W` denotes the leading columns of `J H`, and `R` the
    others.

    **Attributes:**

    - `gram`: `Rᵀ R`.
    - `coupling`, `core`: `Wᵀ R` and `Wᵀ W`, in float64 if 64-bit types are enabled. The leading
        directions come from the step before. Each contains a part of the largest one, and beside
        this part its own singular value is below rounding.
    - `squares`: the squared norms of the columns of `J`.
    """

    gram: Lower
    coupling: Float[Array, "leading others"]
    core: Float[Array, "leading leading"]
    squares: Float[Array, " columns"]


def summed(
    rows: Callable[[Any], Float[Array, "rows columns"]],
    blocks: Any,
    leading: Reflector,
    precision: str,
) -> Sums:
    """Sums over `rows(block)` for each of the blocks, which are stacked along leading axes.

    The columns that are not leading have a Gram matrix of their own, so its rounding is relative to
    them. The rows are turned by `H` in float64 if 64-bit types are enabled, because the rounding of
    a turn is relative to the largest singular values.
    """
    (columns, several), dtype = leading.y.shape, leading.y.dtype
    wide = dtypes.canonicalize_dtype("float64")
    leading = jax.tree.map(lambda x: x.astype(wide), leading)

    def one(block: Any) -> Sums:
        jac = rows(block)
        squares = jnp.sum(jac**2, axis=0)
        turned = leading(jac.astype(wide))
        with jax.default_matmul_precision("highest"):
            along = turned[:, :several].T @ turned
        core, coupling = jnp.split(along, [several], axis=1)
        gram = Lower.gram(turned[:, several:].astype(jac.dtype), precision)
        return Sums(gram, coupling, core, squares)

    count = len(jax.tree.leaves(blocks)[0])
    if count == 1:
        return one(jax.tree.map(lambda x: x[0], blocks))
    start = Sums(
        Lower.zeros(columns - several, dtype),
        jnp.zeros((several, columns - several), wide),
        jnp.zeros((several, several), wide),
        jnp.zeros(columns, dtype),
    )
    add = lambda sums, block: (jax.tree.map(jnp.add, sums, one(block)), None)
    return lax.scan(add, start, blocks)[0]


def first_leading(columns: int, several: int, dtype: Any = "float32") -> Reflector:
    """Returns `several` random directions to begin with."""
    return Reflector.spanning(jax.random.normal(jax.random.key(0), (columns, several), dtype))


def next_leading(sums: Sums, leading: Reflector) -> Reflector:
    """Returns the reflector of the columns of `Jᵀ J V` for leading directions `V`, which is a step
    of the power method. If it is not finite, returns `leading`."""
    along = jnp.concatenate([sums.core, sums.coupling], axis=1).astype(leading.y.dtype)
    new = Reflector.spanning(leading(along, transposed=True).T)
    return select_tree(jnp.all(jnp.isfinite(new.t)), new, leading)


def factored(
    sums: Sums,
    leading: Reflector,
    damping: Float[Array, ""],
    solver: Any,
    precision: str,
) -> Callable[[Float[Array, " columns"]], Float[Array, " columns"]]:
    """Returns a function that solves with `Jᵀ J + damping`, as accurately as the sums allow.

    If 64-bit types are enabled, the matrix is factorized in float64, except the part of a wide
    matrix that is not leading. It is factorized in float32 or, for a narrower `precision`, by split
    products. A late step of the Klein–Gordon equation (961 parameters, relative damping 3e-14,
    float32 Jacobian) takes 50 conjugate gradients if turned and factorized in float32, and 10 in
    float64.
    """
    gram, core = sums.gram.matrix(), sums.core
    gram = gram if len(sums.squares) >= WIDE else gram.astype(core.dtype)
    return in_two_blocks(gram, sums.coupling, core, leading, damping, solver, precision)


def in_two_blocks(
    gram: Float[Array, "others others"],
    coupling: Float[Array, "leading others"],
    core: Float[Array, "leading leading"],
    leading: Reflector,
    damping: Float[Array, ""],
    solver: Any,
    precision: str,
) -> Callable[[Float[Array, " columns"]], Float[Array, " columns"]]:
    """Returns a function that solves with `damping` plus the matrix that `leading` turns into one
    of two blocks, `core` and `gram`, and their `coupling`. Reads the lower triangle of `gram`.

    It is factorized in these blocks: the leading directions, and the Schur complement of the
    others.
    """
    dtype, size = gram.dtype, jnp.diagonal(gram)
    if not len(core):
        return _positive(gram, size, damping.astype(dtype), solver, precision)
    eps = float(jnp.finfo(core.dtype).eps)
    lower, _ = _cholesky(core, jnp.diagonal(core), damping.astype(core.dtype), eps)
    half = solve_triangular(lower, coupling, lower=True)
    rest = gram - Lower.gram(half.astype(dtype), dtype.name).matrix()
    inner = _positive(rest, size, damping.astype(dtype), solver, precision)
    solve_core = lambda b: cho_solve((lower, True), b)

    def solve(b):
        # A large part along small singular values must leave nothing along the leading directions,
        # so `b` is turned in its own dtype.
        b_along, b_rest = jnp.split(leading(b[None])[0].astype(core.dtype), [len(core)])
        x = inner(b_rest - solve_core(b_along) @ coupling)
        x = jnp.concatenate([solve_core(b_along - coupling @ x), x]).astype(b.dtype)
        return leading(x[None], transposed=True)[0]

    return solve


def _shifted(gram: Array, raised: Array) -> Array:
    """Adds `raised` to the diagonal of a matrix."""
    at = jnp.arange(len(gram))
    return gram.at[at, at].add(raised)


def _positive(
    gram: Float[Array, "columns columns"],
    size: Float[Array, " columns"],
    damping: Float[Array, ""],
    solver: Any,
    precision: str,
) -> Callable[[Float[Array, " columns"]], Float[Array, " columns"]]:
    """Returns a function that solves with `gram + damping`, of which it reads the lower triangle.
    `gram` may be a difference, so its rounding is relative to `size`, the minuend's diagonal."""
    eps = 0.0 if precision == "float64" else float(jnp.finfo("float32").eps)
    if solver is None:
        factor = _cholesky(gram, size, damping, eps, precision)
        return lambda b: cho_solve(factor, b.astype(gram.dtype)).astype(b.dtype)
    import lineax as lx

    matrix = jnp.tril(_shifted(gram, damping + _SHIFT * eps * size))
    symmetric = matrix + jnp.tril(matrix, -1).T
    operator = lx.MatrixLinearOperator(symmetric, lx.positive_semidefinite_tag)
    state = solver.init(operator, options={})

    def solve(b):
        return lx.linear_solve(operator, b, solver, state=state, throw=False).value

    return lambda b: solve(b.astype(gram.dtype)).astype(b.dtype)


def _cholesky(
    gram: Float[Array, "columns columns"],
    size: Float[Array, " columns"],
    damping: Float[Array, ""],
    eps: float,
    precision: str = "float32",
) -> tuple[Float[Array, "columns columns"], bool]:
    """Returns the Cholesky factor of `gram + damping` and a flag that is true if it is the lower
    one. Reads the lower triangle of `gram`. Rounding by `eps` may leave an eigenvalue below 0, so
    the diagonal is raised by a share of `size`."""
    lower = len(gram) < WIDE or precision in ("float32", "float64")
    raised = lambda shift: damping + shift * size

    def factor(shift):
        if not lower:
            split = precision if precision in SPLIT_PRODUCTS else "bfloat16_x3"
            return by_steps(gram, raised(shift), split)
        return lax.linalg.cholesky(_shifted(gram, raised(shift)), symmetrize_input=False)

    if not eps:
        return factor(0.0), lower

    def failed(carry):
        i, _, factor = carry
        lost = ~jnp.all(jnp.isfinite(jnp.diagonal(factor)))
        return (i == 0) | (i < _TRIES) & lost & jnp.all(jnp.isfinite(size))

    def again(carry):
        i, shift, _ = carry
        return i + 1, _MORE * shift, factor(shift)

    first = jnp.asarray(_SHIFT * eps, gram.dtype)
    return lax.while_loop(failed, again, (0, first, jnp.zeros_like(gram)))[2], lower


def by_steps(
    gram: Float[Array, "columns columns"],
    raised: Float[Array, " columns"],
    precision: str,
    steps: int = _STEPS,
) -> Float[Array, "columns columns"]:
    """Returns the upper Cholesky factor of a matrix with a `raised` diagonal. Nearly all of its
    work is products in `precision`. Reads the lower triangle of the matrix. If the matrix is not
    positive definite, the result has NaN."""
    columns = len(gram)
    edges = [min(edge, columns) for edge in _edges(columns, steps)]
    upper = jnp.zeros((0, columns), gram.dtype)  # each step adds its rows
    for a, b in pairwise(edges):
        rows = gram[a:, a:b].T
        if a:
            rows = rows - _product(upper[:, a:b], upper[:, a:], precision, rows.dtype)
        lower = _shifted(rows[:, : b - a].T, raised[a:b])
        lower = lax.linalg.cholesky(lower, symmetrize_input=False)
        right = solve_triangular(lower, rows[:, b - a :], lower=True)
        new = jnp.concatenate([jnp.zeros((b - a, a), gram.dtype), lower.T, right], axis=1)
        upper = jnp.concatenate([upper, new])
    return upper


def conjugate_gradients(
    push: _Product,
    pull: _Product,
    solve: _Product,
    damping: Float[Array, ""],
    b: Float[Array, " rows"],
    s: Float[Array, " columns"],
    squares: Float[Array, " columns"],
    *,
    most: int,
    close: float,
) -> tuple[Float[Array, " columns"], Int32[Array, ""]]:
    """Solves `(Jᵀ J + damping) x = s` with `s = Jᵀ b`, and returns the solution and the number of
    iterations. `push(x)` is `J x`, and `pull(b)` is `Jᵀ b`.

    Runs conjugate gradients for least squares, preconditioned by `solve`, which uses a rounded
    Jacobian (Carson, Higham and Pranesh, *Three-precision GMRES-based iterative refinement for
    least squares problems*, SIAM J. Sci. Comput. 42, 2020). Rounded directions are not conjugate
    for long. So each is followed to its lowest point, and none leads up. The factor on the previous
    direction is that of Polak and Ribière. Nothing is cast: products are in the dtype of `b`.

    The iterations end after `most` of them, or once the quadratic model falls by less than `close`
    of its fall so far, divided by the number of the iteration (Nash and Nocedal, *A numerical study
    of the limited memory BFGS method and the truncated-Newton method*, SIAM J. Optim. 1, 1991).
    They also end if, by the preconditioner, less than `_SURE * close` of that fall is left, if `s`
    is below the rounding of `Jᵀ b`, by `squares`, the squared norms of the columns of `J`, or after
    `PATIENCE` of them if the fall is below the rounding of `bᵀ b`.
    """
    tiny, eps = jnp.finfo(b.dtype).tiny, jnp.finfo(b.dtype).eps
    norms, least = jnp.sqrt(squares).astype(b.dtype), eps * (b @ b)

    def going(carry):
        more, i, _, b, s, _, gamma, total = carry
        left = (gamma > _SURE * close * total) & jnp.any(jnp.abs(s) > eps * norms * jnp.sqrt(b @ b))
        return more & ((i == 0) | left)

    def again(carry):
        _, i, x, b, s, p, gamma, total = carry
        i += 1
        q = push(p)
        along = (s @ p) / jnp.maximum(q @ q + damping * (p @ p), tiny)
        fell = along * (s @ p)
        x, b, total = x + along * p, b - along * q, total + fell

        def turned():
            new = pull(b) - damping * x
            z = solve(new)
            beta = jnp.maximum(z @ (new - s), 0) / jnp.maximum(gamma, tiny)
            return new, z + beta * p, new @ z

        more = (i < most) & (i.astype(total.dtype) * fell > close * total)
        more &= (i < PATIENCE) | (total > least)
        s, p, gamma = lax.cond(more, turned, lambda: (s, p, gamma))
        return more, i, x, b, s, p, gamma, total

    z = solve(s)
    zero = jnp.zeros((), b.dtype)
    start = (jnp.array(True), jnp.array(0, jnp.int32), jnp.zeros_like(s), b, s, z, s @ z, zero)
    _, i, x, *_ = lax.while_loop(going, again, start)
    return x, i

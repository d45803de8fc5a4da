"""Newton's method for steady fields on a grid, in float64; it computes the flow references."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse as sp
from jaxtyping import Float
from scipy.sparse.linalg import splu


def solve(
    residual: Callable,
    start: Float[np.ndarray, "fields nx ny"],
    *,
    reach: int = 2,
    tolerance: float = 1e-9,
    iterations: int = 30,
) -> Float[np.ndarray, "fields nx ny"]:
    """Solves `residual(fields) = 0` from a start.

    Forward-mode differentiation computes the Jacobian. An equation depends only on unknowns within
    `reach` cells, so unknowns `2 reach + 1` cells apart share a seed.

    **Arguments:**

    - `residual`: a JAX function from fields to residuals of the same shape.
    - `start`: the initial fields.
    - `reach`: the largest distance, in cells, of unknowns that an equation depends on.
    - `tolerance`: the iteration ends when the largest residual is smaller.
    - `iterations`: the largest number of steps.

    **Returns:** the fields.

    **Raises:** `ValueError` if it does not converge.
    """
    with jax.enable_x64(True):
        fields = jnp.asarray(np.asarray(start, np.float64))
        value = jax.jit(residual)
        seeds, gather = _coloring(fields.shape, reach)
        columns = jax.jit(
            lambda q: jax.lax.map(lambda seed: jax.jvp(residual, (q,), (seed,))[1], seeds)
        )
        size = fields.size
        for _ in range(iterations):
            f = np.asarray(value(fields))
            if not np.isfinite(f).all():
                break
            if np.abs(f).max() < tolerance:
                return np.asarray(fields)
            jacobian = gather(np.asarray(columns(fields)))
            step = splu(jacobian, permc_spec="COLAMD").solve(f.reshape(size))
            fields = fields - step.reshape(fields.shape)
    raise ValueError(f"`solve` stopped at a residual of {np.abs(f).max():.1e}.")


def _coloring(shape, reach):
    """Returns seeds of unknowns that share no equation, and a function that reads the Jacobian."""
    fields, nx, ny = shape
    period = 2 * reach + 1
    field, i, j = np.indices(shape)
    color = (field * period + i % period) * period + j % period
    colors = fields * period**2
    seeds = jnp.asarray((color == np.arange(colors)[:, None, None, None]).astype(np.float64))

    offsets = range(-reach, reach + 1)
    rows, cols, picks = [], [], []
    for equation in range(fields):
        for unknown in range(fields):
            for di in offsets:
                for dj in offsets:
                    a, b = np.meshgrid(np.arange(nx), np.arange(ny), indexing="ij")
                    inside = (0 <= a + di) & (a + di < nx) & (0 <= b + dj) & (b + dj < ny)
                    a, b = a[inside], b[inside]
                    rows.append(np.ravel_multi_index((equation, a, b), shape))
                    cols.append(np.ravel_multi_index((unknown, a + di, b + dj), shape))
                    c = color[unknown, a + di, b + dj]
                    picks.append(np.ravel_multi_index((c, equation, a, b), (colors, *shape)))
    rows, cols, picks = (np.concatenate(x) for x in (rows, cols, picks))

    def gather(columns):
        values = columns.reshape(-1)[picks]
        kept = values != 0
        size = int(np.prod(shape))
        return sp.csc_matrix((values[kept], (rows[kept], cols[kept])), (size, size))

    return seeds, gather

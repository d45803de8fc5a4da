"""Draws points in a box, evenly and where a residual is large."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from .._util._types import PyTree
from ..precision._dtypes import is_integer, is_real, wide


class Points(eqx.Module):
    """Draws points in a box, some evenly, the others where a residual is large.

    Even points are a randomly shifted lattice whose steps are powers of a generalized golden ratio
    (Roberts, 2018). For the others more candidates are drawn evenly, and each is taken with a
    probability in proportion to the size of its residual (residual-based adaptive sampling, Wu et
    al., 2023). Where parameters outnumber points, draw new ones every few steps: a network that
    fits fixed points exactly may be far off between them.

    ```python
    inside = mpx.Points((0.0, 0.0), (1.0, 1.0), 500, residual=interior)
    edge = mpx.Points((0.0, 0.0), (1.0, 1.0), 100, faces=(0, 1))
    points = inside(model, key=key)
    ```
    """

    low: tuple[float, ...] = eqx.field(static=True)
    high: tuple[float, ...] = eqx.field(static=True)
    count: int = eqx.field(static=True)
    residual: Callable[..., Any] | None
    share: float = eqx.field(static=True)
    candidates: int = eqx.field(static=True)
    faces: tuple[int, ...] = eqx.field(static=True)
    dtype: Any = eqx.field(static=True)

    def __init__(
        self,
        low: Sequence[float],
        high: Sequence[float],
        count: int,
        *,
        residual: Callable[..., Any] | None = None,
        share: float = 0.5,
        candidates: int = 8,
        faces: Sequence[int] = (),
        dtype: Any = float,
    ):
        """**Arguments:**

        - `low`, `high`: corners of the box.
        - `count`: the number of points.
        - `residual`: a function of the model and one point. Without it all points are even.
        - `share`: the share of points that are drawn by the residual.
        - `candidates`: the number of candidates for each point.
        - `faces`: axes; points lie on the two faces of the box across each of them, in turn.
        - `dtype`: the dtype of the points, by default float64 if 64-bit types are enabled.

        **Raises:** `ValueError` for corners that are not in order, not finite or not of one length,
        a `count` or `candidates` that is not an integer of at least 1, a `share` outside of 0 to 1,
        axes that the box does not have, and a `dtype` that is not floating-point; `TypeError` for a
        `residual` that is not a function.
        """
        corners = [np.atleast_1d(np.asarray(x, dtype=float)) for x in (low, high)]
        ordered = len({x.shape for x in corners}) == 1 and corners[0].size > 0
        if not ordered or not np.all(corners[0] < corners[1]) or not np.all(np.isfinite(corners)):
            raise ValueError(
                "`Points` needs `low` below `high`, one finite number for each coordinate, but "
                f"got {low!r} and {high!r}."
            )
        numbers = all(is_integer(x) and x >= 1 for x in (count, candidates))
        if not numbers or not (is_real(share) and 0 <= share <= 1):
            raise ValueError(
                f"`Points` needs a `count` and `candidates` of at least 1 and a `share` from 0 to "
                f"1, but got {count!r}, {candidates!r} and {share!r}."
            )
        axes = faces if isinstance(faces, Sequence) else None
        if axes is None or not all(0 <= axis < corners[0].size for axis in axes):
            raise ValueError(
                f"`Points` needs a tuple of axes from 0 to {corners[0].size - 1} as `faces`, but "
                f"got {faces!r}."
            )
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(f"`Points` needs a floating-point `dtype`, but got {dtype!r}.")
        if residual is not None and not callable(residual):
            raise TypeError(
                "`Points` takes a function of the model and one point as `residual`, but got "
                f"{residual!r}."
            )
        self.low, self.high = (tuple(x.ravel().tolist()) for x in corners)
        self.count, self.share, self.candidates = int(count), float(share), int(candidates)
        self.residual, self.faces, self.dtype = residual, tuple(faces), dtype

    def __call__(self, model: PyTree, *, key: PRNGKeyArray) -> Float[Array, "count coords"]:
        """Draws points for a model."""
        return self._drawn(model, key)

    @eqx.filter_jit
    def _drawn(self, model: PyTree, key: PRNGKeyArray) -> Float[Array, "count coords"]:
        chosen = round(self.share * self.count)
        if self.residual is None or not chosen:
            return self._even(key, self.count)
        even_key, noise_key = jax.random.split(key)
        points = self._even(even_key, self.candidates * self.count)
        residuals = jax.vmap(self.residual, (None, 0))(model, points)
        size = _lengths(residuals.reshape(len(points), -1))
        noise = jax.random.gumbel(noise_key, size.shape, size.dtype)
        # The largest sums with Gumbel noise are drawn without replacement, in proportion to `size`,
        # and by chance where it is zero.
        weight = jnp.log(jnp.maximum(size, jnp.finfo(size.dtype).tiny)) + noise
        _, drawn = jax.lax.top_k(weight, chosen)
        return jnp.concatenate([points[: self.count - chosen], points[drawn]])

    def _even(self, key: PRNGKeyArray, count: int) -> Float[Array, "count coords"]:
        asked, axes = jax.dtypes.canonicalize_dtype(self.dtype), len(self.low)
        dtype = wide(asked)  # half precision has no number as large as an index
        low, high = jnp.asarray(self.low, dtype), jnp.asarray(self.high, dtype)
        ratio = np.roots([1, *[0] * (axes - 1), -1, -1]).real.max()
        steps = (ratio ** -np.arange(1.0, axes + 1) * 2**32).astype(np.uint32)
        shift = jax.random.bits(key, (1, axes), jnp.uint32)
        index = jnp.arange(count, dtype=jnp.uint32)[:, None]
        # Integers wrap around without loss.
        part = (index * jnp.asarray(steps)[None] + shift).astype(dtype) / 2.0**32
        points = low[None] + (high - low)[None] * part
        for i, axis in enumerate(self.faces):
            face = np.arange(count) // len(self.faces) % 2
            mine = np.arange(count) % len(self.faces) == i
            ends = jnp.where(jnp.asarray(face == 0), low[axis], high[axis])
            points = points.at[:, axis].set(jnp.where(jnp.asarray(mine), ends, points[:, axis]))
        return points.astype(asked)


def _lengths(x: Array) -> Float[Array, " rows"]:
    """Returns the lengths of rows, relative to the largest entry: squares leave the range of half
    precision. What is not finite counts as zero."""
    x = jnp.abs(x.astype(wide(x.dtype)))
    x = jnp.where(jnp.all(jnp.isfinite(x), axis=1, keepdims=True), x, 0.0)
    largest = jnp.max(x, initial=0.0)
    return jnp.linalg.norm(x / jnp.where(largest > 0, largest, 1.0), axis=1)

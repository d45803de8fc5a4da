"""Draws points in a box, evenly and where a residual is large."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from .._util._types import PyTree


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

        **Raises:** `ValueError` for corners that are not in order or not of one length, a `count`
        or `candidates` below 1, a `share` outside of 0 to 1, and axes that the box does not have.
        """
        self.low, self.high = tuple(map(float, low)), tuple(map(float, high))
        if len(self.low) != len(self.high) or not all(map(np.less, self.low, self.high)):
            raise ValueError(
                f"`Points` needs `low` below `high`, one number for each coordinate, but got "
                f"{self.low} and {self.high}."
            )
        if count < 1 or candidates < 1 or not 0 <= share <= 1:
            raise ValueError(
                f"`Points` needs a `count` and `candidates` of at least 1 and a `share` from 0 to "
                f"1, but got {count!r}, {candidates!r} and {share!r}."
            )
        if not all(0 <= axis < len(self.low) for axis in faces):
            raise ValueError(
                f"`Points` needs axes from 0 to {len(self.low) - 1} as `faces`, but got {faces!r}."
            )
        self.count, self.share, self.candidates = int(count), float(share), int(candidates)
        self.residual, self.faces, self.dtype = residual, tuple(faces), dtype

    @eqx.filter_jit
    def __call__(self, model: PyTree, *, key: PRNGKeyArray) -> Float[Array, "count coords"]:
        """Draws points for a model."""
        chosen = round(self.share * self.count)
        if self.residual is None or not chosen:
            return self._even(key, self.count)
        even_key, noise_key = jax.random.split(key)
        points = self._even(even_key, self.candidates * self.count)
        residuals = jax.vmap(self.residual, (None, 0))(model, points)
        size = jnp.sum(jnp.square(residuals.reshape(len(points), -1)), axis=1)
        noise = jax.random.gumbel(noise_key, size.shape, size.dtype)
        # The largest sums with Gumbel noise are drawn without replacement, in proportion to `size`.
        weight = jnp.where(jnp.isfinite(size), jnp.log(size) / 2, -jnp.inf) + noise
        _, drawn = jax.lax.top_k(weight, chosen)
        return jnp.concatenate([points[: self.count - chosen], points[drawn]])

    def _even(self, key: PRNGKeyArray, count: int) -> Float[Array, "count coords"]:
        dtype, axes = jax.dtypes.canonicalize_dtype(self.dtype), len(self.low)
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
        return points

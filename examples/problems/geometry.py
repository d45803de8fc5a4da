"""Solids made of boxes: signed distances, and points inside solids and on their surfaces."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, PRNGKeyArray


class Box(NamedTuple):
    """A box from one corner to the other."""

    low: tuple[float, ...]
    high: tuple[float, ...]


class Surface(NamedTuple):
    """Points `[n, d]` on the faces of boxes, their outward normals, and whether each is on the
    surface."""

    points: Float32[Array, "n d"]
    normals: Float32[Array, "n d"]
    there: Float32[Array, " n"]


def distance(boxes: Sequence[Box], points: Float[Array, "n d"]) -> Float[Array, " n"]:
    """Returns the signed distance to the nearest box, negative inside any of them."""

    def to(box):
        low, high = (jnp.asarray(x, points.dtype)[None] for x in box)
        away = jnp.abs(points - (low + high) / 2) - (high - low) / 2
        outside = jnp.sqrt(jnp.sum(jnp.maximum(away, 0) ** 2, axis=1))
        return outside + jnp.minimum(jnp.max(away, axis=1), 0)

    return jnp.min(jnp.stack([to(box) for box in boxes]), axis=0)


def to_edges(boxes: Sequence[Box], points: Float[Array, "n d"]) -> Float[Array, " n"]:
    """Returns the distance to the nearest edge of a box, where fields around boxes are singular."""

    def to(box):
        low, high = (jnp.asarray(x, points.dtype)[None] for x in box)
        away = jnp.abs(points - (low + high) / 2) - (high - low) / 2
        flat, along = away**2, jnp.maximum(away, 0) ** 2
        # An edge ends along its own direction, and lies on faces across the other two.
        return jnp.min(jnp.sum(flat, axis=1, keepdims=True) - flat + along, axis=1)

    return jnp.sqrt(jnp.min(jnp.stack([to(box) for box in boxes]), axis=0))


def away(boxes: Sequence[Box], point: Float[Array, " d"], reach: float = 0.05) -> Float[Array, ""]:
    """Returns 0 on boxes, the distance over `reach` close to a box, and nearly 1 far from all.

    It multiplies fields that vanish on the boxes. It is smooth except on their edges, whereas the
    signed distance has kinks.
    """
    out = jnp.ones((), point.dtype)
    for box in boxes:
        low, high = (jnp.asarray(x, point.dtype) for x in box)
        beyond = jnp.maximum(jnp.maximum(low - point, point - high), 0)
        # Unlike with squares, this distance has three derivatives where a face ends.
        near = jnp.sqrt(jnp.sqrt(jnp.sum(beyond**4) + 1e-16)) - 1e-4
        out = out * near / (near + reach)
    return out


def volume(boxes: Sequence[Box]) -> float:
    """Returns the volume of boxes that do not overlap."""
    return float(sum(np.prod(np.subtract(box.high, box.low)) for box in boxes))


def area(boxes: Sequence[Box]) -> float:
    """Returns the area of the faces of all boxes, even where they do not bound the union."""
    edges = (np.subtract(box.high, box.low) for box in boxes)
    return float(sum(2 * np.prod(np.delete(e, axis)) for e in edges for axis in range(len(e))))


def inside(key: PRNGKeyArray, boxes: Sequence[Box], count: int) -> Float32[Array, "n d"]:
    """Draws uniform points in boxes that do not overlap, about `count` in all, by volume."""
    volumes = np.array([np.prod(np.subtract(box.high, box.low)) for box in boxes])
    shares = np.maximum(np.round(count * volumes / volumes.sum()), 1).astype(int)
    keys = jax.random.split(key, len(boxes))
    return jnp.concatenate(
        [_uniform(k, n, *box) for k, n, box in zip(keys, shares, boxes, strict=True)]
    )


def surface(key: PRNGKeyArray, boxes: Sequence[Box], count: int) -> Surface:
    """Draws points on the faces of all boxes, about `count` in all, in proportion to the areas.
    Where a face lies on another box it does not bound their union, and `there` is 0."""
    faces = [(box, axis, end) for box in boxes for axis in range(len(box.low)) for end in (0, 1)]
    areas = np.array(
        [np.prod(np.delete(np.subtract(box.high, box.low), axis)) for box, axis, _ in faces]
    )
    shares = np.maximum(np.round(count * areas / areas.sum()), 1).astype(int)
    points, normals = [], []
    for k, n, (box, axis, end) in zip(
        jax.random.split(key, len(faces)), shares, faces, strict=True
    ):
        points.append(_uniform(k, n, *box).at[:, axis].set(box[end][axis]))
        normals.append(np.zeros((n, len(box.low)), np.float32))
        normals[-1][:, axis] = 2 * end - 1
    at, out = jnp.concatenate(points), jnp.concatenate(normals)
    return Surface(at, out, (distance(boxes, at + 1e-3 * out) > 0).astype(at.dtype))


def _uniform(key, count, low, high):
    low, high = jnp.asarray(low, jnp.float32), jnp.asarray(high, jnp.float32)
    return jax.random.uniform(key, (int(count), len(low)), minval=low, maxval=high)

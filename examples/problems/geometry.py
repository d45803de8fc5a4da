"""Solids made of boxes: signed distances, and points inside and on what bounds them."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, PRNGKeyArray


class Box(NamedTuple):
    """From one corner to the other."""

    low: tuple[float, ...]
    high: tuple[float, ...]


class Surface(NamedTuple):
    """Points on a surface: `[n, d]`, their outward normals, and whether each is on it at all."""

    points: Float32[Array, "n d"]
    normals: Float32[Array, "n d"]
    there: Float32[Array, " n"]


def distance(boxes: Sequence[Box], points: Float[Array, "n d"]) -> Float[Array, " n"]:
    """The signed distance to the nearest of the boxes, negative inside of any."""

    def to(box):
        low, high = (jnp.asarray(x, points.dtype)[None] for x in box)
        away = jnp.abs(points - (low + high) / 2) - (high - low) / 2
        outside = jnp.sqrt(jnp.sum(jnp.maximum(away, 0) ** 2, axis=1))
        return outside + jnp.minimum(jnp.max(away, axis=1), 0)

    return jnp.min(jnp.stack([to(box) for box in boxes]), axis=0)


def to_edges(boxes: Sequence[Box], points: Float[Array, "n d"]) -> Float[Array, " n"]:
    """The distance to the nearest edge of a box, where fields around boxes are singular."""

    def to(box):
        low, high = (jnp.asarray(x, points.dtype)[None] for x in box)
        away = jnp.abs(points - (low + high) / 2) - (high - low) / 2
        flat, along = away**2, jnp.maximum(away, 0) ** 2
        # An edge has a direction, along which it ends, and lies on faces across the other two.
        return jnp.min(jnp.sum(flat, axis=1, keepdims=True) - flat + along, axis=1)

    return jnp.sqrt(jnp.min(jnp.stack([to(box) for box in boxes]), axis=0))


def away(boxes: Sequence[Box], point: Float[Array, " d"], reach: float = 0.05) -> Float[Array, ""]:
    """0 on boxes, their distance over `reach` close to one, and nearly 1 far from all.

    What fields are multiplied by that vanish on the boxes: it is smooth but on their edges, where
    the signed distance has kinks.
    """
    out = jnp.ones((), point.dtype)
    for box in boxes:
        low, high = (jnp.asarray(x, point.dtype) for x in box)
        beyond = jnp.maximum(jnp.maximum(low - point, point - high), 0)
        # Other than with squares, a distance with three derivatives where a face ends.
        near = jnp.sqrt(jnp.sqrt(jnp.sum(beyond**4) + 1e-16)) - 1e-4
        out = out * near / (near + reach)
    return out


def volume(boxes: Sequence[Box]) -> float:
    """Of boxes that do not overlap."""
    return float(sum(np.prod(np.subtract(box.high, box.low)) for box in boxes))


def area(boxes: Sequence[Box]) -> float:
    """Of the faces of all boxes, also where nothing bounds their union."""
    edges = (np.subtract(box.high, box.low) for box in boxes)
    return float(sum(2 * np.prod(np.delete(e, axis)) for e in edges for axis in range(len(e))))


def inside(key: PRNGKeyArray, boxes: Sequence[Box], count: int) -> Float32[Array, "n d"]:
    """Uniform points in boxes that do not overlap, each with its share of about `count`."""
    volumes = np.array([np.prod(np.subtract(box.high, box.low)) for box in boxes])
    shares = np.maximum(np.round(count * volumes / volumes.sum()), 1).astype(int)
    keys = jax.random.split(key, len(boxes))
    return jnp.concatenate(
        [_uniform(k, n, *box) for k, n, box in zip(keys, shares, boxes, strict=True)]
    )


def surface(key: PRNGKeyArray, boxes: Sequence[Box], count: int) -> Surface:
    """Points on the faces of all boxes, each with its share of about `count`. Where a face lies on
    another box, nothing bounds their union: these are not there."""
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

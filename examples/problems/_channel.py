"""Channels with a block that is cooled, in three dimensions: what their problems share.

Conditions that hold by construction, points, conditions that are trained, and a solution by finite
volumes. The equations stand in the files of the problems.
"""

import functools
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from _cache import cached
from jaxtyping import Array, Float, Float32, PRNGKeyArray

import mpx_pde as mpx

from ._runner import Reference, grid, uniform
from .geometry import Box, away, distance, surface, to_edges, volume


KARMAN = 0.419


class Channel(NamedTuple):
    """A channel along x with a block on its floor, and what flows through it.

    A mean speed of 1 comes in, a product of two parabolas, with the temperature 0. The block is of
    metal: it has one temperature, which is 1. The conductivity of the fluid is its viscosity.
    """

    space: Box
    block: tuple[Box, ...]  # no two of which overlap
    viscosity: float
    chip: Box = Box((0, 0), (0, 0))  # a part of the floor, by x and y
    heat: float = 0.0  # −∂T/∂z there
    mixing: float = 0.0  # the largest mixing length of the turbulence model, if there is any


def parabolas(channel: Channel, point: Any) -> Any:
    """1 in the middle of the channel and 0 at its walls."""
    (_, *low), (_, *high) = channel.space
    across = zip(point[1:], low, high, strict=True)
    one, two = ((x - a) * (b - x) * 4 / (b - a) ** 2 for x, a, b in across)
    return one * two


FASTEST = 9 / 4  # where the mean of a product of two parabolas is 1


def mixing_length(channel: Channel, points: Float[Array, "n 3"]) -> Float[Array, " n"]:
    """l of the zero-equation model: in proportion to the distance to the nearest wall."""
    wall = distance(channel.block, points)
    for axis in (1, 2):
        for at in (channel.space.low[axis], channel.space.high[axis]):
            wall = jnp.minimum(wall, jnp.abs(points[:, axis] - at))
    return jnp.minimum(KARMAN * wall, channel.mixing)


# --- Conditions by construction --------------------------------------------------------------


def form(channel: Channel, pressure: float) -> Any:
    """u, v, w, p and T from what a network returns. No slip at walls and block, the block's
    temperature, all fields at the inlet; and at the outlet p = 0 and v = w = 0."""
    enter, leave = channel.space.low[0], channel.space.high[0]

    def fields(point: Float[Array, "3"], n: Float[Array, "5"]) -> Float[Array, "5"]:
        near = away(channel.block, point)
        inlet = away(channel.block, jnp.concatenate([jnp.full((1,), enter), point[1:]]))
        passed, ahead = point[0] - enter, leave - point[0]
        through = near * parabolas(channel, point)
        u = through * (FASTEST / inlet + passed * n[0])
        v, w = (through * passed * ahead * n[i] for i in (1, 2))
        t = 1 - near * (1 / inlet + passed * n[4])
        return jnp.stack([u, v, w, pressure * ahead * n[3], t])

    return fields


# --- Points ----------------------------------------------------------------------------------


class Fluid(NamedTuple):
    """Points in the fluid, and what their residuals are weighed by."""

    at: Float32[Array, "n 3"]
    weight: Float32[Array, " n"]  # the inverse of their density
    calm: Float32[Array, " n"]  # less than 1 close to edges of the block


class Walls(NamedTuple):
    """Points on walls and at the outlet, and what ∂T/∂n is there."""

    at: Float32[Array, "n 3"]
    normals: Float32[Array, "n 3"]
    slope: Float32[Array, " n"]
    there: Float32[Array, " n"]  # 0 where the block stands, and at the inlet


class Sections(NamedTuple):
    """Cross-sections, through each of which what comes in goes on."""

    at: Float32[Array, "sections n 3"]
    fluid: Float32[Array, "sections n"]


def draw(
    channel: Channel, key: PRNGKeyArray, *, fluid: int, walls: int, sections: int, across: int
) -> dict[str, Any]:
    """Those of a step, the same in every precision: `across`² on each section."""
    one, two, three = jax.random.split(key, 3)
    return {
        "fluid": _in_fluid(channel, one, fluid),
        "walls": _on_walls(channel, two, walls),
        "sections": _on_sections(channel, three, sections, across),
    }


def surroundings(channel: Channel, margin: float = 0.15) -> Box:
    """A box around the block, in the channel."""
    low = np.min([box.low for box in channel.block], axis=0) - margin
    high = np.max([box.high for box in channel.block], axis=0) + margin
    low, high = np.maximum(low, channel.space.low), np.minimum(high, channel.space.high)
    return Box(tuple(low.tolist()), tuple(high.tolist()))


def _in_fluid(channel: Channel, key: PRNGKeyArray, count: int) -> Fluid:
    """Half of the points are anywhere in the fluid, the other half close to the block. Weights
    make that a mean over the fluid (importance sampling)."""
    near = surroundings(channel)
    found = []
    for k, box in zip(jax.random.split(key), (channel.space, near), strict=True):
        candidates = uniform(k, count, *box)
        solid = distance(channel.block, candidates) < 1e-3
        found.append(candidates[jnp.argsort(solid)][: count // 2])  # those in the fluid first
    at = jnp.concatenate(found)
    fluid = [volume([box]) - volume(channel.block) for box in (channel.space, near)]
    inside = distance([near], at) < 0
    weight = 1 / jnp.where(inside, 0.5 + 0.5 * fluid[0] / fluid[1], 0.5)
    calm = jnp.minimum(to_edges(channel.block, at) / 0.1, 1.0)
    return Fluid(at, weight, calm)


def _on_walls(channel: Channel, key: PRNGKeyArray, count: int) -> Walls:
    """Three quarters are anywhere, the others on the chip."""
    one, two = jax.random.split(key)
    at, normals, _ = surface(one, [channel.space], 3 * count // 4)
    low, high = (jnp.asarray(x, jnp.float32) for x in channel.chip)
    chip = jnp.pad(uniform(two, count // 4, *channel.chip), ((0, 0), (0, 1)))
    at = jnp.concatenate([at, chip])
    normals = jnp.concatenate([normals, jnp.tile(jnp.array([[0.0, 0.0, -1.0]]), (len(chip), 1))])
    warm = jnp.all((at[:, :2] > low) & (at[:, :2] < high), axis=1) & (normals[:, 2] < 0)
    there = (distance(channel.block, at) > 1e-3) & (at[:, 0] > channel.space.low[0])
    return Walls(at, normals, channel.heat * warm.astype(at.dtype), there.astype(at.dtype))


def _on_sections(channel: Channel, key: PRNGKeyArray, count: int, across: int) -> Sections:
    """One point in each of `across`² equal parts of a section."""
    low, high = channel.space
    places, parts = jax.random.split(key)
    x = jax.random.uniform(places, (count, 1), minval=low[0], maxval=high[0])
    shift = jax.random.uniform(parts, (count, across**2, 2))
    index = np.stack(np.divmod(np.arange(across**2), across), axis=-1)
    yz = jnp.array(low[1:]) + (index + shift) / across * (jnp.array(high[1:]) - jnp.array(low[1:]))
    at = jnp.concatenate([jnp.broadcast_to(x[:, :, None], (*shift.shape[:2], 1)), yz], axis=-1)
    open_ = distance(channel.block, at.reshape(-1, 3)).reshape(at.shape[:2]) > 0
    return Sections(at, open_.astype(at.dtype))


# --- Conditions that are trained -------------------------------------------------------------


def heat_through_walls(fields: Any, walls: Walls, given: Mapping[str, Any]) -> Array:
    """The mean square of what ∂T/∂n is off."""
    slopes = mpx.partials(fields, ["t_x", "t_y", "t_z"], **given)
    d = jax.vmap(slopes)(walls.at)
    x, y, z = walls.normals.T
    wrong = x * d["t_x"] + y * d["t_y"] + z * d["t_z"] - walls.slope
    return jnp.mean(walls.there * wrong**2)


def flow_through_sections(fields: Any, sections: Sections, given: Mapping[str, Any]) -> Array:
    """The mean square of what the mean speed is off 1."""
    speed = jax.vmap(jax.vmap(mpx.partials(fields, ["u"], **given)))(sections.at)["u"]
    return jnp.mean((jnp.mean(sections.fluid * speed, axis=1) - 1) ** 2)


def total(
    residuals: tuple[Array, list[Array], Array],
    fields: Any,
    points: Mapping[str, Any],
    given: Mapping[str, Any],
) -> Array:
    """The loss: means over the fluid of the squares of the residuals of mass, momentum (three) and
    heat, and what is off at walls and through sections. Edges of the block, where all but the mass
    balance are singular, weigh less."""
    mass, force, heat = residuals
    _, weight, calm = points["fluid"]
    balance = mass**2 + calm**2 * (0.1 * sum(x**2 for x in force) + heat**2)
    walls = heat_through_walls(fields, points["walls"], given)
    through = flow_through_sections(fields, points["sections"], given)
    return jnp.mean(weight * balance) + 0.2 * walls + 4 * through


# --- The reference ---------------------------------------------------------------------------


@functools.cache
def reference(channel: Channel, cells: int = 20) -> Reference:
    """u, v, w, p and T by finite volumes in the middle of cells, NaN in the block."""
    given = {"channel": repr(channel), "cells": cells}
    found = cached("channel", lambda **_: steady(channel, cells), version=1, **given)
    axes = (found["x"], found["y"], found["z"])
    return Reference(grid(*axes), found["fields"].reshape(5, -1).T)


def steady(
    channel: Channel, cells: int, tolerance: float = 3e-7, *, sound: float = 3.0
) -> dict[str, np.ndarray]:
    """Steady flow and temperature, by central differences on a staggered grid, in float64.

    They are what a march through an artificial time ends at, in which the fluid is compressible
    (Chorin, 1967): ∂p/∂t = −c² ∇·u.

    **Arguments:**

    - `cells`: to a length of 1; faces of the block must be those of cells.
    - `tolerance`: what the rates of velocity and temperature and ∇·u must come to.
    - `sound`: c, which says how fast that is and nothing of where it ends.

    **Returns:** the centres' `x`, `y` and `z`, the `fields` u, v, w, p, T there, and the `flux`
    through the cross-sections between cells.

    **Raises:** `ValueError` if it does not come to rest.
    """
    solver = FiniteVolumes(channel, 1 / cells)
    h, fluid = solver.h, solver.fluid
    u, p, t = solver.start()
    dt = off = np.inf
    for step in range(200_000):
        rates, viscosity = solver.momentum(u, p)
        if step % 100 == 0:
            fastest = sum(np.abs(x).max() for x in u) + np.sqrt(3) * sound
            dt = 0.8 / (6 * np.max(viscosity) / h**2 + fastest / h)
        u = [x + dt * rate for x, rate in zip(u, rates, strict=True)]
        mass = fluid * sum(solver.stretch(u))
        p = p - dt * sound**2 * mass
        warming = solver.heat(u, t, viscosity)
        t = t + dt * warming
        if step % 100 == 0:
            off = max(float(np.abs(x).max()) for x in (*rates, mass, warming))
            if not tolerance <= off < np.inf:
                break
    if not off < tolerance:
        raise ValueError(f"`steady` stopped where rates are {off:.1e}.")
    middle = [_mean(x, axis) for axis, x in enumerate(u)]
    fields = np.where(fluid > 0, np.stack([*middle, p, t]), np.nan)
    flux = u[0].sum(axis=(1, 2)) * h**2
    return {**dict(zip("xyz", solver.axes, strict=True)), "fields": fields, "flux": flux}


def _sides(x: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """What is below and above of each face between neighbors."""
    lead = (slice(None),) * axis
    return x[(*lead, slice(None, -1))], x[(*lead, slice(1, None))]


def _wider(x: np.ndarray, axis: int, low: Any, high: Any) -> np.ndarray:
    """With one more layer at both ends of an axis: a number, or a factor `"same"`."""
    lead = (slice(None),) * axis
    first, last = x[(*lead, slice(0, 1))], x[(*lead, slice(-1, None))]
    first = first if low == "same" else np.full_like(first, low)
    last = last if high == "same" else np.full_like(last, high)
    return np.concatenate([first, x, last], axis=axis)


def _mean(x: np.ndarray, axis: int) -> np.ndarray:
    low, high = _sides(x, axis)
    return (low + high) / 2


class FiniteVolumes:
    """The equations on cells of size h: u, v, w on the faces of cells, p and T in their middle.

    A list `u` holds the three velocities, of which that along an axis has one layer more there.
    """

    def __init__(self, channel: Channel, h: float):
        self.channel, self.h = channel, h
        low, high = channel.space
        counts = [round((b - a) / h) for a, b in zip(low, high, strict=True)]
        self.axes = [a + (np.arange(n) + 0.5) * h for a, n in zip(low, counts, strict=True)]
        at = grid(*self.axes)
        with jax.enable_x64(True):
            points = jnp.asarray(at, jnp.float64)
            solid = np.asarray(distance(channel.block, points) < 0).reshape(counts)
            length = np.asarray(mixing_length(channel, points)).reshape(counts)
        self.fluid = (~solid).astype(float)
        self.length2 = self.fluid * length**2
        x, y = np.meshgrid(self.axes[0], self.axes[1], indexing="ij")
        warm = np.ones_like(x)
        for z, a, b in zip((x, y), *channel.chip, strict=True):
            warm *= (z > a) & (z < b)
        self.warmth = channel.viscosity * channel.heat * warm
        self.open, self.pairs, self.clear, self.conducted = [], {}, {}, []
        deep = []
        for axis in range(3):
            # Beyond walls all is solid, and beyond the inlet, whose velocity is given.
            below, above = _sides(_wider(solid, axis, True, axis > 0), axis)
            self.open.append((~(below | above)).astype(float))
            deep.append(below & above)
            # A wall is half as far away as a neighbor.
            below, above = _sides(_wider(solid, axis, False, False), axis)
            self.conducted.append(np.where(below ^ above, 2.0, 1.0) / h)
            if axis == 0:
                self.conducted[0][0] *= 2
            self.clear[axis] = (~(below | above)).astype(float)
        for i, j in itertools.permutations(range(3), 2):
            # Of a face inside of a solid, the neighbor has its opposite: 0 at the wall.
            below, above = (x.astype(float) for x in _sides(_wider(deep[i], j, True, True), j))
            self.pairs[i, j] = ((1 + below) / h, (1 + above) / h, (1 - below) / 2, (1 - above) / 2)
        for i, j in itertools.combinations(range(3), 2):
            self.clear[i, j] = (self._to_edges(self.fluid, i, j) > 0.99).astype(float)

    def start(self) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
        """The inlet's velocity wherever there is fluid."""
        _, y, z = np.meshgrid(*self.axes, indexing="ij")
        inlet = FASTEST * parabolas(self.channel, (None, y[0], z[0]))
        u = [np.zeros_like(x) for x in self.open]
        u[0] += inlet * self.open[0]
        u[0][0] = inlet * self.fluid[0]
        return u, np.zeros_like(self.fluid), 1 - self.fluid

    def stretch(self, u: list[np.ndarray]) -> list[np.ndarray]:
        """∂u/∂x, ∂v/∂y and ∂w/∂z, in the middle of cells."""
        return [np.diff(x, axis=axis) / self.h for axis, x in enumerate(u)]

    def momentum(self, u: list[np.ndarray], p: np.ndarray) -> tuple[list[np.ndarray], Any]:
        """∂u/∂t, and the viscosity in the middle of cells."""
        h, slopes, means = self.h, {}, {}
        for (i, j), (a, b, c, d) in self.pairs.items():
            low, high = _sides(_wider(u[i], j, 0.0, 0.0), j)
            slopes[i, j], means[i, j] = a * high - b * low, c * high + d * low
        stretch = self.stretch(u)
        shear = {ij: slopes[ij] + slopes[ij[::-1]] for ij in itertools.combinations(range(3), 2)}
        nu, nu_at_edges = self.viscosity(stretch, shear)
        mass = sum(stretch)
        rates = []
        for i, (x, along) in enumerate(zip(u, stretch, strict=True)):
            # `mass` vanishes in the end; until then it halves what bounds the time step.
            drag = nu * (2 * along - mass)
            below, above = _sides(_mean(x, i) ** 2 + p - drag, i)
            rate = _wider((below - above) / h, i, 0.0, 0.0)
            if i == 0:  # beyond the outlet −p, and u as before it
                rate[-1] = 2 * (p - drag)[-1] / h
            rates.append(rate)
        for (i, j), strain in shear.items():
            carried = means[i, j] * means[j, i] - nu_at_edges[i, j] * strain
            for one, other in ((i, j), (j, i)):
                rates[one] -= np.diff(carried, axis=other) / h
        return [rate * open_ for rate, open_ in zip(rates, self.open, strict=True)], nu

    def viscosity(self, stretch: list[np.ndarray], shear: dict) -> tuple[Any, Any]:
        """ν + l² √(2 S:S) in the middle of cells and on their edges; l = 0 on those of walls."""
        nu = self.channel.viscosity
        if not self.channel.mixing:
            return nu, dict.fromkeys(shear, nu)
        square = 2 * sum(x**2 for x in stretch)
        square = square + sum(_mean(_mean(x**2, i), j) for (i, j), x in shear.items())
        eddies = self.length2 * np.sqrt(square)
        at_edges = {ij: nu + self.clear[ij] * self._to_edges(eddies, *ij) for ij in shear}
        return nu + eddies, at_edges

    def _to_edges(self, x: np.ndarray, i: int, j: int) -> np.ndarray:
        for axis in (i, j):
            beyond = "same" if axis == 0 else 0.0
            x = _mean(_wider(x, axis, beyond, beyond), axis)
        return x

    def heat(self, u: list[np.ndarray], t: np.ndarray, viscosity: Any) -> np.ndarray:
        """∂T/∂t. Solid cells have the temperature 1."""
        h, nu = self.h, self.channel.viscosity
        out = np.zeros_like(t)
        for axis in range(3):
            wide = _wider(t, axis, 0.0 if axis == 0 else "same", "same")
            low, high = _sides(wide, axis)
            k = nu
            if np.ndim(viscosity):
                eddies = _mean(_wider(viscosity - nu, axis, "same", "same"), axis)
                k = nu + self.clear[axis] * eddies
            # The inlet has T = 0 on the face itself.
            carried = u[axis] * (low + high) / 2
            if axis == 0:
                carried[0] = 0.0
            flux = carried - k * self.conducted[axis] * (high - low)
            if axis == 2:
                flux[:, :, 0] += self.warmth
            out -= np.diff(flux, axis=axis) / h
        return out * self.fluid

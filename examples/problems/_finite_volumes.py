"""Steady flow and heat in a channel with a block, by finite volumes in float64."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._cache import cached
from ._channel import FASTEST, Channel, mixing_length, parabolas
from ._problem import Reference, grid
from .geometry import distance


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

"""Steady flow and heat in a channel with a block, by finite volumes in float64."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ._cache import cached
from ._channel import FASTEST, Channel, mixing_length, parabolas
from ._problem import Reference, grid
from .geometry import distance


ORDER = 1.09
"""The order by which errors fall with the size of cells: twice the exponent of the velocity at an
edge of the block, 0.5445 (Moffatt, 1964). From 10 to 20 to 40 cells errors fall with order 1.18."""


@functools.cache
def reference(channel: Channel, cells: int = 20) -> Reference:
    """Returns u, v, w, p and T at the centers of cells, NaN in the block.

    Extrapolates to cells of size 0 from finite volumes on these cells and on cells of half their
    size.
    """

    def solved(cells):
        given = {"channel": repr(channel), "cells": cells}
        return cached("channel", lambda **_: steady(channel, cells), version=2, **given)

    coarse, fine = solved(cells), solved(2 * cells)
    n = coarse["fields"].shape[1:]
    halves = fine["fields"].reshape(5, n[0], 2, n[1], 2, n[2], 2).mean(axis=(2, 4, 6))
    fields = halves + (halves - coarse["fields"]) / (2**ORDER - 1)
    return Reference(grid(*(coarse[x] for x in "xyz")), fields.reshape(5, -1).T)


def steady(
    channel: Channel, cells: int, tolerance: float = 1e-5, *, sound: float = 3.0
) -> dict[str, np.ndarray]:
    """Computes steady flow and temperature by central differences on a staggered grid, in float64.

    They are the end state of a march through an artificial time in which the fluid is compressible
    (Chorin, 1967): ∂p/∂t = −c² ∇·u.

    **Arguments:**

    - `cells`: cells per unit length; faces of the block must coincide with those of cells.
    - `tolerance`: the rates of velocity and temperature and ∇·u must fall below this.
    - `sound`: c, which affects the speed of the march but not its end state.

    **Returns:** the `x`, `y` and `z` of the centers, the `fields` u, v, w, p, T there, and the
    `flux` through the cross-sections between cells.

    **Raises:** `ValueError` if the march does not come to rest.
    """
    with jax.enable_x64(True):
        solver = FiniteVolumes(channel, 1 / cells)
        h, state, off = solver.h, solver.start(), np.inf

        @jax.jit
        def hundred(state):
            u, p, _ = state
            fastest = sum(jnp.abs(x).max() for x in u) + np.sqrt(3) * sound
            dt = 0.8 / (6 * jnp.max(solver.momentum(u, p)[1]) / h**2 + fastest / h)
            step = lambda _, carry: solver.step(carry[0], dt, sound)
            return jax.lax.fori_loop(0, 100, step, (state, jnp.zeros(())))

        for _ in range(2000):
            state, off = hundred(state)
            if not tolerance <= off < np.inf:
                break
        if not off < tolerance:
            raise ValueError(f"`steady` stopped where rates are {off:.1e}.")
        u, p, t = state
        middle = [_mean(x, axis) for axis, x in enumerate(u)]
        fields = np.where(solver.fluid > 0, np.stack([*middle, p, t]), np.nan)
    flux = np.asarray(u[0]).sum(axis=(1, 2)) * h**2
    return {**dict(zip("xyz", solver.axes, strict=True)), "fields": fields, "flux": flux}


def _sides(x: Any, axis: int) -> tuple[Any, Any]:
    """Returns the neighbors below and above each face along an axis."""
    lead = (slice(None),) * axis
    return x[(*lead, slice(None, -1))], x[(*lead, slice(1, None))]


def _wider(x: Any, axis: int, low: Any, high: Any) -> Array:
    """Adds a layer at both ends of an axis: a number, or `"same"` to repeat the last layer."""
    lead = (slice(None),) * axis
    first, last = x[(*lead, slice(0, 1))], x[(*lead, slice(-1, None))]
    first = first if low == "same" else jnp.full_like(first, low)
    last = last if high == "same" else jnp.full_like(last, high)
    return jnp.concatenate([first, x, last], axis=axis)


def _mean(x: Any, axis: int) -> Array:
    low, high = _sides(x, axis)
    return (low + high) / 2


class FiniteVolumes:
    """The equations on cells of size h: u, v, w on the faces of cells, p and T at their centers.

    A list `u` holds the three velocities; each has one more layer along its own axis. Everything
    needs 64-bit types.
    """

    def __init__(self, channel: Channel, h: float):
        self.channel, self.h = channel, h
        low, high = channel.space
        counts = [round((b - a) / h) for a, b in zip(low, high, strict=True)]
        self.axes = [a + (np.arange(n) + 0.5) * h for a, n in zip(low, counts, strict=True)]
        at = grid(*self.axes)
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
            # Beyond walls everything is solid, and beyond the inlet, whose velocity is given.
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
            # For a face inside a solid, the neighbor has the opposite velocity: 0 at the wall.
            below, above = (x.astype(float) for x in _sides(_wider(deep[i], j, True, True), j))
            self.pairs[i, j] = ((1 + below) / h, (1 + above) / h, (1 - below) / 2, (1 - above) / 2)
        for i, j in itertools.combinations(range(3), 2):
            self.clear[i, j] = (self._to_edges(self.fluid, i, j) > 0.99).astype(float)

    def start(self) -> tuple[list[Array], Array, Array]:
        """Starts with the inlet's velocity wherever there is fluid."""
        _, y, z = np.meshgrid(*self.axes, indexing="ij")
        inlet = FASTEST * parabolas(self.channel, (None, y[0], z[0]))
        _, v, w = (jnp.zeros_like(x) for x in self.open)
        u = jnp.asarray(inlet * self.open[0]).at[0].set(inlet * self.fluid[0])
        return [u, v, w], jnp.zeros_like(self.fluid), jnp.asarray(1 - self.fluid)

    def step(
        self, state: tuple[list[Array], Array, Array], dt: Array, sound: float
    ) -> tuple[tuple[list[Array], Array, Array], Array]:
        """Returns velocity, pressure and temperature a step later, and their largest rate."""
        u, p, t = state
        rates, viscosity = self.momentum(u, p)
        u = [x + dt * rate for x, rate in zip(u, rates, strict=True)]
        mass = self.fluid * sum(self.stretch(u))
        warming = self.heat(u, t, viscosity)
        off = jnp.max(jnp.stack([jnp.abs(x).max() for x in (*rates, mass, warming)]))
        return (u, p - dt * sound**2 * mass, t + dt * warming), off

    def stretch(self, u: list[Array]) -> list[Array]:
        """Returns ∂u/∂x, ∂v/∂y and ∂w/∂z at the centers of cells."""
        return [jnp.diff(x, axis=axis) / self.h for axis, x in enumerate(u)]

    def momentum(self, u: list[Array], p: Array) -> tuple[list[Array], Any]:
        """Returns ∂u/∂t, and the viscosity at the centers of cells."""
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
            # `mass` vanishes in the end; until then it halves the rate that bounds the time step.
            drag = nu * (2 * along - mass)
            below, above = _sides(_mean(x, i) ** 2 + p - drag, i)
            rate = _wider((below - above) / h, i, 0.0, 0.0)
            if i == 0:  # beyond the outlet, −p, and u unchanged
                rate = rate.at[-1].set(2 * (p - drag)[-1] / h)
            rates.append(rate)
        for (i, j), strain in shear.items():
            carried = means[i, j] * means[j, i] - nu_at_edges[i, j] * strain
            for one, other in ((i, j), (j, i)):
                rates[one] -= jnp.diff(carried, axis=other) / h
        return [rate * open_ for rate, open_ in zip(rates, self.open, strict=True)], nu

    def viscosity(self, stretch: list[Array], shear: dict) -> tuple[Any, Any]:
        """Returns ν + l² √(2 S:S) at cell centers and on edges; l = 0 on edges of walls."""
        nu = self.channel.viscosity
        if not self.channel.mixing:
            return nu, dict.fromkeys(shear, nu)
        square = 2 * sum(x**2 for x in stretch)
        square = square + sum(_mean(_mean(x**2, i), j) for (i, j), x in shear.items())
        eddies = self.length2 * jnp.sqrt(square)
        at_edges = {ij: nu + self.clear[ij] * self._to_edges(eddies, *ij) for ij in shear}
        return nu + eddies, at_edges

    def _to_edges(self, x: Any, i: int, j: int) -> Array:
        for axis in (i, j):
            beyond = "same" if axis == 0 else 0.0
            x = _mean(_wider(x, axis, beyond, beyond), axis)
        return x

    def heat(self, u: list[Array], t: Array, viscosity: Any) -> Array:
        """Returns ∂T/∂t. Solid cells have the temperature 1."""
        h, nu = self.h, self.channel.viscosity
        out = jnp.zeros_like(t)
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
                carried = carried.at[0].set(0.0)
            flux = carried - k * self.conducted[axis] * (high - low)
            if axis == 2:
                flux = flux.at[:, :, 0].add(self.warmth)
            out -= jnp.diff(flux, axis=axis) / h
        return out * self.fluid

"""Channels with a block that is cooled, in three dimensions: what their problems share.

Conditions that hold by construction, points, and conditions that are trained. The equations stand
in the files of the problems, their solution by finite volumes in `_finite_volumes.py`.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, PRNGKeyArray

import mpx_pde as mpx

from ._problem import Problem, Reference, uniform
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


def channel_problem(
    title: str,
    channel: Channel,
    residuals: Callable,
    reference: Callable[..., Reference],
    *,
    pressure: float,
    fluid: int = 640,
    steps: int = 3000,
) -> Problem:
    """Returns the problem of a channel. `residuals(fields, at, given)` are those that `total`
    takes, `reference(channel)` what it ends at, by default or with `cells` to a length of 1,
    `pressure` is about as large as p gets, `fluid` points of a step are in the fluid."""

    def network(key, width=64, depth=4):
        mlp = mpx.nn.CoordinateMLP(3, 5, width, depth, key=key, fourier_features=(32, 0.5))
        return mpx.nn.Ansatz(mlp, form(channel, pressure))

    def loss(fields, points, *, derivatives=None):
        given = {"coords": "xyz", "outputs": "uvwpt", "scaling": derivatives}
        return total(residuals(fields, points["fluid"].at, given), fields, points, given)

    def sample(key, fluid=fluid, walls=128, across=16):
        return draw(channel, key, fluid=fluid, walls=walls, sections=4, across=across)

    problem = Problem(
        title=title,
        coords="xyz",
        order=2,
        network=network,
        loss=loss,
        sample=sample,
        reference=functools.partial(reference, channel),
        fields="uvwpt",
        free=(3,),
        family="3D",
        steps=steps,
        paper={  # its network is that of PhysicsNeMo
            "network": functools.partial(network, width=512, depth=6),
            "sample": functools.partial(sample, fluid=16_384, walls=4096, across=64),
            "steps": 400_000,
        },
    )
    rough = functools.partial(reference, channel, 10)
    return dataclasses.replace(problem, quick=dataclasses.replace(problem, reference=rough))

"""Channels with a cooled block, in three dimensions: shared parts of their problems.

This module has the conditions that hold by construction, the points, and the conditions that are
trained. The equations are in the files of the problems, their finite-volume solution is in
`_finite_volumes.py`.
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
    """A channel along x with a block on its floor, and the fluid in it.

    The fluid enters with temperature 0 and a mean speed of 1, whose profile is a product of two
    parabolas. The block is of metal: it has a single temperature, 1. The conductivity of the fluid
    equals its viscosity.
    """

    space: Box
    block: tuple[Box, ...]  # boxes that do not overlap
    viscosity: float
    chip: Box = Box((0, 0), (0, 0))  # a part of the floor, by x and y
    heat: float = 0.0  # −∂T/∂z there
    mixing: float = 0.0  # the largest mixing length of the turbulence model; 0 without a model


def parabolas(channel: Channel, point: Any) -> Any:
    """Returns 1 in the middle of the channel and 0 at its walls."""
    (_, *low), (_, *high) = channel.space
    across = zip(point[1:], low, high, strict=True)
    one, two = ((x - a) * (b - x) * 4 / (b - a) ** 2 for x, a, b in across)
    return one * two


FASTEST = 9 / 4  # the maximum of a product of two parabolas whose mean is 1


def mixing_length(channel: Channel, points: Float[Array, "n 3"]) -> Float[Array, " n"]:
    """Returns l of the zero-equation model, proportional to the distance to the nearest wall."""
    wall = distance(channel.block, points)
    for axis in (1, 2):
        for at in (channel.space.low[axis], channel.space.high[axis]):
            wall = jnp.minimum(wall, jnp.abs(points[:, axis] - at))
    return jnp.minimum(KARMAN * wall, channel.mixing)


# --- Conditions by construction --------------------------------------------------------------


def form(channel: Channel, pressure: float) -> Any:
    """Builds u, v, w, p and T from the outputs of a network.

    They meet no slip at walls and block, the block's temperature, and the values of all fields at
    the inlet; at the outlet, p = 0 and v = w = 0.
    """
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
    """Points in the fluid, and the weights of their residuals."""

    at: Float32[Array, "n 3"]
    weight: Float32[Array, " n"]  # the inverse of their density
    calm: Float32[Array, " n"]  # less than 1 close to edges of the block


class Walls(NamedTuple):
    """Points on walls and at the outlet, and the required ∂T/∂n."""

    at: Float32[Array, "n 3"]
    normals: Float32[Array, "n 3"]
    slope: Float32[Array, " n"]
    there: Float32[Array, " n"]  # 0 where the block stands, and at the inlet


class Sections(NamedTuple):
    """Cross-sections; the flow through each equals the flow that enters."""

    at: Float32[Array, "sections n 3"]
    fluid: Float32[Array, "sections n"]


def draw(
    channel: Channel, key: PRNGKeyArray, *, fluid: int, walls: int, sections: int, across: int
) -> dict[str, Any]:
    """Draws the points of a step, the same in every precision: `across`² on each section."""
    one, two, three = jax.random.split(key, 3)
    return {
        "fluid": _in_fluid(channel, one, fluid),
        "walls": _on_walls(channel, two, walls),
        "sections": _on_sections(channel, three, sections, across),
    }


def surroundings(channel: Channel, margin: float = 0.15) -> Box:
    """Returns a box around the block, inside the channel."""
    low = np.min([box.low for box in channel.block], axis=0) - margin
    high = np.max([box.high for box in channel.block], axis=0) + margin
    low, high = np.maximum(low, channel.space.low), np.minimum(high, channel.space.high)
    return Box(tuple(low.tolist()), tuple(high.tolist()))


def _in_fluid(channel: Channel, key: PRNGKeyArray, count: int) -> Fluid:
    """Draws half of the points anywhere in the fluid and the other half close to the block. Weights
    turn this into a mean over the fluid (importance sampling)."""
    near = surroundings(channel)
    found = []
    for k, box in zip(jax.random.split(key), (channel.space, near), strict=True):
        candidates = uniform(k, count, *box)
        solid = distance(channel.block, candidates) < 1e-3
        found.append(candidates[jnp.argsort(solid)][: count // 2])  # sorts the fluid first
    at = jnp.concatenate(found)
    fluid = [volume([box]) - volume(channel.block) for box in (channel.space, near)]
    inside = distance([near], at) < 0
    weight = 1 / jnp.where(inside, 0.5 + 0.5 * fluid[0] / fluid[1], 0.5)
    calm = jnp.minimum(to_edges(channel.block, at) / 0.1, 1.0)
    return Fluid(at, weight, calm)


def _on_walls(channel: Channel, key: PRNGKeyArray, count: int) -> Walls:
    """Draws three quarters of the points anywhere on the walls, the others on the chip."""
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
    """Draws one point in each of `across`² equal parts of a section."""
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
    """Returns the mean square of the error of ∂T/∂n."""
    slopes = mpx.partials(fields, ["t_x", "t_y", "t_z"], **given)
    d = jax.vmap(slopes)(walls.at)
    x, y, z = walls.normals.T
    wrong = x * d["t_x"] + y * d["t_y"] + z * d["t_z"] - walls.slope
    return jnp.mean(walls.there * wrong**2)


def flow_through_sections(fields: Any, sections: Sections, given: Mapping[str, Any]) -> Array:
    """Returns the mean square deviation of the mean speed from 1."""
    speed = jax.vmap(jax.vmap(mpx.partials(fields, ["u"], **given)))(sections.at)["u"]
    return jnp.mean((jnp.mean(sections.fluid * speed, axis=1) - 1) ** 2)


def total(
    residuals: tuple[Array, list[Array], Array],
    fields: Any,
    points: Mapping[str, Any],
    given: Mapping[str, Any],
) -> Array:
    """Returns the loss: the mean over the fluid of the squared residuals of mass, momentum (three)
    and heat, plus the terms of walls and sections. Near edges of the block all residuals but the
    mass balance are singular and get a smaller weight."""
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
    """Returns the problem of a channel.

    `residuals(fields, at, given)` are those that `total` takes. `reference(channel)` is the
    solution, with `cells` per unit length if given. `pressure` is about as large as p gets, and
    `fluid` is the number of points of a step in the fluid.
    """

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

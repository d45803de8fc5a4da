"""Burgers' equation of `examples/`, trained by every rival in JAX."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._examples import load_example
from ._pinn_trainings import rivals as rivals


_pinn: Any = load_example("_pinn")
_burgers: Any = load_example("burgers")

FACTORS = (10.0, 3.0, 1.1)
"""Errors to be reached, in units of the final error of float32."""


class Size(NamedTuple):
    """Network, points in a step, and steps."""

    width: int
    depth: int
    points: int
    steps: int


SIZES = {
    "quick": Size(16, 2, 64, 200),
    "small": Size(32, 4, 384, 8000),
    "full": Size(512, 6, 16_384, 8000),
}
SHOCK = 0.05  # half of the points are that far from it, by their standard deviation


def make_problem(size: Size) -> Any:
    """That of the example, in another size, on points that no network chooses: half of them lie
    around the shock at x = 0."""

    def points(_, key):
        shape = (_pinn.STEPS_PER_CALL, size.points)
        t_key, x_key, near_key = jax.random.split(key, 3)
        t = jax.random.uniform(t_key, shape)
        x = jax.random.uniform(x_key, shape, minval=-1, maxval=1)
        near = jnp.clip(SHOCK * jax.random.normal(near_key, shape), -1, 1)
        x = jnp.where(jnp.arange(size.points) % 2 == 0, x, near)
        return jnp.stack([t, x], axis=-1)

    return dataclasses.replace(
        _burgers.PROBLEM,
        network=lambda key: _burgers.BurgersNetwork(size.width, size.depth, key=key),
        points=points,
        full=_pinn.Training(size.steps, 5e-3),
    )

"""Burgers' equation of `examples/`, trained by every rival in JAX."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ._examples import load_example
from ._pinn_trainings import FACTORS as FACTORS, SIZES as SIZES, Size, rivals as rivals


_pinn: Any = load_example("_pinn")
_burgers: Any = load_example("burgers")

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

"""The lid-driven cavity of `examples/`, trained by every rival."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from . import _pinn_trainings
from ._cavity import layers_of, with_layers
from ._examples import load_example
from ._pinn_trainings import FACTORS as FACTORS, SIZES as SIZES, Size, points_by_call
from ._rivals import require
from ._trainings import Moment, Training


_pinn: Any = load_example("_pinn")
_cavity: Any = load_example("lid_driven_cavity")


def make_problem(size: Size) -> Any:
    """That of the example, in another size."""

    def network(key):
        options = {"key": key, "fourier_features": (16, 0.5)}
        return mpx.nn.Ansatz(
            mpx.nn.CoordinateMLP(2, 3, size.width, size.depth, **options), _cavity.form
        )

    def points(_, key):
        shape = (_pinn.STEPS_PER_CALL, size.points, 2)
        return jax.random.uniform(key, shape, maxval=jnp.array([1.0, 0.998]))

    return dataclasses.replace(
        _cavity.problem(),
        network=network,
        points=points,
        full=_pinn.Training(size.steps, 1e-2),
    )


def in_torch(problem: Any, seed: int, *, precision: str) -> Training:
    """PyTorch, with the same weights and points: see `_torch/pinn.py`."""
    require("torch")
    from ._torch.pinn import train

    steps, rate = problem.full
    state, _, key = _pinn.initial(
        problem, "float32", mode="paper", steps=steps, learning_rate=rate, seed=seed
    )
    network = state.model.network

    def error(layers):
        model = eqx.tree_at(lambda m: m.network, state.model, with_layers(network, layers))
        return next(iter(problem.errors(model).values()))

    moments = train(
        jax.tree.map(np.asarray, layers_of(network)),
        np.asarray(network.embedding.module.frequencies),
        map(np.asarray, points_by_call(problem, key)),
        np.asarray(_pinn.learning_rates(steps, rate)(np.arange(steps))).tolist(),
        precision,
    )
    for call, (seconds, layers) in enumerate(moments):
        yield Moment(call * _pinn.STEPS_PER_CALL, seconds, partial(error, layers))


def rivals(on_gpu: bool) -> dict[str, Callable[[Any, int], Training]]:
    """By name, what trains a problem from a seed."""
    return {
        **_pinn_trainings.rivals(on_gpu),
        "PyTorch, float32": partial(in_torch, precision="float32"),
        **({"PyTorch, TF32": partial(in_torch, precision="TF32")} if on_gpu else {}),
        "torch.amp, float16": partial(in_torch, precision="float16"),
        "torch.amp, bfloat16": partial(in_torch, precision="bfloat16"),
    }

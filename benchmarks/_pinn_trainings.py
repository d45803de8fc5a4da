"""Physics-informed networks of `examples/problems`: the lid-driven cavity, trained by every rival,
and Burgers' equation, trained by those in JAX."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx
from examples.problems import burgers_1d as _burgers, cavity as _cavity
from examples.problems._naive import without_protection
from examples.problems._runner import State, Trainer, running_average

from ._cavity import layers_of, with_layers
from ._rivals import require
from ._tf32 import emulate_tf32
from ._trainings import Moment, Training, by_runner, points_by_call


SHOCK = 0.05  # half of the points are that far from it, by their standard deviation
PER_CALL = 100  # steps

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


def cavity(size: Size) -> Any:
    """The problem in another size."""

    def network(key):
        options = {"key": key, "fourier_features": (16, 0.5)}
        return mpx.nn.Ansatz(
            mpx.nn.CoordinateMLP(2, 3, size.width, size.depth, **options), _cavity.form
        )

    def points(_, key):
        shape = (PER_CALL, size.points, 2)
        return jax.random.uniform(key, shape, maxval=jnp.array([1.0, 0.998]))

    # Second derivatives are singular in the corners: a point close to one is a spike of many powers
    # of two over what the last steps have shown.
    derivatives = lambda: mpx.DerivativeScaling.per_direction("xy", order=2, margin=12)
    given = {"network": network, "points": points, "steps": size.steps, "derivatives": derivatives}
    return dataclasses.replace(_cavity.PROBLEM, **given)


def burgers(size: Size) -> Any:
    """The same, on points that no network chooses: half of them lie around the shock at x = 0."""

    def points(_, key):
        shape = (PER_CALL, size.points)
        t_key, x_key, near_key = jax.random.split(key, 3)
        t = jax.random.uniform(t_key, shape)
        x = jax.random.uniform(x_key, shape, minval=-1, maxval=1)
        near = jnp.clip(SHOCK * jax.random.normal(near_key, shape), -1, 1)
        x = jnp.where(jnp.arange(size.points) % 2 == 0, x, near)
        return jnp.stack([t, x], axis=-1)

    network = lambda key: _burgers.BurgersNetwork(size.width, size.depth, key=key)
    given = {"network": network, "points": points, "steps": size.steps}
    return dataclasses.replace(_burgers.PROBLEM, **given, optimizer="adam", learning_rate=5e-3)


# --- Rivals ----------------------------------------------------------------------------------


def in_jax(
    problem: Any,
    seed: int,
    *,
    precision: str,
    plain: bool = False,
    matmul: str | None = None,
    make: Callable[..., Any] = Trainer,
) -> Training:
    """The training of the runner in one of its precisions.

    With `plain`, the network is a function of which nothing is known, differentiated by nested
    `jax.jvp`. `matmul` is JAX's default precision of products.
    """
    if plain:
        network = problem.network
        plainly = lambda key: without_protection(network(key))
        problem = dataclasses.replace(problem, network=plainly)
    return by_runner(partial(make, problem, precision), seed, matmul=matmul)


class ByMpx(Trainer):
    """By MPX as its documentation has it: everything in float16, with its loss scaling."""

    def _scaling(self) -> Any:
        return require("mpx").DynamicLossScaling(
            loss_scaling=jnp.float32(2.0**15), min_loss_scaling=jnp.float32(1.0), period=2000
        )

    def step(self, state: State, points: Any) -> tuple[State, Any]:
        rival: Any = require("mpx")
        model, opt_state, scaling, average, count = state
        gradient = rival.filter_value_and_grad(self.problem.loss, scaling)
        value, scaling, finite, grads = gradient(model, points)
        model, opt_state = rival.optimizer_update(model, self.optimizer, opt_state, grads, finite)
        average = running_average(average, model, finite, min(1.0, 10 / self.steps))
        return State(model, opt_state, scaling, average, count + 1), (value, finite)


def in_torch(problem: Any, seed: int, *, precision: str) -> Training:
    """The cavity in PyTorch, with the same weights and points: see `_torch/pinn.py`."""
    require("torch")
    from ._torch.pinn import train

    trainer = Trainer(problem)
    state, key = trainer.initial(seed)
    network = state.model.network

    def error(layers):
        model = eqx.tree_at(lambda m: m.network, state.model, with_layers(network, layers))
        return next(iter(problem.errors(model).values()))

    moments = train(
        jax.tree.map(np.asarray, layers_of(network)),
        np.asarray(network.embedding.module.frequencies),
        map(np.asarray, points_by_call(trainer, state.model, key)),
        np.asarray(trainer.rates(np.arange(trainer.steps))).tolist(),
        precision,
    )
    for call, (seconds, layers) in enumerate(moments):
        yield Moment(call * trainer.per_call, seconds, partial(error, layers))


HALVES = ("float16", "bfloat16")
EXACT = partial(in_jax, precision="float32", matmul="highest")
"""True float32, also where products are TF32 unless one asks for more."""


def burgers_rivals(on_gpu: bool) -> dict[str, Callable[[Any, int], Training]]:
    """By name, what trains a problem from a seed."""
    tf32 = partial(in_jax, precision="float32", plain=True, matmul="tensorfloat32")
    emulated = partial(
        in_jax, precision="float32", plain=True, make=partial(Trainer, transform=emulate_tf32)
    )
    return {
        "float32": partial(EXACT, plain=True),
        **({"TF32": tf32} if on_gpu else {"TF32, emulated": emulated}),
        "casts by hand, float16": partial(in_jax, precision="naive-float16"),
        "MPX, float16": partial(in_jax, precision="naive-float16", make=ByMpx),
        "mpx_pde, float32": EXACT,
        **{f"mpx_pde, {half}": partial(in_jax, precision=half) for half in HALVES},
        **{
            f"mpx_pde, forward float32, {half}": partial(
                in_jax, precision=f"forward-float32-{half}"
            )
            for half in HALVES
        },
    }


def cavity_rivals(on_gpu: bool) -> dict[str, Callable[[Any, int], Training]]:
    """And by PyTorch."""
    return {
        **burgers_rivals(on_gpu),
        "PyTorch, float32": partial(in_torch, precision="float32"),
        **({"PyTorch, TF32": partial(in_torch, precision="TF32")} if on_gpu else {}),
        **{f"torch.amp, {half}": partial(in_torch, precision=half) for half in HALVES},
    }

"""Physics-informed networks of `examples/`: the lid-driven cavity, trained by every rival, and
Burgers' equation, trained by those in JAX."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._cavity import layers_of, with_layers
from ._examples import load_example
from ._rivals import require
from ._tf32 import emulate_tf32
from ._trainings import Moment, Training, timed


_pinn: Any = load_example("_pinn")
_burgers: Any = load_example("burgers")
_cavity: Any = load_example("lid_driven_cavity")

SHOCK = 0.05  # half of the points are that far from it, by their standard deviation

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
    """The problem of the example, in another size."""

    def network(key):
        options = {"key": key, "fourier_features": (16, 0.5)}
        return mpx.nn.Ansatz(
            mpx.nn.CoordinateMLP(2, 3, size.width, size.depth, **options), _cavity.form
        )

    def points(_, key):
        shape = (_pinn.STEPS_PER_CALL, size.points, 2)
        return jax.random.uniform(key, shape, maxval=jnp.array([1.0, 0.998]))

    given = {"network": network, "points": points, "full": _pinn.Training(size.steps, 1e-2)}
    return dataclasses.replace(_cavity.problem(), **given)


def burgers(size: Size) -> Any:
    """The same, on points that no network chooses: half of them lie around the shock at x = 0."""

    def points(_, key):
        shape = (_pinn.STEPS_PER_CALL, size.points)
        t_key, x_key, near_key = jax.random.split(key, 3)
        t = jax.random.uniform(t_key, shape)
        x = jax.random.uniform(x_key, shape, minval=-1, maxval=1)
        near = jnp.clip(SHOCK * jax.random.normal(near_key, shape), -1, 1)
        x = jnp.where(jnp.arange(size.points) % 2 == 0, x, near)
        return jnp.stack([t, x], axis=-1)

    network = lambda key: _burgers.BurgersNetwork(size.width, size.depth, key=key)
    given = {"network": network, "points": points, "full": _pinn.Training(size.steps, 5e-3)}
    return dataclasses.replace(_burgers.PROBLEM, **given)


# --- Rivals ----------------------------------------------------------------------------------


def initial(problem: Any, precision: str, seed: int) -> Any:
    """The state, the optimizer and the key that a training begins with."""
    steps, rate = problem.full
    options = {"mode": "paper", "steps": steps, "learning_rate": rate, "seed": seed}
    return _pinn.initial(problem, precision, **options)


def points_by_call(problem: Any, key: jax.Array) -> Iterator[jax.Array]:
    """The points of all steps of a call, for each call of a training."""
    choose = jax.jit(problem.points)
    for _ in range(problem.full.steps // _pinn.STEPS_PER_CALL):
        key, points_key = jax.random.split(key)
        yield jax.block_until_ready(choose(None, points_key))


def in_jax(
    problem: Any,
    seed: int,
    *,
    precision: str,
    forward: str = "half",
    plain: bool = False,
    matmul: str | None = None,
    adapt: Callable[..., Any] | None = None,
) -> Training:
    """The training of `examples/_pinn.py` in one of its precisions, with the forward pass in
    `forward`.

    With `plain`, the network is a function of which nothing is known, differentiated by nested
    `jax.jvp`. `matmul` is JAX's default precision of products. `adapt(step, state)` returns another
    step, and the state it begins with.
    """
    with jax.default_matmul_precision(matmul):
        state, optimizer, key = initial(problem, precision, seed)
        if plain:
            model, average = map(_pinn.without_protection, (state.model, state.average))
            opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
            state = state._replace(model=model, opt_state=opt_state, average=average)
        ladder = mpx.PrecisionLadder(("full",) if precision == "float32" else (forward,))
        average = 10 / problem.full.steps
        step = partial(_pinn.step, problem, optimizer, precision, average, ladder=ladder)
        if adapt is not None:
            step, state = adapt(step, state)
        run = _pinn.compiled_steps(step, state, next(points_by_call(problem, key)))
    arrays, static = eqx.partition(state, eqx.is_array)

    def moment(done, seconds, arrays):
        model = eqx.combine(arrays, static).average
        return Moment(done, seconds, lambda: next(iter(problem.errors(model).values())))

    seconds = 0.0
    yield moment(0, seconds, arrays)
    for call, points in enumerate(points_by_call(problem, key), 1):
        (arrays, _), taken = timed(run, arrays, points)
        seconds += taken
        yield moment(call * _pinn.STEPS_PER_CALL, seconds, arrays)


def by_mpx(problem: Any, seed: int) -> Training:
    """By MPX as its documentation has it: everything in float16, with its loss scaling."""
    rival: Any = require("mpx")

    def adapt(step, state):
        optimizer = step.args[1]

        def run_step(state, points):
            model, opt_state, scaling, average = state
            value, scaling, finite, grads = rival.filter_value_and_grad(problem.loss, scaling)(
                model, points
            )
            model, opt_state = rival.optimizer_update(model, optimizer, opt_state, grads, finite)
            average = _pinn.running_average(average, model, finite, 10 / problem.full.steps)
            return _pinn.State(model, opt_state, scaling, average), (value, finite)

        scaling = rival.DynamicLossScaling(
            loss_scaling=jnp.float32(2.0**15), min_loss_scaling=jnp.float32(1.0), period=2000
        )
        return run_step, state._replace(scaling=scaling)

    return in_jax(problem, seed, precision=_pinn.NAIVE, adapt=adapt)


def in_emulated_tf32(problem: Any, seed: int) -> Training:
    """Plain JAX, with the roundings of TF32."""

    def adapt(step, state):
        def run_step(state, points):
            arrays, static = eqx.partition(state, eqx.is_array)

            def run(arrays, points):
                new, record = step(eqx.combine(arrays, static), points)
                return eqx.filter(new, eqx.is_array), record

            arrays, record = emulate_tf32(run)(arrays, points)
            return eqx.combine(arrays, static), record

        return run_step, state

    return in_jax(problem, seed, precision="float32", plain=True, adapt=adapt)


def in_torch(problem: Any, seed: int, *, precision: str) -> Training:
    """The cavity in PyTorch, with the same weights and points: see `_torch/pinn.py`."""
    require("torch")
    from ._torch.pinn import train

    state, _, key = initial(problem, "float32", seed)
    network = state.model.network

    def error(layers):
        model = eqx.tree_at(lambda m: m.network, state.model, with_layers(network, layers))
        return next(iter(problem.errors(model).values()))

    steps, rate = problem.full
    moments = train(
        jax.tree.map(np.asarray, layers_of(network)),
        np.asarray(network.embedding.module.frequencies),
        map(np.asarray, points_by_call(problem, key)),
        np.asarray(_pinn.learning_rates(steps, rate)(np.arange(steps))).tolist(),
        precision,
    )
    for call, (seconds, layers) in enumerate(moments):
        yield Moment(call * _pinn.STEPS_PER_CALL, seconds, partial(error, layers))


HALVES = ("float16", "bfloat16")
EXACT = partial(in_jax, precision="float32", matmul="highest")
"""True float32, also where products are TF32 unless one asks for more."""


def burgers_rivals(on_gpu: bool) -> dict[str, Callable[[Any, int], Training]]:
    """By name, what trains a problem from a seed."""
    tf32 = partial(in_jax, precision="float32", plain=True, matmul="tensorfloat32")
    full = partial(in_jax, forward="float32")
    return {
        "float32": partial(EXACT, plain=True),
        **({"TF32": tf32} if on_gpu else {"TF32, emulated": in_emulated_tf32}),
        "casts by hand, float16": partial(in_jax, precision=_pinn.NAIVE),
        "MPX, float16": by_mpx,
        "mpx_pde, float32": EXACT,
        **{f"mpx_pde, {half}": partial(in_jax, precision=half) for half in HALVES},
        **{f"mpx_pde, forward float32, {half}": partial(full, precision=half) for half in HALVES},
    }


def cavity_rivals(on_gpu: bool) -> dict[str, Callable[[Any, int], Training]]:
    """And by PyTorch."""
    return {
        **burgers_rivals(on_gpu),
        "PyTorch, float32": partial(in_torch, precision="float32"),
        **({"PyTorch, TF32": partial(in_torch, precision="TF32")} if on_gpu else {}),
        **{f"torch.amp, {half}": partial(in_torch, precision=half) for half in HALVES},
    }

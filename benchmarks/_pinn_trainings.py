"""Physics-informed networks of `examples/`, trained by rivals in JAX that can be followed."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

import mpx_pde as mpx

from ._examples import load_example
from ._rivals import require
from ._tf32 import emulate_tf32
from ._trainings import Moment, Training, timed


_pinn: Any = load_example("_pinn")

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
    steps, rate = problem.full
    settings: AbstractContextManager[Any] = (
        nullcontext() if matmul is None else jax.default_matmul_precision(matmul)
    )
    with settings:
        state, optimizer, key = _pinn.initial(
            problem, precision, mode="paper", steps=steps, learning_rate=rate, seed=seed
        )
        if plain:
            model, average = map(_pinn.without_protection, (state.model, state.average))
            opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
            state = state._replace(model=model, opt_state=opt_state, average=average)
        rungs = ("full",) if precision == "float32" else (forward,)
        ladder = mpx.PrecisionLadder(rungs)
        step = partial(_pinn.step, problem, optimizer, precision, 10 / steps, ladder=ladder)
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
    steps, _ = problem.full

    def adapt(step, state):
        optimizer = step.args[1]

        def run_step(state, points):
            model, opt_state, scaling, average = state
            value, scaling, finite, grads = rival.filter_value_and_grad(problem.loss, scaling)(
                model, points
            )
            model, opt_state = rival.optimizer_update(model, optimizer, opt_state, grads, finite)
            average = _pinn.running_average(average, model, finite, 10 / steps)
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


EXACT = partial(in_jax, precision="float32", matmul="highest")
"""True float32, also where products are TF32 unless one asks for more."""


def rivals(on_gpu: bool) -> dict[str, Callable[[Any, int], Training]]:
    """By name, what trains a problem from a seed."""
    if on_gpu:
        tf32 = {
            "TF32": partial(in_jax, precision="float32", plain=True, matmul="tensorfloat32"),
        }
    else:
        tf32 = {"TF32, emulated": in_emulated_tf32}
    halves = ("float16", "bfloat16")
    return {
        "float32": partial(EXACT, plain=True),
        **tf32,
        "casts by hand, float16": partial(in_jax, precision=_pinn.NAIVE),
        "MPX, float16": by_mpx,
        "mpx_pde, float32": EXACT,
        **{f"mpx_pde, {half}": partial(in_jax, precision=half) for half in halves},
        **{
            f"mpx_pde, forward float32, {half}": partial(in_jax, precision=half, forward="float32")
            for half in halves
        },
    }

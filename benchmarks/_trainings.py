"""Trainings that can be followed: generators that train a little, and say where they are."""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax

import mpx_pde as mpx


class Moment(NamedTuple):
    """Where a training is. Its error is only computed when it is asked for."""

    steps: int
    seconds: float  # of the steps alone, without compilation and evaluation
    error: Callable[[], float]


Training = Iterator[Moment]
"""Compiles, yields the moment before the first step, and trains from one moment to the next."""


def timed(run: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """What a function returns, and the seconds until it is there."""
    start = time.perf_counter()
    out = jax.block_until_ready(run(*args))
    return out, time.perf_counter() - start


def points_by_call(trainer: Any, model: Any, key: jax.Array) -> Iterator[Any]:
    """The points of all steps of a call, for each call of a training; the model chooses none."""
    for _ in range(trainer.steps // trainer.per_call):
        key, points_key = jax.random.split(key)
        yield jax.block_until_ready(trainer.next_points(model, points_key))


def by_runner(
    make: Callable[[], Any], seed: int, *, matmul: str | None = None, averaged: bool = True
) -> Training:
    """The training that `make` returns, of the runner of `examples/problems`.

    `matmul` is JAX's default precision of products. The error is that of the running average of the
    weights, or of the weights themselves.
    """
    with jax.default_matmul_precision(matmul), warnings.catch_warnings():
        warnings.simplefilter("ignore", mpx.PrecisionWarning)
        trainer = make()
        state, key = trainer.initial(seed)
        model = state.model
        first = next(points_by_call(trainer, model, key))
        state = trainer.with_first_scales(state, first)
        arrays = eqx.filter(state, eqx.is_array)
        run = trainer.steps_of(state).lower(arrays, first).compile()

    def error(arrays: Any) -> float:
        now = eqx.combine(arrays, trainer.static)
        return next(iter(trainer.errors(now.average if averaged else now.model).values()))

    seconds = 0.0
    yield Moment(0, seconds, partial(error, arrays))
    for call, points in enumerate(points_by_call(trainer, model, key), 1):
        (arrays, _), taken = timed(run, arrays, points)
        seconds += taken
        yield Moment(call * trainer.per_call, seconds, partial(error, arrays))


def take_turns(trainings: dict[str, Training]) -> Iterator[tuple[str, Moment]]:
    """All moments of all trainings, one of each in turn, so that a machine that slows down slows
    down all of them. A training that fails raises where its moment would be."""
    running = dict(trainings)
    while running:
        for name in list(running):
            moment = next(running[name], None)
            if moment is None:
                del running[name]
            else:
                yield name, moment


def first_below(errors: Sequence[float], at: Sequence[float], level: float) -> float | None:
    """Where (in `at`: steps or seconds) the error first falls to a level; `None` if never."""
    return next((x for x, error in zip(at, errors, strict=True) if error <= level), None)

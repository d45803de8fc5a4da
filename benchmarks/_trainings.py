"""Trainings that can be followed: generators that train a little, and say where they are."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax


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

"""The problems of `examples/problems`, in the precisions of their runner and in others: those that
a CPU only emulates, and derivatives of two evaluations."""

import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import mpx_pde as mpx

from ._tf32 import emulate_tf32


def _as_it_is(step: Callable) -> Callable:
    return step


def _refined(step: Callable) -> Callable:
    """A step whose derivative terms are refined, one by one, by a second evaluation."""

    def refined(derivatives: Callable) -> Callable:
        def terms(fun, *args, **given):
            at = lambda fun, point: derivatives(fun, *args, **given)(point)
            return partial(mpx.refined(at, dtype="bfloat16", keep_full=(False, True)), fun)

        return terms

    for name in ("partials", "laplacian", "linear_operator"):
        step = mock.patch.object(mpx, name, refined(getattr(mpx, name)))(step)
    return step


OTHERS: dict[str, tuple[str, Callable[[Callable], Callable]]] = {
    "tensorfloat32-emulated": ("float32", emulate_tf32),
    "forward-bfloat16_x3-float16-emulated": ("forward-bfloat16_x3-float16", _as_it_is),
    "forward-bfloat16_x3-bfloat16-emulated": ("forward-bfloat16_x3-bfloat16", _as_it_is),
    "refined-bfloat16": ("float32", _refined),
}
"""By name, the precision of the runner, and what makes the step another. On a CPU the library
itself computes split products out of float32 ones."""


def problems() -> Any:
    """The package of problems, from the repository that this one is in."""
    root = str(Path(__file__).parent.parent)
    if root not in sys.path:
        sys.path.insert(0, root)
    return importlib.import_module("examples.problems")


def trainer(
    name: str, precision: str, *, optimizer: str | None, steps: int | None, quick: bool = False
) -> Any:
    """What trains a problem in a precision, those of `OTHERS` too."""
    package = problems()
    runner = importlib.import_module("examples.problems._runner")
    steps = steps or (runner.QUICK_STEPS if quick else None)
    known, transform = OTHERS.get(precision, (precision, _as_it_is))
    if known not in runner.PRECISIONS:
        choice = ", ".join((*runner.PRECISIONS, *OTHERS))
        raise ValueError(f"there is no precision `{precision}`; there are {choice}.")
    given = {"optimizer": optimizer, "steps": steps, "transform": transform}
    problem = package.load(name)
    return runner.Trainer((problem.quick if quick else None) or problem, known, **given)

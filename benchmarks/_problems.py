"""The problems of `examples/problems`, and precisions that a CPU only emulates."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ._tf32 import emulate_tf32


def _as_it_is(step: Callable) -> Callable:
    return step


EMULATED: dict[str, tuple[str, Callable[[Callable], Callable]]] = {
    "tensorfloat32-emulated": ("float32", emulate_tf32),
    "forward-bfloat16_x3-float16-emulated": ("forward-bfloat16_x3-float16", _as_it_is),
    "forward-bfloat16_x3-bfloat16-emulated": ("forward-bfloat16_x3-bfloat16", _as_it_is),
}
"""By name, the precision of the runner, and what makes an emulation of its step. On a CPU the
library itself computes split products out of float32 ones."""


def problems() -> Any:
    """The package of problems, from the repository that this one is in."""
    root = str(Path(__file__).parent.parent)
    if root not in sys.path:
        sys.path.insert(0, root)
    return importlib.import_module("examples.problems")


def trainer(
    name: str, precision: str, *, optimizer: str | None, steps: int | None, quick: bool = False
) -> Any:
    """What trains a problem in a precision, emulated ones too."""
    package = problems()
    runner = importlib.import_module("examples.problems._runner")
    steps = steps or (runner.QUICK_STEPS if quick else None)
    known, transform = EMULATED.get(precision, (precision, _as_it_is))
    if known not in runner.PRECISIONS:
        choice = ", ".join((*runner.PRECISIONS, *EMULATED))
        raise ValueError(f"there is no precision `{precision}`; there are {choice}.")
    given = {"optimizer": optimizer, "steps": steps, "transform": transform}
    problem = package.load(name)
    return runner.Trainer((problem.quick if quick else None) or problem, known, **given)

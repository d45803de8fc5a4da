"""Problems on which to compare precisions: each in its own short file, trained by one recipe.

    python -m examples.problems list
    python -m examples.problems run burgers_1d --precision float32 float16 --seeds 0 1 2
    python -m examples.problems run all --quick
    python -m examples.problems run kovasznay --recipe deep --precision float64 float64-float32

A file contains the equation, its domain and conditions, a reference for the solution, and a
network. No file has a setting for a precision: `_runner.py` defines the step in each precision.
References are exact, or computed in float64 by `references.py`; the tests verify each of them.
"""

import dataclasses
import importlib
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from ._problem import Problem

_HERE = Path(__file__).parent

HELPERS = ("references", "geometry")


def names() -> list[str]:
    """Returns the names of the problems, each a module of this package."""
    found = (path.stem for path in sorted(_HERE.glob("[!_]*.py")))
    return [name for name in found if name not in HELPERS]


SIZES = ("small", "paper")


def load(name: str, size: str = "small") -> "Problem":
    """Returns a problem by name, at a size for two cores or at that of the paper it is from.

    **Raises:** `ValueError` if there is none.
    """
    if name not in names():
        raise ValueError(f"there is no problem `{name}`; there are {', '.join(names())}.")
    problem = importlib.import_module(f"{__name__}.{name}").PROBLEM
    if size == "small":
        return problem
    if size not in SIZES or not problem.paper:
        raise ValueError(f"the problem `{name}` has no size {size!r}.")
    return dataclasses.replace(problem, **problem.paper)

"""The examples, whose trainings and steps the benchmarks measure."""

import importlib
import sys
from pathlib import Path
from types import ModuleType


def load_example(name: str) -> ModuleType:
    """A module of `examples/`, which is no package: `name` is none of this one."""
    folder = str(Path(__file__).parent.parent / "examples")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)

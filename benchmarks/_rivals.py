"""The other libraries that some benchmarks run beside ours, and compilers for hardware that is not
here. Each of them may be missing."""

import importlib
from types import ModuleType


class RivalMissing(ImportError):
    """A library to compare with is not installed."""


class TargetUnavailable(RuntimeError):
    """The compiler for a target is not installed."""


RIVALS = {
    "mpx": "mixed-precision-for-JAX",
    "jmp": "jmp",
    "torch": "torch",
    "neuralop": "neuraloperator",
    "folx": "folx",
}
"""Of each module the package that it comes in."""


def require(module: str) -> ModuleType:
    """Imports one of `RIVALS`.

    **Raises:** `RivalMissing`, with the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name != module:
            raise
        raise RivalMissing(
            f'{RIVALS[module]} is not installed: `pip install -e ".[rivals]"` brings all rivals.'
        ) from e


def failure(error: BaseException) -> str:
    """What went wrong with a rival, in one line for a table."""
    first = str(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {first[:200]}" if first else type(error).__name__

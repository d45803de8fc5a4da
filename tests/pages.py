"""The root of the repository, its problem modules, and the fenced blocks of its pages."""

import importlib
import re
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parent.parent


def module(name: str) -> Any:
    """Imports a module of `examples/problems`."""
    return importlib.import_module(f"examples.problems.{name}")


_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """Returns the fenced blocks of a page, each with the number of its first line."""
    text = page.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, match.start(2)) + 1, match[2])
        for match in _FENCE.finditer(text)
        if match[1] == language
    ]

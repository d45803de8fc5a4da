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
_PRINTS = re.compile(r'\n\n```text title="prints"\n(.*?)```$', re.DOTALL | re.MULTILINE)


def blocks(page: Path, language: str, *, within: str = "", without: str = "") -> list:
    """Returns the fenced blocks of a page, each with the number of its first line: those of the
    section with the heading `within`, or all but those of the section `without`."""
    text = page.read_text(encoding="utf-8")
    inside, outside = _section(text, within), _section(text, without)
    return [
        (text.count("\n", 0, match.start(2)) + 1, match[2])
        for match in _FENCE.finditer(text)
        if match[1] == language
        and (not within or match.start() in inside)
        and (not without or match.start() not in outside)
    ]


def _section(text: str, heading: str) -> range:
    """Returns the places of a section of the second level in a text."""
    found = re.search(rf"^## {re.escape(heading)}$.*?(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    return range(found.start(), found.end()) if heading and found else range(0)


def prints(page: Path) -> dict[int, str]:
    """Returns the text that a page shows for what a block prints, by the line of that block."""
    text = page.read_text(encoding="utf-8")
    shown = {}
    for match in _FENCE.finditer(text):
        told = _PRINTS.match(text, match.end())
        if match[1] == "python" and told:
            shown[text.count("\n", 0, match.start(2)) + 1] = told[1]
    return shown

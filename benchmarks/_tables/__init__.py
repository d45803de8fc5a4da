"""The tables in README and documentation, generated from `results/*.json`.

A block between `<!-- results:NAME -->` and `<!-- /results -->` holds the table of that name here,
such as `breadth.paper` for `paper` in `_breadth.py`; nothing in it is typed by hand. A table too
long for a page goes into a file: if a page links to `data/NAME.csv`, that file is written. It holds
a table or, as in `spectral.layers`, all records of a section of results.
"""

import importlib
import re
import textwrap
from pathlib import Path
from typing import Any

from ._format import RESULTS, ROOT, Table, load, path_of


DATA = ROOT / "docs" / "data"
_LINK = re.compile(r"\]\((?:docs/)?data/([\w.-]+)\.csv\)")
# Blocks in a collapsible section are indented.
_BLOCK = re.compile(
    r"^( *)<!-- results:([\w.]+) -->\n.*?^ *<!-- /results -->$", re.DOTALL | re.MULTILINE
)


def table(name: str) -> Any:
    """Returns the table with this name: a `Table`, or a function that returns Markdown."""
    module, _, at = name.partition(".")
    if path_of(module).exists() and at in load(module):
        return Table(module, at)
    return getattr(importlib.import_module(f"{__package__}._{module}"), at)


def _filled(match: re.Match[str]) -> str:
    block = f"<!-- results:{match[2]} -->\n\n{table(match[2])()}\n<!-- /results -->"
    return textwrap.indent(block, match[1])


def stale(write: bool) -> list[Path]:
    """Returns the pages and files whose tables differ from the results; with `write`, updates
    them."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = {path: path.read_text(encoding="utf-8") for path in pages}
    wanted = {path: _BLOCK.sub(_filled, text) for path, text in texts.items()}
    linked = {name for text in texts.values() for name in _LINK.findall(text)}
    wanted |= {DATA / f"{name}.csv": table(name).csv() for name in sorted(linked)}
    found = []
    for path, new in wanted.items():
        if not path.exists() or path.read_text(encoding="utf-8") != new:
            found.append(path)
            if write:
                path.parent.mkdir(exist_ok=True)
                path.write_text(new, encoding="utf-8")
    for path in sorted(set(DATA.glob("*.csv")) - wanted.keys()):  # no page links to it
        found.append(path)
        if write:
            path.unlink()
    return found


def taken() -> dict[str, list[str]]:
    """Returns the commits at which each result was taken, by the name of the result."""
    names = sorted(path.stem for path in RESULTS.glob("*.json"))
    return {name: load(name)["environment"]["commits"] for name in names}

"""The tables in README and documentation, generated from `results/*.json`.

A block between `<!-- results:NAME -->` and `<!-- /results -->` belongs to the table of that name
here, such as `breadth.paper` for `paper` in `_breadth.py`; nothing in it is typed by hand. What is
too long for a page is a file: a link to `data/NAME.csv` is enough to have that one written, of a
table or, as in `spectral.layers`, of all that a section of results records.
"""

import importlib
import re
import textwrap
from pathlib import Path
from typing import Any

from ._format import RESULTS, ROOT, Table, load, path_of


DATA = ROOT / "docs" / "data"
_LINK = re.compile(r"\]\((?:docs/)?data/([\w.-]+)\.csv\)")
# Indented in a section that folds.
_BLOCK = re.compile(
    r"^( *)<!-- results:([\w.]+) -->\n.*?^ *<!-- /results -->$", re.DOTALL | re.MULTILINE
)


def table(name: str) -> Any:
    """Returns the table of a name: a `Table`, or a function that returns Markdown."""
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
    """The commits at which the results were taken, by name."""
    names = sorted(path.stem for path in RESULTS.glob("*.json"))
    return {name: load(name)["environment"]["commits"] for name in names}

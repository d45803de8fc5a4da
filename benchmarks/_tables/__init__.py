"""The tables in README and documentation, generated from `results/*.json`.

A block between `<!-- results:NAME -->` and `<!-- /results -->` belongs to the table of that name
here, such as `breadth.paper` for `paper` in `_breadth.py`; nothing in it is typed by hand.
"""

import importlib
import re
from collections.abc import Callable
from pathlib import Path

from ._format import RESULTS, ROOT, load


_BLOCK = re.compile(r"(<!-- results:([\w.]+) -->\n).*?(<!-- /results -->)", re.DOTALL)


def table(name: str) -> Callable[..., str]:
    """By the module and the name in it."""
    module, _, at = name.partition(".")
    return getattr(importlib.import_module(f"{__package__}._{module}"), at)


def stale(write: bool) -> list[Path]:
    """The pages whose tables differ from the results; with `write`, brings them up to date."""
    found = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        new = _BLOCK.sub(lambda m: f"{m[1]}\n{table(m[2])()}\n{m[3]}", text)
        if new != text:
            found.append(path)
            if write:
                path.write_text(new, encoding="utf-8")
    return found


def taken() -> dict[str, list[str]]:
    """The commits at which the results were taken, by name."""
    names = sorted(path.stem for path in RESULTS.glob("*.json"))
    return {name: load(name)["environment"]["commits"] for name in names}

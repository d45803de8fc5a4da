"""Writes into the pages what their programs print: `python docs/prints.py [PAGE ...]`.

A block of Python that is followed by a block of text with the title `prints` gets its output in
there. Only the pages that are named, or all that have such a block, are run.
"""

import contextlib
import io
import re
import sys
import textwrap
import warnings
from pathlib import Path


ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from pages import blocks, prints  # noqa: E402


_LINES, _COLUMNS = 14, 100


def shown(output: str) -> str:
    """Shortens what a block printed: files without the folders around them, long lines wrapped, and
    the first lines and the last one of many."""
    text = re.sub(r"/\S*/site-packages/", "", output.replace(f"{ROOT}/docs/", "")).rstrip()
    lines = []
    for line in text.splitlines():
        wide = len(line) > _COLUMNS and "  " not in line.strip()
        lines += textwrap.wrap(line, _COLUMNS - 4) if wide else [line.rstrip()]
    if len(lines) > _LINES:
        lines = [*lines[: _LINES - 1], "…", lines[-1]]
    return "\n".join(lines) + "\n"


def outputs(page: Path) -> dict[int, str]:
    """Runs the blocks of a page, and returns what those print that the page shows."""
    wanted, found, names = prints(page), {}, {"__name__": "__docs__"}
    for line, source in blocks(page, "python"):
        out = io.StringIO()
        with contextlib.redirect_stdout(out), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile("\n" * (line - 1) + source, str(page), "exec"), names)
        if line in wanted:
            found[line] = shown(out.getvalue())
    return found


def fill(page: Path) -> None:
    for line, text in reversed(outputs(page).items()):
        lines = page.read_text(encoding="utf-8").split("\n")
        start = lines.index('```text title="prints"', line)
        end = lines.index("```", start)
        lines[start + 1 : end] = text.rstrip("\n").split("\n")
        page.write_text("\n".join(lines), encoding="utf-8")


def main(names: list[str]) -> None:
    pages = [Path(name).resolve() for name in names] or sorted((ROOT / "docs").glob("*.md"))
    for page in filter(prints, pages):
        print(re.sub(r".*/", "", str(page)), flush=True)
        fill(page)


if __name__ == "__main__":
    main(sys.argv[1:])

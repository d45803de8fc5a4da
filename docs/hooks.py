"""Links from docstrings to other projects, without downloading their inventories; and the index of
all names."""

import inspect
import re
from operator import attrgetter
from pathlib import Path

import mpx_pde


_AUTOREF = re.compile(
    r'<autoref [^>]*identifier="((?:jax|equinox|optax)\.[\w.]+)"[^>]*>(.*?)</autoref>'
)


def _link(match: re.Match) -> str:
    name, text = match.groups()
    if name.startswith("jax."):
        return f'<a href="https://docs.jax.dev/en/latest/_autosummary/{name}.html">{text}</a>'
    return text


def index(folder: Path) -> str:
    """A table for each page of the reference: its names, and what the first lines of their
    docstrings say."""
    parts = []
    for path in sorted(folder.glob("[!i]*.md")):
        text = path.read_text(encoding="utf-8")
        rows = []
        for name in re.findall(r"^::: mpx_pde\.([\w.]+)$", text, re.MULTILINE):
            doc = inspect.getdoc(attrgetter(name)(mpx_pde)) or ""
            told = " ".join(doc.split("\n\n", 1)[0].split())
            told = re.sub(r"\[(`[^`]+`)\]\[[^\]]*\]", r"\1", told)
            rows.append(f"| [`{name}`][mpx_pde.{name}] | {told} |")
        title = text.split("\n", 1)[0].removeprefix("# ")
        parts.append("\n".join([f"## {title}\n", "| name | what it is |", "| --- | --- |", *rows]))
    return "\n\n".join(parts)


def on_page_markdown(markdown: str, page, config, **_) -> str:
    return markdown.replace("<!-- index -->", index(Path(config["docs_dir"]) / "api"))


def on_page_content(html: str, **_) -> str:
    return _AUTOREF.sub(_link, html)

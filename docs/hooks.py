"""Links from docstrings to other projects, without downloading their inventories; the index of all
names; what no line may break; and what leads from former pages to the present ones."""

import inspect
import re
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path

import mpx_pde


_AUTOREF = re.compile(
    r'<autoref [^>]*identifier="((?:jax|equinox|optax)\.[\w.]+)"[^>]*>(.*?)</autoref>'
)


_TAG = re.compile(r"(<[^>]+>)")
_VERBATIM = ("pre", "script", "style", "svg")
_ONE_PIECE = re.compile(
    r"\d[\d.,]*(?:\s×\s\d(?:[\d.,]*\d)?)+|"
    r"\d[\d.,]*\s(?:[%×]|[kKMGT]i?B|[mµ]?s|h|steps|points|units)(?!\w)|\d[\d.,]*e[-+]?\d+"
    r"|\d[\d.,]*[–^]-?\d[\d.,]*"
)


def in_one_piece(html: str) -> str:
    """Marks what no line may break: a number and its unit, an option of a command, and code in a
    table but at its spaces. Code blocks stay as they are."""
    around, out = [], []
    for part in _TAG.split(html):
        if part.startswith("<"):
            name = re.match(r"</?([\w-]*)", part)[1]
            if name in (*_VERBATIM, "code", "table"):
                if part.startswith("</") and name in around:
                    del around[len(around) - 1 - around[::-1].index(name) :]
                elif not part.startswith("</"):
                    around.append(name)
        elif around[-2:] == ["table", "code"]:
            part = re.sub(r"\S+", r'<span class="piece">\g<0></span>', part)
        elif around and around[-1] == "code" and not {*_VERBATIM} & set(around):
            part = re.sub(r"(?<!\S)--?\w[\w-]*", r'<span class="piece">\g<0></span>', part)
        elif not {*_VERBATIM, "code"} & set(around):
            part = _ONE_PIECE.sub(r'<span class="piece">\g<0></span>', part)
        out.append(part)
    return "".join(out)


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


MOVED = {
    "forward": "pinns/",
    "derivatives": "pinns/",
    "derivative-engine": "how-it-works/#derivatives",
    "spectral": "operators/",
    "autocast": "operators/#autocast",
    "jno": "other_libraries/#jno",
    "coming_from": "other_libraries/#from-mpx",
    "faq": "recipes/#questions",
    "breadth": "results/#accuracy",
    "precisions": "results/#accuracy",
    "benchmarks": "results/",
    "predicted": "results/#on-a-gpu",
    "derivative-networks": "results/#derivatives-in-float32",
    "gallery": "results/#gallery",
}
"""The places where the content of former pages is now."""


def on_post_build(config, **_) -> None:
    """Leaves a page at each former address that leads to the present one."""
    for name, target in MOVED.items():
        page = Path(config["site_dir"]) / name / "index.html"
        page.parent.mkdir(exist_ok=True)
        page.write_text(
            f'<!doctype html><meta http-equiv="refresh" content="0; url=../{target}">'
            f'<link rel="canonical" href="../{target}"><a href="../{target}">Moved.</a>\n',
            encoding="utf-8",
        )


def on_config(config):
    """Shows the version beside the name of the site."""
    config["site_name"] = f"mpx_pde {version('mpx_pde')}"
    return config


def on_page_markdown(markdown: str, page, config, **_) -> str:
    return markdown.replace("<!-- index -->", index(Path(config["docs_dir"]) / "api"))


def on_page_content(html: str, **_) -> str:
    return in_one_piece(_AUTOREF.sub(_link, html))

"""Links from docstrings to other projects, without downloading their inventories."""

import re


_AUTOREF = re.compile(
    r'<autoref [^>]*identifier="((?:jax|equinox|optax)\.[\w.]+)"[^>]*>(.*?)</autoref>'
)


def _link(match: re.Match) -> str:
    name, text = match.groups()
    if name.startswith("jax."):
        return f'<a href="https://docs.jax.dev/en/latest/_autosummary/{name}.html">{text}</a>'
    return text


def on_page_content(html: str, **_) -> str:
    return _AUTOREF.sub(_link, html)

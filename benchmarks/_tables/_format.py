"""From the JSON file of a benchmark to Markdown."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .._sources import accepted


ROOT = Path(__file__).parent.parent.parent
NOT_RUN = "compiled for an H100, not run"


class Result(dict[str, Any]):
    """A file of results, which knows its name."""

    name: str


def load(name: str) -> Result:
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    result = Result(json.loads(path.read_text(encoding="utf-8")))
    result.pop("sources", None)  # of no use to a table
    result.name = name
    return result


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def source(data: dict[str, Any]) -> str:
    """Where a result comes from, and whether it is older than the code."""
    env = data["environment"]
    return (
        f"{env['device']}, {env['cpu_count']} cores, JAX {env['jax']}, Python {env['python']}; "
        f"`{env['command']}`.{older(data)}"
    )


def older(data: dict[str, Any]) -> str:
    """That a result is accepted as older than the code, and why; empty if it is not."""
    entry = accepted().get(data.name) if isinstance(data, Result) else None
    return "" if entry is None else f" **Older than the code:** {entry['reason']}"

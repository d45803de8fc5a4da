"""From the JSON file of a benchmark to Markdown."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parent.parent.parent


def load(name: str) -> dict[str, Any]:
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def source(data: dict[str, Any]) -> str:
    env = data["environment"]
    return (
        f"{env['device']}, {env['cpu_count']} cores, JAX {env['jax']}, Python {env['python']}; "
        f"`{env['command']}`."
    )

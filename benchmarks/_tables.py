"""The tables in README and documentation, generated from `results/*.json`.

A block between `<!-- results:NAME -->` and `<!-- /results -->` belongs to the function of that
name here; nothing in it is typed by hand.
"""

import json
import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parent.parent
_BLOCK = re.compile(r"(<!-- results:([\w-]+) -->\n).*?(<!-- /results -->)", re.DOTALL)


def _load(name: str) -> dict[str, Any]:
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _source(data: dict[str, Any]) -> str:
    env = data["environment"]
    return (
        f"{env['device']}, {env['cpu_count']} cores, JAX {env['jax']}, Python {env['python']}; "
        f"`{env['command']}`."
    )


def burgers() -> str:
    data = _load("burgers-cpu")
    trainings = data["trainings"]
    rows = []
    for precision in dict.fromkeys(t["precision"] for t in trainings):
        runs = [t for t in trainings if t["precision"] == precision]
        scaled = precision != "float32"

        def median(field, runs=runs):
            return statistics.median(run[field] for run in runs)

        rows.append(
            [
                precision,
                f"{median('error'):.2e}",
                " ".join(f"{run['error_over_float32']:.2f}" for run in runs),
                f"{median('skipped_steps'):.0f}" if scaled else "–",
                f"2^{math.log2(median('final_scale')):.0f}" if scaled else "–",
                f"{median('ms_per_step'):.2f}",
                f"{median('temp_bytes') / 2**20:.2f}",
            ]
        )
    columns = [
        "precision",
        "relative L2 error",
        "over float32, by seed",
        "skipped steps",
        "final scale",
        "ms per step",
        "temp memory, MiB",
    ]
    runs = [t for t in trainings if t["precision"] == "float32"]
    return (
        f"{_markdown(columns, rows)}\n\n{runs[0]['steps']:,} steps, medians over seeds "
        f"{', '.join(str(run['seed']) for run in runs)}. {_source(data)}\n"
    )


def overhead() -> str:
    data = _load("overhead-cpu")
    rows = []
    for program in data["programs"]:
        if program["step"] != "mpx_pde":
            continue
        key = {k: program[k] for k in ("problem", "size", "target", "dtype")}
        [by_hand] = [
            p for p in data["programs"] if p["step"] == "by hand" and key.items() <= p.items()
        ]

        def ratio(field, program=program, by_hand=by_hand):
            if program[field] is None:
                return "not told"
            return f"{program[field] / by_hand[field]:.4f}"

        rows.append(
            [
                f"{program['problem']} {program['size']}",
                program["target"],
                *(ratio(f) for f in ("operations", "bytes_accessed", "temp_bytes")),
            ]
        )
    columns = ["problem", "compiled for", "operations", "bytes accessed", "temp memory"]
    return f"{_markdown(columns, rows)}\n\n{_source(data)}\n"


TABLES = {"burgers": burgers, "overhead": overhead}


def stale(write: bool) -> list[Path]:
    """The pages whose tables differ from the results; with `write`, brings them up to date."""
    found = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        new = _BLOCK.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]()}\n{m[3]}", text)
        if new != text:
            found.append(path)
            if write:
                path.write_text(new, encoding="utf-8")
    return found

"""What every benchmark shares: the header, the clock, the tables and the JSON file."""

import json
import os
import platform
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import jax

from ._rivals import RIVALS
from ._sources import sources


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        return re.findall(r"^model name\s*: (.*)$", text, re.MULTILINE)[0]
    except (OSError, IndexError):
        return platform.processor() or platform.machine()


def environment(command: str) -> dict[str, Any]:
    """Where the numbers come from: hardware, versions, and how to get them again."""
    device = jax.devices()[0]
    packages = ("jax", "jaxlib", "equinox", "optax", "jax-cuda12-plugin", "libtpu")
    versions = {name: _version(name) for name in packages}
    return {
        "device": device.device_kind if device.platform != "cpu" else _processor(),
        "backend": device.platform,
        "device_count": jax.device_count(),
        "cpu_count": os.cpu_count(),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: text for name, text in versions.items() if text is not None},
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "command": command,
    }


class Timing(NamedTuple):
    """Seconds per call: the median and the quartiles over all rounds."""

    median: float
    lower: float
    upper: float
    rounds: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Timing":
        """From one number for each round."""
        if len(seconds) == 1:
            return cls(seconds[0], seconds[0], seconds[0], 1)
        lower, median, upper = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, lower, upper, len(seconds))

    def __str__(self) -> str:
        unit, name = (1e3, "ms") if self.median < 1 else (1.0, "s")
        low, mid, high = (f"{x * unit:.4g}" for x in (self.lower, self.median, self.upper))
        return f"{mid} [{low}, {high}] {name}"


PAUSE = 0.02  # seconds; threads of OpenMP spin for some milliseconds


def interleave(
    rivals: Mapping[str, Callable[[], Any]], *, rounds: int, calls: int = 1, warmup: int = 2
) -> dict[str, Timing]:
    """Times the rivals in turn, so that a machine that slows down slows down all of them.

    **Arguments:**

    - `rivals`: functions of no arguments. What they return is waited for.
    - `rounds`: how often each is timed, in an order that differs between rounds, and each time
        after a pause and an untimed call: another rival leaves its data in the caches, and threads
        that spin for a while.
    - `calls`: calls within one measurement; more for those far below a millisecond.
    - `warmup`: untimed calls of each first, compilation among them.

    **Returns:**

    For each rival its [`Timing`][benchmarks._report.Timing].
    """
    for function in rivals.values():
        for _ in range(warmup):
            jax.block_until_ready(function())
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(rivals), len(rivals)):
            time.sleep(PAUSE)
            jax.block_until_ready(rivals[name]())
            begin = time.perf_counter()
            for _ in range(calls):
                out = rivals[name]()
            jax.block_until_ready(out)
            seconds[name].append((time.perf_counter() - begin) / calls)
    return {name: Timing.of(values) for name, values in seconds.items()}


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


class Report:
    """Prints what a benchmark finds and keeps it for the JSON file.

    Sections are lists of records (plain dicts), which is what the tables of the documentation
    are generated from.
    """

    def __init__(self, name: str, *, command: str):
        self.name = name
        self.environment = environment(command)
        self.sections: dict[str, list[dict[str, Any]]] = {}
        print(f"# {name}\n")
        for key, value in self.environment.items():
            if value != "":
                print(f"- {key}: {value}")

    def record(self, section: str, **fields: Any) -> dict[str, Any]:
        """Adds one record to a section. A `Timing` becomes a dict of its fields."""
        plain = {k: v._asdict() if isinstance(v, Timing) else v for k, v in fields.items()}
        self.sections.setdefault(section, []).append(plain)
        return plain

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Prints a Markdown table."""
        cells = [list(columns), *([_cell(value) for value in row] for row in rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
        lines = [" | ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) for r in cells]
        lines.insert(1, " | ".join("-" * w for w in widths))
        print(f"\n## {title}\n")
        print("\n".join(f"| {line} |" for line in lines), flush=True)

    def note(self, text: str) -> None:
        """Prints a remark."""
        print(f"\n{text}", flush=True)

    def path(self, folder: Path) -> Path:
        """`NAME-PLATFORM.json`, where the platform is `cpu` or the device's name."""
        kind = self.environment["backend"]
        if kind != "cpu":
            kind = re.sub(r"[^a-z0-9]+", "-", self.environment["device"].lower()).strip("-")
        return folder / f"{self.name}-{kind}.json"

    def save(self, folder: Path) -> Path:
        """Writes the file."""
        folder.mkdir(parents=True, exist_ok=True)
        path = self.path(folder)
        rivals = {RIVALS[name]: _version(RIVALS[name]) for name in RIVALS if name in sys.modules}
        environment = {**self.environment, **rivals}
        content = {
            "benchmark": self.name,
            "environment": environment,
            "sources": sources(self.name),
            **self.sections,
        }
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return path

"""Shared parts of all benchmarks: rivals that may be missing, header, clock and results."""

import importlib
import json
import os
import platform
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import jax
import numpy as np

from ._tables._format import ROOT, Table


T = TypeVar("T")


class RivalMissing(ImportError):
    """A library to compare with is not installed."""


class TargetUnavailable(RuntimeError):
    """The compiler for a target is not installed."""


RIVALS = {name: name for name in ("jmp", "torch", "folx")}
RIVALS |= {"mpx": "mixed-precision-for-JAX", "neuralop": "neuraloperator"}
"""The package that contains each module."""


def require(module: str) -> ModuleType:
    """Imports one of `RIVALS`.

    **Raises:** `RivalMissing`, with the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name != module:
            raise
        raise RivalMissing(
            f'{RIVALS[module]} is not installed: `pip install -e ".[rivals]"` brings all rivals.'
        ) from e


def failure(error: BaseException) -> str:
    """Describes in one line of a table why a rival failed."""
    first = str(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {first[:200]}" if first else type(error).__name__


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Returns the versions of those packages that are installed."""
    found = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


# --- The code of a result --------------------------------------------------------------------

CODE = ("mpx_pde", "examples", "benchmarks/*.py")
"""The code that a result depends on, as git patterns."""


def _git(*args: str) -> str | None:
    """Returns the output of git; `None` if it fails or is not installed."""
    try:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def is_code_of(commit: str) -> bool:
    """Returns whether the code is the same as at a commit, written as `commit` writes it."""
    name = commit.split(" ")[0]
    return not name.endswith("+") and _git("diff", "--quiet", name, "--", *CODE) is not None


def commit() -> str:
    """Returns the commit of the code and its date, such as `40f9e21 of 2026-11-23`.

    A `+` follows the hash if files of the code differ from it.
    """
    told = _git("log", "-1", "--format=%h of %cs")
    if told is None:
        return "unknown"
    return told if is_code_of(told) else told.replace(" ", "+ ", 1)


def changes_since(commit: str) -> int | None:
    """Counts the commits that changed the library since; `None` if git does not know the commit."""
    name = commit.split(" ")[0].rstrip("+")
    told = _git("rev-list", "--count", f"{name}..HEAD", "--", "mpx_pde")
    return None if told is None else int(told)


# --- Where it was taken ----------------------------------------------------------------------


def _processor() -> str:
    with suppress(OSError, IndexError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        return re.findall(r"^model name\s*: (.*)$", text, re.MULTILINE)[0]
    return platform.processor() or platform.machine()


def environment(command: str) -> dict[str, Any]:
    """Describes where the numbers come from: hardware, versions, and the command to repeat them."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind if device.platform != "cpu" else _processor(),
        "backend": device.platform,
        "device_count": jax.device_count(),
        "cpu_count": os.cpu_count(),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **versions(("jax", "jaxlib", "equinox", "optax", "jax-cuda12-plugin", "libtpu")),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "commits": [commit()],
        "command": command,
    }


def timing(seconds: Sequence[float]) -> dict[str, float]:
    """Returns the seconds per call: the median and the quartiles over all rounds."""
    lower, median, upper = np.quantile(seconds, (0.25, 0.5, 0.75)).tolist()
    return {"median": median, "lower": lower, "upper": upper, "rounds": len(seconds)}


PAUSE = 0.02  # seconds; OpenMP threads keep spinning for some milliseconds


def interleave(
    rivals: Mapping[str, Callable[[], Any]], *, rounds: int, warmup: int = 2, calls: int = 1
) -> dict[str, dict[str, float]]:
    """Times the rivals in turn, so that a machine that slows down slows down all of them.

    **Arguments:**

    - `rivals`: functions of no arguments. The clock waits for their results.
    - `rounds`: how often each is timed. The order differs between rounds. A pause and an untimed
        call come before each timing, because another rival leaves its data in the caches and
        threads that spin for a while.
    - `warmup`: untimed calls of each at the start, including compilation.
    - `calls`: how many are timed together; the clock waits only for the last.

    **Returns:**

    The `timing` of each rival.
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
            jax.block_until_ready([rivals[name]() for _ in range(calls)][-1])
            seconds[name].append((time.perf_counter() - begin) / calls)
    return {name: timing(values) for name, values in seconds.items()}


def text_of(data: Mapping[str, Any]) -> str:
    """Returns the JSON of a result, with each of its records in a line of its own."""

    def lines(name: str, content: Any) -> str:
        each = content if isinstance(content, list) else [content]
        records = ",\n".join(f"  {json.dumps(record, ensure_ascii=False)}" for record in each)
        if isinstance(content, list):
            records = f"[\n{records}\n ]"
        return f" {json.dumps(name)}: {records.strip()}"

    return "{\n" + ",\n".join(lines(*item) for item in data.items()) + "\n}\n"


class Report:
    """Prints the findings of a benchmark and keeps them for the JSON file.

    Sections are lists of records (plain dicts). The tables of the documentation are generated from
    them.
    """

    def __init__(self, name: str, *, command: str, folder: Path = Path()):
        self.name, self.folder = name, folder
        self.environment = environment(command)
        self.sections: dict[str, list[dict[str, Any]]] = {}
        print(f"# {name}\n")
        for key, value in self.environment.items():
            if value != "":
                print(f"- {key}: {value}")

    def record(self, section: str, **fields: Any) -> dict[str, Any]:
        """Adds one record to a section."""
        self.sections.setdefault(section, []).append(fields)
        return fields

    def show(self) -> None:
        """Prints each section as a Markdown table. Of a series it shows only the last entry; the
        file has all."""
        for section in self.sections:
            print(f"\n## {section}\n\n{Table(self.name, section)(self.data)}", flush=True)

    @property
    def data(self) -> dict[str, Any]:
        """The content of the file."""
        rivals = versions(package for name, package in RIVALS.items() if name in sys.modules)
        environment = {**self.environment, **rivals}
        return {"benchmark": self.name, "environment": environment, **self.sections}

    def note(self, text: str) -> None:
        """Prints a remark."""
        print(f"\n{text}", flush=True)

    @property
    def path(self) -> Path:
        """The path `NAME-PLATFORM.json`, where the platform is `cpu` or the device's name."""
        kind = self.environment["backend"]
        if kind != "cpu":
            kind = re.sub(r"[^a-z0-9]+", "-", self.environment["device"].lower()).strip("-")
        return self.folder / f"{self.name}-{kind}.json"

    def resume(self, *sections: str, same_code: bool = False) -> None:
        """Keeps the records of earlier runs; with `same_code`, only if they ran the present
        code."""
        if not self.path.exists():
            return
        before = json.loads(self.path.read_text("utf-8"))
        commits = before["environment"]["commits"]
        if same_code and not all(map(is_code_of, commits)):
            self.note("The results there were taken with other code, so this run starts anew.")
            return
        self.sections |= {name: before[name] for name in sections if name in before}
        told = dict.fromkeys([*commits, *self.environment["commits"]])
        self.environment["commits"] = list(told)

    def has(self, section: str, **fields: Any) -> bool:
        """Whether there is a record with these fields."""
        return any(fields.items() <= record.items() for record in self.sections.get(section, []))

    def missing(self, section: str, keys: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yields the keys that no record has yet. Writes the file after each, so a run of hours
        that is interrupted keeps its results."""
        for key in keys:
            if not self.has(section, **key):
                yield key
                self.save()

    def within(self, minutes: float | None, items: Iterable[T]) -> Iterator[T]:
        """Yields the items one by one until the time is over; then notes how many are left."""
        start, left = time.monotonic(), 0
        for item in items:
            if minutes is not None and time.monotonic() - start > 60 * minutes:
                left += 1
            else:
                yield item
        if left:
            self.note(f"{left} are left out, because {minutes:g} minutes have passed.")

    def installed(self, *modules: str) -> bool:
        """Returns whether the libraries to compare with are installed; prints a note if not."""
        try:
            list(map(require, modules))
        except RivalMissing as error:
            self.note(f"Left out: {error}")
            return False
        return True

    def save(self) -> Path:
        """Writes the file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path.write_text(text_of(self.data), encoding="utf-8")
        return self.path

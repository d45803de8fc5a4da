"""What every benchmark shares: the header, the clock, the tables and the JSON file."""

import json
import os
import platform
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax

from ._history import commit, is_code_of
from ._rivals import RIVALS, RivalMissing, TargetUnavailable, failure, require


T = TypeVar("T")


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _processor() -> str:
    with suppress(OSError, IndexError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        return re.findall(r"^model name\s*: (.*)$", text, re.MULTILINE)[0]
    return platform.processor() or platform.machine()


def environment(command: str) -> dict[str, Any]:
    """Where the numbers come from: hardware, versions, and how to get them again."""
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


NONE = "–"


def _text(value: Any) -> str:
    """A value of a record; of a series the last."""
    if value is None:
        return NONE
    if isinstance(value, Mapping):
        if value.keys() == set(Timing._fields):
            return str(Timing(**value))
        return ", ".join(f"{key} {_text(x)}" for key, x in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(value) if all(isinstance(x, str) for x in value) else _text(value[-1])
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class Report:
    """Prints what a benchmark finds and keeps it for the JSON file.

    Sections are lists of records (plain dicts), which is what the tables of the documentation
    are generated from.
    """

    def __init__(self, name: str, *, command: str, folder: Path = Path()):
        self.name, self.folder = name, folder
        self.environment = environment(command)
        self.sections: dict[str, list[dict[str, Any]]] = {}
        self._missing: set[tuple[str, ...]] = set()
        print(f"# {name}\n")
        for key, value in self.environment.items():
            if value != "":
                print(f"- {key}: {value}")

    def record(self, section: str, **fields: Any) -> dict[str, Any]:
        """Adds one record to a section. A `Timing` becomes a dict of its fields."""
        plain = {k: v._asdict() if isinstance(v, Timing) else v for k, v in fields.items()}
        self.sections.setdefault(section, []).append(plain)
        return plain

    def attempt(
        self, section: str, where: dict[str, Any], make: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Adds a record of where something is tried and what it comes to, or how it fails."""
        try:
            found = make()
        except TargetUnavailable:
            raise
        except Exception as error:  # whatever it is, it is what there is to show
            found = {"failed": failure(error)}
        return self.record(section, **where, **found)

    def show(self) -> None:
        """Prints each section as a Markdown table. Of a series the last entry stands there, the
        rest is in the file."""
        from ._tables._format import markdown

        for section, records in self.sections.items():
            names = list(dict.fromkeys(name for record in records for name in record))
            rows = ([_text(record.get(name)) for name in names] for record in records)
            print(f"\n## {section}\n\n{markdown(names, rows)}", flush=True)

    def page(self, *tables: str) -> None:
        """Prints tables as the pages have them, with what this run has found."""
        from ._tables import table

        data = {"environment": self.environment, **self.sections}
        for name in tables:
            print(f"\n{table(name)(data)}", flush=True)

    def note(self, text: str) -> None:
        """Prints a remark."""
        print(f"\n{text}", flush=True)

    @property
    def path(self) -> Path:
        """`NAME-PLATFORM.json`, where the platform is `cpu` or the device's name."""
        kind = self.environment["backend"]
        if kind != "cpu":
            kind = re.sub(r"[^a-z0-9]+", "-", self.environment["device"].lower()).strip("-")
        return self.folder / f"{self.name}-{kind}.json"

    def resume(self, *sections: str, same_code: bool = False) -> None:
        """Takes over what earlier runs have written, or only if they had the code of today."""
        if not self.path.exists():
            return
        before = json.loads(self.path.read_text("utf-8"))
        commits = before["environment"]["commits"]
        if same_code and not all(map(is_code_of, commits)):
            self.note("The results there are of other code: from the start.")
            return
        self.sections |= {name: before[name] for name in sections if name in before}
        told = dict.fromkeys([*commits, *self.environment["commits"]])
        self.environment["commits"] = list(told)

    def has(self, section: str, **fields: Any) -> bool:
        """Whether there is a record with these fields."""
        return any(fields.items() <= record.items() for record in self.sections.get(section, []))

    def missing(
        self, section: str, keys: Iterable[dict[str, Any]], minutes: float | None = None
    ) -> Iterator[dict[str, Any]]:
        """Those of the keys that no record has yet, until the time is over. The file is written
        after each: a run of hours that is cut short has shown something."""
        for key in self.within(minutes, (key for key in keys if not self.has(section, **key))):
            yield key
            self.save()

    def within(self, minutes: float | None, items: Iterable[T]) -> Iterator[T]:
        """The items one by one, until the time is over; a note says how many are left then."""
        start, left = time.monotonic(), 0
        for item in items:
            if minutes is not None and time.monotonic() - start > 60 * minutes:
                left += 1
            else:
                yield item
        if left:
            self.note(f"{left} are left out, for {minutes:g} minutes have passed.")

    def installed(self, *modules: str) -> bool:
        """Whether libraries to compare with are there; a note says so, once, if not."""
        try:
            list(map(require, modules))
        except RivalMissing as error:
            if modules not in self._missing:
                self.note(f"Left out: {error}")
                self._missing.add(modules)
            return False
        return True

    def save(self) -> Path:
        """Writes the file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        rivals = versions(package for name, package in RIVALS.items() if name in sys.modules)
        content = {
            "benchmark": self.name,
            "environment": {**self.environment, **rivals},
            **self.sections,
        }
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        self.path.write_text(text, encoding="utf-8")
        return self.path

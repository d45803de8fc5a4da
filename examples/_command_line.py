"""Shared parts of the examples' command lines: options, progress bars, and a clean end by
Ctrl-C."""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def progress_bar(console: Console, width: int) -> Progress:
    """Returns a bar per task: its description in `width` columns, its steps and its field
    `loss`."""
    return Progress(
        TextColumn(f"{{task.description:>{width}}}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(),
        console=console,
    )


class _Help(argparse.HelpFormatter):
    """Adds the default of each option to its help."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help, action.default
        if text is None or default is None or isinstance(default, bool) or "by default" in text:
            return text
        if default == argparse.SUPPRESS:
            return text
        told = " ".join(default) if isinstance(default, list | tuple) else default
        return f"{text}; by default {told}"


def parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser whose `--help` shows the first line of `description` and all defaults."""
    first = (description or "").split("\n", 1)[0]
    return argparse.ArgumentParser(description=first, formatter_class=_Help)


def training_parser(
    description: str | None,
    *,
    precisions: Sequence[str],
    shown: Sequence[str],
    steps: str,
    data: str,
    out: str,
    quick: str,
) -> argparse.ArgumentParser:
    """Returns a parser for several trainings from a seed, and a picture of them."""
    options = parser(description)
    told = "precisions to train in, one after another"
    given = {"nargs": "+", "choices": precisions, "default": shown, "dest": "precisions"}
    options.add_argument("--precision", **given, help=told)
    options.add_argument("--steps", type=positive, help=f"steps of each training, {steps}")
    options.add_argument("--seed", type=int, default=0, help=f"seed of initial weights and {data}")
    options.add_argument("--out", type=folder, default=out, help="folder of the picture")
    options.add_argument("--quick", action="store_true", help=quick)
    return options


def positive(text: str) -> int:
    """Parses an option that is a positive integer."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer of at least 1")
    return value


def folder(text: str) -> Path:
    """Parses an option that is a folder to write to; it need not exist yet."""
    path = Path(text)
    there = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    if not there.is_dir():
        raise argparse.ArgumentTypeError(f"cannot write to {text!r}: {there} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"cannot write to {text!r}: no permission in {there}")
    return path


def file(text: str) -> Path:
    """Parses an option that is a file to write."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"cannot write to {text!r}: it is a folder")
    folder(str(path.parent))
    return path


@contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Defers Ctrl-C until a training can stop.

    Yields a function that returns whether to stop; a training calls it between two compiled calls.
    What has been trained by then is printed and drawn, and then `KeyboardInterrupt` is raised after
    all. A second Ctrl-C stops at once.
    """
    asked = threading.Event()

    def ask(*_: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        print("\nStopping after these steps; Ctrl-C again stops at once.", file=sys.stderr)

    try:
        before = signal.signal(signal.SIGINT, ask)
    except ValueError:  # only the main thread receives signals
        yield asked.is_set
        return
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)
    if asked.is_set():
        raise KeyboardInterrupt


def run_main(
    main: Callable[..., Any], options: argparse.ArgumentParser, argv: Sequence[str] | None = None
) -> None:
    """Runs `main` with the options of the command line. Ctrl-C ends it without a traceback."""
    given = vars(options.parse_args(argv))
    try:
        main(**given)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)

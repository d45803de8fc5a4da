"""Which code a result was taken with: the commits, as git tells them."""

import subprocess
from pathlib import Path


ROOT = Path(__file__).parent.parent
CODE = ("mpx_pde", "examples", "benchmarks/*.py")
"""What a result depends on, as git's patterns."""


def _git(*args: str) -> str | None:
    """What git prints; `None` where it fails, or is not there."""
    try:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def is_code_of(commit: str) -> bool:
    """Whether the code is as it was at a commit, as `commit` writes it."""
    name = commit.split(" ")[0]
    return not name.endswith("+") and _git("diff", "--quiet", name, "--", *CODE) is not None


def commit() -> str:
    """The commit of the code and its date, such as `40f9e21 of 2026-11-23`; a `+` behind the hash
    where files of the code differ from it."""
    told = _git("log", "-1", "--format=%h of %cs")
    if told is None:
        return "unknown"
    return told if is_code_of(told) else told.replace(" ", "+ ", 1)


def changes_since(commit: str) -> int | None:
    """How many commits have changed the library since then; `None` where git does not know it."""
    name = commit.split(" ")[0].rstrip("+")
    told = _git("rev-list", "--count", f"{name}..HEAD", "--", "mpx_pde")
    return None if told is None else int(told)

"""A cache on disk for data that is made only once."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def cache_folder() -> Path:
    """Returns `$MPX_PDE_CACHE`, by default `~/.cache/mpx_pde`."""
    return Path(os.environ.get("MPX_PDE_CACHE") or Path.home() / ".cache" / "mpx_pde")


def cached(
    name: str,
    make: Callable[..., dict[str, np.ndarray]],
    *,
    version: int,
    **parameters: int | float | str,
) -> dict[str, np.ndarray]:
    """Returns `make(**parameters)`, from the cache if it was made before.

    The file is named after all parameters and the version; raise the version when `make` changes.
    The file is first written under another name, so that neither two processes nor an interrupted
    one leave a half-written file behind.
    """
    key = json.dumps({"version": version, **parameters}, sort_keys=True)
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    path = cache_folder() / f"{name}-{digest}.npz"
    if not path.exists():
        arrays: dict[str, Any] = make(**parameters)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
            try:
                np.savez(file, **arrays)
            except BaseException:
                os.unlink(file.name)
                raise
        os.replace(file.name, path)
    with np.load(path, allow_pickle=False) as file:
        return dict(file)

"""Saves and compares the options that scalings were built with."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import jax.tree_util as jtu
import numpy as np

from .._util._repr import in_a_line
from .._util._types import PyTree
from ..scaling._derivatives import DerivativeScaling, Scaling
from ..scaling._loss import AbstractLossScaling
from ..scaling._strategies import AbstractStrategy
from ._ladder import PrecisionLadder


_SCALERS = (AbstractLossScaling, DerivativeScaling, PrecisionLadder)


def _plain(value: Any) -> Any:
    """Converts a static field to a JSON value that is the same in every process."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {x.name: getattr(value, x.name) for x in dataclasses.fields(value)}
    elif as_dict := getattr(value, "_asdict", None):
        value = as_dict()
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(name): _plain(v) for name, v in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(_plain, value), key=repr)
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    # JSON has no name for NaN and infinity, and a NaN does not equal itself.
    finite = isinstance(value, float) and math.isfinite(value)
    if value is None or isinstance(value, bool | int | str) or finite:
        return value
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    # Addresses differ from process to process.
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _flat(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    return {k: v for part, x in value.items() for k, v in _flat(f"{name}.{part}", x).items()}


def scaling_options(tree: PyTree) -> dict[str, dict[str, Any]]:
    """Returns the static options of all scalings in a PyTree, in a form that JSON can write.

    A checkpoint holds arrays. The options that a scaling was built with (period, factor, bounds,
    names, update rule) are part of the program instead: a restored run uses the options of the
    scaling that it restores into. The same holds for the rungs of a
    [`mpx_pde.PrecisionLadder`][]; only the number of its present rung is saved. Save these options
    with the arrays, and let [`mpx_pde.check_scaling_options`][] compare them when you restore.

    **Arguments:**

    - `tree`: any PyTree, such as the whole state of a run.

    **Returns:**

    A mapping from the path of each scaling to a mapping from the names of its options to numbers,
    strings, lists, or `None`.

    ```python
    saved = json.dumps(mpx.scaling_options(state))
    mpx.check_scaling_options(json.loads(saved), state)
    ```
    """

    by_path: dict[str, dict[str, Any]] = {}

    def visit(prefix, tree):
        # A scaling may hold other scalings.
        inside = lambda x: x is not tree and isinstance(x, _SCALERS)
        if isinstance(tree, _SCALERS) and not isinstance(tree, Scaling):
            by_path[prefix] = _options(tree)
        for path, x in jtu.tree_leaves_with_path(tree, is_leaf=inside):
            if inside(x):
                visit(prefix + jtu.keystr(path), x)

    visit("", tree)
    return by_path


def _options(scaler: Any) -> dict[str, Any]:
    options = {"type": type(scaler).__name__}
    if isinstance(scaler, PrecisionLadder):
        # Tolerance, interval and `say` may change within a run.
        return options | {"rungs": list(scaler.rungs)}
    for field in dataclasses.fields(scaler):
        if field.metadata.get("static", False):
            value = getattr(scaler, field.name)
            if isinstance(value, AbstractStrategy):
                options |= value.options
            else:
                options |= _flat(field.name, _plain(value))
    return options


def _option_differences(saved: Mapping[str, Any], tree: PyTree) -> list[str]:
    lines = []
    present = scaling_options(tree)
    for path in sorted(saved.keys() | present.keys()):
        old, new = saved.get(path), present.get(path)
        where = path or "the state itself"
        if old is None or new is None:
            lines.append(
                f"a scaling at {where} {'only in `tree`' if old is None else 'is missing'}"
            )
            continue
        lines += [
            f"{where}: {name} was {old.get(name)!r} and is {new.get(name)!r}"
            for name in sorted(old.keys() | new.keys())
            if old.get(name) != new.get(name)
        ]
    return lines


def check_scaling_options(saved: Mapping[str, Any], tree: PyTree) -> None:
    """Checks that the scalings in a PyTree were built with the options that were saved.

    **Arguments:**

    - `saved`: the result of [`mpx_pde.scaling_options`][], directly or read back from JSON.
    - `tree`: the PyTree that the checkpoint is restored into.

    **Raises:** `ValueError` that lists each option that differs; `TypeError` if `saved`
    is not such a mapping.
    """
    if not isinstance(saved, Mapping) or not all(isinstance(x, Mapping) for x in saved.values()):
        raise TypeError(
            "`check_scaling_options` takes what `scaling_options` returned as `saved`, and the "
            f"state after it, but got {in_a_line(saved)} as `saved`."
        )
    differences = _option_differences(saved, tree)
    if differences:
        raise ValueError(
            "`check_scaling_options`: the scalings differ from those that were saved:\n  "
            + "\n  ".join(differences)
            + "\nBuild them with the saved options; to go on with new ones, restore into the saved "
            "ones and copy the arrays."
        )

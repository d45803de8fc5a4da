"""The state of a run in a file, with the options of its scalings."""

import dataclasses
import functools as ft
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer

from .._loss_scaling import AbstractLossScaling
from .._tree import in_a_line
from .._types import PyTree
from ..derivatives import DerivativeScaling, Scaling
from ..derivatives._strategies import AbstractStrategy
from ._checkpoint_file import Entry, is_data, opened, replaced, write
from ._ladder import PrecisionLadder


_SCALERS = (AbstractLossScaling, DerivativeScaling, PrecisionLadder)


# --- Options of the scalers ------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """A static field as JSON knows it, the same in every process."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(name): _plain(v) for name, v in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(v) for v in value), key=repr)
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)  # JSON has no name for it, and a NaN does not equal itself
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, ft.partial):
        return [_plain(value.func), *map(_plain, value.args), _plain(value.keywords)]
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    # Addresses differ from process to process.
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _flat(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    return {k: v for part, x in value.items() for k, v in _flat(f"{name}.{part}", x).items()}


def scaling_options(tree: PyTree) -> dict[str, dict[str, Any]]:
    """The static options of all scalings in a PyTree, as JSON can write them.

    A checkpoint holds arrays. The options that a scaling was built with (period, factor, bounds,
    names, update rule) are part of the program instead: a restored run takes those of the scaling
    that it restores into. So it is with the rungs of a [`mpx_pde.PrecisionLadder`][], among which
    it finds its own by number. Save these beside the arrays, and let
    [`mpx_pde.check_scaling_options`][] compare. [`mpx_pde.save_checkpoint`][] does so by itself.

    **Arguments:**

    - `tree`: any PyTree, such as the whole state of a run.

    **Returns:**

    A mapping from the path of each scaling to a mapping from the names of its options to numbers,
    strings, lists, or `None`.
    """

    found: dict[str, dict[str, Any]] = {}

    def visit(prefix, tree):
        # A scaling may hold others.
        inside = lambda x: x is not tree and isinstance(x, _SCALERS)
        if isinstance(tree, _SCALERS) and not isinstance(tree, Scaling):
            found[prefix] = _options(tree)
        for path, x in jtu.tree_leaves_with_path(tree, is_leaf=inside):
            if inside(x):
                visit(prefix + jtu.keystr(path), x)

    visit("", tree)
    return found


def _options(scaler: Any) -> dict[str, Any]:
    options = {"type": type(scaler).__name__}
    if isinstance(scaler, PrecisionLadder):
        # When it climbs, and what it says, may change within a run.
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

    - `saved`: what [`mpx_pde.scaling_options`][] returned, through JSON or not.
    - `tree`: the PyTree that the checkpoint is restored into.

    **Raises:** `ValueError` that lists each option that differs; `TypeError` for a `saved` that is
    no such mapping.
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


# --- Files -----------------------------------------------------------------------------------


def save_checkpoint(path: str | os.PathLike, state: PyTree) -> None:
    """Writes a PyTree to a file, all of it or nothing.

    The file is written beside `path` and renamed when it is complete, so that a process that is
    killed at any moment leaves the last complete checkpoint, and of several that write to one path
    at the same time the last one wins with all of its state. All arrays (of every dtype, PRNG keys
    too) and Python numbers are saved to the last bit with checksums, and the options of the
    scalings with them. Functions, strings and other leaves are not: they come from the state that
    the file is restored into.

    **Arguments:**

    - `path`: the file.
    - `state`: any PyTree: model, optimizer state, scaling, key, step.

    **Raises:** `ValueError` for an array of which this process holds only a part, as in a run on
    several hosts: use Orbax there, with [`mpx_pde.scaling_options`][]; and for an array of Python
    objects. `FileNotFoundError` and `IsADirectoryError` for a `path` in a folder that does not
    exist, or that is a folder itself, `TypeError` for one that is none and inside of `jax.jit`.
    """
    call = "save_checkpoint"
    path = _checked_path(path, call)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"`{call}`: there is no folder {path.parent}. Make it first.")
    if path.is_dir():
        raise IsADirectoryError(f"`{call}`: {path} is a folder. Name a file in it.")
    leaves = _leaves(state, call)
    for where, x in leaves.items():
        if isinstance(x, Tracer):
            raise TypeError(
                f"`{call}` writes a file, so it cannot be called inside of `jax.jit`, `jax.grad` "
                f"or `jax.vmap`, but got a traced value at {where or 'the root'}. Call it between "
                "steps."
            )
        if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
            raise ValueError(
                f"`{call}`: the array at {where} is spread over several processes. Save it with "
                "Orbax, and `mpx_pde.scaling_options(state)` beside it."
            )
        if isinstance(x, jax.ShapeDtypeStruct):
            raise ValueError(f"`{call}`: at {where} is the shape of an array and no array.")
        if isinstance(x, np.ndarray) and x.dtype.hasobject:
            raise ValueError(
                f"`{call}`: the array at {where} holds Python objects, which only a pickle could "
                "save. Keep them out of the state."
            )
    with replaced(path) as file:
        write(file, leaves, scaling_options(state))


def restore_checkpoint(path: str | os.PathLike, like: PyTree) -> PyTree:
    """Reads what [`mpx_pde.save_checkpoint`][] wrote.

    **Arguments:**

    - `path`: the file.
    - `like`: a PyTree of the same structure, such as a freshly made state or what
        [`jax.eval_shape`][] makes of one. Leaves are found by their paths, in whatever order they
        were saved. Each array comes back with the sharding of its counterpart here, whatever it
        was when it was saved.

    **Returns:**

    A PyTree like `like`, with the saved values.

    **Raises:** `ValueError` that lists what differs, if a leaf differs in path, shape or dtype or a
    scaling was built with other options, for a file of another kind, and for one that is damaged.

    ```python
    state = (model, opt_state, scaling, key)
    mpx.save_checkpoint("run.ckpt", state)
    state = mpx.restore_checkpoint("run.ckpt", like=state)
    ```
    """
    call = "restore_checkpoint"
    path = _checked_path(path, call)
    present = _leaves(like, call)
    with open(path, "rb") as file:
        saved, scalings, read = opened(file, path, call)
        types = {where: Entry.of(x) for where, x in present.items()}
        differences = [
            f"{where or 'the state itself'}: "
            + " and ".join(
                f"{verb} {x.dtype}{[*x.shape]}" if x else f"{verb} missing"
                for verb, x in (("was", saved.get(where)), ("is", types.get(where)))
            )
            for where in dict.fromkeys([*saved, *present])
            if saved.get(where) != types.get(where)
        ]
        differences += _option_differences(scalings, like)
        if differences:
            raise ValueError(
                f"`{call}`: `like` is not what was saved in {os.fspath(path)!r}:\n  "
                + "\n  ".join(differences)
                + "\nMake the state as it was made in the run that saved it."
            )
        values = {where: read(where, x) for where, x in present.items()}
    return jtu.tree_map_with_path(lambda where, x: values.get(jtu.keystr(where), x), like)


def _checked_path(path: Any, call: str) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"`{call}` takes the path of a file first, and the state after it, but got "
            f"{in_a_line(path)} as `path`."
        )
    return Path(path)


def _leaves(tree: PyTree, call: str) -> dict[str, Any]:
    """All that is saved, by path."""
    leaves = {}
    for where, x in jtu.tree_leaves_with_path(tree):
        where = jtu.keystr(where)
        if is_data(x):
            if where in leaves:
                raise ValueError(
                    f"`{call}`: two leaves have the path {where!r}, and cannot be told apart. "
                    "Register the PyTree node that holds them with distinct keys."
                )
            leaves[where] = x
    return leaves

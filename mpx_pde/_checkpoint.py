"""The state of a run in a file: what Equinox's serialisation leaves to its caller.

A file holds one line of JSON, and then the arrays as `equinox.tree_serialise_leaves` writes them.
Nothing in it is executed when it is read.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ._loss_scaling import AbstractLossScaling
from ._types import PyTree
from .derivatives import DerivativeScaling, Scaling


_FORMAT = "mpx_pde checkpoint 1"


def _is_key(x: Any) -> bool:
    return eqx.is_array(x) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _is_data(x: Any) -> bool:
    return eqx.is_array_like(x) or isinstance(x, jax.ShapeDtypeStruct)


# --- Options of the scalers ------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """A static field as JSON knows it; what JSON does not know, by its `repr`."""
    if hasattr(value, "_asdict"):
        return {name: _plain(v) for name, v in value._asdict().items()}
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    known = value is None or isinstance(value, bool | int | float | str)
    return value if known else repr(value)


def _flat(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    return {k: v for part, x in value.items() for k, v in _flat(f"{name}.{part}", x).items()}


def scaling_options(tree: PyTree) -> dict[str, dict[str, Any]]:
    """The static options of all scalings in a PyTree, as JSON can write them.

    A checkpoint holds arrays. The options that a scaling was built with (period, factor, bounds,
    names, update rule) are part of the program instead: a restored run takes those of the scaling
    that it restores into. Save these beside the arrays, and let
    [`mpx_pde.check_scaling_options`][] compare. [`mpx_pde.save_checkpoint`][] does so by itself.

    **Arguments:**

    - `tree`: any PyTree, such as the whole state of a run.

    **Returns:**

    A mapping from the path of each scaling to a mapping from the names of its options to numbers,
    strings, lists, or `None`.
    """

    def is_scaler(x):
        return isinstance(x, AbstractLossScaling | DerivativeScaling) and not isinstance(x, Scaling)

    found = {}
    for path, scaler in jtu.tree_leaves_with_path(tree, is_leaf=is_scaler):
        if is_scaler(scaler):
            options = {"type": type(scaler).__name__}
            for field in dataclasses.fields(scaler):
                # Rows follow from kind, names and order, and show in the shapes.
                if field.metadata.get("static", False) and field.name != "rows":
                    options |= _flat(field.name, _plain(getattr(scaler, field.name)))
            found[jtu.keystr(path)] = options
    return found


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

    **Raises:** `ValueError` that lists each option that differs.
    """
    differences = _option_differences(saved, tree)
    if differences:
        raise ValueError(
            "`check_scaling_options`: the scalings differ from those that were saved:\n  "
            + "\n  ".join(differences)
            + "\nBuild them with the saved options; to go on with new ones, restore into the saved "
            "ones and copy the arrays."
        )


# --- Files -----------------------------------------------------------------------------------


def _manifest(tree: PyTree) -> list[list[Any]]:
    """Path, dtype and shape of all that is saved, in the order of saving."""
    return [
        [
            jtu.keystr(path),
            str(x.dtype) if hasattr(x, "dtype") else type(x).__name__,
            [*np.shape(x)],
        ]
        for path, x in jtu.tree_leaves_with_path(tree)
        if _is_data(x)
    ]


def _write(file: Any, x: Any) -> None:
    eqx.default_serialise_filter_spec(file, jax.random.key_data(x) if _is_key(x) else x)


def _read(file: Any, x: Any) -> Any:
    if _is_key(x):
        data = np.load(file, allow_pickle=False)
        new = jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(x))
    else:
        new = eqx.default_deserialise_filter_spec(file, x)
    sharding = getattr(x, "sharding", None)
    return new if sharding is None else jax.device_put(new, sharding)


def save_checkpoint(path: str | os.PathLike, state: PyTree) -> None:
    """Writes a PyTree to a file, all of it or nothing.

    The file is written beside `path` and renamed when it is complete, so that a process that is
    killed at any moment leaves the last complete checkpoint. All arrays (bfloat16 and PRNG keys
    too) and Python numbers are saved to the last bit, and the options of the scalings with them.

    **Arguments:**

    - `path`: the file.
    - `state`: any PyTree: model, optimizer state, scaling, key, step.

    **Raises:** `ValueError` for an array of which this process holds only a part, as in a run on
    several hosts: use Orbax there, with [`mpx_pde.scaling_options`][].
    """
    path = Path(path)
    for where, x in jtu.tree_leaves_with_path(state):
        if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
            raise ValueError(
                f"`save_checkpoint`: the array at {jtu.keystr(where)} is spread over several "
                "processes. Save it with Orbax, and `mpx_pde.scaling_options(state)` beside it."
            )
    header = {"format": _FORMAT, "leaves": _manifest(state), "scalings": scaling_options(state)}
    # One name for all, so that what a killed process left is written over.
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(json.dumps(header).encode() + b"\n")
            eqx.tree_serialise_leaves(file, state, filter_spec=_write)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def restore_checkpoint(path: str | os.PathLike, like: PyTree) -> PyTree:
    """Reads what [`mpx_pde.save_checkpoint`][] wrote.

    **Arguments:**

    - `path`: the file.
    - `like`: a PyTree of the same structure, such as a freshly made state. Each array comes back
        with the sharding of its counterpart here, whatever it was when it was saved.

    **Returns:**

    A PyTree like `like`, with the saved values.

    **Raises:** `ValueError` that lists what differs, if a leaf differs in path, shape or dtype or a
    scaling was built with other options, and for a file of another kind.

    ```python
    state = (model, opt_state, scaling, key)
    mpx.save_checkpoint("run.ckpt", state)
    state = mpx.restore_checkpoint("run.ckpt", like=state)
    ```
    """
    call = "restore_checkpoint"
    with open(path, "rb") as file:
        try:
            header = json.loads(file.readline())
            known = header["format"] == _FORMAT
        except (ValueError, TypeError, KeyError):
            known = False
        if not known:
            raise ValueError(f"`{call}`: {os.fspath(path)!r} is no file of `save_checkpoint`.")
        saved = {path: (dtype, shape) for path, dtype, shape in header["leaves"]}
        present = {path: (dtype, shape) for path, dtype, shape in _manifest(like)}
        differences = [
            f"{path or 'the state itself'}: "
            + " and ".join(
                f"{verb} {x[0]}{x[1]}" if x else f"{verb} missing"
                for verb, x in (("was", saved.get(path)), ("is", present.get(path)))
            )
            for path in dict.fromkeys([*saved, *present])
            if saved.get(path) != present.get(path)
        ]
        differences += _option_differences(header["scalings"], like)
        if differences:
            raise ValueError(
                f"`{call}`: `like` is not what was saved in {os.fspath(path)!r}:\n  "
                + "\n  ".join(differences)
                + "\nMake the state as it was made in the run that saved it."
            )
        return eqx.tree_deserialise_leaves(file, like, filter_spec=_read)

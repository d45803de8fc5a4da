"""A training that was stopped: where it stands is kept in a file, from which it goes on."""

from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np


class Kept:
    """The file of a training that may be stopped by Ctrl-C.

    It holds the arrays of a PyTree, in order, and named NumPy arrays. What is no array in the tree
    is that of the training that goes on.
    """

    def __init__(self, path: Path, *, resume: bool = True):
        self.path, self.resume = path, resume

    def save(self, tree: Any, **named: Any) -> None:
        """Writes the file, completely or not at all."""
        leaves = jax.tree.leaves(eqx.filter(tree, eqx.is_array))
        arrays = {f"leaf{i}": np.asarray(x) for i, x in enumerate(leaves)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(self.path.name + ".part")
        with part.open("wb") as file:
            np.savez(file, **arrays, **named)
        part.replace(self.path)

    def load(self, tree: Any) -> tuple[Any, dict[str, np.ndarray]] | None:
        """Returns the tree with the arrays of the file, and the named arrays; `None` if there is no
        file, or the training shall start anew."""
        if not (self.resume and self.path.exists()):
            return None
        with np.load(self.path) as file:
            found = dict(file)
        arrays, static = eqx.partition(tree, eqx.is_array)
        leaves, treedef = jax.tree.flatten(arrays)
        kept = [jnp.asarray(found.pop(f"leaf{i}")) for i in range(len(leaves))]
        return eqx.combine(jax.tree.unflatten(treedef, kept), static), found

    def remove(self) -> None:
        """Removes the file of a training that is finished."""
        self.path.unlink(missing_ok=True)

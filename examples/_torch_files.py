"""Reads tensors from files of `torch.save`, without PyTorch.

    load_tensors("darcy_train_16.pt")  # {"x": bool[1000, 16, 16], "y": float32[1000, 16, 16]}

Such a file is a zip of raw arrays and a pickle that has their shapes *and strides*. The fields of
neuraloperator's Darcy files are stored with the strides (1, n, n s): their samples vary fastest.
Read by shape alone they give fields of plausible mean and deviation that mean nothing.
"""

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


DTYPES = {
    "BoolStorage": np.bool_,
    "ByteStorage": np.uint8,
    "IntStorage": np.int32,
    "LongStorage": np.int64,
    "HalfStorage": np.float16,
    "FloatStorage": np.float32,
    "DoubleStorage": np.float64,
}


def _tensor(
    raw: np.ndarray, offset: int, shape: Sequence[int], strides: Sequence[int], *_: Any
) -> np.ndarray:
    """Returns a tensor, whose strides count elements, as a contiguous array."""
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if 0 in shape:
        return np.zeros(shape, raw.dtype)
    if min(offset, *strides, 0) < 0 or last >= len(raw):
        raise ValueError(f"a tensor of shape {tuple(shape)} reaches beyond its {len(raw)} numbers.")
    steps = tuple(step * raw.itemsize for step in strides)
    view = np.lib.stride_tricks.as_strided(raw[offset:], tuple(shape), steps, writeable=False)
    return np.ascontiguousarray(view)


class _Unpickler(pickle.Unpickler):
    """An unpickler that knows tensors, their storages and plain containers, and calls nothing
    else."""

    def __init__(self, file: Any, archive: zipfile.ZipFile, folder: str):
        super().__init__(file)
        self.archive, self.folder = archive, folder

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        raise ValueError(
            f"`load_tensors` reads tensors of {', '.join(DTYPES)}, not {module}.{name}."
        )

    def persistent_load(self, pid: Any) -> np.ndarray:
        _, dtype, key, *_ = pid
        return np.frombuffer(self.archive.read(f"{self.folder}/data/{key}"), dtype)


def load_tensors(path: str | Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a file by name, as NumPy arrays in the order of their axes."""
    with zipfile.ZipFile(path) as archive:
        [name] = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        with archive.open(name) as file:
            return _Unpickler(file, archive, name.removesuffix("/data.pkl")).load()

"""Tests that tensors are read from files of `torch.save` by their strides."""

import importlib
import zipfile

import numpy as np
import pytest


files = importlib.import_module("_torch_files")


def written(path, strides, function="_rebuild_tensor_v2", size=None):
    """Writes fields `y` of shape [n, s, s] as `torch.save` does, with the given strides.

    The pickle is written by hand, because its functions are those of PyTorch.
    """
    fields = np.arange(3 * 4 * 4, dtype=np.float32).reshape(3, 4, 4) ** 2
    raw = np.empty(fields.size, np.float32)
    at = sum(i * step for i, step in zip(np.indices(fields.shape), strides, strict=True))
    raw[at.ravel()] = fields.ravel()
    number = lambda n: b"J" + int(n).to_bytes(4, "little")
    tuple_ = lambda *xs: b"(" + b"".join(xs) + b"t"
    text = lambda s: b"X" + len(s).to_bytes(4, "little") + s.encode()
    name = lambda module, name: f"c{module}\n{name}\n".encode()
    storage = tuple_(
        text("storage"), name("torch", "FloatStorage"), text("0"), text("cpu"), number(raw.size)
    )
    shape = tuple_(*map(number, size or fields.shape))
    arguments = tuple_(storage + b"Q", number(0), shape, tuple_(*map(number, strides)), b"\x89")
    tensor = name("torch._utils", function) + arguments + b"R"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}" + text("y") + tensor + b"s.")
        archive.writestr("archive/data/0", raw.tobytes())
    return fields


@pytest.mark.parametrize("strides", [(16, 4, 1), (1, 3, 12), (16, 1, 4)])
def test_fields_are_read_by_their_strides(tmp_path, strides):
    path = tmp_path / "fields.pt"
    want = written(path, strides)
    got = files.load_tensors(path)["y"]
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, want)
    # By shape alone the numbers are the same, their order is not.
    with zipfile.ZipFile(path) as archive:
        raw = np.frombuffer(archive.read("archive/data/0"), np.float32)
    assert raw.sum() == want.sum()
    assert np.array_equal(raw.reshape(want.shape), want) == (strides == (16, 4, 1))


def test_a_file_that_calls_something_else_or_reaches_too_far_is_refused(tmp_path):
    path = tmp_path / "fields.pt"
    written(path, (16, 4, 1), function="_rebuild_sparse_tensor")
    with pytest.raises(ValueError, match=r"reads tensors of BoolStorage.*not torch\._utils"):
        files.load_tensors(path)
    written(path, (16, 4, 1), size=(4, 4, 4))
    with pytest.raises(ValueError, match="reaches beyond its 48 numbers"):
        files.load_tensors(path)

"""The bytes of a checkpoint.

The first line names the format, the length of a header and its checksum. The header is JSON: path,
dtype and shape of each leaf, and the options of the scalings. Then come the leaves, each as the
plain bytes of its array and their checksum. Nothing in a file is executed when it is read.
"""

import contextlib
import json
import math
import os
import secrets
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._cast import convert
from .._tree import is_key


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


_MAGIC = "mpx_pde checkpoint"
_VERSION = 2
_FIRST = b'{"format": "mpx_pde checkpoint 1"'
_CHECKSUM = 4

_ARRAYS = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct


def is_data(x: Any) -> bool:
    """Whether a leaf is saved: arrays, their shapes, and Python numbers."""
    return isinstance(x, _ARRAYS | bool | int | float | complex)


class Entry(NamedTuple):
    """What must be the same in the file and in the state that it is restored into."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, x: Any) -> "Entry":
        dtype = str(x.dtype) if isinstance(x, _ARRAYS) else type(x).__name__
        return cls(dtype, tuple(np.shape(x)))


# --- Writing ---------------------------------------------------------------------------------


def _content(x: Any) -> bytes:
    if is_key(x):
        x = jax.random.key_data(x)
    if isinstance(x, _ARRAYS):
        return np.asarray(x).tobytes()
    if isinstance(x, bool | int):
        return str(int(x)).encode()  # of any size
    return struct.pack("<dd", complex(x).real, complex(x).imag)


def _size(x: Any) -> int:
    """The length of `_content`, without moving arrays off their device."""
    if is_key(x):
        x = jax.eval_shape(jax.random.key_data, x)
    if isinstance(x, _ARRAYS):
        return math.prod(x.shape) * x.dtype.itemsize
    return len(_content(x))


def write(file: BinaryIO, leaves: Mapping[str, Any], scalings: Mapping[str, Any]) -> None:
    entries = [[where, *Entry.of(x), _size(x), _implementation(x)] for where, x in leaves.items()]
    header = json.dumps({"leaves": entries, "scalings": scalings}).encode()
    file.write(f"{_MAGIC} {_VERSION} {len(header)} {zlib.crc32(header):08x}\n".encode())
    file.write(header)
    for x in leaves.values():
        content = _content(x)
        file.write(content)
        file.write(zlib.crc32(content).to_bytes(_CHECKSUM, "little"))


def _implementation(x: Any) -> str | None:
    """The name of a PRNG key's implementation, where it has one that can be looked up."""
    name = jax.random.key_impl(x) if is_key(x) else None
    return name if isinstance(name, str) else None


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which becomes `path` as a whole, or not at all."""
    for left in path.parent.glob(f".{_escaped(path.name)}.*.partial"):
        _remove_if_abandoned(left)
    while True:
        # A name of its own: another process may be writing to the same path.
        partial = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
        file = open(partial, "xb")  # noqa: SIM115 (closed below, when it is known to be kept)
        _lock(file, wait=True)
        # Between its making and its locking, another process may have taken it for abandoned.
        if partial.exists():
            break
        file.close()
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            # Renamed before it is unlocked, which closing does; Windows wants it closed first.
            if fcntl is not None:
                os.replace(partial, path)
        if fcntl is None:
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _escaped(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _lock(file: Any, wait: bool) -> bool:
    """Whether the file is locked now, as far as the system knows of locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # held by another, or a file system without locks
        return False
    return True


def _remove_if_abandoned(partial: Path) -> None:
    """Removes what a killed process left: a lock ends with the process that holds it."""
    with contextlib.suppress(OSError), open(partial, "rb") as file:
        if _lock(file, wait=False):
            partial.unlink()


# --- Reading ---------------------------------------------------------------------------------


def opened(
    file: BinaryIO, path: str | os.PathLike, call: str
) -> tuple[dict[str, Entry], dict[str, Any], Callable[[str, Any], Any]]:
    """What is in a file: its leaves, the options of its scalings, and a function that reads the
    leaf of a given path into the kind of a counterpart."""
    name = os.fspath(path)
    line = file.readline(100)
    first = line.split(b" ")
    if not line.startswith(_MAGIC.encode()) or len(first) != 5:
        old = "in the format of an earlier version" if _FIRST in line else "no file"
        raise ValueError(f"`{call}`: {name!r} is {old} of `save_checkpoint`.")
    damaged = f"`{call}`: {name!r} is damaged"
    hint = "Go back to an earlier checkpoint."
    try:
        version, length, checksum = int(first[2]), int(first[3]), int(first[4], 16)
    except ValueError as e:
        raise ValueError(f"{damaged}: its first line is {line!r}. {hint}") from e
    if version != _VERSION:
        raise ValueError(
            f"`{call}`: {name!r} has version {version} of the format, but this version of the "
            f"library reads {_VERSION}."
        )
    size = os.fstat(file.fileno()).st_size
    header = file.read(length) if 0 <= length <= size else b""
    if len(header) != length or zlib.crc32(header) != checksum:
        raise ValueError(f"{damaged}: its header is not what was written. {hint}")
    header = json.loads(header)
    entries, implementations, places = {}, {}, {}
    end = file.tell()
    for where, dtype, shape, length, implementation in header["leaves"]:
        entries[where] = Entry(dtype, tuple(shape))
        implementations[where] = implementation
        places[where] = end, length
        end += length + _CHECKSUM
    if size != end:
        raise ValueError(f"{damaged}: it has {size} bytes, and {end} were written. {hint}")

    def read(where, like):
        start, length = places[where]
        file.seek(start)
        content, checksum = file.read(length), file.read(_CHECKSUM)
        if zlib.crc32(content) != int.from_bytes(checksum, "little"):
            raise ValueError(f"{damaged}: the array at {where} is not what was written. {hint}")
        return _value(content, like, implementations[where], call)

    return entries, header["scalings"], read


def _value(content: bytes, like: Any, implementation: str | None, call: str) -> Any:
    if is_key(like):
        data = jax.eval_shape(jax.random.key_data, like)
        data = np.frombuffer(content, data.dtype).reshape(data.shape)
        new = jax.random.wrap_key_data(
            jnp.asarray(data), impl=implementation or jax.random.key_impl(like)
        )
    elif isinstance(like, np.generic):
        return np.frombuffer(content, like.dtype)[0]
    elif isinstance(like, np.ndarray):
        return np.frombuffer(content, like.dtype).reshape(like.shape).copy()
    elif isinstance(like, jax.Array | jax.ShapeDtypeStruct):
        # A copy: a CPU's JAX may go on using the memory that it is given.
        new = jnp.array(np.frombuffer(content, like.dtype).reshape(like.shape))
        if new.dtype != like.dtype:
            raise ValueError(
                f"`{call}`: `like` asks for {like.dtype.name}, which JAX makes {new.dtype.name} "
                "of. Set `jax_enable_x64` as in the run that saved it."
            )
        new = convert(new, like.dtype, bool(getattr(like, "weak_type", False)))
    elif isinstance(like, bool | int):
        return type(like)(int(content))
    else:
        number = complex(*struct.unpack("<dd", content))
        return type(like)(number if isinstance(like, complex) else number.real)
    sharding = getattr(like, "sharding", None)
    return new if sharding is None else jax.device_put(new, sharding)

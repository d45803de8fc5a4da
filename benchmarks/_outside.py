"""The public files that benchmarks compare with. The project contains none of them."""

import argparse
import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from ._report import Report


class Source(NamedTuple):
    """Where a file is from. All are under the MIT licence."""

    repository: str
    path: str
    commit: str
    sha256: str


_PINNS, _PINNACLE = "maziarraissi/PINNs", "i207M/PINNacle"
_NEURALOP = "neuraloperator/neuraloperator", "neuralop/data/datasets/data"
SOURCES = {
    "burgers_shock.mat": Source(
        *(_PINNS, "appendix/Data", "93d3f063"),
        "f4d11e6798b8d29b6829984952b04adcc470d9bf70dd7e56c7985cd8e316c4bf",
    ),
    "AC.mat": Source(
        *(_PINNS, "main/Data", "93d3f063"),
        "266e97eedd9ef543d7f6d370fa5f06388761aa7da2b97e476562dcf1d644a175",
    ),
    "KdV.mat": Source(
        *(_PINNS, "main/Data", "93d3f063"),
        "7c04e89a0c65692105dbe7fc8ba52cb90ce01a64e47e995a5736fbf1c06be220",
    ),
    "burgers1d.dat": Source(
        *(_PINNACLE, "ref", "6f8d69c9"),
        "3b6d31d895022b397330091ace59220167f0918c2ed616ed2ae5b1458eede5eb",
    ),
    "lid_driven_a4.dat": Source(
        *(_PINNACLE, "ref", "6f8d69c9"),
        "9920232758297eee09404d66a914522cc8285ea3a4d7a05f5e776c5fcac852f3",
    ),
    "poisson_boltzmann2d.dat": Source(
        *(_PINNACLE, "ref", "6f8d69c9"),
        "439354e99e9d749c3ff1ae44065de502ac53e96479a74546e27b790802806578",
    ),
    "darcy_train_16.pt": Source(
        *(*_NEURALOP, "932f50a2"),
        "0be662acdb1dab7dfd1a1da0b140e97f75cc94f98a14edcf768abe6968b3b418",
    ),
    "darcy_test_16.pt": Source(
        *(*_NEURALOP, "932f50a2"),
        "d2b19af9d4a6ae04ba2de54b8ecccc8b89766472faf6ce7f506c0b2a60f69a4c",
    ),
    "darcy_test_32.pt": Source(
        *(*_NEURALOP, "932f50a2"),
        "bcbd10622373e94df84a17fcdb72ac4317d76e024c2499d21fd1fd34d0742cfd",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        type=Path,
        default=os.environ.get("MPX_PDE_OUTSIDE"),
        help="folder with the public files; by default $MPX_PDE_OUTSIDE",
    )


def outside_file(report: Report, folder: str | Path | None, name: str) -> Path | None:
    """Returns the path of a public file; if it is missing, prints a note and returns `None`.

    **Raises:** `ValueError` if it is another file than that of `SOURCES`.
    """
    source = SOURCES[name]
    path = Path(folder) / name if folder else None
    if path is None or not path.exists():
        where = f"github.com/{source.repository}, {source.path}, commit {source.commit}"
        report.note(f"Left out: {name} ({where}) is not in the folder given by `--data`.")
        return None
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != source.sha256:
        raise ValueError(f"{path} has the sha256 {found}, not {source.sha256}.")
    return path

"""Are the references right? Against solutions that others published, and against finer selves.

    python -m benchmarks outside --data DIR     # or MPX_PDE_OUTSIDE=DIR

`DIR` holds public files, of which this project contains none; `_outside.py` names the source, the
commit and the sha256 of each. A file that is not there is left out. Solutions are compared at
shared grid points. Where a published solution has nodes of its own, ours is evaluated there by its
series, or by splines along a line on which both have values. Every numerical reference is also
compared with itself on a finer grid (or, where that takes hours, on a coarser one, which tells more
than its error), or with a bound of its error.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import exponax
import jax
import jax.numpy as jnp
import numpy as np
from scipy.io import loadmat

from examples.problems import (
    _finite_volumes,
    allen_cahn,
    back_step,
    burgers_1d,
    cavity,
    finned_block_3d,
    fpga_laminar,
    gray_scott,
    heat_sink,
    kdv_cosine,
    kuramoto_sivashinsky,
    navier_stokes_long_time,
    poisson_boltzmann,
    poisson_holes,
    poisson_subdomains,
    references,
    three_fin_3d,
    wave_heterogeneous,
)

from . import _outside
from ._outside import SOURCES, outside_file
from ._report import Report


def relative(got: np.ndarray, want: np.ndarray) -> float:
    """Returns the relative L2 error over the values that both know."""
    known = np.isfinite(got) & np.isfinite(want)
    return float(np.linalg.norm((got - want)[known]) / np.linalg.norm(want[known]))


# --- Published solutions ---------------------------------------------------------------------


def burgers(path: Path) -> dict[str, Any]:
    file = loadmat(path)
    t, x = file["t"].ravel(), file["x"].ravel()
    return {"error": relative(burgers_1d.solution(t, x[:, None]), file["usol"]), "at": "all points"}


def pinnacle_burgers(path: Path) -> dict[str, Any]:
    """Compares with finite elements on 101 nodes, too few for the shock."""
    x, *u = np.loadtxt(path, comments="%").T
    ours = burgers_1d.solution(np.linspace(0, 1, len(u))[:, None], x)
    return {"error": relative(ours, np.stack(u)), "at": "all nodes"}


def allen_cahn_error(path: Path) -> dict[str, Any]:
    """Compares from t = 0.25 on: earlier, the file has an error of its own at the kink of the
    initial values."""
    file = loadmat(path)["uu"][::2, ::2].T
    ours = allen_cahn.reference().values.reshape(101, 257)[:, :-1]
    early = max(relative(ours[i], file[i]) for i in range(1, 25))
    told = {"error": relative(ours[25:], file[25:]), "at": "shared points, t ≥ 0.25"}
    return {**told, "elsewhere": early, "where": "largest before"}


def kdv(path: Path) -> dict[str, Any]:
    """Compares with every fourth time of the file."""
    ours = kdv_cosine.reference().values.reshape(51, 512)
    return {"error": relative(ours, loadmat(path)["uu"].T[::4]), "at": "51 times"}


def cavity_lines(path: Path) -> dict[str, Any]:
    """Compares on the center lines, where the file has 101 nodes each."""
    x, y, u, v, _ = np.loadtxt(path, comments="%").T
    middle, level = np.isclose(x, 0.5), np.isclose(y, 0.5)
    ours = references.center_lines(y[middle], n=128, lid="parabola")[0]
    other = references.center_lines(x[level], n=128, lid="parabola")[1]
    error = relative(np.r_[ours, other], np.r_[u[middle], v[level]])
    return {"error": error, "at": "center lines"}


def boltzmann(path: Path) -> dict[str, Any]:
    *points, u = np.loadtxt(path, comments="%").T
    ours = poisson_boltzmann.solution()(np.stack(points, axis=1))
    return {"error": relative(ours, u), "at": "all nodes"}


FILES: dict[str, tuple[str, str, Callable[[Path], dict[str, Any]]]] = {
    "burgers_shock.mat": ("burgers_1d", "Burgers' equation", burgers),
    "burgers1d.dat": ("burgers_1d", "Burgers' equation", pinnacle_burgers),
    "AC.mat": ("allen_cahn", "Allen–Cahn equation", allen_cahn_error),
    "KdV.mat": ("kdv_cosine", "Korteweg–de Vries, from a cosine", kdv),
    "lid_driven_a4.dat": ("cavity_parabolic_lid", "Cavity, parabolic lid", cavity_lines),
    "poisson_boltzmann2d.dat": ("poisson_boltzmann", "Poisson–Boltzmann", boltzmann),
}


def marchi(n: int) -> float:
    """Compares our finite volumes with thirty published values."""
    lines = references.center_lines(references.MARCHI_S, n=n)
    return relative(np.r_[lines], np.r_[references.MARCHI_U, references.MARCHI_V])


def exponax_ks() -> float:
    """Compares with Exponax, which solves the equation on its own."""
    file = kuramoto_sivashinsky
    n, steps = 256, 3000
    with jax.enable_x64(True):
        step: Any = exponax.stepper.generic.GeneralConvectionStepper(
            *(1, file.TURN, n, file.END / steps),
            linear_coefficients=(0.0, 0.0, -file.B, 0.0, -file.C),
            convection_scale=file.A,
            order=4,
        )
        x = jnp.arange(n) * file.TURN / n
        start = (jnp.cos(x) * (1 + jnp.sin(x)))[None]
        ours = file.reference(n, 600).values.reshape(31, n)[-1]
        advance: Any = exponax.repeat(step, steps)
        return relative(ours, np.asarray(advance(start))[0])


PUBLISHED = {
    **{
        name: (
            f"Cavity, {n}² cells",
            "Marchi, Suero & Araki (2009)",
            "30 values",
            partial(marchi, n),
        )
        for name, n in {"cavity": 128, "cavity_64": 64}.items()
    },
    "kuramoto_sivashinsky": (
        *("Kuramoto–Sivashinsky", f"Exponax {version('exponax')}", "t = 0.06"),
        exponax_ks,
    ),
}


# --- Finer selves ----------------------------------------------------------------------------


def blocks(u: np.ndarray, dims: int) -> np.ndarray:
    """Returns the means over cells of twice the size along the first axes."""
    shape = [k for n in u.shape[:dims] for k in (n // 2, 2)]
    return u.reshape(*shape, *u.shape[dims:]).mean(axis=tuple(range(1, 2 * dims, 2)))


def plane(file: Any, cells: int) -> float:
    """Compares channels by finite volumes, the finer by means over blocks."""
    both = []
    for n in (cells, 2 * cells):
        points, values = file.reference(n)
        shape = [len(np.unique(points[:, i])) for i in (0, 1)]
        both.append(values.reshape(*shape, -1))
    return relative(both[0], blocks(both[1], 2))


def channel_3d(file: Any) -> float:
    """Compares 10 cells a unit with the 20 of the reference, by means over blocks."""
    coarse, fine = (_finite_volumes.reference(file.CHANNEL, n) for n in (10, 20))
    shape = [len(np.unique(np.round(fine.points[:, i], 9))) for i in range(3)]
    wide = fine.values.reshape(*shape, -1)
    return relative(coarse.values.reshape(*(n // 2 for n in shape), -1), blocks(wide, 3))


def thinned(file: Any, *size: int, shape: tuple[int, ...], every: int = 2) -> float:
    """Compares with twice the points and steps; `shape` is that of the finer solution."""
    coarse, fine = file.reference(*size), file.reference(*(2 * n for n in size))
    at = (slice(None), *(slice(None, None, every),) * (len(shape) - 1))
    return relative(coarse.values.ravel(), fine.values.reshape(*shape)[at].ravel())


def sixteen_blocks() -> float:
    coarse, fine = (poisson_subdomains.reference(n).values for n in (128, 256))
    return relative(coarse.reshape(128, 128), blocks(fine.reshape(256, 256), 2))


def spots() -> float:
    coarse = gray_scott.reference(128, 200).values.reshape(6, 64, 64, 2)
    return relative(
        coarse, gray_scott.reference(256, 400).values.reshape(6, 128, 128, 2)[:, ::2, ::2]
    )


def conduction() -> float:
    coarse, fine = (finned_block_3d.reference(n) for n in (40, 80))
    cells = np.full((80, 80, 56), np.nan)
    cells[tuple(np.floor(fine.points.T * 80).astype(int))] = fine.values
    at = tuple(np.floor(coarse.points.T * 40).astype(int))
    return relative(coarse.values, blocks(cells, 3)[at])


def vorticity() -> float:
    coarse = navier_stokes_long_time.reference(64, 0.01).values.reshape(7, 32, 32, 3)
    fine = navier_stokes_long_time.reference(128, 0.005).values.reshape(7, 64, 64, 3)
    return relative(coarse, fine[:, ::2, ::2])


def turbulent_cavity() -> float:
    s, *ours = cavity.center_line_reference(True)
    return relative(np.r_[tuple(ours)], np.r_[references.center_lines(s, n=128, turbulence=True)])


def parabolic_cavity() -> float:
    s = references.MARCHI_S
    two = (np.r_[references.center_lines(s, n=n, lid="parabola")] for n in (80, 160))
    return relative(*two)


CENTER_LINES = "80² cells, center lines"
FINER: dict[str, tuple[str, str, Callable[[], float]]] = {
    "allen_cahn": (
        *("Allen–Cahn equation", "4,096 points, 800 steps"),
        lambda: thinned(allen_cahn, 4096, 800, shape=(101, 257), every=1),
    ),
    "kuramoto_sivashinsky": (
        *("Kuramoto–Sivashinsky", "256 points, 600 steps"),
        lambda: thinned(kuramoto_sivashinsky, 256, 600, shape=(31, 512)),
    ),
    "gray_scott": ("Gray–Scott", "128² points, 200 steps", spots),
    "navier_stokes_long_time": ("Navier–Stokes, long time", "64² points, steps of 0.01", vorticity),
    "wave_heterogeneous": (
        *("Wave, varying speed", "2,000 cells"),
        lambda: thinned(wave_heterogeneous, 2000, shape=(26, 101), every=1),
    ),
    "poisson_subdomains": ("Poisson in 16 blocks", "128² cells", sixteen_blocks),
    "cavity_parabolic_lid": ("Cavity, parabolic lid", CENTER_LINES, parabolic_cavity),
    "cavity_zero_equation": ("Cavity, zero equation", "64² cells, center lines", turbulent_cavity),
    "finned_block_3d": ("Finned block, 3D", "cells of 1/40", conduction),
}
COARSER: dict[str, tuple[str, str, Callable[[], float]]] = {
    "back_step": ("Backward-facing step", "40 cells over the height", lambda: plane(back_step, 20)),
    "heat_sink": ("Heat sink, 2D", "80 cells over the height", lambda: plane(heat_sink, 40)),
    "three_fin_3d": ("Three fins, 3D", "cells of 1/20 and 1/40", lambda: channel_3d(three_fin_3d)),
    "fpga_laminar": ("FPGA heat sink", "cells of 1/20 and 1/40", lambda: channel_3d(fpga_laminar)),
}
BOUNDED: dict[str, tuple[str, Callable[[], float]]] = {
    "poisson_holes": ("Laplace with four holes", lambda: poisson_holes.solution()[1]),
    "poisson_boltzmann": (
        "Poisson–Boltzmann",
        lambda: poisson_boltzmann.off(poisson_boltzmann.solution()),
    ),
}


def alone(measure: Callable[[], float]) -> dict[str, float]:
    return {"error": measure()}


def checks(
    report: Report, folder: str | None
) -> Iterator[tuple[dict[str, Any], Callable[[], Any]]]:
    """Yields each check: what is known before it is made, and a function that makes it."""
    for name, (problem, title, compare) in FILES.items():
        path = outside_file(report, folder, name)
        if path is not None:
            source = SOURCES[name]
            against = f"{source.repository.split('/')[1]}, `{name}`"
            told = {"against": against, "commit": source.commit, "sha256": source.sha256}
            yield (
                {"problem": problem, "title": title, "kind": "published", **told},
                partial(compare, path),
            )
    for problem, (title, against, at, measure) in PUBLISHED.items():
        told = {"kind": "published", "against": against, "at": at}
        yield {"problem": problem, "title": title, **told}, partial(alone, measure)
    both = [("twice", FINER), ("half", COARSER)]
    several = ((how, *check) for how, checks in both for check in checks.items())
    for how, problem, (title, size, measure) in several:
        told = {"kind": "finer", "against": f"itself, {how} as fine", "at": size}
        yield {"problem": problem, "title": title, **told}, partial(alone, measure)
    for problem, (title, bound) in BOUNDED.items():
        told = {"kind": "bound", "against": "its boundary values, a bound", "at": "the boundary"}
        yield {"problem": problem, "title": title, **told}, partial(alone, bound)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _outside.add_arguments(parser)
    parser.add_argument("--problems", nargs="+", help="by default all")
    parser.add_argument("--resume", action="store_true", help="keep the checks in the file")


def run(report: Report, args: argparse.Namespace) -> None:
    if args.resume:
        report.resume("checks")
    for key, check in checks(report, args.data):
        wanted = args.problems is None or key["problem"] in args.problems
        if wanted and not (args.quick and key["kind"] == "finer"):
            for _ in report.missing("checks", [key]):
                found = report.record("checks", **key, **check())
                print(f"{key['title']}, {key['against']}: {found['error']:.1e}", flush=True)

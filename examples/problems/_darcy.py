"""Darcy flow through a random medium of two materials: training data for operators.

The data are the pressure u of

    −∇·(a ∇u) = f   on the unit square,   u = 0 on its boundary,   f = 1

for coefficients a = 12 where a Gaussian random field N(0, (−Δ + 9)^−2) is positive and a = 3
elsewhere (Li et al., Fourier neural operator, 2021, appendix A.3). The field has zero Neumann
boundary values and no mean, so each material takes about half of the square.

The grid consists of the points (i/n, j/n). The arrays keep 0 ≤ i, j < n, so every second point
gives the grid of n/2; the boundary values at i = n are zero anyway.
"""

from typing import Any

import numpy as np
import scipy.sparse
import scipy.sparse.linalg
from jaxtyping import Float, Float32, Float64

from ._cache import cached


LOW, HIGH = 3.0, 12.0
MODES = 64  # cosines per axis in the random field, for any grid


def random_field(rng: np.random.Generator, resolution: int) -> Float64[np.ndarray, "points points"]:
    """Draws a sample of N(0, (−Δ + 9)^−2) on all (n + 1)² points, including the boundary.

    The random numbers belong to cosines, not to grid points: the same `rng` gives the same
    function at every resolution.
    """
    k = np.arange(MODES)
    cosines = np.cos(np.pi * np.outer(np.arange(resolution + 1) / resolution, k))
    amplitudes = 1 / (np.pi**2 * (k[:, None] ** 2 + k**2) + 9)
    # The basis functions have norm √½ per axis, except the constant.
    amplitudes *= np.outer(np.where(k == 0, 1, np.sqrt(2)), np.where(k == 0, 1, np.sqrt(2)))
    amplitudes[0, 0] = 0
    return cosines @ (amplitudes * rng.standard_normal((MODES, MODES))) @ cosines.T


def solve(
    a: Float[np.ndarray, "points points"], f: Float[np.ndarray, "points points"]
) -> Float64[np.ndarray, "points points"]:
    """Returns the solution u on all (n + 1)² points of the unit square, from a and f there.

    Uses finite volumes around the points, in float64. The flux between two neighbors passes two
    halves of different material in series, whose conductivity is the harmonic mean of both. The
    order is two, also where a jumps halfway between two points.
    """
    a = np.asarray(a, np.float64)
    n = a.shape[0] - 1
    ax = 2 / (1 / a[1:] + 1 / a[:-1])[:, 1:-1]  # from (i, j) to (i + 1, j)
    ay = 2 / (1 / a[:, 1:] + 1 / a[:, :-1])[1:-1]  # from (i, j) to (i, j + 1)
    diagonal = ax[1:] + ax[:-1] + ay[:, 1:] + ay[:, :-1]
    x = -ax[1:-1].ravel()
    y = np.pad(-ay[:, 1:-1], ((0, 0), (0, 1))).ravel()[:-1]  # no entry from one row to the next
    offsets: Any = [0, n - 1, 1 - n, 1, -1]
    diagonals = [diagonal.ravel(), x, x, y, y]
    matrix = scipy.sparse.diags_array(diagonals, offsets=offsets, format="csc")
    right = np.asarray(f, np.float64)[1:-1, 1:-1].ravel() / n**2
    inner = scipy.sparse.linalg.splu(matrix, permc_spec="MMD_AT_PLUS_A").solve(right)
    return np.pad(inner.reshape(n - 1, n - 1), 1)


def _make(*, samples: int, resolution: int, seed: int) -> dict[str, np.ndarray]:
    shape = (samples, resolution, resolution)
    data = {"a": np.empty(shape, np.float32), "u": np.empty(shape, np.float32)}
    f = np.ones((resolution + 1, resolution + 1))
    for i, rng in enumerate(np.random.default_rng(seed).spawn(samples)):
        a = np.where(random_field(rng, resolution) >= 0, HIGH, LOW)
        data["a"][i] = a[:-1, :-1]
        data["u"][i] = solve(a, f)[:-1, :-1]
    return data


def darcy_data(
    samples: int, resolution: int, *, seed: int
) -> tuple[Float32[np.ndarray, "samples n n"], Float32[np.ndarray, "samples n n"]]:
    """Returns coefficients a and solutions u, from the cache if they were made before.

    Sample i is the same function for any `samples` and `resolution`.
    """
    data = cached("darcy", _make, version=1, samples=samples, resolution=resolution, seed=seed)
    return data["a"], data["u"]

"""Solutions of Δu = k² u in a square with round holes, to ten digits, by series and sources."""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float
from scipy.special import ive, kv, kve


Holes = Sequence[tuple[float, float, float]]


def screened(
    boundary: Float[np.ndarray, "n 2"],
    values: Float[np.ndarray, " n"],
    holes: Holes,
    *,
    k: float,
    order: int = 30,
    sources: int = 40,
) -> Callable[[Float[np.ndarray, "m 2"]], Float[np.ndarray, " m"]]:
    """Computes the solution with these boundary values on the square −1 ≤ x, y ≤ 1 with holes.

    The solution is a sum of Bessel functions I_n of the distance from the middle and K_n of that
    from each hole, and of sources outside of the corners, where the solution is not smooth. The
    distances of these sources to their corner fall exponentially (Gopal and Trefethen, *Solving
    Laplace problems with corner singularities via rational functions*, 2019). Coefficients are
    fitted to the values by least squares. By the maximum principle, the error is largest at the
    boundary.

    **Arguments:**

    - `boundary`, `values`: points on the whole boundary, dense near the corners, and values there.
    - `holes`: x, y and radius of each hole.
    - `order`: the order of the series about a hole; a third of that about the middle.
    - `sources`: the number of places of sources near each corner.
    """
    distances = np.exp(-3 * (np.sqrt(sources) - np.sqrt(np.arange(1, sources + 1))))
    corners = np.asarray([(x, y) for x in (-1, 1) for y in (-1, 1)])

    def around(points, center, radius, family, top):
        z = (points - center) @ np.asarray([1, 1j])
        r, angle = np.abs(z), np.angle(z)
        # Relative to the values at the radius. `ive` and `kve` are scaled by an exponential.
        decay = np.exp((1 if family is ive else -1) * k * (r - radius))
        for n in range(top + 1):
            radial = family(n, k * r) / family(n, k * radius) * decay
            yield radial * np.cos(n * angle)
            if n:
                yield radial * np.sin(n * angle)

    def basis(points):
        columns = list(around(points, (0, 0), np.sqrt(2), ive, 10 * order // 3))
        for x, y, radius in holes:
            columns += around(points, (x, y), radius, kve, order)
        for corner in corners:
            for distance in distances:
                apart = points - corner * (1 + distance / np.sqrt(2))
                r = np.linalg.norm(apart, axis=1)
                along = -apart @ corner / np.sqrt(2) / r  # cosine of the angle from the diagonal
                columns += [kv(0, k * r), distance * kv(1, k * r) * along]
        return np.stack(columns, axis=1)

    matrix = basis(boundary)
    sizes = np.abs(matrix).max(axis=0)
    factors = np.linalg.lstsq(matrix / sizes, values, rcond=1e-14)[0] / sizes
    return lambda points: basis(points) @ factors


def boundary_of(holes: Holes, edge: int, around: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns points on the edges of the square, dense near its corners, and around the holes."""
    s = np.unique(np.tanh(np.linspace(-14, 14, edge)))
    sides = [np.stack([s, np.full_like(s, end)], axis=1) for end in (-1.0, 1.0)]
    angles = np.linspace(0, 2 * np.pi, around, endpoint=False)
    ring = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    rings = [np.asarray((x, y)) + radius * ring for x, y, radius in holes]
    return np.concatenate([*sides, *(side[:, ::-1] for side in sides)]), np.concatenate(rings)

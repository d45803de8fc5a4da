"""Float64 reference solutions for problems of this folder without a known solution.

A test verifies each, by refinement or by a bound on its error.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import exponax
import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
import scipy.sparse.linalg
from jaxtyping import Array, Bool, Complex, Float

from ._cache import cached as cached
from ._cavity_reference import (
    MARCHI_S as MARCHI_S,
    MARCHI_U as MARCHI_U,
    MARCHI_V as MARCHI_V,
    cavity_fields as cavity_fields,
    center_lines as center_lines,
    mixing_length as mixing_length,
)
from ._darcy import darcy_data as darcy_data
from ._plane_channel import channel as channel
from ._screened import boundary_of as boundary_of, screened as screened


# --- Laplace ---------------------------------------------------------------------------------


def harmonic(
    boundary: Float[np.ndarray, "n 2"],
    values: Float[np.ndarray, " n"],
    holes: Sequence[tuple[float, float, float]],
    *,
    order: int = 40,
) -> tuple[Callable[[np.ndarray], np.ndarray], float]:
    """Computes a harmonic function with these boundary values on a domain with round holes.

    The function is a polynomial of z plus, for each hole, a logarithm and a Laurent series about
    its center, fitted to the values by least squares (Trefethen, *Series solution of Laplace
    problems*, 2018). By the maximum principle, its error is largest at the boundary.

    **Arguments:**

    - `boundary`, `values`: points on the whole boundary, and the values there.
    - `holes`: x, y and radius of each hole.
    - `order`: the order of the polynomial and the series.

    **Returns:** the function, of points `[n, 2]`, and its largest error at the boundary points.
    """

    def basis(points):
        z = points[:, 0] + 1j * points[:, 1]
        columns = [np.ones(len(z))]
        powers = [z[:, None] ** np.arange(1, order + 1)]
        for x, y, radius in holes:
            apart = z - (x + 1j * y)
            columns.append(np.log(np.abs(apart)))
            powers.append((radius / apart[:, None]) ** np.arange(1, order // 2 + 1))
        both: Any = np.concatenate(powers, axis=1)
        return np.concatenate([np.stack(columns, axis=1), both.real, both.imag], axis=1)

    matrix = basis(boundary)
    sizes = np.abs(matrix).max(axis=0)
    factors = np.linalg.lstsq(matrix / sizes, values, rcond=1e-14)[0] / sizes
    return lambda p: basis(p) @ factors, float(np.abs(matrix @ factors - values).max())


# --- Diffusion -------------------------------------------------------------------------------


def diffusion(a: Float[np.ndarray, "n n"], f: Float[np.ndarray, "n n"]) -> Float[np.ndarray, "n n"]:
    """Solves −∇·(a ∇u) = f on the unit square, u = 0 at its edges, at the centers of n² cells.

    Uses second-order finite volumes: a may jump between cells, and a flux between two cells passes
    through half a cell of each.
    """
    n = len(a)

    def along(axis):
        """Returns conductivities of the faces across an axis, including those at the edges."""
        a_ = np.moveaxis(a, axis, 0)
        inner = 2 / (1 / a_[1:] + 1 / a_[:-1])
        return np.moveaxis(np.concatenate([2 * a_[:1], inner, 2 * a_[-1:]]), 0, axis)

    x, y = along(0), along(1)
    index = np.arange(n * n).reshape(n, n)
    diagonal = x[1:] + x[:-1] + y[:, 1:] + y[:, :-1]
    pairs = [(index[1:], index[:-1], x[1:-1]), (index[:, 1:], index[:, :-1], y[:, 1:-1])]
    rows = np.concatenate([index.ravel(), *(z.ravel() for p, q, _ in pairs for z in (p, q))])
    columns = np.concatenate([index.ravel(), *(z.ravel() for p, q, _ in pairs for z in (q, p))])
    entries = np.concatenate([diagonal.ravel(), *(-k.ravel() for *_, k in pairs for _ in (0, 1))])
    matrix: Any = scipy.sparse.csc_matrix((entries, (rows, columns)), (n * n, n * n))
    return np.asarray(scipy.sparse.linalg.spsolve(matrix, f.ravel() / n**2)).reshape(n, n)


def conduction(
    solid: Bool[np.ndarray, "nx ny nz"], heat: Float[np.ndarray, "nx ny"], h: float
) -> Float[np.ndarray, "nx ny nz"]:
    """Solves ΔT = 0 in a solid of cells of size `h`, by second-order finite volumes.

    `heat` comes in through the lowest cells, and ∂T/∂n = −T at all other faces. The result is zero
    outside the solid.
    """
    index = np.full(solid.shape, -1)
    index[solid] = np.arange(solid.sum())
    diagonal, right = np.zeros(solid.shape), np.zeros(solid.shape)
    rows, columns = [], []
    for axis in range(3):
        low, high = np.moveaxis(index, axis, 0)[:-1], np.moveaxis(index, axis, 0)[1:]
        both = (low >= 0) & (high >= 0)
        rows += [low[both], high[both]]
        columns += [high[both], low[both]]
        for end in (0, 1):
            next_ = np.roll(np.pad(solid, 1), 1 - 2 * end, axis)[1:-1, 1:-1, 1:-1]
            # To the next cell; or through half a cell and the surface, in series.
            lost = np.where(next_, 1.0, 1 / (h / 2 + 1) * h)
            if (axis, end) == (2, 0):
                lost[:, :, 0] = 0.0
                right[:, :, 0] += heat * h
            diagonal += lost
    row, column = np.concatenate(rows), np.concatenate(columns)
    size = int(solid.sum())
    links = scipy.sparse.csr_matrix((-np.ones(len(row)), (row, column)), (size, size))
    matrix = links + scipy.sparse.diags_array(diagonal[solid])
    found, failed = scipy.sparse.linalg.cg(matrix, right[solid], rtol=1e-10, maxiter=10_000)
    if failed:
        raise ValueError("`conduction` did not converge.")
    out = np.zeros(solid.shape)
    out[solid] = found
    return out


# --- Waves -----------------------------------------------------------------------------------


def wave(
    speed: Callable[[np.ndarray], np.ndarray],
    start: Callable[[np.ndarray], np.ndarray],
    *,
    time: float,
    cells: int,
    frames: int,
) -> Float[np.ndarray, "frames+1 cells+1"]:
    """Solves u_tt = c(x)² u_xx from rest on 0 ≤ x ≤ 1 with fixed ends.

    Uses central differences of second order in both, and returns u at `frames` + 1 times from 0 to
    `time`.
    """
    x = np.linspace(0, 1, cells + 1)
    c = speed(x)
    steps = frames * int(np.ceil(time * cells * c.max() / 0.9 / frames))
    factor = (c * time / steps * cells) ** 2

    def curved(u):
        return factor * np.pad(u[2:] - 2 * u[1:-1] + u[:-2], 1)

    before = start(x)
    now = before + curved(before) / 2
    found = [before]
    for step in range(1, steps + 1):
        if step % (steps // frames) == 0:
            found.append(now)
        before, now = now, 2 * now - before + curved(now)
    return np.stack(found)


# --- Periodic fields of one dimension ---------------------------------------------------------


def etdrk4(
    u: Float[np.ndarray, " x"],
    linear: Float[np.ndarray, " k"] | Complex[np.ndarray, " k"],
    nonlinear: Callable[[Float[np.ndarray, " x"]], Float[np.ndarray, " x"]],
    *,
    dt: float,
    steps: int,
    every: int = 1,
) -> Float[np.ndarray, "times x"]:
    """Solves u_t = L u + N(u) by a Fourier method, at the times 0, `every · dt`, …, `steps · dt`.

    The exponential Runge–Kutta method ETDRK4 of Cox and Matthews (J. Comput. Phys. 176, 2002) takes
    L exactly and N to fourth order in time. To limit rounding, its coefficients are means over a
    contour, as Kassam and Trefethen recommend (SIAM J. Sci. Comput. 26, 2005).

    `u` are the initial values on a uniform grid, `linear` is the symbol of L on `len(u) // 2 + 1`
    frequencies, and `nonlinear` computes N from values on the grid.
    """
    n = len(u)
    whole, half = np.exp(dt * linear), np.exp(dt * linear / 2)
    circle = np.exp(2j * np.pi * (np.arange(64) + 0.5) / 64)
    z = dt * linear[:, None] + circle
    mean = lambda f: dt * np.mean(f, axis=1)
    q, f1, f2, f3 = (
        mean((np.exp(z / 2) - 1) / z),
        mean((-4 - z + np.exp(z) * (4 - 3 * z + z**2)) / z**3),
        mean((2 + z + np.exp(z) * (z - 2)) / z**3),
        mean((-4 - 3 * z - z**2 + np.exp(z) * (4 - z)) / z**3),
    )
    if np.isrealobj(linear):
        q, f1, f2, f3 = q.real, f1.real, f2.real, f3.real
    term = lambda v: np.fft.rfft(nonlinear(np.fft.irfft(v, n)))
    v = np.fft.rfft(u)
    found = [np.asarray(u, np.float64)]
    for step in range(1, steps + 1):
        nv = term(v)
        a = half * v + q * nv
        na = term(a)
        b = half * v + q * na
        nb = term(b)
        c = half * a + q * (2 * nb - nv)
        v = whole * v + f1 * nv + 2 * f2 * (na + nb) + f3 * term(c)
        if step % every == 0:
            found.append(np.fft.irfft(v, n))
    return np.stack(found)


def allen_cahn(
    u: Float[np.ndarray, " x"],
    *,
    diffusivity: float,
    reaction: float,
    length: float,
    time: float,
    steps: int,
    every: int = 1,
) -> Float[np.ndarray, "times x"]:
    """Solves u_t = `diffusivity` u_xx + `reaction` (u − u³) from `u` on a periodic grid of that
    `length`, at `steps // every + 1` times from 0 to `time`."""
    wavenumber = 2 * np.pi / length * np.arange(len(u) // 2 + 1)
    linear = reaction - diffusivity * wavenumber**2
    cubic = lambda u: -reaction * u**3
    return etdrk4(u, linear, cubic, dt=time / steps, steps=steps, every=every)


# --- Periodic fields in the plane ------------------------------------------------------------


def reaction_diffusion(
    start: Float[np.ndarray, "fields n n"],
    reaction: Callable[[np.ndarray], np.ndarray],
    diffusivities: Sequence[float],
    *,
    length: float,
    time: float,
    steps: int,
    frames: int,
) -> Float[np.ndarray, "frames+1 fields n n"]:
    """Solves u_t = D Δu + R(u), periodic, by Fourier series and a Runge–Kutta method of fourth
    order with an integrating factor, which takes diffusion exactly."""
    n = start.shape[-1]
    k = 2 * np.pi / length * n * np.fft.fftfreq(n)
    square = k[:, None] ** 2 + k[None, : n // 2 + 1] ** 2
    dt = time / steps
    half = np.exp(-np.asarray(diffusivities)[:, None, None] * square * dt / 2)
    into, back = np.fft.rfft2, lambda v: np.fft.irfft2(v, s=(n, n))
    rate = lambda v: dt * into(reaction(back(v)))
    v, found = into(start), [start]
    for step in range(1, steps + 1):
        a = rate(v)
        b = rate(half * (v + a / 2))
        c = rate(half * v + b / 2)
        d = rate(half**2 * v + half * c)
        v = half**2 * (v + a / 6) + half * (b + c) / 3 + d / 6
        if step % (steps // frames) == 0:
            found.append(back(v))
    return np.stack(found)


@partial(jax.jit, static_argnames=("time", "viscosity", "time_step"))
def solve_vorticity(
    vorticity: Float[Array, "samples n n"], *, time: float, viscosity: float, time_step: float
) -> Float[Array, "samples n n"]:
    """Returns the vorticity ω of ω_t + v·∇ω = ν Δω on the unit torus after `time`.

    Exponax (Köhler et al.) is pseudo-spectral in space with the 2/3 rule. In time it uses an
    exponential Runge–Kutta method, which takes diffusion exactly.
    """
    stepper = exponax.stepper.NavierStokesVorticity(
        2,
        1.0,
        vorticity.shape[-1],
        time_step,
        diffusivity=viscosity,
        # Exponax defines Δψ = ω, so positive vorticity turns clockwise.
        vorticity_convection_scale=-1.0,
    )
    advance = exponax.repeat(stepper, round(time / time_step))
    return jax.lax.map(advance, vorticity[:, None], batch_size=32)[:, 0]


def vortices(
    vorticity: Float[np.ndarray, "n n"],
    *,
    viscosity: float,
    time: float,
    time_step: float,
    frames: int,
) -> Float[np.ndarray, "frames+1 3 n n"]:
    """Solves for u, v and the vorticity ω of ω_t + u ω_x + v ω_y = ν Δω, periodic over 2π.

    Exponax solves on the unit torus, where lengths and velocities are smaller by 2π.
    """
    n = len(vorticity)
    k = n * np.fft.fftfreq(n)
    square = k[:, None] ** 2 + k[None, :] ** 2
    square[0, 0] = 1.0

    def fields(w):
        stream = np.fft.fft2(w) / square  # −Δψ = ω, u = ψ_y, v = −ψ_x
        u, v = np.fft.ifft2(1j * k[None, :] * stream), np.fft.ifft2(-1j * k[:, None] * stream)
        return np.stack([u.real, v.real, w])

    found = [fields(vorticity)]
    with jax.enable_x64(True):
        w = jnp.asarray(vorticity, jnp.float64)[None]
        for _ in range(frames):
            step = {"viscosity": viscosity / (4 * np.pi**2), "time_step": time_step}
            w = solve_vorticity(w, time=time / frames, **step)
            found.append(fields(np.asarray(w[0])))
    return np.stack(found)

"""Reference solutions of periodic problems, by a Fourier method in float64.

For u_t = L u + N(u), with L diagonal in Fourier space, the exponential Runge–Kutta method ETDRK4
of Cox and Matthews (J. Comput. Phys. 176, 2002) takes L exactly and N to fourth order in time; its
coefficients are means over a contour, as Kassam and Trefethen (SIAM J. Sci. Comput. 26, 2005)
found that rounding asks for.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Complex, Float


def etdrk4(
    u: Float[np.ndarray, " x"],
    linear: Float[np.ndarray, " k"] | Complex[np.ndarray, " k"],
    nonlinear: Callable[[Float[np.ndarray, " x"]], Float[np.ndarray, " x"]],
    *,
    dt: float,
    steps: int,
    every: int = 1,
) -> Float[np.ndarray, "times x"]:
    """The solution at the times 0, `every · dt`, …, `steps · dt`.

    `u` are the initial values on a uniform grid, `linear` the symbol of L on `len(u) // 2 + 1`
    frequencies, and `nonlinear` gives N from values on the grid.
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
    """u_t = `diffusivity` u_xx + `reaction` (u − u³) from `u` on a periodic grid of that `length`,
    at `steps // every + 1` times from 0 to `time`."""
    wavenumber = 2 * np.pi / length * np.arange(len(u) // 2 + 1)
    linear = reaction - diffusivity * wavenumber**2
    cubic = lambda u: -reaction * u**3
    return etdrk4(u, linear, cubic, dt=time / steps, steps=steps, every=every)

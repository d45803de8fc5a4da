"""Two-dimensional turbulence that decays, the data that `navier_stokes.py` learns from.

The vorticity ω of an incompressible fluid on the unit torus,

    ω_t + v·∇ω = ν Δω,    v = (ψ_y, −ψ_x),    −Δψ = ω,

from a random initial field of the lowest wavenumbers to the field at time T. Exponax (Köhler et
al.) solves it: pseudo-spectral in space with the 2/3 rule, and in time by an exponential
Runge–Kutta method, which treats the diffusion exactly.
"""

from functools import partial

import exponax
import jax
import numpy as np
from _cache import cached
from jaxtyping import Array, Float, Float32


VISCOSITY = 1e-3
TIME = 1.0
TIME_STEP = 0.005
INITIAL_STD = 3.0  # of the vorticity: in T = 1 the fluid turns by about 3 radians
CUTOFF = 5  # largest wavenumber per axis in the initial field
BATCH = 32  # fields that are solved for at once


@partial(jax.jit, static_argnames=("time", "viscosity", "time_step"))
def solve(
    vorticity: Float[Array, "samples n n"], *, time: float, viscosity: float, time_step: float
) -> Float[Array, "samples n n"]:
    """The vorticity after `time`, in the dtype of the initial one."""
    stepper = exponax.stepper.NavierStokesVorticity(
        2,
        1.0,
        vorticity.shape[-1],
        time_step,
        diffusivity=viscosity,
        # Exponax has Δψ = ω, where positive vorticity turns clockwise.
        vorticity_convection_scale=-1.0,
    )
    advance = exponax.repeat(stepper, round(time / time_step))
    return jax.lax.map(advance, vorticity[:, None], batch_size=BATCH)[:, 0]


def initial_vorticity(samples: int, resolution: int, *, seed: int) -> Float32[Array, "samples n n"]:
    """Random truncated Fourier series: normally distributed up to `CUTOFF`, without a mean."""
    series = exponax.ic.RandomTruncatedFourierSeries(2, cutoff=CUTOFF, std_one=True)
    keys = jax.random.split(jax.random.key(seed), samples)
    fields = jax.jit(jax.vmap(lambda key: series(resolution, key=key)))(keys)
    return INITIAL_STD * fields[:, 0]


def _make(
    *, samples: int, resolution: int, seed: int, time: float, viscosity: float, time_step: float
) -> dict[str, np.ndarray]:
    initial = initial_vorticity(samples, resolution, seed=seed)
    final = solve(initial, time=time, viscosity=viscosity, time_step=time_step)
    return {"initial": np.asarray(initial), "final": np.asarray(final)}


def navier_stokes_data(
    samples: int,
    resolution: int,
    *,
    seed: int,
    time: float = TIME,
    viscosity: float = VISCOSITY,
    time_step: float = TIME_STEP,
) -> tuple[Float32[np.ndarray, "samples n n"], Float32[np.ndarray, "samples n n"]]:
    """Vorticity at the beginning and at `time`, from the cache where it has been made before."""
    data = cached(
        "navier-stokes",
        _make,
        version=1,
        samples=samples,
        resolution=resolution,
        seed=seed,
        time=time,
        viscosity=viscosity,
        time_step=time_step,
    )
    return data["initial"], data["final"]

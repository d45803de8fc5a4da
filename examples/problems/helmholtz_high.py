"""The Helmholtz equation with a high wave number, Δu + k² u = f on the unit square, k = 14.9.

Here u = 0 at the edges, and f is chosen so that u = sin 5πx sin 4πy. The square resonates at
k² = 20π² and 25π², and k lies between them: a remaining residual counts 16 times in the solution.
The frequencies of the Fourier features are about as large as those of u, √(M² + N²)/2 = 3.2.
"""

import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._problem import coordinate_mlp, grid, problem, uniform


K, M, N = np.sqrt(22.5) * np.pi, 5, 4
SIZE = (M**2 + N**2) * np.pi**2


def exact(point):
    x, y = point
    return jnp.sin(M * jnp.pi * x) * jnp.sin(N * jnp.pi * y)


def form(point, n):
    x, y = point
    return 16 * x * (1 - x) * y * (1 - y) * n


network = coordinate_mlp(2, "scalar", 48, 3, fourier_features=(32, 2.5), form=form)


def loss(u, points, *, derivatives=None):
    terms = mpx.laplacian(u, ["u"], coords="xy", outputs="u", scaling=derivatives)
    d = jax.vmap(terms)(points)
    source = (K**2 - SIZE) * jax.vmap(exact)(points)
    return jnp.mean(((d["lap_u"] + K**2 * d["u"] - source) / SIZE) ** 2)


sample = lambda key: uniform(key, 512, low=(0, 0), high=(1, 1))
AT = grid(np.linspace(0, 1, 101), np.linspace(0, 1, 101))
PROBLEM = problem(__name__, "Helmholtz, high wave number", coords="xy", order=2, steps=4000)

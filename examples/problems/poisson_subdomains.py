"""The Poisson equation −∇·(a ∇u) = 1 on the unit square of 4 × 4 blocks with different a.

u = 0 at the edges; a is 1 or 10 (after Poisson2d-MS of PINNacle). ∇·(a ∇u) does not exist where a
jumps. So the network minimizes the energy ½ ∫ a |∇u|² − ∫ u (Weinan & Yu, *The deep Ritz method*,
2018), which needs only first derivatives. The reference is by finite volumes on cells within
blocks.
"""

import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._problem import Reference, coordinate_mlp, grid, problem, uniform
from .references import diffusion


BLOCKS = np.asarray([[1, 10, 10, 1], [10, 1, 10, 10], [1, 1, 10, 1], [10, 10, 1, 10]], np.float32)


def form(point, n):
    x, y = point
    return 16 * x * (1 - x) * y * (1 - y) * n


network = coordinate_mlp(2, "scalar", 48, 3, fourier_features=(32, 1.5), form=form)


def loss(u, points, *, derivatives=None):
    terms = mpx.partials(u, ["u", "u_x", "u_y"], coords="xy", outputs="u", scaling=derivatives)
    d = jax.vmap(terms)(points)
    i, j = jnp.floor(4 * points.T).astype(jnp.int32)
    a = jnp.asarray(BLOCKS)[i, j]
    return jnp.mean(a / 2 * (d["u_x"] ** 2 + d["u_y"] ** 2) - d["u"])


def sample(key):
    """Draws one point in each of 32² squares, so that energies differ less between steps."""
    corners = jnp.asarray(grid(np.arange(32.0), np.arange(32.0)), jnp.float32)
    return (corners + uniform(key, 32**2, (0, 0), (0.999, 0.999))) / 32


def reference(cells=128):
    centres = (np.arange(cells) + 0.5) / cells
    a = np.kron(BLOCKS.astype(np.float64), np.ones((cells // 4, cells // 4)))
    return Reference(grid(centres, centres), diffusion(a, np.ones((cells, cells))).ravel())


PROBLEM = problem(__name__, "Poisson in 16 blocks, by its energy", coords="xy", order=1)

"""Heat in a medium of varying conductivity, u_t = ∇·(a ∇u) + f on the unit square, up to t = 1.

Here a = 1 + ½ sin 2πx sin 2πy, u = 0 at the edges, and f is chosen so that u = e^(−t) sin πx sin
2πy (after Heat2d-VC of PINNacle).
"""

import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._problem import coordinate_mlp, grid, problem, uniform


SIZE = 5 * np.pi**2  # scale of Δu


def waves(x, k):
    """Returns sine and cosine of k waves on half of 0 ≤ x ≤ 2."""
    return jnp.sin(k * jnp.pi * x), jnp.cos(k * jnp.pi * x)


def medium(x, y):
    """Returns a and its slopes."""
    (sx, cx), (sy, cy) = waves(x, 2), waves(y, 2)
    return 1 + sx * sy / 2, jnp.pi * cx * sy, jnp.pi * sx * cy


def exact(point):
    t, x, y = point
    return jnp.exp(-t) * waves(x, 1)[0] * waves(y, 2)[0]


def source(t, x, y):
    (sx, cx), (sy, cy) = waves(x, 1), waves(y, 2)
    a, a_x, a_y = medium(x, y)
    slopes = a_x * jnp.pi * cx * sy + a_y * 2 * jnp.pi * sx * cy
    return jnp.exp(-t) * (-sx * sy + SIZE * a * sx * sy - slopes)


def form(point, n):
    t, x, y = point
    return waves(x, 1)[0] * waves(y, 2)[0] + t * 16 * x * (1 - x) * y * (1 - y) * n


network = coordinate_mlp(3, "scalar", 32, 3, fourier_features=(16, 0.5), form=form)


def loss(u, points, *, derivatives=None):
    terms = ["u_t", "u_x", "u_y"]
    terms = mpx.laplacian(u, terms, coords="txy", outputs="u", over="xy", scaling=derivatives)
    d = jax.vmap(terms)(points)
    t, x, y = points.T
    a, a_x, a_y = medium(x, y)
    flux = a * d["lap_u"] + a_x * d["u_x"] + a_y * d["u_y"]
    return jnp.mean((d["u_t"] - flux - source(t, x, y)) ** 2) / SIZE**2


sample = lambda key: uniform(key, 384, low=(0, 0, 0), high=(1, 1, 1))
AT = grid(np.linspace(0, 1, 11), np.linspace(0, 1, 33), np.linspace(0, 1, 33))
PROBLEM = problem(__name__, "Heat, varying conductivity", coords="txy", order=2)

"""The Gray–Scott equations u_t = ε₁ Δu + b (1 − u) − u v², v_t = ε₂ Δv − d v + u v², up to t = 20.

The fields are periodic on −1 ≤ x, y ≤ 1 with b = 0.04, d = 0.1, ε₁ = 1e-5, ε₂ = 5e-6, and start
from two bells (PINNacle goes on to t = 200). The reference is a Fourier method of fourth order in
time.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._problem import Reference, coordinate_mlp, grid, problem, uniform
from .references import reaction_diffusion


FEED, KILL, DIFFUSIVITIES = 0.04, 0.1, (1e-5, 5e-6)
END = 20.0


def start(x, y):
    bell = lambda s: jnp.exp(-80 * ((x + s * 0.05) ** 2 + (y + s * 0.02) ** 2))
    return jnp.stack([1 - bell(1), bell(-1)])


form = lambda p, n: start(p[1], p[2]) + p[0] / END * n
features = {"periodic": {1: 2.0, 2: 2.0}, "fourier_features": (48, 0.5)}
network = coordinate_mlp(3, 2, 48, 3, **features, form=form, units=(END, 1, 1))


def loss(fields, points, *, derivatives=None):
    given = {"coords": "txy", "outputs": "uv", "scaling": derivatives}
    d = jax.vmap(mpx.laplacian(fields, ["u", "v", "u_t", "v_t"], over="xy", **given))(points)
    eaten = d["u"] * d["v"] ** 2
    u = d["u_t"] - DIFFUSIVITIES[0] * d["lap_u"] - FEED * (1 - d["u"]) + eaten
    v = d["v_t"] - DIFFUSIVITIES[1] * d["lap_v"] + KILL * d["v"] - eaten
    return 100 * jnp.mean(u**2 + v**2)


def sample(key):
    """Draws half of the points near the bells."""
    boxes = zip(jax.random.split(key), (1.0, 0.4), strict=True)
    return jnp.concatenate([uniform(k, 256, (0, -x, -x), (END, x, x)) for k, x in boxes])


@functools.cache
def reference(n=128, steps=200):
    x = -1 + 2 * np.arange(n) / n
    first = np.asarray(jax.vmap(start)(*(jnp.asarray(z, jnp.float32) for z in grid(x, x).T)))

    def reaction(fields):
        u, v = fields
        return np.stack([FEED * (1 - u) - u * v**2, u * v**2 - KILL * v])

    first = first.T.reshape(2, n, n).astype(np.float64)
    given = {"length": 2.0, "time": END, "steps": steps, "frames": 5}
    fields = reaction_diffusion(first, reaction, DIFFUSIVITIES, **given)[..., ::2, ::2]
    values = np.moveaxis(fields, 1, -1).reshape(-1, 2)
    return Reference(grid(np.linspace(0, END, 6), x[::2], x[::2]), values)


PROBLEM = problem(__name__, "Gray–Scott", coords="txy", order=2, fields="uv")

"""Heat in five dimensions, u_t = Δu / 5 + f in the unit ball, up to t = 1.

With f = −|x|² e^(|x|²/2 + t) / 5, u = e^(|x|²/2) at first and the heat flux e^(½ + t) out of the
ball, the solution is u = e^(|x|²/2 + t) (HeatND of PINNacle).
"""

import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._problem import coordinate_mlp, problem


SIZE = 5
X = "abcde"


def exact(point):
    t, *x = point
    return jnp.exp(sum(xi**2 for xi in x) / 2 + t)


form = lambda p, n: jnp.exp(jnp.sum(p[1:] ** 2) / 2) + p[0] * n
network = coordinate_mlp(1 + SIZE, "scalar", 32, 3, form=form)


def loss(u, points, *, derivatives=None):
    given = {"coords": "t" + X, "outputs": "u", "scaling": derivatives}
    d = jax.vmap(mpx.laplacian(u, ["u_t"], over=X, **given))(points["ball"])
    square = jnp.sum(points["ball"][:, 1:] ** 2, axis=1)
    source = -square / SIZE * jnp.exp(square / 2 + points["ball"][:, 0])
    heat = d["u_t"] - d["lap_u"] / SIZE - source
    outwards = {name: lambda point, i=i: point[i] for i, name in enumerate(X, 1)}
    flux = jax.vmap(mpx.linear_operator(u, {"out": outwards}, **given))(points["sphere"])["out_u"]
    return jnp.mean(heat**2) + jnp.mean((flux - jnp.exp(0.5 + points["sphere"][:, 0])) ** 2)


def ball(key, count, radius):
    """Draws uniform points in the ball, or points at the given `radius`."""
    time, direction, size = jax.random.split(key, 3)
    t = jax.random.uniform(time, (count, 1))
    x = jax.random.normal(direction, (count, SIZE))
    r = jax.random.uniform(size, (count, 1)) ** (1 / SIZE) if radius is None else radius
    return jnp.concatenate([t, r * x / jnp.linalg.norm(x, axis=1, keepdims=True)], axis=1)


def sample(key):
    inside, surface = jax.random.split(key)
    return {"ball": ball(inside, 256, None), "sphere": ball(surface, 128, 1.0)}


AT = np.asarray(ball(jax.random.key(1), 4096, None), np.float64)
PROBLEM = problem(__name__, "Heat in 5 dimensions", coords="t" + X, order=2)

"""A soliton of the nonlinear Schrödinger equation i h_t + h_xx/2 + |h|² h = 0, up to t = 2.

On −6 ≤ x ≤ 8 the solution is h = u + i v = sech(x − t) e^(ix), a wave packet that keeps its shape.
Initial and boundary values are those of the solution.
"""

import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._problem import coordinate_mlp, draws, from_start, grid, misfit, problem


LOW, HIGH = (0.0, -6.0), (2.0, 8.0)


def exact(point):
    t, x = point
    return jnp.stack([jnp.cos(x), jnp.sin(x)]) / jnp.cosh(x - t)


network = coordinate_mlp(2, 2, 40, 3, fourier_features=(24, 0.2), form=from_start(exact))


def loss(fields, points, *, derivatives=None):
    given = {"coords": "tx", "outputs": "uv", "scaling": derivatives}
    names = ["u", "v", "u_t", "v_t", "u_xx", "v_xx"]
    d = jax.vmap(mpx.partials(fields, names, **given))(points["inside"])
    size = d["u"] ** 2 + d["v"] ** 2
    real = -d["v_t"] + d["u_xx"] / 2 + size * d["u"]
    imaginary = d["u_t"] + d["v_xx"] / 2 + size * d["v"]
    wrong = misfit(fields, exact, points["ends"], "uv", given)
    return jnp.mean(real**2 + imaginary**2) + 10 * wrong


sample = draws(inside=(384, LOW, HIGH), ends=(64, LOW, HIGH, (1,)))
AT = grid(np.linspace(0, 2, 41), np.linspace(-6, 8, 141))
PROBLEM = problem(__name__, "Schrödinger, a soliton", coords="tx", order=2, fields="uv")

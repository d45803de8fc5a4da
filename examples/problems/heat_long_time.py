"""Heat driven by a source for a long time, u_t = ν u_xx + f on 0 ≤ x ≤ 1 up to t = 20.

Here ν = 0.02, u = 0 at the ends, and f is chosen so that u = sin πx cos t + ½ sin 3πx sin 2t. These
are several periods, through which an error of the start would have to be forgotten (after Heat2d-LT
of PINNacle).
"""

import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._problem import coordinate_mlp, grid, problem, uniform


NU, END = 0.02, 20.0


def exact(point):
    t, x = point
    pi = jnp.pi
    return jnp.sin(pi * x) * jnp.cos(t) + jnp.sin(3 * pi * x) * jnp.sin(2 * t) / 2


def source(point):
    t, x = point
    pi = jnp.pi
    first = NU * pi**2 * jnp.cos(t) - jnp.sin(t)
    third = 9 * NU * pi**2 / 2 * jnp.sin(2 * t) + jnp.cos(2 * t)
    return jnp.sin(pi * x) * first + jnp.sin(3 * pi * x) * third


def form(point, n):
    t, x = point
    return jnp.sin(jnp.pi * x) + t / (1 + t) * 4 * x * (1 - x) * n


network = coordinate_mlp(2, "scalar", 32, 3, fourier_features=(32, 0.5), form=form)


def loss(u, points, *, derivatives=None):
    operator = {"heat": {"t": 1.0, "xx": -NU}}
    terms = mpx.linear_operator(u, operator, coords="tx", outputs="u", scaling=derivatives)
    left = jax.vmap(terms)(points)["heat_u"]
    return jnp.mean((left - jax.vmap(source)(points)) ** 2)


sample = lambda key: uniform(key, 512, low=(0, 0), high=(END, 1))
AT = grid(np.linspace(0, END, 201), np.linspace(0, 1, 65))
PROBLEM = problem(__name__, "Heat, long time", coords="tx", order=2)

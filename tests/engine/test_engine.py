"""The derivative engine on networks of many architectures, against nested forward mode."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_zoo import NETWORKS
from helpers import relative

import mpx_pde as mpx


pytestmark = pytest.mark.slow


TERMS = ["u", "u_x", "u_xx", "u_xy", "u_xxx", "u_xxxx", "u_xyy", "u_xxyy"]
ORDER = 4

# As many directions as there are derivatives of order 4, in which they are told apart.
DIRECTIONS = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, -1.0], [0.6, 1.2]])
POINTS = np.array([[0.31, 0.62], [0.78, 0.17], [-0.4, 0.55]])


def along(fun, p, direction, order):
    """A function and its derivatives along a direction, by nested `jax.jvp`."""
    out = lambda p: [fun(p)]
    for _ in range(order):
        out = lambda p, f=out: (lambda v, d: [*v, d[-1]])(*jax.jvp(f, (p,), (direction,)))
    return jnp.stack(out(p))


def partial_derivatives(slopes):
    """The terms from the derivatives along all directions, `[directions, points, order]`."""
    found = {}
    for order in range(slopes.shape[-1]):
        matrix = np.stack(
            [
                math.comb(order, k) * DIRECTIONS[:, 0] ** (order - k) * DIRECTIONS[:, 1] ** k
                for k in range(order + 1)
            ],
            axis=1,
        )
        solved = np.linalg.lstsq(matrix, np.asarray(slopes[..., order]), rcond=None)[0]
        for k in range(order + 1):
            found["u" + "_" * (order > 0) + "x" * (order - k) + "y" * k] = solved[k]
    return found


@pytest.mark.parametrize("name", NETWORKS)
def test_orders_one_to_four(name):
    """In float64, where the two differ by rounding alone."""
    with jax.enable_x64(True):
        arrays, static = eqx.partition(NETWORKS[name](jax.random.key(1)), eqx.is_array)
        assert {x.dtype.name for x in jax.tree.leaves(arrays)} == {"float64"}

        @jax.jit
        def both(arrays, x, directions):
            model = eqx.combine(arrays, static)
            values = mpx.partials(model, TERMS, coords="xy", outputs="u")
            slopes = lambda d: jax.vmap(lambda p: along(model, p, d, ORDER))(x)
            return jax.vmap(values)(x), jax.vmap(slopes)(directions)

        got, slopes = both(arrays, jnp.asarray(POINTS), jnp.asarray(DIRECTIONS))
    want = partial_derivatives(np.asarray(slopes))
    for term in TERMS:
        assert got[term].dtype == jnp.float64
        # Sums of some hundred products that partly cancel, in ten layers.
        assert relative(got[term], want[term]) < 1e-10, term

"""Tests Gram matrices by the factors of gradients against dense Jacobians in float64."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import in_float64

import mpx_pde as mpx
from mpx_pde.second_order import _outer
from mpx_pde.second_order._dual import _by_factors
from mpx_pde.second_order._gram import first_leading
from mpx_pde.second_order._outer import FactoredRows, Size
from mpx_pde.second_order._residuals import Linearized


WIDTH, SLOW = 80, pytest.mark.slow


def mlp():
    return in_float64(eqx.nn.MLP(2, "scalar", WIDTH, 2, jnp.tanh, key=jax.random.key(0)))


def value(model, x):
    return jnp.reshape(model(x), ()) - x[0]


def by_hessian(model, x):
    return jnp.trace(jax.hessian(model)(x)) - 1.0


def nested(model, x):
    second = lambda e, i: jax.jvp(lambda y: jax.grad(model)(y)[i], (x,), (e,))[1]
    return second(jnp.array([1.0, 0.0]), 0) + second(jnp.array([0.0, 1.0]), 1)


def by_partials(model, x):
    d = mpx.partials(model, ["u_xx", "u_yy"], coords="xy", outputs="u")(x)
    return d["u_xx"] + d["u_yy"] - 1.0


def by_laplacian(model, x):
    return mpx.laplacian(model, coords="xy", outputs="u")(x)["lap_u"] - 1.0


def several(model, x):
    return jnp.stack([model(x), *jax.grad(model)(x)])


class Twice(eqx.Module):
    """A weight that enters twice, once transposed; one that is not used, and one of three axes."""

    shared: jax.Array
    idle: jax.Array
    cube: jax.Array

    def __call__(self, x):
        hidden = jnp.tanh(self.shared @ jnp.tile(x, WIDTH // 2))
        return jnp.sum(jnp.einsum("ijk,k->ij", self.cube, jnp.sin(hidden @ self.shared)) ** 2)

    @staticmethod
    def make():
        shared, cube = (WIDTH,) * 2, (3, 4, WIDTH)
        draw = lambda shape: jax.random.normal(jax.random.key(0), shape, "float64") / 9
        return Twice(*map(draw, (shared, shared, cube)))


def checkpointed(model, x):
    return jax.checkpoint(lambda x: by_hessian(model, x))(x)


# The number of outer products of the hidden weight: one for each stream of the derivatives.
CASES = {
    "value": (mlp, (value,), 1),
    "hessian": (mlp, (by_hessian,), 6),
    "nested derivatives": (mlp, (nested,), 6),
    "partials": (mlp, (by_partials,), 4),  # of the second derivatives their sum is evaluated
    "laplacian and values": (mlp, (by_laplacian, value), 4),
    "several entries": (mlp, (several, value), 2),
    "checkpoint": (mlp, (checkpointed,), 6),
    "CoordinateMLP": (
        lambda: in_float64(mpx.nn.CoordinateMLP(2, 1, WIDTH, 2, key=jax.random.key(0))),
        (by_laplacian, value),
        4,
    ),
    "a weight that enters twice": (Twice.make, (value,), 2),
}


def rows_of(model, functions):
    optimizer = mpx.LevenbergMarquardt(functions, forward="float64", method="dual")
    lengths = (13, 6)[: len(functions)]
    draw = lambda n: jax.random.normal(jax.random.key(n), (n, 2), "float64")
    batches = tuple(map(draw, lengths))
    at = Linearized(optimizer._residuals, model, batches, optimizer.init(model).scaling)
    return at, FactoredRows.of(at.gradients(), at.examples, at.shapes)


@pytest.mark.parametrize(("blocks", "tile"), [(1, 4), (3, _outer._TILE)])
@pytest.mark.parametrize("name", ["value", *(pytest.param(x, marks=SLOW) for x in [*CASES][1:])])
def test_the_kernel_is_that_of_a_dense_jacobian(name, blocks, tile, monkeypatch):
    monkeypatch.setattr(_outer, "_TILE", tile)
    make, functions, terms = CASES[name]
    with jax.enable_x64(True):
        at, rows = rows_of(make(), functions)
        assert Size(terms, WIDTH, WIDTH) in rows.sizes
        examples = at.rows(blocks, "float64")[1]
        kernel = _by_factors(rows, examples, 1, first_leading(at.shape[1], 0, "float64"))
        jac = np.asarray(jax.jit(jax.vmap(at.pull))(jnp.eye(at.shape[0])))
    order = at.order(blocks)
    real = order < at.shape[0]  # others fill blocks up
    found, want = np.asarray(kernel.rest)[np.ix_(real, real)], (jac @ jac.T)
    want, lower = want[np.ix_(order[real], order[real])], np.tril_indices(np.sum(real))
    # Sums of some thousand products in another order.
    np.testing.assert_allclose(found[lower], want[lower], rtol=0, atol=1e-14 * np.max(want))
    squares = np.sum(jac**2, axis=0)
    np.testing.assert_allclose(kernel.squares, squares, rtol=0, atol=1e-14 * np.max(squares))


def test_a_weight_is_computed_as_a_whole_where_factors_do_not_pay():
    """Gradients of convolutions, and of real weights of complex numbers, are no outer products.
    Narrow weights have too few entries."""
    with jax.enable_x64(True):
        narrow = in_float64(eqx.nn.MLP(2, "scalar", 8, 2, jnp.tanh, key=jax.random.key(0)))
        assert rows_of(narrow, (by_hessian,))[1] is None
        convolution = in_float64(eqx.nn.Conv1d(1, 64, 2, key=jax.random.key(0)))
        total = lambda model, x: jnp.sum(jnp.tanh(model(x[None])))
        assert rows_of(convolution, (total,))[1] is None
        waves = lambda x: jax.lax.complex(*jnp.tile(x, WIDTH).reshape(2, WIDTH))
        total = lambda weight, x: jnp.abs(jnp.sum(weight.astype(waves(x).dtype) @ waves(x)))
        assert rows_of(jnp.ones((WIDTH, WIDTH)), (total,))[1] is None


@pytest.mark.slow
def test_a_residual_with_effects_is_evaluated_as_it_is():
    seen = []

    def told(model, x):
        jax.debug.callback(lambda y: seen.append(float(y)), x[0])
        return value(model, x)

    with jax.enable_x64(True):
        at, rows = rows_of(mlp(), (told,))
        assert rows is None
        losses = []
        for fun in (told, value):
            optimizer = mpx.LevenbergMarquardt(fun, forward="float64", method="dual")
            _, state = optimizer.update(mlp(), optimizer.init(mlp()), at.batches)
            losses.append(state.loss)
    assert seen
    # A step by rows and one by factors, which round differently.
    np.testing.assert_allclose(*losses, rtol=1e-8)

"""Tests that `forward=` evaluates in full what is computed from a batch alone."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forward_passes import step_of
from helpers import HALVES, relative

import mpx_pde as mpx


pytestmark = pytest.mark.usefixtures("standard_promotion")

KEY = jax.random.key(0)
ROWS = jax.random.normal(KEY, (64, 8))
MODEL = eqx.nn.MLP(8, 1, 16, 2, key=KEY)
TURN = jax.random.orthogonal(KEY, 8)

# For a gradient that is evaluated in half at full values: a few roundings in a row. The offsets of
# layers with few rows are among them.
TOLERANCE = 2.0**-7


squared = lambda x: jnp.mean((x - 1) ** 2)
mapped = lambda model, rows: squared(jax.vmap(model)(rows))


def test_products_of_data_alone_are_in_float32():
    """Rounding leaves little of these. The random programs draw others in their mode `forward`."""
    loss, rows = lambda model, x: mapped(model, x @ TURN - 100 * TURN.sum(0)), ROWS + 100
    want = eqx.filter_jit(eqx.filter_grad(loss))(MODEL, rows)
    grads = eqx.filter_jit(step_of(loss, forward="tensorfloat32"))(MODEL, rows)[3]
    assert relative(grads, want) < TOLERANCE


@pytest.mark.parametrize("half", HALVES)
def test_what_is_kept_of_data_is_not_exact(half):
    """The means are kept and rounded, so the backward pass does not subtract them again."""

    def loss(model, x):
        pairs = x.reshape(-1, 4, 2)
        means = pairs @ jnp.full(2, 1 / 2)
        return mapped(model, jnp.reshape(pairs - means[..., None], x.shape))

    first = lambda model: model.layers[0].weight
    want = first(eqx.filter_jit(eqx.filter_grad(loss))(MODEL, ROWS + 1000))
    step = eqx.filter_jit(step_of(loss, half))
    assert relative(first(step(MODEL, ROWS + 1000)[3]), want) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("keep", [True, (False, True), ([True, False, False], False)])
def test_what_is_kept_in_full_meets_products_in_full(keep):
    """A batch keeps the first product in full, a layer its own, and `True` all products."""
    layers = list(MODEL.layers)

    def loss(layers, rows):
        h = rows
        for layer in layers[:-1]:
            h = jnp.tanh(jax.vmap(layer)(h))
        return squared(jax.vmap(layers[-1])(h))

    report = mpx.precision_report(step_of(loss, keep_full=keep))(layers, ROWS)
    without = mpx.precision_report(step_of(loss))(layers, ROWS)
    half = lambda report: sum(row.flops for row in report.rows if row.dtype == "bfloat16")
    # The product of 64 × 8 × 16 for the gradient of the first weights. Before JAX 0.12 the product
    # for the gradient of the batch is traced too, and the compiler drops it.
    first = 2 * ROWS.size * 16
    fewer = half(without) - half(report)
    assert fewer == half(without) if keep is True else fewer in (first, 2 * first)
    want = eqx.filter_grad(loss)(layers, ROWS)
    got = step_of(loss, keep_full=keep)(layers, ROWS)[3]
    assert relative(got, want) < TOLERANCE


@pytest.mark.slow
def test_keyword_arguments_are_data():
    loss = lambda model, *, rows: mapped(model, rows - 1e4)
    want = eqx.filter_grad(lambda model: loss(model, rows=ROWS + 1e4))(MODEL)
    got = step_of(loss)(MODEL, rows=ROWS + 1e4)[3]
    assert relative(got, want) < TOLERANCE


POINTS = {
    "from a key": lambda key: jax.random.normal(key, (64, 8)),
    "even": lambda _: jnp.stack([jnp.linspace(0, 1, 64)] * 8, -1),
    "of integers": lambda _: (jnp.arange(512) / 512).reshape(64, 8),
}


@pytest.mark.parametrize(
    "wrap", [lambda f: f, pytest.param(eqx.filter_checkpoint, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", POINTS)
def test_points_that_the_loss_makes_are_data(name, wrap):
    make, mapped_again = POINTS[name], wrap(mapped)
    made = step_of(lambda model, key: mapped_again(model, make(key)))
    given = step_of(mapped_again)
    share = mpx.precision_report(given)(MODEL, make(KEY)).half_share
    # A checkpoint of constants and parameters may compute its result again, one small product more.
    assert mpx.precision_report(made)(MODEL, KEY).half_share == pytest.approx(share, rel=0.01)
    assert share > 0.25
    # Points that are made of nothing are constants, and what is made of them and of parameters is
    # not rounded.
    want = eqx.filter_grad(lambda model: mapped(model, make(KEY)))(MODEL)
    assert relative(made(MODEL, KEY)[3], want) < TOLERANCE


def test_points_of_numpy_that_a_loss_closes_over():
    points = np.asarray(ROWS)
    terms = lambda model: mpx.partials(model, ["u_x"], coords=list("xabcdefg"), outputs="u")
    loss = lambda model, x: squared(jax.vmap(terms(model))(x)["u_x"])
    want = step_of(loss)(MODEL, ROWS)[3]
    assert relative(step_of(lambda model: loss(model, points))(MODEL)[3], want) == 0


def test_operators_on_parameters_stay_in_full():
    """The entries of the operator are beyond float16, and its products cancel."""

    def loss(u):
        sharp = (jnp.eye(64, k=1) - 2 * jnp.eye(64) + jnp.eye(64, k=-1)) * 2.0**16
        return jnp.mean((sharp @ u - 1) ** 2)

    u = jnp.sin(jnp.linspace(0, 3, 64))
    _, _, finite, grads = step_of(loss, "float16")(u)
    assert finite
    assert relative(grads, jax.grad(loss)(u)) < 1e-6  # rounding of float32 in another order

"""Data stays data: under `forward=` what is computed of a batch alone is evaluated in full."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import in_float64, relative

import mpx_pde as mpx


KEY = jax.random.key(0)
ROWS = jax.random.normal(KEY, (64, 8))
MODEL = eqx.nn.MLP(8, 1, 16, 2, key=KEY)
TURN = jax.random.orthogonal(KEY, 8)
TABLE = jnp.sin(jnp.arange(62.0))

# Of a gradient evaluated in half at values that are not: a few roundings one after another, the
# offsets of layers with few rows among them.
TOLERANCES = {"float16": 2.0**-11, "bfloat16": 2.0**-7}


def squared(x):
    return jnp.mean((x - 1) ** 2)


def turned(rows):
    """A product of data alone, of which little is left."""
    return rows @ TURN - 100 * TURN.sum(0)


def mapped(model, rows):
    return squared(jax.vmap(model)(rows))


def scanned(model, rows):
    def step(total, row):
        out = model(row - 1e4)
        return total + out[0] ** 2, out

    total, every = jax.lax.scan(step, 0.0, rows)
    return total / len(rows) + jnp.mean(every**4)


def places(rows, factor):
    return jnp.floor(rows[:, 0] * factor).astype(int) % 62


def chosen_by_the_network(model, rows):
    """Integers, booleans and whole numbers that come of values which are kept rounded."""
    first, second, last = model.layers
    h = jax.vmap(first)(rows)
    h = jnp.where(h > 0.3, h, 0.1 * h) * jnp.take_along_axis(h, jnp.argmax(h, 1)[:, None], 1)
    h = jnp.tanh(jax.vmap(second)(h))
    return squared(jax.vmap(last)(h - jnp.floor(h * 8) / 8))


LOSSES = {
    "offset": (lambda model, x: mapped(model, x - 1e4), MODEL, ROWS + 1e4),
    "table behind a layer": (
        lambda p, x: squared(p[1][places(x, 512)][:, None] * jax.vmap(p[0])(x)),
        (MODEL, TABLE),
        ROWS,
    ),
    "scan over rows": (scanned, MODEL, ROWS + 1e4),
    "product": (lambda model, x: mapped(model, turned(x)), MODEL, ROWS + 100),
    "chosen by the network": (chosen_by_the_network, MODEL, ROWS),
}  # fmt: skip


@pytest.fixture(autouse=True)
def as_users_promote():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def step_of(loss, half="bfloat16", **options):
    policy = f"params=float32,compute={half},output=float32"
    options = {"forward": "float32", **options}
    return mpx.filter_value_and_grad(loss, mpx.StaticLossScaling(2.0**8), policy=policy, **options)


@pytest.mark.parametrize(("name", "half"), list(zip(LOSSES, itertools.cycle(TOLERANCES))))
def test_what_is_computed_of_data_alone_is_not_rounded(name, half):
    loss, model, rows = LOSSES[name]
    with jax.enable_x64(True):
        # Of the numbers that the program has in float32.
        want, want_grads = eqx.filter_value_and_grad(loss)(*in_float64((model, rows)))
    value, _, finite, grads = eqx.filter_jit(step_of(loss, half))(model, rows)
    assert finite
    # Float32 takes 2^-24 of 1e4 from each row before the offset goes.
    np.testing.assert_allclose(value, want, rtol=2e-3 if "e4" in str(rows.max()) else 1e-3)
    plain = relative(eqx.filter_jit(eqx.filter_grad(loss))(model, rows), want_grads)
    assert relative(grads, want_grads) < TOLERANCES[half] + 2 * plain
    if "table" in name:
        # To the rows that were read, and to no others.
        assert ((np.asarray(grads[1]) != 0) == (np.asarray(want_grads[1]) != 0)).all()


def test_products_of_data_alone_are_in_float32():
    loss, model, rows = LOSSES["product"]
    want = eqx.filter_jit(eqx.filter_grad(loss))(model, rows)
    grads = eqx.filter_jit(step_of(loss, forward="tensorfloat32"))(model, rows)[3]
    assert relative(grads, want) < TOLERANCES["bfloat16"]


@pytest.mark.parametrize("keep", [True, (False, True), ([True, False, False], False)])
def test_what_is_kept_in_full_meets_products_in_full(keep):
    """The first product for the batch, its own for a layer, and all for everything."""
    layers = list(MODEL.layers)

    def loss(layers, rows):
        h = rows
        for layer in layers[:-1]:
            h = jnp.tanh(jax.vmap(layer)(h))
        return squared(jax.vmap(layers[-1])(h))

    report = mpx.precision_report(step_of(loss, keep_full=keep))(layers, ROWS)
    without = mpx.precision_report(step_of(loss))(layers, ROWS)
    half = lambda report: sum(row.flops for row in report.rows if row.dtype == "bfloat16")
    # A product of 64 × 8 × 16: the gradient of the first weights. Before JAX 0.12 that of the batch
    # is traced too, and the compiler drops it.
    first = 2 * ROWS.size * 16
    fewer = half(without) - half(report)
    assert fewer == half(without) if keep is True else fewer in (first, 2 * first)
    want = eqx.filter_grad(loss)(layers, ROWS)
    got = step_of(loss, keep_full=keep)(layers, ROWS)[3]
    assert relative(got, want) < TOLERANCES["bfloat16"]


def test_keep_full_is_checked_under_forward():
    for keep, error in (("points", TypeError), ((False, True, True), ValueError)):
        with pytest.raises(error, match=r"`filter_value_and_grad` takes .*`keep_full`"):
            step_of(mapped, keep_full=keep)(MODEL, ROWS)


def test_keyword_arguments_are_data():
    loss = lambda model, *, rows: mapped(model, rows - 1e4)
    want = eqx.filter_grad(lambda model: loss(model, rows=ROWS + 1e4))(MODEL)
    got = step_of(loss)(MODEL, rows=ROWS + 1e4)[3]
    assert relative(got, want) < TOLERANCES["bfloat16"]

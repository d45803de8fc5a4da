"""Tests losses that close over the key of their random numbers, which is no array of numbers."""

import jax
import jax.numpy as jnp
import pytest
from helpers import relative
from jax import lax

import mpx_pde as mpx


KEY = jax.random.key(0)
W = jnp.eye(32) / 2 + 0.01
X = jax.random.normal(jax.random.key(1), (8, 32))


def noise(key, x):
    """Returns random numbers that are the same in each mode, since they are float32."""
    return jax.random.normal(key, x.shape).astype(x.dtype)


def layer(w, x):
    return jnp.tanh(x @ w)


def stepped(w, x):
    def step(carry, _):
        x, key = carry
        key, now = jax.random.split(key)
        return (layer(w, x + noise(now, x)), key), None

    return lax.scan(step, (x, KEY), length=3)[0][0]


def folded(w, x):
    step = lambda x, i: (layer(w, x + noise(jax.random.fold_in(KEY, i), x)), None)
    return lax.scan(step, x, jnp.arange(3))[0]


NETWORKS = {
    "a layer": lambda w, x: layer(w, x + noise(KEY, x)),
    "a key carried by a scan": stepped,
    "folded in a scan": folded,
    "a branch": lambda w, x: lax.cond(x[0, 0] > 9, lambda y: y, lambda y: y + noise(KEY, y), x @ w),
    "a checkpoint": lambda w, x: jax.checkpoint(lambda w, x: layer(w, x + noise(KEY, x)))(w, x),
    "a key for each row": lambda w, x: jax.vmap(lambda key, row: layer(w, row + noise(key, row)))(
        jax.random.split(KEY, len(x)), x
    ),
    "a choice of keys": lambda w, x: layer(
        w, x + noise(lax.select(x[0, 0] > 9, KEY, jax.random.key(1)), x)
    ),
    "partials": lambda w, x: jax.vmap(
        mpx.partials(
            lambda p: jnp.sum(layer(w[:2], p + noise(KEY, p))), "u_xx", coords="tx", outputs="u"
        )
    )(x[:, :2])["u_xx"],
}


def loss(network, w, x):
    return jnp.mean(network(w, x).astype(jnp.float32) ** 2)


@pytest.mark.filterwarnings("ignore::mpx_pde.PrecisionWarning")  # small networks gain nothing
@pytest.mark.parametrize(
    "options",
    [
        {"forward": "float32"},
        pytest.param({"autocast": True}, marks=pytest.mark.slow),
        pytest.param({}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_loss_may_close_over_a_key(name, options):
    fun = lambda w, x: loss(NETWORKS[name], w, x)
    got = mpx.filter_grad(fun, mpx.DynamicLossScaling(), **options)(W, X)[2]
    # float16 rounds to 5e-4, a cast several times in a row.
    assert relative(got, jax.grad(fun)(W, X)) < 4e-3


@pytest.mark.parametrize("options", [{"forward": "float32"}, {}], ids=str)
def test_reports_of_such_a_loss(options):
    fun = lambda w, x: loss(stepped, w, x)
    gradient = mpx.filter_grad(fun, mpx.DynamicLossScaling(), **options)
    assert mpx.range_report(gradient)(W, X).first_nonfinite is None
    assert mpx.precision_report(gradient)(W, X).rows

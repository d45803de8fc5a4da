"""Tests that a warning of products in float32 names where float32 enters, and with what."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_tells
from jax import lax

import mpx_pde as mpx


pytestmark = pytest.mark.usefixtures("standard_promotion")

DATA = np.random.default_rng(0).normal(size=(8, 16)).astype("float32")
WEIGHT = DATA[:, :8].T @ DATA / 8


def number(x, half):
    return x * (0.5 if half else np.float64(0.5))


def identity(x, half):
    return x + jnp.eye(8, 16, dtype=x.dtype if half else None)


def closed_over(x, half):
    return x + (DATA.astype(x.dtype) if half else DATA)


def asked(x, half):
    return x if half else 2 * x.astype("float32")


def filled(x, half):
    return jnp.where(x > 0, x, jnp.zeros_like(x, dtype=x.dtype if half else "float32"))


def drawn(x, half):
    noise = jax.random.normal(jax.random.key(0), x.shape, x.dtype if half else None)
    return x + 0.1 * noise


def looped(x, half):
    zero = jnp.zeros((8, 16), x.dtype if half else None)
    return lax.scan(lambda c, _: (c + jnp.tanh(x), None), zero, length=3)[0]


def counted(x, half):
    factor = 0.5 if half else jnp.float32(0.5)
    zero = jnp.zeros((8, 16), x.dtype if half else None)
    return lax.fori_loop(0, jnp.argmax(x), lambda i, c: c + x * factor, zero)


def checkpointed(x, half):
    time = np.float32(3.0) if not half else 3.0
    return jax.checkpoint(lambda x: jnp.sin(x * time))(x)


# Functions before a network, with the number of lines from their first one to where float32 enters,
# and with what it does.
ENTERS = {
    number: (1, "with the number 0.5, which is no Python number"),
    identity: (1, "with float32[8, 16], made there"),
    closed_over: (1, "with an array float32[8, 16] that is no argument"),
    asked: (1, "by a cast"),
    filled: (1, "with float32[8, 16], made there"),
    drawn: (2, "with float32[8, 16], made at {file}:{first_1}"),
    looped: (2, "with float32[8, 16], made at {file}:{first_1}"),
    counted: (3, "with the number 0.5, which is no Python number"),
    checkpointed: (2, "with the number 3, which is no Python number"),
}


def told(loss, *args, **options):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run = mpx.filter_grad(loss, mpx.NoOpLossScaling(), **options)
        jax.eval_shape(lambda *args: run(*args)[-1], *args)
    return [str(x.message) for x in found if "was asked for" in str(x.message)]


@pytest.mark.parametrize("before", ENTERS)
def test_a_warning_of_float32_products_names_where_float32_enters(before):
    lines, what = ENTERS[before]
    loss = lambda half: lambda w, x: jnp.mean(jnp.tanh(before(x, half) @ w.T) ** 2)
    first = before.__code__.co_firstlineno
    (text,) = told(loss(False), WEIGHT, DATA)
    what = what.format(file=__file__, first_1=first + 1)
    assert_tells(text, f"float32 enters at {__file__}:{first + lines}, {what}.")
    # With it in the dtype of what it meets, products are half.
    assert told(loss(True), WEIGHT, DATA) == []


def test_an_argument_that_is_kept_in_full_is_named():
    loss = lambda w, x: jnp.mean(jnp.tanh(x["points"] @ DATA.T @ w[:, :8]) ** 2)
    (text,) = told(loss, WEIGHT, {"points": jnp.asarray(DATA)}, keep_full=(False, True))
    assert_tells(text, "float32 enters", "with argument [1]['points'], which is not cast")

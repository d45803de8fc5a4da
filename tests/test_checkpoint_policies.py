"""Tests that a mixed product is kept for the backward pass whenever a plain one is."""

import functools as ft
import warnings

import jax
import jax.numpy as jnp
import pytest
from helpers import normal, products, tree_allclose
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import mpx_pde as mpx


OURS, JAXS = mpx.checkpoint_policies, jax.checkpoint_policies
DOTS = "dots_saveable", "dots_with_no_batch_dims_saveable"


def layer(w, x):
    return jnp.tanh(checkpoint_name(jnp.tanh(x @ w), "inside") @ w)


def batched_layer(w, x):
    return jnp.tanh(jnp.einsum("bij,bjk->bik", x, w)) * x


def convolution(w, x):
    conv = ft.partial(lax.conv_general_dilated, window_strides=(1,), padding="SAME")
    return jnp.tanh(conv(jnp.tanh(conv(x, w)), w))


CASES = {
    "dense": (layer, (8, 8), (4, 8)),
    "batched": (batched_layer, (3, 8, 8), (3, 8, 8)),
    "convolution": (convolution, (4, 4, 3), (2, 4, 9)),
}


def count(fun, w, x):
    """Returns the number of products of a gradient, forward and backward."""
    return len(products(jax.grad(lambda w: jnp.sum(fun(w, x).astype(jnp.float32) ** 2)), w))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", [*DOTS, "nothing", "named", "own"])
def test_as_many_products_as_without_mixed_precision(case, name):
    fun, w, x = CASES[case]
    w, x = normal(0, w, 0.3), normal(1, x)
    policy = {
        "nothing": JAXS.nothing_saveable,
        "named": JAXS.save_only_these_names("inside"),
        "own": lambda primitive, *avals, **params: primitive is lax.dot_general_p,
    }.get(name) or getattr(JAXS, name)
    want = count(jax.checkpoint(fun, policy=policy), w, x)
    inside = mpx.autocast(jax.checkpoint(fun, policy=policy), "float16")
    around = jax.checkpoint(mpx.autocast(fun, "float16"), policy=OURS.translate(policy))
    assert count(inside, w, x) == want
    assert count(around, w, x) == want
    got = jax.jit(jax.grad(lambda w: jnp.sum(around(w, x) ** 2)))(w)
    exact = jax.jit(jax.grad(lambda w: jnp.sum(fun(w, x) ** 2)))(w)
    assert tree_allclose(got, exact, computed_in="float16")


def test_the_policies_are_those_of_jax():
    w, x = normal(0, (8, 8), 0.3), normal(1, (4, 8))
    mixed = lambda w, x: jnp.tanh(mpx.mixed_matmul(x, w, dtype="float16"))
    again = count(jax.checkpoint(mixed), w, x)
    for name in DOTS:
        kept = count(jax.checkpoint(mixed, policy=getattr(OURS, name)), w, x)
        assert kept == again - 1
        # JAX's own policies do not know the primitive.
        assert count(jax.checkpoint(mixed, policy=getattr(JAXS, name)), w, x) == again
        plain = lambda w, x: jnp.tanh(x @ w)
        theirs = count(jax.checkpoint(plain, policy=getattr(OURS, name)), w, x)
        assert theirs == count(plain, w, x)


@pytest.mark.parametrize(
    ("version", "backend", "told"),
    [("0.11.0", "gpu", True), ("0.11.0", "cpu", False), ("0.11.1", "gpu", False)],
)
def test_offloading_warns_where_its_gradients_are_wrong(monkeypatch, version, backend, told):
    monkeypatch.setattr(jax, "__version__", version)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        OURS.offload_dot_with_no_batch_dims("device", "pinned_host")
    messages = [str(w.message) for w in caught if w.category is mpx.PrecisionWarning]
    assert [m for m in messages if "scan" in m] == messages
    assert len(messages) == told


def test_offloading_is_asked_for_mixed_products():
    policy = OURS.offload_dot_with_no_batch_dims("device", "pinned_host")
    asked = []

    def spy(primitive, *avals, **params):
        asked.append((primitive.name, policy(primitive, *avals, **params)))
        return False

    fun = jax.checkpoint(lambda w, x: mpx.mixed_matmul(x, w, dtype="float16"), policy=spy)
    jax.make_jaxpr(jax.grad(lambda w: jnp.sum(jnp.sin(fun(w, jnp.ones((4, 8)))))))(jnp.ones((8, 8)))
    answers = {name: type(answer).__name__ for name, answer in asked}
    assert answers["mixed_dot_general"] == "Offloadable"


def test_a_translation_is_made_once_and_equals_itself():
    once = OURS.translate(JAXS.dots_saveable)
    assert OURS.translate(once) is once
    assert once == OURS.dots_saveable
    assert hash(once) == hash(OURS.dots_saveable)

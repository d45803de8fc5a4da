"""Tests gradients in mixed precision: exact unscaling, and what is left without mixed precision.

For equality to the last bit, numbers are small integers or powers of two, which all formats hold,
or the computation is in float32.
"""

import math

import equinox as eqx
import jax.numpy as jnp
import pytest
from gradients import TRANSFORMATIONS, batch, linear_loss, mlp, mse
from helpers import policy, scaler, tree_equal_bits

import mpx_pde as mpx


# --- The scale is applied and removed exactly ----------------------------------------------------


# By compute dtype: exponents of a scale and of an entry of `x` whose product overflows.
OVERFLOWING = {"float16": (15, 6), "bfloat16": (100, 100)}


@pytest.mark.parametrize("compute", OVERFLOWING)
def test_growth_overflow_and_plain_steps(compute):
    exponent, big = OVERFLOWING[compute]
    w = jnp.array([1.0, 0.0, -2.0])
    good, bad = jnp.array([0.5, 0.25, 1.0]), jnp.array([0.5, 2.0**big, 1.0])

    @eqx.filter_jit
    def step(scaling, w, x):
        return mpx.filter_value_and_grad(linear_loss, scaling, policy=policy(compute))(w, x)

    scaling = scaler(exponent - 5, period=2, max_loss_scaling=2.0**exponent)
    exponents = []
    for x in [good] * 10 + [bad, good, bad, bad, good, good]:
        value, scaling, finite, grads = step(scaling, w, x)
        assert tree_equal_bits(value, jnp.float32(-1.5))
        assert finite == (x is good)
        want = x if x is good else jnp.array([0.5, jnp.inf, 1.0])
        assert tree_equal_bits(grads, want)
        exponents.append(math.frexp(scaling.loss_scaling)[1] - 1 - exponent)
    assert exponents == [-5, -4, -4, -3, -3, -2, -2, -1, -1, 0, -1, -1, -2, -3, -3, -2]
    assert scaling.skipped_steps == 3


@pytest.mark.slow
@pytest.mark.parametrize(("half", "exponent"), [("float16", 15), ("bfloat16", 126)])
def test_the_value_is_finite_whenever_the_loss_is(half, exponent):
    """The scaled loss, 6 · 2^15 or 6 · 2^126, is beyond the format."""
    with mpx.half_precision(half):
        for dtype in (half, "float32"):
            loss = lambda w, dtype=dtype: jnp.sum(w).astype(dtype)
            step = eqx.filter_jit(mpx.filter_value_and_grad(loss, scaler(exponent)))
            value, _, finite, grads = step(jnp.array([4.0, 2.0]))
            assert finite
            assert tree_equal_bits((value, grads), (jnp.float32(6.0), jnp.ones(2)))


# --- Without mixed precision, and the raw ingredients --------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("has_aux", [False, True])
def test_without_mixed_precision_it_is_equinox(has_aux):
    """There is no cast and no scale, and aux is unchanged."""

    def loss(model, batch):
        assert model.layers[0].weight.dtype == jnp.float32
        value = mse(model, batch)
        return (value, {"half": value.astype(jnp.float16), "n": 3}) if has_aux else value

    # This scale would show: 2^100 times the gradients is finite, times the cap's 2^15 it is not.
    scaling = scaler(100, max_loss_scaling=2.0**120, period=1)
    options = {"has_aux": has_aux, "use_mixed_precision": False, "policy": "compute=bfloat16"}
    plain = eqx.filter_value_and_grad(loss, has_aux=has_aux)
    want_value, want_grads = eqx.filter_jit(plain)(mlp(), batch())
    transformed = mpx.filter_value_and_grad(loss, scaling, **options)
    value, same, finite, grads = eqx.filter_jit(transformed)(mlp(), batch())
    assert tree_equal_bits((value, same, grads), (want_value, scaling, want_grads))
    assert tree_equal_bits(finite, jnp.array(True))


@pytest.mark.parametrize("transform", TRANSFORMATIONS[::3])
def test_without_mixed_precision_infinite_gradients_are_not_flagged(transform):
    """The same holds in MPX, and in the float32 loop that this replaces."""
    before = scaler(4)
    gradient = transform(linear_loss, before, use_mixed_precision=False)
    *_, same, finite, grads = gradient(jnp.ones(1), jnp.array([jnp.inf]))
    assert tree_equal_bits((same, grads), (before, jnp.array([jnp.inf])))
    assert finite

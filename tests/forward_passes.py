"""Evaluates losses whose forward pass is in another precision than their backward pass."""

import equinox as eqx
import jax
import numpy as np
from helpers import policy, relative

import mpx_pde as mpx


# The error of a gradient that is evaluated in half at full values: a few roundings of 2^-11 and of
# 2^-8 in a row, most of which average out.
TOLERANCES = {"float16": 2.0**-9, "bfloat16": 2.0**-6}
# That of most programs, whatever the number of their steps.
CLOSE = {"float16": 1e-3, "bfloat16": 8e-3}
SCALING = mpx.StaticLossScaling(2.0**8)


def step_of(loss, half="bfloat16", scaling=SCALING, **options):
    options = {"forward": "float32", "policy": policy(half), **options}
    return mpx.filter_value_and_grad(loss, scaling, **options)


def evaluated(loss, model, batch, half, forward="float32", scaling=SCALING):
    step = step_of(loss, half, scaling, forward=forward)
    value, _, finite, grads = eqx.filter_jit(step)(model, batch)
    assert finite
    return value, grads


def assert_nearly(loss, model, batch, half, rtol=2.0**-21, least=1e-6, most=None, scaling=SCALING):
    """Checks that the value is float32's and the gradient that of a half backward pass."""
    want, want_grads = eqx.filter_jit(eqx.filter_value_and_grad(loss))(model, batch)
    value, grads = evaluated(loss, model, batch, half, scaling=scaling)
    # The operations are the same, but XLA may fuse a sum in another order.
    np.testing.assert_allclose(value, want, rtol=rtol)
    assert jax.tree.structure(grads) == jax.tree.structure(want_grads)
    assert least <= relative(grads, want_grads) < (most or TOLERANCES[half])

"""Tests the half-precision setting, and that compiled functions notice its changes."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import HALVES

import mpx_pde as mpx


def test_float16_is_the_default():
    assert type(mpx.FLOAT16_MAX) is type(mpx.BFLOAT16_MAX) is float
    assert mpx.half_precision_datatype() == jnp.float16
    assert jnp.float16 == mpx.HALF_PRECISION_DATATYPE


@pytest.mark.parametrize("name", HALVES)
def test_every_spelling_of_a_dtype_sets_it(name):
    dtype = jnp.dtype(name)
    for spelling in (name, dtype, getattr(jnp, name), dtype.type):
        mpx.set_half_precision_datatype("bfloat16" if name == "float16" else "float16")
        mpx.set_half_precision_datatype(spelling)
        assert mpx.half_precision_datatype() == dtype
        assert isinstance(mpx.half_precision_datatype(), np.dtype)
        assert dtype == mpx.HALF_PRECISION_DATATYPE
        assert mpx.cast_to_half_precision(jnp.ones(2)).dtype == dtype


def test_the_block_ends_where_it_began():
    with mpx.half_precision("bfloat16"):
        assert mpx.half_precision_datatype() == jnp.bfloat16
        with mpx.half_precision(jnp.float16):
            assert mpx.half_precision_datatype() == jnp.float16
        assert mpx.half_precision_datatype() == jnp.bfloat16
    assert mpx.half_precision_datatype() == jnp.float16


def test_an_exception_ends_the_block():
    with pytest.raises(KeyError), mpx.half_precision("bfloat16"):
        raise KeyError
    assert mpx.half_precision_datatype() == jnp.float16
    # An unknown dtype changes nothing either.
    with pytest.raises(ValueError, match="half_precision"), mpx.half_precision("float32"):
        pass
    with pytest.raises(ValueError, match="half_precision"):
        mpx.set_half_precision_datatype("float32")
    assert mpx.half_precision_datatype() == jnp.float16


def in_thread(func):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(func).result()


def test_the_setting_is_for_all_threads_and_a_block_for_its_own():
    in_thread(lambda: mpx.set_half_precision_datatype("bfloat16"))
    assert mpx.half_precision_datatype() == jnp.bfloat16
    assert in_thread(mpx.half_precision_datatype) == jnp.bfloat16
    with mpx.half_precision("float16"):
        assert in_thread(mpx.half_precision_datatype) == jnp.bfloat16

    def block():
        with mpx.half_precision("float16"):
            inside.set()
            leave.wait(10)

    inside, leave = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(block)
        assert inside.wait(10)
        assert mpx.half_precision_datatype() == jnp.bfloat16
        leave.set()


def test_a_compiled_step_sees_the_setting_and_each_is_compiled_once():
    traced = []

    @jax.jit
    def step(w, scaling):
        def loss(w):
            traced.append(w.dtype.name)
            return jnp.sum(w * w)

        return mpx.filter_grad(loss, scaling)(w)

    # float16 can hold 1 + 2^-9 and bfloat16 cannot, so the gradient reveals its dtype.
    w, scaling = jnp.array([1.0 + 2.0**-9]), mpx.DynamicLossScaling(2.0**8, period=1)
    top = {"float16": 2.0**15, "bfloat16": 2.0**126}
    for name, want in [("float16", 2 + 2.0**-8), ("bfloat16", 2.0)] * 2:
        mpx.set_half_precision_datatype(name)
        adjusted, finite, grads = step(w, scaling)
        assert finite
        assert grads.dtype == jnp.float32
        assert grads[0] == want
        assert adjusted.loss_scaling == 2.0**9
        # The cap follows as well.
        adjusted, _, _ = step(w * 2.0**-60, mpx.DynamicLossScaling(top[name], period=1))
        assert adjusted.loss_scaling == top[name]
    assert traced == ["float16", "bfloat16"]


def test_the_block_is_seen_by_jitted_functions_called_in_it():
    @jax.jit
    def inner(x):
        return mpx.cast_to_half_precision(x)

    @jax.jit
    def outer(x):
        with mpx.half_precision("bfloat16"):
            return inner(x)

    assert inner(jnp.ones(2)).dtype == jnp.float16
    assert outer(jnp.ones(2)).dtype == jnp.bfloat16


def test_an_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = mpx.no_such_name

"""Tests the one private context that changes results."""

import jax
import jax.numpy as jnp

import mpx_pde as mpx
from mpx_pde.precision._forward import Forward, forward_in, takes_halves, without_halves
from mpx_pde.precision._setting import Setting, setting, setting_with


def test_a_change_leaves_the_rest_and_ends_with_its_block():
    forward = Forward("half", "float16")
    with forward_in(forward), without_halves():
        assert setting() == Setting(forward=forward, without_halves=True)
        with forward_in(None), setting_with(marks=True):
            assert setting() == Setting(without_halves=True, marks=True)
        assert setting() == Setting(forward=forward, without_halves=True)
    assert setting() == Setting()


def test_it_takes_effect_where_it_is_entered_and_not_where_it_is_made():
    inner = without_halves()
    with forward_in(Forward("float32", "bfloat16")):
        with inner:
            assert setting().forward is not None
        assert setting().without_halves is False


def test_a_compiled_function_is_traced_anew_under_another_setting():
    compiled = jax.jit(lambda x: x if takes_halves() else x + 1)
    assert compiled(0) == 0
    with without_halves():
        assert compiled(0) == 1
    assert compiled(0) == 0
    full = mpx.force_full_precision(compiled)
    assert full(jnp.zeros((), jnp.int32)) == 1

"""Tests which mode options select, and whose name is in a message."""

import jax.numpy as jnp
import pytest
from helpers import scaler

import mpx_pde as mpx
from mpx_pde._util._calls import named
from mpx_pde.modes._by_engine import Autocast, FullForward
from mpx_pde.modes._choice import mode_of
from mpx_pde.modes._mode import Casts, Full


FLOAT32 = "params=float32,compute=float32,output=float32"
CASES = [
    ({}, Casts, "half", True),
    ({"policy": FLOAT32}, Casts, "full", False),
    ({"autocast": True}, Autocast, "half", True),
    ({"autocast": {"full": "exp"}}, Autocast, "half", True),
    ({"forward": "float32"}, FullForward, "float32", True),
    ({"forward": "bfloat16_x3", "autocast": True}, FullForward, "bfloat16_x3", True),
    ({"forward": "float32", "policy": FLOAT32}, FullForward, "full", False),
    ({"use_mixed_precision": False}, Full, "full", False),
    ({"use_mixed_precision": False, "forward": "float32", "autocast": True}, Full, "full", False),
]


@pytest.mark.parametrize(("options", "kind", "rung", "in_half"), CASES)
def test_options_select_one_mode(options, kind, rung, in_half):
    mode = mode_of(**options)
    assert type(mode) is kind
    assert (mode.rung, mode.in_half) == (rung, in_half)
    assert (mode.forward is not None) == (kind is FullForward)
    assert mode.scales == (kind is not Full)


def test_only_overrides_of_the_user_have_a_mode_without_them():
    assert mode_of().without_overrides() is None
    assert mode_of(autocast=True).without_overrides() is None
    assert mode_of(autocast={"full": "exp"}).without_overrides() == mode_of(autocast=True)


def test_a_message_names_the_innermost_call_and_then_the_outer_one_again():
    def loss(w):
        with pytest.raises(TypeError, match=r"^`as_trained` takes bools"):
            mpx.as_trained(w, keep_full=3)
        inner = mpx.calculate_scaled_grad(lambda w: w, scaler(2))
        with pytest.raises(TypeError, match=r"^`calculate_scaled_grad` needs a function"):
            inner(w)
        return w

    w = jnp.ones(3)
    outer = mpx.filter_grad(loss, scaler(2))
    with pytest.raises(TypeError, match=r"^`filter_grad` needs a function"):
        outer(w)
    with named("somebody"), pytest.raises(TypeError, match=r"^`somebody` takes a bool as"):
        mode_of(use_mixed_precision="half")

"""Tests that each mode takes other people's programs as they are.

`python -m benchmarks clients` measures all of them in both formats.
"""

import jax
import pytest
from clients.measure import CLIENTS, MODES, STEPS, measured


pytestmark = pytest.mark.usefixtures("standard_promotion")

# Bounds of the gradient's error.
# - forward: what is kept and the operands of backward products are rounded once. A few roundings of
#   2^-11 or 2^-8 in a row mostly average out, whatever the number of steps.
# - autocast: operands of forward products are rounded too, and second derivatives or sines of large
#   phases magnify that up to tenfold.
# - cast: everything is, also the sums that a state is carried through, so errors add up over steps.
BOUNDS = {
    "forward": {"float16": 1e-3, "bfloat16": 8e-3},
    "autocast": {"float16": 6e-3, "bfloat16": 5e-2},
    "cast": {"float16": 5e-2, "bfloat16": 4e-1},
}

# Second differences on a grid of n points magnify the roundings of hidden layers by n², a thousand
# here. Only a full forward pass has none.
MAGNIFIED = {"finite elements, BCOO": 20.0}

# The least share of the backward pass in half, where it is not nearly all. Products that JAX
# transposed count, and derivatives that the loss itself takes by `grad` are such, but full.
SHARES = {
    "causal PINN, nested grad": 0.7,
    "norm of its own gradient": 0.7,
    "terms balanced by gradients": 0.4,
    "DeepONet, vjp": 0.8,
}
FAST = [
    ("leaky cell, 400 steps", "forward", "float16"),
    ("table at 300", "autocast", "bfloat16"),
    ("Euler, 50 steps", "cast", "float16"),
]


def checked(name, mode, half):
    found = measured(name, mode, half)
    if mode == "cast" and found.told:  # a cast may be told that it does nothing, or sums in half
        return
    factor = 1.0 if mode == "forward" else MAGNIFIED.get(name, 1.0)
    assert found.gradient < factor * BOUNDS[mode][half], found
    # The scale falls from 2^15 within a few steps.
    assert found.skipped < STEPS, found
    if mode == "forward":
        assert found.value < 2e-5, found  # float32's, after hundreds of steps
        assert found.share is None or found.share >= SHARES.get(name, 0.9), found


@pytest.mark.parametrize(("name", "mode", "half"), FAST)
def test_a_program_in_a_mode(name, mode, half):
    checked(name, mode, half)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is done in half")  # loops of other libraries keep to float32
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CLIENTS)
def test_a_program_in_each_mode(name, mode):
    # One format for each keeps the test short, and every mode and group of programs has both.
    half = ("float16", "bfloat16")[(list(CLIENTS).index(name) + list(MODES).index(mode)) % 2]
    checked(name, mode, half)
    jax.clear_caches()

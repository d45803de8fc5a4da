"""Tests that a full forward pass takes other people's programs as they are.

`python -m benchmarks clients` measures all of them in each mode and both formats.
"""

import re

import jax
import pytest
from clients.measure import CLIENTS, STEPS, measured
from pages import ROOT


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

# The least share of the backward pass in half, where it is not nearly all. Products that JAX
# transposed count, and derivatives that the loss itself takes by `grad` are such, but full. So are
# those in branches of a loop, and what a backward rule evaluates again.
SHARES = {
    "causal PINN, nested grad": 0.7,
    "norm of its own gradient": 0.7,
    "terms balanced by gradients": 0.4,
    "DeepONet, vjp": 0.8,
    "training inside": 0.6,
    "forces of a potential, NNX": 0.7,
    "diffrax, direct": 0.4,
    "diffrax, checkpointed": 0.4,
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
    assert found.gradient < BOUNDS[mode][half], found
    # The scale falls from 2^15 within a few steps.
    assert found.skipped < STEPS, found
    if mode == "forward":
        assert found.value < 2e-5, found  # float32's, after hundreds of steps
        assert found.share is None or found.share >= SHARES.get(name, 0.9), found


def test_the_readme_tells_what_is_tested_here():
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    told = re.search(
        r"Gradients of \[(\d+) programs .*? at most (\S+) \(float16\) and (\S+) \(", text
    )
    assert told is not None
    assert list(map(float, told.groups())) == [len(CLIENTS), *BOUNDS["forward"].values()]


@pytest.mark.parametrize(("name", "mode", "half"), FAST)
def test_a_program_in_a_mode(name, mode, half):
    checked(name, mode, half)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is done in half")  # loops of other libraries keep to float32
@pytest.mark.parametrize("name", CLIENTS)
def test_a_full_forward_pass(name):
    # One format for each program keeps this short.
    checked(name, "forward", ("float16", "bfloat16")[list(CLIENTS).index(name) % 2])
    jax.clear_caches()

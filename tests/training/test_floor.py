"""Tests the estimate of the current rounding error of a training against float64."""

import math
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_tells, in_float64, policy, relative
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import mpx_pde as mpx
from mpx_pde import nn


KEY = jax.random.key(0)
POINTS = jax.random.uniform(jax.random.key(1), (16, 2), minval=-1.0)
MODEL = nn.CoordinateMLP(2, "scalar", 8, 2, key=KEY)
KEEP = {"keep_full": (False, True)}


def pde(model, points, targets, *, derivatives=None):
    terms = mpx.partials(model, ["u", "u_xx"], coords="xy", outputs="u", scaling=derivatives)
    d = jax.vmap(terms)(points)
    return jnp.mean((d["u_xx"] + d["u"] - targets) ** 2)


def targets(residual):
    """Returns targets that cancel the terms at `MODEL` except for this residual."""
    terms = jax.vmap(mpx.partials(MODEL, ["u", "u_xx"], coords="xy", outputs="u"))(POINTS)
    return terms["u"] + terms["u_xx"] + residual * jnp.sin(5 * POINTS[:, 0])


def error_of_gradient(loss, args, **options):
    """Returns the errors of loss and gradient in a precision against float64."""
    step = mpx.filter_value_and_grad(loss, mpx.StaticLossScaling(1.0), **options)
    value, _, _, grads = eqx.filter_jit(step)(*args)
    with jax.enable_x64(True):
        true, true_grads = eqx.filter_jit(eqx.filter_value_and_grad(loss))(*in_float64(args))
        return relative(value, true), relative(grads, true_grads)


OPTIONS = {"half": {"keep_full": (False, True, True)}, "float32": {"forward": "float32"}}


@pytest.mark.slow
@pytest.mark.parametrize(("rung", "residual"), [("half", 1.0), ("half", 3e-3), ("float32", 3e-3)])
def test_the_floor_is_the_error_against_float64(rung, residual):
    args = (MODEL, POINTS, targets(residual))
    options = {**OPTIONS[rung], "policy": policy("bfloat16")}
    want_loss, want = error_of_gradient(pde, args, **options)
    floor = mpx.precision_floor(pde, mpx.StaticLossScaling(1.0), micro_batches=1, **options)(*args)
    assert floor.finite
    # The next precision rounds the values kept for the backward pass as this one does, so their
    # part of the difference is 0 to 2 times its size. The rounding of the residual shows in full.
    assert want / 3 < floor.gradient < 2 * want
    if rung == "half":
        assert want_loss / 2 < floor.loss < 2 * want_loss
    # Rounding of the half residual affects the gradient as the residual vanishes, but no longer if
    # the forward pass is in full.
    assert bool(floor.reached) == (rung == "half" and residual < 1)


@pytest.mark.slow
def test_a_branch_that_is_not_taken_is_not_run():
    """The branch may hold a name of the user's, as derivative terms do."""
    ran = []

    def loss(model, points, targets, derivatives=None):
        def other(x):
            jax.debug.callback(lambda: ran.append(x))
            return checkpoint_name(x, "mine")

        value = pde(model, points, targets, derivatives=derivatives)
        return lax.cond(jnp.sum(lax.stop_gradient(points)) > -1e9, lambda x: x, other, value)

    options = {"forward": "float32", "micro_batches": 1}
    floor = mpx.precision_floor(loss, mpx.StaticLossScaling(1.0), **options)
    assert set(floor(MODEL, POINTS, targets(1.0)).terms) == {"u", "u_xx"}
    jax.effects_barrier()
    assert not ran


@pytest.mark.slow
def test_the_table_and_the_verdict():
    args = (MODEL, POINTS, targets(3e-3))
    options = {"policy": policy("bfloat16"), **OPTIONS["half"]}
    floor = mpx.precision_floor(pde, mpx.StaticLossScaling(1.0), **options)(*args)
    assert_tells(str(floor), "bfloat16 against forward='float32'", "% of your")
    assert str(floor).endswith("go on with forward='float32'.")
    assert set(floor.terms) == {"u", "u_xx"}
    paths = {".hidden[0].weight", ".last.bias", ".first.module.weight"}
    assert paths <= set(floor.parameters)
    assert floor.parameters.keys() == floor.parameter_noise.keys()
    assert f"{floor!s}".count("%") > 2 * len(paths)
    # A bfloat16 has eight bits, and u_xx a few roundings.
    assert 2.0**-12 < floor.terms["u_xx"] < 2.0**-4


@pytest.mark.parametrize(
    ("error", "told"), [(0.0123, "1.2 %"), (0.123, "12 %"), (0.997, "100 %"), (12.3, "1230 %")]
)
def test_shares_read_as_numbers(error, told):
    x, none = jnp.float32(error), jnp.float32(jnp.nan)
    parts = {"loss": x, "gradient": x, "noise": none, "finite": jnp.asarray(True)}
    named = {"terms": {}, "parameters": {".w": x}, "parameter_noise": {".w": none}}
    floor = mpx.PrecisionFloor(**parts, **named, precision="half", above="full", tolerance=0.1)
    assert re.search(rf"\.w +{told} +nan %$", str(floor), re.MULTILINE), str(floor)


@pytest.mark.slow
def test_noise_is_the_standard_error_of_the_batch():
    loss = lambda model, x: jnp.mean((x @ model - 1) ** 2)
    x, model = jax.random.normal(jax.random.key(2), (64, 4)), jnp.ones(4)
    floor = mpx.precision_floor(loss, mpx.NoOpLossScaling(), micro_batches=8)(model, x)
    grads = np.stack([jax.grad(loss)(model, x[i::8]) for i in range(8)])
    want = np.sqrt(np.sum(np.var(grads, axis=0, ddof=1)) / 8) / np.linalg.norm(grads.mean(0))
    # The gradients are in float16, including that of the batch.
    np.testing.assert_allclose(floor.noise, want, rtol=0.02)
    for given, args, named in [({"micro_batches": 1}, [x], {}), ({}, [], {"x": x})]:
        none = mpx.precision_floor(loss, mpx.NoOpLossScaling(), **given)(model, *args, **named)
        assert math.isnan(none.noise)
        assert "nan" not in str(none)


def test_what_is_no_batch_is_named():
    def loss(model, x, weights):
        return jnp.mean(((x * weights[None]) @ model) ** 2)

    args = (jnp.ones(3), jnp.ones((8, 3)), jnp.ones(3))
    with pytest.raises(ValueError, match=r"`precision_floor` cannot split .*3 entries.*`in_axes`"):
        mpx.precision_floor(loss, mpx.NoOpLossScaling())(*args)
    floor = mpx.precision_floor(loss, mpx.NoOpLossScaling(), in_axes=(0, None))(*args)
    assert floor.noise < 1e-3  # all are alike up to sums of halves


@pytest.mark.slow
def test_one_program_for_all_calls():
    traces = []

    def loss(model, x, *, derivatives):
        traces.append(None)
        d = jax.vmap(mpx.partials(model, ["u_x"], coords="xy", outputs="u", scaling=derivatives))
        return jnp.mean((d(x)["u_x"] - 1) ** 2)

    scaling = mpx.Scaling(derivatives=mpx.DerivativeScaling.per_direction("xy"))
    first = mpx.precision_floor(loss, scaling, **KEEP)(MODEL, POINTS)
    count = len(traces)
    lower = scaling.adjust(False)
    other = jax.tree.map(lambda x: x * 2 if eqx.is_inexact_array(x) else x, MODEL)
    second = mpx.precision_floor(loss, lower, **KEEP)(other, POINTS)
    assert len(traces) == count
    assert first.gradient != second.gradient

    @eqx.filter_jit
    def run(model, points):
        floor = mpx.precision_floor(loss, scaling, **KEEP)(model, points)
        assert "being traced" in str(floor)
        return floor

    assert run(MODEL, POINTS).gradient == pytest.approx(float(first.gradient), rel=0.5)


@pytest.mark.slow
def test_float32_against_float64():
    args = (MODEL, POINTS, targets(1e-3))
    _, want = error_of_gradient(pde, args, use_mixed_precision=False)
    with jax.enable_x64(True):
        floor = mpx.precision_floor(pde, None, use_mixed_precision=False, micro_batches=1)(*args)
        assert "float32 against float64" in str(floor)
        assert floor.gradient.dtype == jnp.float64
        wide = mpx.precision_floor(pde, None, use_mixed_precision=False)(*in_float64(args))
        assert (wide.precision, wide.reached) == ("float64", False)
        np.testing.assert_allclose(floor.gradient, want, rtol=0.5)  # fused otherwise
        # Terms of float64 meet targets of float32.
        with jax.numpy_dtype_promotion("standard"):
            options = {"policy": policy("float32"), "forward": "float64", "micro_batches": 1}
            same = mpx.precision_floor(pde, mpx.NoOpLossScaling(), **options)(*args)
        assert same.loss < 1e-12


def test_what_overflows_has_no_floor():
    loss = lambda model, x: jnp.mean((x @ model) ** 2)
    x = jnp.full((4, 2), 300.0)
    floor = mpx.precision_floor(loss, mpx.StaticLossScaling(1.0))(jnp.ones(2), x)
    assert (floor.finite, floor.reached) == (False, False)
    assert "overflow" in floor.verdict

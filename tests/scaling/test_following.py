"""Tests that the scale of a loss rises to small gradients, and tells what it cannot reach."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import relative

import mpx_pde as mpx


def in_small_units(model, x, unit):
    """Returns the loss of a regression whose values are multiples of `unit`."""
    return jnp.mean((unit * jax.vmap(model)(x) - unit * jnp.sin(6 * x[:, 0])) ** 2)


slow = partial(pytest.param, marks=pytest.mark.slow)
NETWORK = eqx.nn.MLP(2, "scalar", 32, 2, jnp.sin, key=jax.random.key(0))
POINTS = jax.random.uniform(jax.random.key(1), (256, 2))


@eqx.filter_jit
def small_step(model, x, unit, scaling, **options):
    return mpx.filter_grad(in_small_units, scaling, **options)(model, x, unit)


@pytest.mark.parametrize(
    ("options", "unit", "close"),
    [
        ({"forward": "float32"}, 1e-5, 1e-3),
        slow({"forward": "float32"}, 1e-7, 1e-3),
        # Operands of forward products are rounded too.
        slow({"autocast": True}, 1e-5, 6e-3),
    ],
)
def test_the_scale_rises_to_a_small_gradient(options, unit, close):
    want = eqx.filter_grad(in_small_units)(NETWORK, POINTS, unit)
    scaling = mpx.DynamicLossScaling()
    for _ in range(12):
        scaling, finite, grads = small_step(NETWORK, POINTS, unit, scaling, **options)
        assert finite
    assert relative(grads, want) < close
    # It stays, since another step would take the largest gradient beyond 1.
    largest = max(float(jnp.max(jnp.abs(g))) for g in jax.tree.leaves(grads))
    assert 2**-4 <= largest * float(scaling.loss_scaling) < 1
    assert scaling.skipped_steps == scaling.counter - scaling.taken_steps == 0


@pytest.mark.parametrize(
    ("unit", "scaling", "scale"),
    [
        (1, mpx.DynamicLossScaling(), 2**15),
        (0, mpx.DynamicLossScaling(), 2**15),
        slow(1e-5, mpx.DynamicLossScaling(max_loss_scaling=2**20), 2**20),
        slow(1e-5, mpx.StaticLossScaling(2**15), 2**15),
    ],
)
def test_the_scale_rises_no_further_than_it_should(unit, scaling, scale):
    for _ in range(6):
        scaling, _, _ = small_step(NETWORK, POINTS, unit, scaling, forward="float32")
    assert scaling.loss_scaling == scale


@pytest.mark.slow
def test_the_scale_of_a_loss_rises_beside_scales_of_derivatives():
    def loss(model, x, *, derivatives=None):
        terms = ["u_x", "u_yy"]
        d = mpx.partials(model, terms, coords="xy", outputs="u", scaling=derivatives)
        d = jax.vmap(d)(x)
        return jnp.mean((1e-5 * (d["u_x"] + d["u_yy"] - 1)) ** 2)

    scaling = mpx.Scaling(mpx.DynamicLossScaling(), mpx.DerivativeScaling.per_direction("xy"))
    step = eqx.filter_jit(
        lambda scaling, model, x: mpx.filter_grad(loss, scaling, forward="float32")(model, x)
    )
    for _ in range(8):
        scaling, finite, grads = step(scaling, NETWORK, POINTS)
        assert finite
    assert scaling.loss.loss_scaling > 2**15
    assert relative(grads, eqx.filter_grad(loss)(NETWORK, POINTS)) < 1e-3


def test_a_gradient_that_is_far_smaller_than_its_cotangents_costs_few_steps():
    def loss(w, x):  # the gradients of the two halves cancel but for 1e-7
        return jnp.mean(1e3 * (x @ w) - (1e3 + 1e-4) * (x @ w))

    w, x = jnp.ones(16), jnp.ones((64, 16))
    scaling, skipped = mpx.DynamicLossScaling(), []
    step = eqx.filter_jit(
        lambda scaling, w, x: mpx.filter_grad(loss, scaling, forward="float32")(w, x)
    )
    for _ in range(12):
        scaling, finite, _ = step(scaling, w, x)
        skipped.append(not finite)
    assert sum(skipped) <= 5
    assert not any(skipped[-4:])


@pytest.mark.slow
def test_no_scale_rises_in_bfloat16_or_after_a_skip():
    scaling = mpx.DynamicLossScaling()
    with mpx.half_precision(jnp.bfloat16):
        after, *_ = small_step(NETWORK, POINTS, 1e-5, scaling, forward="float32")
    assert after.loss_scaling == 2**15
    skipped = scaling.adjust(False)
    after, *_ = small_step(NETWORK, POINTS, 1e-5, skipped, forward="float32")
    assert after.loss_scaling == skipped.loss_scaling


def test_the_scale_rises_in_a_cast_if_the_loss_is_float32():
    def loss(model, x, unit):
        residuals = unit * (jax.vmap(model)(x) - jnp.sin(6 * x[:, 0]))
        return jnp.mean(residuals.astype(jnp.float32) ** 2)

    step = eqx.filter_jit(lambda s, *args: mpx.filter_grad(loss, s)(*args))
    scaling = mpx.DynamicLossScaling()
    for _ in range(6):
        scaling, finite, grads = step(scaling, NETWORK, POINTS, 1e-4)
        assert finite
    assert scaling.loss_scaling > 2**20
    # The network is evaluated in half, where its gradient at full size is off by 3e-3, too.
    assert relative(grads, eqx.filter_grad(loss)(NETWORK, POINTS, 1e-4)) < 1e-2


@pytest.mark.parametrize(("unit", "off"), [(1e-4, 0.03), slow(1e-5, 0.5)])
def test_a_gradient_that_no_scale_reaches_counts_as_vanished(unit, off):
    def train(scaling):
        for _ in range(3):
            scaling, finite, grads = small_step(NETWORK, POINTS, unit, scaling)
        return jax.block_until_ready((scaling, finite, grads))

    with pytest.warns(mpx.PrecisionWarning, match="vanished as a whole"):
        scaling, finite, grads = train(mpx.DynamicLossScaling())
    assert (finite, scaling.vanished_steps, scaling.loss_scaling) == (True, 3, 2**15)
    # It is told since it is wrong.
    assert relative(grads, eqx.filter_grad(in_small_units)(NETWORK, POINTS, unit)) > off


def test_a_gradient_of_usual_size_counts_as_nothing_in_a_cast():
    for scale in (1.0, 2.0**15):  # whatever the scale begins with
        scaling, *_ = small_step(NETWORK, POINTS, 1e-2, mpx.DynamicLossScaling(scale))
        assert scaling.vanished_steps == 0

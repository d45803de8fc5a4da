"""Tests that a gradient which vanished as a whole is counted and told, and that a step with a loss
that is not finite is skipped."""

import io
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from helpers import assert_tells, over_devices, scaler
from jax import export, lax
from jax.sharding import PartitionSpec as P

import mpx_pde as mpx


pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),
    # Quotients by the root of squares are told when they are traced, too.
    pytest.mark.filterwarnings("ignore:.*divides by the root of:mpx_pde.PrecisionWarning"),
]

W = jnp.linspace(300.0, 400.0, 8)  # the square of each is infinite in float16
Y = jnp.ones(8)


def distance(prediction, y=Y):
    return jnp.mean((prediction - y) ** 2)


# Functions that overflow in float16 and end in 1/∞. Their gradients in float32 are not zero.
OVERFLOWING = {
    "x/‖x‖": lambda w, y: distance(w / jnp.linalg.norm(w), y),
    "x/√Σx²": lambda w, y: distance(w / jnp.sqrt(jnp.sum(w * w)), y),
    "x/(1+x²)": lambda w, y: distance(w / (1 + w * w), y),
    "tanh(x²)/x²": lambda w, y: distance(jnp.tanh(w * w) / (w * w), y),
    "exp(-x²/3e4)": lambda w, y: distance(jnp.exp(-w * w / 3e4), y),
}

# Gradients that are zero as they should be: of a loss that is zero, or does not depend on `w`.
ZERO = {
    "converged": lambda w, y: distance(w, lax.stop_gradient(w)),
    "masked": lambda w, y: jnp.mean(jnp.where(y > 2, (w / 100 - y) ** 2, 0)),
    "weight of zero": lambda w, y: 0 * distance(w / 100, y),
    "stop_gradient": lambda w, y: distance(lax.stop_gradient(w) / 100, y),
    "rounded": lambda w, y: distance(jnp.round(w / 100), y),
}


def taken(loss, scaling, model, *batch, steps=3, transform=mpx.filter_value_and_grad, **options):
    """Takes compiled gradients, and returns the last result and the scaling behind it."""

    @eqx.filter_jit
    def step(model, scaling, *batch):
        value, scaling, finite, grads = transform(loss, scaling, **options)(model, *batch)
        return value, scaling, finite, grads

    for _ in range(steps):
        out = jax.block_until_ready(step(model, scaling, *batch))
        scaling = out[1]
    return out


def check_told(loss):
    with pytest.warns(mpx.PrecisionWarning, match="vanished as a whole in 1 steps") as told:
        _, scaling, finite, grads = taken(loss, mpx.DynamicLossScaling(), W, Y)
    told = [warning for warning in told if "divides by the root of" not in str(warning.message)]
    assert [warning.filename for warning in told] == [__file__]
    assert_tells(str(told[0].message), "explain_nonfinite", "autocast=True", "vanished_steps")
    assert (finite, scaling.vanished_steps, scaling.skipped_steps) == (True, 3, 0)
    assert not np.any(grads)
    assert np.all(jax.grad(loss)(W, Y) != 0)  # the oracle
    assert "vanished_steps=3" in repr(scaling)


def test_a_gradient_that_vanishes_as_a_whole_is_counted_and_told_once():
    check_told(OVERFLOWING["x/√Σx²"])


@pytest.mark.slow
@pytest.mark.parametrize("name", OVERFLOWING)
def test_functions_that_overflow_and_divide(name):
    loss = OVERFLOWING[name]
    check_told(loss)
    where = mpx.explain_nonfinite(mpx.filter_grad(loss, mpx.DynamicLossScaling()))(W, Y)
    assert_tells(where, "float16 overflows first at", "test_vanished.py")
    for options in ({"autocast": True}, {"forward": "float32"}):
        _, scaling, _, grads = taken(loss, mpx.DynamicLossScaling(), W, Y, **options)
        assert (bool(np.all(grads != 0)), int(scaling.vanished_steps)) == (True, 0)


@pytest.mark.parametrize("name", ZERO)
def test_a_gradient_that_should_be_zero_is_no_alarm(name):
    _, scaling, finite, grads = taken(ZERO[name], mpx.DynamicLossScaling(), W, Y)
    assert not np.any(grads)
    assert (finite, scaling.vanished_steps) == (True, 0)


@pytest.mark.slow
def test_frozen_parameters_are_no_alarm():
    model = eqx.nn.MLP(2, 1, 8, 1, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (16, 2))

    def loss(model, x):
        frozen = eqx.tree_at(lambda m: m.layers[0], model, replace_fn=lax.stop_gradient)
        return jnp.mean(jax.vmap(frozen)(x) ** 2) + 1

    _, scaling, *_ = taken(loss, mpx.DynamicLossScaling(), model, x)
    assert scaling.vanished_steps == 0


def test_one_parameter_cannot_be_judged_by_its_gradient():
    """A step has the same numbers to the bit whether one branch of a model overflowed or is masked,
    so a single parameter is not counted. Evaluating the batch in float32 tells the two apart."""
    model = {"a": W, "b": W / 100}
    overflows = lambda m, y: distance(m["a"] / jnp.linalg.norm(m["a"]), y) + distance(m["b"], y)
    masked = lambda m, y: distance(jnp.where(y > 2, m["a"], 0), y) + distance(m["b"], y)
    steps = [
        taken(loss, mpx.DynamicLossScaling(2.0), model, Y, steps=1) for loss in (overflows, masked)
    ]
    for x, y in zip(*map(jtu.tree_leaves, steps), strict=True):
        np.testing.assert_array_equal(x, y)
    assert not np.any(steps[0][3]["a"])
    assert steps[0][1].vanished_steps == 0
    exact = [jax.grad(loss)(model, Y)["a"] for loss in (overflows, masked)]
    assert (bool(np.all(exact[0] != 0)), bool(np.any(exact[1]))) == (True, False)
    with pytest.warns(mpx.PrecisionWarning, match=r"zero for .*\['a'\] at every scale"):
        mpx.initial_scaling(overflows, mpx.DynamicLossScaling())(model, Y)
    mpx.initial_scaling(masked, mpx.DynamicLossScaling())(model, Y)  # warnings are errors


def test_a_float32_baseline_and_a_skipped_step_count_nothing():
    loss = OVERFLOWING["x/‖x‖"]
    run = mpx.filter_value_and_grad(loss, mpx.DynamicLossScaling(), use_mixed_precision=False)
    assert run(W, Y)[1].vanished_steps == 0
    poisoned = lambda w, y: loss(w, y) + jnp.inf
    _, scaling, finite, _ = taken(poisoned, scaler(4), W, Y, steps=1)
    assert (finite, scaling.vanished_steps, scaling.skipped_steps) == (False, 0, 1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::mpx_pde.PrecisionWarning")
def test_vanished_gradients_are_counted_everywhere():
    loss = OVERFLOWING["x/‖x‖"]
    eager = mpx.filter_grad(loss, mpx.DynamicLossScaling())(W, Y)[0]
    assert eager.vanished_steps == 1

    # In an ensemble, by member.
    models = jnp.stack([W, W / 100])
    run = lambda w: mpx.filter_grad(loss, mpx.DynamicLossScaling())(w, Y)[0]
    assert jax.vmap(run)(models).vanished_steps.tolist() == [1, 0]

    # Over micro-batches: only if it vanishes in all of them.
    unit = lambda x: x / jnp.sqrt(jnp.sum(x * x))
    whole = lambda w, y: jnp.mean(jax.vmap(lambda y: jnp.mean((unit(w * y) - 1) ** 2))(y))
    accumulated = lambda *args: mpx.filter_accumulated_value_and_grad(*args, micro_batches=2)
    for y, count in ((jnp.ones((2, 1)), 1), (jnp.array([[1.0], [0.01]]), 0)):
        out = taken(whole, mpx.DynamicLossScaling(), W, y, steps=1, transform=accumulated)
        assert out[1].vanished_steps == count

    # With derivative scales, in both of its counts.
    derivatives = mpx.DerivativeScaling.per_direction("x", order=1)
    # At larger scales, 0 · ∞ would be no number.
    scaling = mpx.Scaling(mpx.DynamicLossScaling(max_loss_scaling=2**15), derivatives)

    def of_derivative(w, y, *, derivatives):
        u = lambda p: w[0] / 400 * p[0]
        d = mpx.partials(u, ["u_x"], coords="x", outputs="u", scaling=derivatives)(y[:1])
        return loss(w, y) + 0 * d["u_x"]

    _, scaling, *_ = taken(of_derivative, scaling, W, Y, keep_full=(False, True))
    assert (scaling.vanished_steps, scaling.loss.vanished_steps) == (3, 3)
    assert mpx.derivatives.telemetry(scaling)["vanished_steps"] == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::mpx_pde.PrecisionWarning")
def test_devices_agree_on_a_vanished_gradient():
    def shard(w, y):
        scaling = mpx.DynamicLossScaling()
        run = mpx.filter_grad(OVERFLOWING["x/‖x‖"], scaling, axis_name="data")
        return run(w, y[0])[0].vanished_steps[None]

    for w, count in ((jnp.stack([W, W]), 1), (jnp.stack([W, W / 100]), 0)):
        step = over_devices(lambda w, y: shard(w[0], y), 2, (P("data"), P("data")), P("data"))
        counts = jax.jit(step)(w, jnp.stack([Y, Y]))
        assert counts.tolist() == [count, count]


@pytest.mark.parametrize("donate", ["none", "all"])
def test_it_is_told_in_a_training_loop_and_may_be_an_error(donate):
    optimizer = optax.sgd(0.1)

    @eqx.filter_jit(donate=donate)
    def step(w, state, scaling):
        run = mpx.filter_value_and_grad(OVERFLOWING["x/‖x‖"], scaling)
        _, scaling, finite, grads = run(w, Y)
        w, state = mpx.optimizer_update(w, optimizer, state, grads, finite)
        return w, state, scaling

    state = jnp.array(W), optimizer.init(W), mpx.DynamicLossScaling()

    def train(state):
        for _ in range(10):
            state = step(*state)

    with pytest.raises(mpx.PrecisionWarning, match="vanished as a whole"):
        train(state)


def test_the_count_is_saved_restored_and_exported():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mpx.PrecisionWarning)
        _, scaling = taken(OVERFLOWING["x/‖x‖"], mpx.DynamicLossScaling(), W, Y)[:2]
    buffer = io.BytesIO()
    eqx.tree_serialise_leaves(buffer, scaling)
    buffer.seek(0)
    mpx.scaling._watched.watch.forget()  # as in a new process
    with pytest.warns(mpx.PrecisionWarning, match="vanished as a whole in 3 steps"):
        restored = eqx.tree_deserialise_leaves(buffer, mpx.DynamicLossScaling())
    assert restored.vanished_steps == 3
    leaves, treedef = jtu.tree_flatten(mpx.DynamicLossScaling())

    @jax.jit
    def step(leaves, w):
        run = mpx.filter_grad(OVERFLOWING["x/‖x‖"], treedef.unflatten(leaves))
        return jtu.tree_leaves(run(w, Y)[0])

    exported = export.export(step)(leaves, W)
    assert "callback" not in exported.mlir_module()  # JAX saves no program with one
    assert treedef.unflatten(exported.call(leaves, W)).vanished_steps == 1


@pytest.mark.slow
def test_scales_that_are_tried_count_nothing_and_a_leaf_that_vanishes_is_told():
    model = {"w": W, "b": jnp.zeros(8)}
    loss = lambda m, y: distance(m["w"] / jnp.linalg.norm(m["w"]) + m["b"], y)
    with pytest.warns(mpx.PrecisionWarning, match=r"zero for \['w'\] at every scale") as told:
        scaling = mpx.initial_scaling(loss, mpx.DynamicLossScaling())(model, Y)
    assert_tells(str(told[0].message), "explain_nonfinite", "autocast=True")
    assert scaling.vanished_steps == 0
    with pytest.warns(mpx.PrecisionWarning, match="a gradient that is zero at every scale"):
        mpx.initial_scaling(OVERFLOWING["x/‖x‖"], mpx.DynamicLossScaling())(W, Y)


# --- A loss that is not finite -------------------------------------------------------------------

NOT_FINITE = {
    "trapezoid": lambda w, x: jnp.trapezoid(w * x, dx=1.0),
    "interp": lambda w, x: jnp.sum(jnp.interp(w * 0 + 2.0, x, x * 0 + 60000.0) * 2),
    "constant": lambda w, x: jnp.mean(w * x) + jnp.log(jnp.zeros(())),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_FINITE)
def test_a_loss_that_is_not_finite_makes_the_step_not_finite(name):
    x = jnp.linspace(1.0, 40000.0, 64)
    value, scaling, finite, _ = taken(NOT_FINITE[name], scaler(0), jnp.ones(64), x, steps=1)
    assert not np.isfinite(value)
    assert (finite, scaling.skipped_steps) == (False, 1)
    rows = lambda w, x: jnp.mean(jax.vmap(lambda x: NOT_FINITE[name](w, x))(x))
    accumulated = lambda *args: mpx.filter_accumulated_value_and_grad(*args, micro_batches=2)
    batch = jnp.stack([x / 1e4, x])  # only one micro-batch of the two need be infinite
    _, _, finite, _ = taken(rows, scaler(0), jnp.ones(64), batch, steps=1, transform=accumulated)
    assert not finite


def test_no_first_scale_is_found_for_a_loss_that_is_not_finite():
    with pytest.raises(ValueError, match="The loss itself is not finite"):
        mpx.initial_scaling(NOT_FINITE["constant"], mpx.DynamicLossScaling())(Y, Y)

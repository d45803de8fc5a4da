"""Tests support for training loops and layers of other libraries."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from helpers import relative, tree_equal_bits

import mpx_pde as mpx


scale_by = mpx.contrib.scale_by_loss_scaling
MOVING = {"scale_in_params": lambda p: p["scale"]}


def test_what_is_not_finite_is_skipped_and_lowers_the_scale():
    optimizer = scale_by(optax.adam(1e-2), mpx.DynamicLossScaling(2.0**15), **MOVING)
    params = {"net": jnp.ones(3), "scale": jnp.float32(2.0**15)}
    state = optimizer.init(params)
    grads = {"net": jnp.array([1.0, jnp.inf, 0.0]), "scale": jnp.float32(0)}
    updates, after = jax.jit(optimizer.update)(grads, state, params)
    assert tree_equal_bits(after.inner, state.inner)
    new = optax.apply_updates(params, updates)
    assert (new["net"] == params["net"]).all()
    assert new["scale"] == after.scaling.loss_scaling == 2.0**14
    assert after.scaling.skipped_steps == 1


def steps(optimizer, params, gradient, count):
    """Returns the parameters before each step and after the last."""
    state, seen = optimizer.init(params), [params]
    for _ in range(count):
        updates, state = optimizer.update(gradient(seen[-1]), state, seen[-1])
        seen.append(optax.apply_updates(seen[-1], updates))
    return seen


@pytest.mark.parametrize(("begin", "rate"), [(2.0**10, 0.5), (2.0**14, 1.0)])
def test_gradients_are_unscaled_by_the_scale_that_the_loss_had(begin, rate):
    """The loss's scale may differ from the state's: a loop scales updates or starts elsewhere."""
    net, count = jnp.array([1.0, -2.0, 0.5]), 4
    scaling = mpx.DynamicLossScaling(2.0**10, period=2)
    optimizer = optax.chain(scale_by(optax.sgd(0.25), scaling, **MOVING), optax.scale(rate))
    params = {"net": net, "scale": jnp.float32(begin)}
    gradient = lambda p: {"net": p["net"] * p["scale"], "scale": jnp.float32(0)}
    *before, last = steps(optimizer, params, gradient, count)
    assert len({float(p["scale"]) for p in before}) > 1
    # If the rate halves each change, the scale is not a power of two: a few roundings.
    np.testing.assert_allclose(last["net"], net * (1 - 0.25 * rate) ** count, rtol=1e-6)


def test_a_scale_far_below_its_leaf_is_reached_in_two_steps():
    """With one update, the sum of the leaf and the difference would be zero."""
    params = {"net": jnp.ones(3), "scale": jnp.float32(2.0**15)}
    optimizer = scale_by(optax.sgd(0.25), mpx.DynamicLossScaling(2.0**-12), **MOVING)
    zeros = lambda params: jax.tree.map(jnp.zeros_like, params)
    found = steps(optimizer, params, zeros, 3)
    assert [float(p["scale"]) for p in found[1:]] == [2.0**-5, 2.0**-12, 2.0**-12]


# Optimizers that use the loss.
OF_THE_LOSS = {
    "polyak_sgd": lambda: optax.polyak_sgd(max_learning_rate=1.0),
    "reduce_on_plateau": lambda: optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, atol=0.3)
    ),
    "momo": lambda: optax.contrib.momo(1.0),
}


def by_gradients():
    """An optimizer that takes the gradient as an extra argument and steps along it."""

    def update(updates, state, params=None, *, grad, **extra_args):
        del params, extra_args
        return jtu.tree_map(lambda g: -0.1 * g, grad), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


@pytest.mark.slow
@pytest.mark.parametrize(("moves", "x64"), [(False, False), (True, True)])
@pytest.mark.parametrize("name", [*OF_THE_LOSS, "grad", "adam"])
def test_the_optimizer_inside_gets_the_loss_itself(name, moves, x64):
    """Scales are powers of two, so everything is exact."""
    inside = {**OF_THE_LOSS, "grad": by_gradients, "adam": lambda: optax.adam(0.1)}[name]()
    scale, target = jnp.float32(2.0**12), jnp.array([1.0, -2.0, 0.5])
    loss = lambda net: jnp.sum((net - target) ** 2)

    def scaled_loss(params):
        return jax.lax.stop_gradient(params.get("scale", scale)) * loss(params["net"])

    scaling = mpx.DynamicLossScaling(scale, period=2) if moves else mpx.StaticLossScaling(scale)
    optimizer = scale_by(inside, scaling, **MOVING if moves else {})

    def train(loss, optimizer, params):
        state, trace = optimizer.init(params), []
        for _ in range(5):
            value, grads = jax.value_and_grad(loss)(params)
            given = {"value": value, "grad": grads}
            updates, state = optimizer.update(grads, state, params, **given)
            assert jax.tree.map(jnp.result_type, updates) == jax.tree.map(jnp.result_type, params)
            params = optax.apply_updates(params, updates)
            trace.append(params["net"])
        return trace

    params = {"net": jnp.zeros(3)}
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(x64):
        # Both use the same tree of parameters, because some optimizers take norms over it.
        extra = {"scale": scale} if moves else {}
        fixed = {"scale": jnp.float32(0)} if moves else {}
        plain = optax.with_extra_args_support(inside)
        want = train(lambda p: loss(p["net"]), plain, {**params, **fixed})
        got = train(scaled_loss, optimizer, {**params, **extra})
    for x, y in zip(got, want, strict=True):
        assert tree_equal_bits(x, y)


def test_a_loss_that_is_not_finite_is_skipped_too():
    optimizer = scale_by(optax.polyak_sgd(), mpx.StaticLossScaling(2.0**12))
    params = jnp.ones(3)
    state = optimizer.init(params)
    with jax.debug_nans(True):
        updates, after = optimizer.update(params, state, params, value=jnp.float32(jnp.inf))
    assert not updates.any()
    assert tree_equal_bits(after, state)


def test_functions_that_the_optimizer_does_not_call_are_no_error():
    """A loop may pass them to every optimizer, and the gradient of a model may be callable."""
    model = eqx.nn.Linear(2, 1, key=jax.random.key(0))
    optimizer = scale_by(by_gradients(), mpx.StaticLossScaling(4.0))
    given = {"grad": model, "value_fn": lambda model: 0.0}
    updates, _ = optimizer.update(model, optimizer.init(model), model, **given)
    assert tree_equal_bits(updates, jax.tree.map(lambda x: -0.1 * (x / 4), model))


@pytest.mark.slow
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_the_fno_of_pdequinox_in_half_precision(dims):
    pdequinox = pytest.importorskip("pdequinox")
    sizes = {"hidden_channels": 4, "num_modes": 2, "num_blocks": 2}
    fno = pdequinox.arch.ClassicFNO(dims, 1, 1, **sizes, key=jax.random.key(0))
    mine = mpx.contrib.convert_spectral_layers(fno)
    x = jax.random.normal(jax.random.key(1), (1, *(8, 10, 12)[:dims]))
    run = eqx.filter_jit(lambda model, x: model(x))
    with jax.numpy_dtype_promotion("standard"):
        want = run(fno, x)
    np.testing.assert_allclose(run(mine, x), want, atol=1e-5)
    half = run(mpx.cast_to_bfloat16(mine), x.astype(jnp.bfloat16))
    assert half.dtype == jnp.bfloat16
    # Each of two blocks rounds its stored values some eight times, by 2^-9.
    assert relative(half, want) < 16 * 2**-9
    assert all(x.dtype == jnp.float32 for x in jtu.tree_leaves(eqx.filter(mine, eqx.is_array)))


def test_no_scaling_needs_no_place_for_its_scale():
    """Training in bfloat16 uses no scaling."""
    optimizer = scale_by(optax.sgd(0.5), mpx.NoOpLossScaling())
    w = jnp.ones(2)
    state = optimizer.init(w)
    update, state = optimizer.update(w.astype("bfloat16"), state, w)
    np.testing.assert_array_equal(update, [-0.5, -0.5])
    skipped, state = optimizer.update(w * jnp.inf, state, w)
    np.testing.assert_array_equal(skipped, [0.0, 0.0])

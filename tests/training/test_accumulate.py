"""Accumulated gradients are those of the whole batch, with one scale and one decision."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from helpers import HALVES, avals, running, tree_allclose, tree_equal_bits
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import mpx_pde as mpx


FULL = "params=float32,compute=float32,output=float32"


def scaler(exponent, **kwargs):
    return running(mpx.DynamicLossScaling(2.0**exponent, **kwargs))


def mlp():
    return eqx.nn.MLP(2, 1, 8, 1, activation=jnp.tanh, key=jax.random.key(0))


def batch():
    x = jnp.linspace(-1, 1, 24).reshape(12, 2)
    return x, jnp.sin(3 * x[:, :1]) + 2


def mse(model, x, y):
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def mean_product(w, x):
    """Its gradient in `w` is the mean of `x` over the batch."""
    return jnp.mean(jnp.sum(w[None] * x, axis=1))


def accumulated(*args, **kwargs):
    return eqx.filter_jit(mpx.filter_accumulated_value_and_grad(*args, **kwargs))


@pytest.mark.parametrize(
    ("micro_batches", "options"),
    [
        (1, {"policy": FULL}),
        (3, {"policy": FULL}),
        (3, {"use_mixed_precision": False}),
    ],
)
def test_in_float32_it_is_the_whole_batch(micro_batches, options):
    want = eqx.filter_jit(eqx.filter_value_and_grad(mse))(mlp(), *batch())
    step = accumulated(mse, scaler(10), micro_batches, **options)
    value, _, finite, grads = step(mlp(), *batch())
    assert finite
    assert tree_allclose((value, grads), want)


@pytest.mark.slow
def test_the_sum_is_taken_in_float32():
    """512 gradients of 1 + 2^-10, and one of 2^-10 fewer: float16 would round the sum."""
    x = jnp.full((512, 1), 1.0 + 2.0**-10)
    _, _, finite, grads = accumulated(mean_product, scaler(0), 512)(jnp.ones(1), x)
    assert finite
    assert tree_equal_bits(grads, jnp.array([1.0 + 2.0**-10]))
    # Parameters in half: summed in float32, handed back in half.
    x = jnp.ones((4096, 1))
    for dtype in HALVES:
        _, _, finite, grads = accumulated(mean_product, scaler(0), 4096)(jnp.ones(1, dtype), x)
        assert tree_equal_bits(grads, jnp.ones(1, dtype))


@pytest.mark.parametrize("period", [1, 3], ids=["growth step", "plain step"])
def test_one_scale_one_flag_one_adjustment(period):
    x = jnp.array([[1.0], [3.0], [0.5], [4.0]])
    scaling = scaler(4, period=period)
    value, adjusted, finite, grads = accumulated(mean_product, scaling, 4)(jnp.ones(1), x)
    assert finite.shape == ()
    assert finite
    # Not by the adjusted scale; and the scale grew once, not four times.
    assert tree_equal_bits((value, grads), (jnp.float32(2.125), jnp.array([2.125])))
    assert adjusted.loss_scaling == 2.0 ** (4 + (period == 1))
    assert adjusted.counter == (0 if period == 1 else 1)
    assert avals(adjusted) == avals(scaling)


def test_an_overflow_in_one_micro_batch_skips_the_window():
    x = jnp.ones((4, 2)).at[2, 1].set(6e4)
    value, adjusted, finite, grads = accumulated(mean_product, scaler(4), 4)(jnp.ones(2), x)
    assert not finite
    assert adjusted.loss_scaling == 2.0**3
    assert adjusted.skipped_steps == 1
    assert grads[0] == 1.0
    assert grads[1] == jnp.inf
    assert jnp.isfinite(value)
    optimizer = optax.adam(0.1)
    w = jnp.ones(2)
    state = optimizer.init(w)
    after = mpx.optimizer_update(w, optimizer, state, grads, finite)
    assert tree_equal_bits(after, (w, state))


# --- How the batch is split ----------------------------------------------------------------------


def splits(in_axes: Any, *args, micro_batches=2, **kwargs):
    """What the function gets of each argument, micro-batch by micro-batch."""

    def loss(w, *args, **kwargs):
        aux = jtu.tree_map(lambda x: x if eqx.is_array(x) else None, (args, kwargs))
        return jnp.sum(w).astype(jnp.float32), aux

    (_, aux), *_ = mpx.filter_accumulated_value_and_grad(
        loss, scaler(0), micro_batches, has_aux=True, in_axes=in_axes, keep_full=True
    )(jnp.ones(1), *args, **kwargs)
    return aux


@pytest.mark.slow
def test_consecutive_blocks_along_the_axes():
    x, y = jnp.arange(8.0).reshape(4, 2), jnp.arange(12.0).reshape(3, 4)
    x_rows, x_columns = jnp.stack([x[:2], x[2:]]), jnp.stack([x[:, :1], x[:, 1:]])
    y_columns = jnp.stack([y[:, :2], y[:, 2:]])
    whole = lambda z: jnp.stack([z, z])
    for in_axes, want in [
        ((0, 1), (x_rows, y_columns)),
        ((-2, None), (x_rows, whole(y))),
        (None, (whole(x), whole(y))),
        (-1, (x_columns, y_columns)),
    ]:
        assert tree_equal_bits(splits(in_axes, x, y), (want, {}))
    assert tree_equal_bits(splits(0, x, x), ((x_rows, x_rows), {}))


@pytest.mark.slow
def test_in_axes_is_a_prefix():
    x = {"a": jnp.arange(4.0), "b": jnp.ones((3, 4))}
    points = [jnp.arange(2.0), (jnp.arange(6), None)]
    ((x_out, points_out), _) = splits(({"a": 0, "b": 1}, 0), x, points)
    assert tree_equal_bits(x_out, {"a": x["a"].reshape(2, 2), "b": jnp.ones((2, 3, 2))})
    assert tree_equal_bits(
        points_out, [points[0].reshape(2, 1), (jnp.arange(6).reshape(2, 3), None)]
    )
    ((x_out, points_out), _) = splits((None, 0), x, points)
    assert tree_equal_bits(x_out["a"], jnp.stack([x["a"]] * 2))


def test_keys_scalars_states_and_keywords_are_passed_whole():
    key, state = jax.random.key(0), eqx.nn.State(eqx.nn.StateIndex(jnp.ones(3)))
    scalar, numpy, text = jnp.float32(2.0), np.arange(4.0, dtype=np.float32), "text"
    c = jnp.ones(3)
    ((key_out, state_out, scalar_out, numpy_out, none), kwargs) = splits(
        0, key, state, scalar, numpy, text, c=c
    )
    assert tree_equal_bits(key_out, jnp.stack([key, key]))
    assert tree_equal_bits(jtu.tree_leaves(state_out), [jnp.ones((2, 3))])
    assert tree_equal_bits(scalar_out, jnp.full(2, 2.0))
    assert tree_equal_bits(numpy_out, jnp.arange(4.0).reshape(2, 2))
    assert none is None
    assert tree_equal_bits(kwargs, {"c": jnp.ones((2, 3))})


def test_aux_is_stacked_and_in_the_output_dtype():
    def loss(w, x):
        static = (None, "text", jnp.tanh, x.shape[0], 1.5)
        aux = {"max": jnp.max(x), "n": jnp.array(x.shape[0]), "static": static, "x": [x]}
        return mean_product(w, x), aux

    x = jnp.arange(6.0).reshape(6, 1)
    for options, dtype in [
        ({}, "float32"),
        ({"policy": "params=float32,compute=float16,output=bfloat16"}, "bfloat16"),
        ({"use_mixed_precision": False}, "float32"),
    ]:
        (value, aux), _, _, _ = accumulated(loss, scaler(4), 3, True, **options)(jnp.ones(1), x)
        assert value == 2.5
        assert tree_equal_bits(aux["max"], jnp.array([1.0, 3.0, 5.0], dtype))
        assert tree_equal_bits(aux["n"], jnp.array([2, 2, 2]))
        # As without accumulation.
        assert aux["static"] == (None, "text", jnp.tanh, 2, 1.5)
        assert tree_equal_bits(aux["x"], [x.reshape(3, 2, 1).astype(dtype)])


# --- Transformations -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "check_vma"),
    [("replicated", True), ("of each device", True), ("of each device", False)],
)
def test_devices_agree(weights, check_vma):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:8])

    def device_step(w, scaling, x):
        if check_vma and weights == "of each device":
            w = lax.pcast(w, "x", to="varying")
        _, scaling, finite, grads = mpx.filter_accumulated_value_and_grad(
            mean_product, scaling, 2, axis_name="x"
        )(w, x)
        grads = lax.pmean(grads, "x") if weights == "of each device" or not check_vma else grads / 8
        return jtu.tree_map(lambda x: x[None], (scaling, finite, grads))

    step = jax.jit(
        jax.shard_map(
            device_step,
            mesh=mesh,
            in_specs=(P(), P(), P("x")),
            out_specs=P("x"),
            check_vma=check_vma,
        )
    )
    ones = jnp.ones((32, 2))
    for x, exponent, good in [(ones, 5, True), (ones.at[13, 1].set(6e4), 3, False)]:
        scaling, finite, grads = step(jnp.ones(2), scaler(4, period=1), x)
        np.testing.assert_array_equal(finite, np.full(8, good))
        np.testing.assert_array_equal(scaling.loss_scaling, np.full(8, 2.0**exponent))
        np.testing.assert_array_equal(grads[:, 0], np.ones(8))


def test_float64():
    with jax.enable_x64(True):
        w, x = jnp.ones(2, jnp.float64), jnp.ones((4, 2), jnp.float64)
        value, scaling, finite, grads = accumulated(mean_product, scaler(4), 2)(w, x)
        assert tree_equal_bits((value, grads), (jnp.float32(2.0), w))
        assert avals(scaling) == avals(scaler(4))


def test_keys_are_split_by_the_caller():
    """One key is the same in all micro-batches; of several each gets its own, an array of one."""

    def loss(w, x, key):
        key = key if key.ndim == 0 else key[0]
        noise = jax.random.normal(key)
        return jnp.sum(w) * jnp.mean(x), noise

    accumulated = mpx.filter_accumulated_value_and_grad(
        loss, mpx.NoOpLossScaling(), 4, has_aux=True
    )
    w, x, key = jnp.ones(2), jnp.ones(8), jax.random.key(0)
    (_, one), *_ = accumulated(w, x, key)
    (_, several), *_ = accumulated(w, x, jax.random.split(key, 4))
    assert len(set(one.tolist())) == 1
    assert len(set(several.tolist())) == 4


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("mixed", [True, False])
def test_numpy_masters_in_float64(mixed):
    """As a file of weights holds them: without 64-bit types they are float32 in JAX."""
    w = np.ones(2)
    loss = lambda w, x: jnp.sum(jnp.asarray(w) * jnp.mean(x))
    accumulated = mpx.filter_accumulated_value_and_grad(
        loss, mpx.NoOpLossScaling(), 2, use_mixed_precision=mixed
    )
    plain = mpx.filter_grad(loss, mpx.NoOpLossScaling(), use_mixed_precision=mixed)
    for grads in (accumulated(w, jnp.ones(4))[-1], plain(w, jnp.ones(4))[-1]):
        assert grads.dtype == jnp.float32
        np.testing.assert_array_equal(grads, [1.0, 1.0])

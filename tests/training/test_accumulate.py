"""Tests that accumulated gradients match the whole batch, with one scale and one decision."""

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from helpers import HALVES, avals, scaler, tree_equal_bits
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import mpx_pde as mpx


def mean_product(w, x):
    """Returns a value whose gradient in `w` is the mean of `x` over the batch."""
    return jnp.mean(jnp.sum(w[None] * x, axis=1))


def accumulated(*args, **kwargs):
    return eqx.filter_jit(mpx.filter_accumulated_value_and_grad(*args, **kwargs))


@pytest.mark.slow
def test_the_sum_is_taken_in_float32():
    """Sums 512 gradients of 1 + 2^-10. float16 would round the sum."""
    x = jnp.full((512, 1), 1.0 + 2.0**-10)
    _, _, finite, grads = accumulated(mean_product, scaler(0), 512)(jnp.ones(1), x)
    assert finite
    assert tree_equal_bits(grads, jnp.array([1.0 + 2.0**-10]))
    # Gradients of half parameters are summed in float32 and returned in half.
    x = jnp.ones((4096, 1))
    for dtype in HALVES:
        _, _, finite, grads = accumulated(mean_product, scaler(0), 4096)(jnp.ones(1, dtype), x)
        assert tree_equal_bits(grads, jnp.ones(1, dtype))
        kept = mpx.FullPrecision(jnp.ones(1, dtype))
        in_full = lambda w, x: mean_product(w.value.astype(x.dtype), x)
        _, _, finite, grads = accumulated(in_full, scaler(0), 4096)(kept, x)
        assert tree_equal_bits(grads, kept)


@pytest.mark.parametrize("period", [1, 3], ids=["growth step", "plain step"])
def test_one_scale_one_flag_one_adjustment(period):
    x = jnp.array([[1.0], [3.0], [0.5], [4.0]])
    scaling = scaler(4, period=period)
    value, adjusted, finite, grads = accumulated(mean_product, scaling, 4)(jnp.ones(1), x)
    # Not by the adjusted scale; and the scale grew once, not four times.
    want = jnp.float32(2.125), jnp.array(True), jnp.array([2.125])
    assert tree_equal_bits((value, finite, grads), want)
    grown = (2.0**5, 0) if period == 1 else (2.0**4, 1)
    assert (adjusted.loss_scaling, adjusted.counter) == grown
    assert avals(adjusted) == avals(scaling)


def test_an_overflow_in_one_micro_batch_skips_the_window():
    x = jnp.ones((4, 2)).at[2, 1].set(6e4)
    value, adjusted, finite, grads = accumulated(mean_product, scaler(4), 4)(jnp.ones(2), x)
    assert (finite, adjusted.loss_scaling, adjusted.skipped_steps) == (False, 2.0**3, 1)
    assert tree_equal_bits(grads, jnp.array([1.0, jnp.inf]))
    assert jnp.isfinite(value)


# --- How the batch is split ----------------------------------------------------------------------


def splits(in_axes: Any, *args, micro_batches=2, **kwargs):
    """Returns the arguments that the function receives, stacked by micro-batches."""

    def loss(w, *args, **kwargs):
        aux = jtu.tree_map(lambda x: x if eqx.is_array(x) else None, (args, kwargs))
        return jnp.sum(w).astype(jnp.float32), aux

    (_, aux), *_ = mpx.filter_accumulated_value_and_grad(
        loss, scaler(0), micro_batches, has_aux=True, in_axes=in_axes, keep_full=True
    )(jnp.ones(1), *args, **kwargs)
    return aux


@pytest.mark.slow
def test_the_batch_is_dealt_out_along_the_axes():
    x, y = jnp.arange(8.0).reshape(4, 2), jnp.arange(12.0).reshape(3, 4)
    x_rows, x_columns = jnp.stack([x[::2], x[1::2]]), jnp.stack([x[:, :1], x[:, 1:]])
    y_columns = jnp.stack([y[:, ::2], y[:, 1::2]])
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
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_each_device_has_its_part_of_every_micro_batch(kind):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    model = eqx.nn.MLP(2, 1, 24, 1, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (64, 2))
    loss = lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2)
    accumulated = mpx.filter_accumulated_value_and_grad(loss, mpx.DynamicLossScaling(2.0**8), 4)
    want = accumulated(model, x)
    whole, rows = (NamedSharding(mesh, spec) for spec in (P(), P("data")))
    here = eqx.filter_shard(model, whole), jax.device_put(x, rows)
    compiled = eqx.filter_jit(accumulated).lower(*here).compile()
    program = compiled.compiled.as_text()
    # A micro-batch of 16 has 4 rows on each device.
    assert "f32[4,24]" in program
    assert "f32[16,24]" not in program
    assert not re.search("all-gather|all-to-all|collective-permute", program)
    value, _, finite, grads = compiled(*here)
    assert finite
    # Sums over devices are in another order, which changes some roundings to float16.
    for got, true in zip(jax.tree.leaves((value, grads)), jax.tree.leaves(want[::3]), strict=True):
        np.testing.assert_allclose(got, true, rtol=2e-3, atol=2e-5)


def test_a_micro_batch_of_fewer_examples_than_devices():
    """A mesh with explicit axes divides nothing unevenly, so they are on all devices."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    put = lambda x: jax.device_put(x, NamedSharding(mesh, P("data")))
    x, keys = jnp.arange(24.0).reshape(12, 2), jax.random.split(jax.random.key(0), 12)

    def loss(w, x, keys):
        noise = jax.vmap(jax.random.normal)(keys)
        return mean_product(w, x) + jnp.mean(noise), (x, noise)

    grad = accumulated(loss, scaler(0), 6, True, keep_full=True)
    (want, want_aux), _, _, want_grads = grad(jnp.ones(2), x, keys)
    (value, aux), _, finite, grads = grad(jnp.ones(2), put(x), put(keys))
    assert finite
    assert tree_equal_bits((value, aux, grads), (want, want_aux, want_grads))


def test_keys_scalars_states_and_keywords_are_passed_whole():
    key, state = jax.random.key(0), eqx.nn.State(eqx.nn.StateIndex(jnp.ones(3)))
    scalar, numpy, text = jnp.float32(2.0), np.arange(4.0, dtype=np.float32), "text"
    c = jnp.ones(3)
    outs, kwargs = splits(0, key, state, scalar, numpy, text, c=c)
    key_out, state_out, *rest = outs
    assert tree_equal_bits(key_out, jnp.stack([key, key]))
    assert tree_equal_bits(jtu.tree_leaves(state_out), [jnp.ones((2, 3))])
    want = [jnp.full(2, 2.0), jnp.arange(4.0).reshape(2, 2).T, None]
    assert tree_equal_bits((rest, kwargs), (want, {"c": jnp.ones((2, 3))}))
    old = jax.random.PRNGKey(0)  # beside a longer batch; else it may be one
    (_, beside), _ = splits(0, jnp.ones((4, 2)), old)
    assert tree_equal_bits(beside, jnp.stack([old, old]))
    (_, alone), _ = splits(0, jnp.ones((2, 2)), old)
    assert tree_equal_bits(alone, old[:, None])


def test_a_batch_by_keyword_is_told_where_no_shape_tells():
    """Micro-batches of one example broadcast against all targets. Intended cases do not warn."""
    loss = lambda w, x, y=None, **whole: jnp.mean((x @ w[:, None] - y) ** 2)
    w, x, y = jnp.ones(2), jnp.ones((4, 2)), jnp.ones((4, 1))
    of_ones = mpx.filter_accumulated_value_and_grad(loss, mpx.NoOpLossScaling(), 4)
    with pytest.warns(mpx.PrecisionWarning, match=r"passes keyword arguments whole, but 'y' is"):
        of_ones(w, x, y=y)
    of_ones(w, x, y, teacher=[jnp.ones((4, 4)), jnp.ones(3)], scale=2.0)
    of_pairs = mpx.filter_accumulated_value_and_grad(loss, mpx.NoOpLossScaling(), 2)
    of_pairs(w, x, y, grid=y, pair=x[:2])


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
        want = {"max": jnp.array([3.0, 4.0, 5.0], dtype), "n": jnp.array([2, 2, 2])}
        want["x"] = [x.reshape(2, 3, 1).swapaxes(0, 1).astype(dtype)]
        # As without accumulation.
        assert tree_equal_bits(aux, want | {"static": (None, "text", jnp.tanh, 2, 1.5)})

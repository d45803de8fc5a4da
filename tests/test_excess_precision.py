"""What must hold whether or not XLA may keep more precision than the program asks for.

On a GPU, XLA drops `float32 → float16 → float32` unless `xla_allow_excess_precision` is off; on a
CPU it keeps the round trip either way. So these tests run both ways, and count most on a GPU.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx_pde as mpx


excess = pytest.mark.parametrize("excess", [True, False], ids=["excess", "exact"])


def _jit(fun, excess):
    return jax.jit(fun, compiler_options={"xla_allow_excess_precision": excess})


def _model():
    return eqx.nn.MLP(2, "scalar", 32, 2, activation=jnp.tanh, key=jax.random.key(0))


def _batch(scale=1.0):
    x = jax.random.normal(jax.random.key(1), (64, 2))
    return scale * x, jnp.sin(x[:, 0])


def _loss(model, batch):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y).astype(jnp.float32) ** 2)


@excess
def test_operands_of_a_mixed_product_overflow_where_their_dtype_says(excess):
    product = _jit(
        lambda x, y: mpx.mixed_matmul(x, y, dtype="float16", out_dtype="float32"), excess
    )
    y = jnp.eye(16)
    assert not np.isfinite(product(jnp.full((16, 16), 70000.0), y)).any()
    assert (np.asarray(product(jnp.full((16, 16), 60000.0), y)) == 60000.0).all()
    # 1 + 2^-12 is no float16: an operand that skipped its rounding would show it.
    assert (np.asarray(product(jnp.full((16, 16), 1.0 + 2.0**-12), y)) == 1.0).all()


@excess
def test_an_overflowing_step_changes_nothing(excess):
    model, scaling, optimizer = _model(), mpx.DynamicLossScaling(), optax.adam(1e-3)
    arrays, static = eqx.partition(model, eqx.is_array)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    def step(arrays, state, scaling, batch):
        model = eqx.combine(arrays, static)
        scaling, finite, grads = mpx.filter_grad(_loss, scaling)(model, batch)
        model, state = mpx.optimizer_update(model, optimizer, state, grads, finite)
        return eqx.filter(model, eqx.is_array), state, scaling, finite

    step = _jit(step, excess)
    # 1e30 is infinite as a float16 input.
    *after, scaling, finite = step(arrays, state, scaling, _batch(1e30))
    assert not finite
    assert scaling.loss_scaling == 2.0**14
    for x, y in zip(jax.tree.leaves(after), jax.tree.leaves((arrays, state)), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
    *after, scaling, finite = step(arrays, state, scaling, _batch())
    assert finite
    assert any(
        (x != y).any() for x, y in zip(*map(jax.tree.leaves, (after[0], arrays)), strict=True)
    )


@excess
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_follow_float32(excess, dtype):
    model, batch = _model(), _batch()
    arrays, static = eqx.partition(model, eqx.is_array)

    def grad(arrays, batch):
        run = mpx.filter_grad(
            lambda arrays, batch: _loss(eqx.combine(arrays, static), batch),
            mpx.DynamicLossScaling(2**10),
            policy=f"params=float32,compute={dtype},output=float32",
        )
        return run(arrays, batch)[1:]

    finite, got = _jit(grad, excess)(arrays, batch)
    want = jax.grad(lambda a: _loss(eqx.combine(a, static), batch))(arrays)
    assert finite
    error = mpx.global_norm(jax.tree.map(jnp.subtract, got, want)) / mpx.global_norm(want)
    # Some ten roundings lie between an input and a gradient; they add up at random.
    assert float(error) < 10 * {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]

"""A user's program with correct types, which `test_typing.py` checks with pyright."""

from collections.abc import Callable
from typing import Any, assert_type

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpx_pde as mpx


def loss(model: eqx.nn.MLP, x: jax.Array) -> jax.Array:
    return jnp.mean(jax.vmap(model)(x) ** 2)


def loss_and_aux(model: eqx.nn.MLP, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return loss(model, x), x


def pinn(model: Any, x: jax.Array, *, derivatives: Any) -> jax.Array:
    terms = mpx.partials(model, ["u", "u_xx"], coords="x", outputs="u", scaling=derivatives)
    values = jax.vmap(terms)(x)
    return jnp.mean(values["u_xx"])


def train(model: eqx.nn.MLP, x: jax.Array) -> None:
    scaling = mpx.DynamicLossScaling(2**10, period=100)
    value, scaling, finite, grads = mpx.filter_value_and_grad(loss, scaling)(model, x)
    assert_type(value, jax.Array)
    assert_type(scaling, mpx.DynamicLossScaling)
    assert_type(finite, jax.Array)
    (value, aux), scaling, finite, grads = mpx.filter_value_and_grad(
        loss_and_aux, scaling, has_aux=True, policy="compute=bfloat16"
    )(model, x)
    assert_type(value, jax.Array)
    assert_type(scaling, mpx.DynamicLossScaling)
    value, grads = mpx.calculate_scaled_grad(loss, scaling)(model, x)
    assert_type(value, jax.Array)

    both = mpx.Scaling(scaling, mpx.DerivativeScaling.per_direction("x"))
    both, finite, grads = mpx.filter_grad(pinn, both)(model, x)
    assert_type(both, mpx.Scaling)
    assert_type(both.loss, mpx.AbstractLossScaling)

    optimizer = optax.adam(1e-3)
    state: Any = None
    model, state = mpx.optimizer_update(model, optimizer, state, grads, finite)
    print(aux, state)


def products(x: jax.Array) -> jax.Array:
    y = mpx.mixed_matmul(x, x, dtype="bfloat16", out_dtype=jnp.float32)
    return mpx.mixed_dot_general(x, y, (((1,), (0,)), ((), ())), dtype=np.float16)


def others(model: eqx.nn.MLP, x: jax.Array) -> None:
    half: Callable[..., Any] = mpx.cast_function(model, jnp.float16, "float32")
    fast = mpx.autocast(model, "bfloat16_x3", full="readout")
    assert_type(fast.report(x), mpx.AutocastReport)
    assert_type(mpx.range_report(half)(x), mpx.RangeReport)
    assert_type(mpx.laplacian(model, coords="xy", outputs=["u"])(x)["lap_u"], jax.Array)
    with mpx.half_precision(jnp.bfloat16):
        assert_type(mpx.half_precision_datatype(), np.dtype[Any])
        assert_type(mpx.HALF_PRECISION_DATATYPE, np.dtype[Any])
    network = mpx.nn.CoordinateMLP(2, "scalar", 16, 2, key=jax.random.key(0), dtype="float16")
    print(network(x), mpx.FLOAT16_MAX)

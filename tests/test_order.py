"""What a backward pass writes: cotangents in half precision, without a trace in forward mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import equations, program_for_gpu

from mpx_pde._order import rounded_cotangent


HALVES = ("float16", "bfloat16")


@pytest.mark.parametrize("dtype", HALVES)
def test_the_value_and_its_tangent_are_not_rounded_but_the_cotangent_is(dtype):
    x = jnp.array([1.0, 1 / 3, 1e-3], jnp.float32)
    identity = lambda x: rounded_cotangent(x, dtype)
    for got in (identity(x), *jax.jvp(identity, (x,), (x,))):
        np.testing.assert_array_equal(got, x)
    _, pullback = jax.vjp(identity, x)
    (got,) = pullback(x)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, x.astype(dtype).astype(jnp.float32))


def test_a_bias_has_the_sum_of_rounded_cotangents_in_float32():
    g = jax.random.normal(jax.random.key(0), (512, 3))

    def fun(bias, y):
        total = jax.vmap(lambda y: rounded_cotangent(y.astype(jnp.float32) + bias, "float16"))(y)
        return jnp.sum(g * total)

    bias, y = jax.jit(jax.grad(fun, argnums=(0, 1)))(jnp.zeros(3), jnp.zeros((512, 3), jnp.float16))
    assert (bias.dtype, y.dtype) == (jnp.float32, jnp.float16)
    np.testing.assert_array_equal(y, g.astype(jnp.float16))
    # Sums of 512 float32 numbers in another order.
    np.testing.assert_allclose(bias, np.sum(np.asarray(y, np.float64), axis=0), rtol=1e-5)


def test_it_can_be_differentiated_again():
    fun = lambda x: jnp.sum(jnp.sin(rounded_cotangent(x, "float16")))
    hessian = jax.hessian(fun)(jnp.array([0.5, 1.0]))
    # Rounded once, to 11 bits.
    np.testing.assert_allclose(hessian, -np.diag(np.sin([0.5, 1.0])), rtol=2e-3, atol=1e-7)


def test_a_gpu_writes_the_half_and_a_cpu_is_not_held_up():
    fun = jax.grad(lambda x: jnp.sum(jnp.sin(rounded_cotangent(x, "float16"))))
    x = jnp.zeros(4)
    text = program_for_gpu(jax.jit(fun), x)
    (line,) = (line for line in text.splitlines() if "optimization_barrier" in line)
    assert "f16" in line
    assert "optimization_barrier" not in jax.jit(fun).lower(x).as_text()
    assert any(e.primitive.name == "written" for e in equations(jax.make_jaxpr(fun)(x)))

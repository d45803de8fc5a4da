"""What a backward pass writes: cotangents in half precision, without a trace in forward mode."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import HALVES, equations, program_for_gpu

from mpx_pde._order import (
    add_product,
    batch_behind,
    read_at_once,
    rounded_cotangent,
    shared,
    spread,
    written_in,
)


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


@pytest.mark.slow
def test_products_with_one_operand_are_accumulated_one_onto_the_other():
    """XLA accumulates the product that stands first in a sum; the sum is what it was."""
    x = jax.random.normal(jax.random.key(0), (4, 8, 3))
    w = jax.random.normal(jax.random.key(1), (3, 5))
    loss = lambda copies, w: sum(jnp.sum(jnp.sin(y @ v)) for y, v in zip(x, copies(w), strict=True))
    own, plain = partial(loss, lambda w: shared(w, 4)), partial(loss, lambda w: [w] * 4)
    got, want = jax.jit(lambda w: [(jax.grad(f)(w), jax.hessian(f)(w)) for f in (own, plain)])(w)
    # Sums of four float32 numbers in another order.
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    many = jax.vmap(jax.grad(own))(jnp.stack([w, 2 * w]))
    np.testing.assert_allclose(many[0], got[0], rtol=1e-5, atol=1e-5)
    made, sums = {}, []
    for e in equations(jax.make_jaxpr(jax.grad(own))(w)):
        made |= dict.fromkeys(e.outvars, e)
        if e.primitive.name in ("add", "add_any") and e.outvars[0].aval.shape == w.shape:
            sums.append([made[v].primitive.name for v in e.invars])
    assert len(sums) == 3
    assert all(first in ("transpose", "dot_general") for first, _ in sums)
    assert [second for _, second in sums[1:]] == ["add", "add"]


def test_a_gpu_reads_at_once_and_its_cotangent_is_not_held_up():
    x = jnp.arange(3.0)
    fun = lambda x: jnp.sum(jnp.sin(jax.vmap(read_at_once)(x)))
    gradient = jax.jit(jax.value_and_grad(fun))
    for got, want in zip(gradient(x), (jnp.sum(jnp.sin(x)), jnp.cos(x)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)  # another order of the sum
    assert program_for_gpu(gradient, x).count("optimization_barrier") == 1
    assert "optimization_barrier" not in gradient.lower(x).as_text()


@pytest.mark.slow
@pytest.mark.parametrize("axes", [(None, 0), (0, None), (0, 2)])
def test_a_constant_for_each_channel_is_spread_in_every_mode(axes):
    x, like = jnp.arange(3.0), jnp.zeros((3, 4, 5))
    plain = lambda x, _: jnp.broadcast_to(x[:, None, None], like.shape)
    weight = jax.random.normal(jax.random.key(0), (2, *like.shape))
    xs = x if axes[0] is None else jnp.stack([x, 2 * x])
    likes = like if axes[1] is None else jnp.stack([like, like], axes[1])
    many = lambda f: jax.vmap(f, in_axes=axes)
    np.testing.assert_array_equal(many(spread)(xs, likes), many(plain)(xs, likes))
    loss = lambda f, xs: jnp.sum(weight * many(f)(xs, likes) ** 2)
    derivatives = lambda f: [d(lambda xs: loss(f, xs))(xs) for d in (jax.grad, jax.hessian)]
    # Sums of 20 to 40 float32 numbers in another order.
    for got, want in zip(
        *jax.jit(lambda: (derivatives(spread), derivatives(plain)))(), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_the_axis_of_a_vmap_goes_behind_the_channels_and_back():
    x = jax.random.normal(jax.random.key(0), (2, 3, 4, 5))
    for axis in (0, 1):
        fun = lambda x, axis=axis: jnp.sin(batch_behind(x, axis))
        # Where it stands is where no transposition is needed.
        jaxpr = jax.make_jaxpr(jax.vmap(fun, out_axes=axis + 1))(x)
        assert sum(e.primitive.name == "transpose" for e in equations(jaxpr)) == 1
        np.testing.assert_array_equal(jax.vmap(fun)(x), jnp.sin(x))
        y, pullback = jax.vjp(jax.vmap(fun), x)
        np.testing.assert_allclose(pullback(y)[0], jnp.sin(x) * jnp.cos(x), rtol=1e-6)
        np.testing.assert_array_equal(batch_behind(x, axis), x)


@pytest.mark.slow
def test_a_gpu_accumulates_a_product_onto_what_it_has_written():
    dtype = "bfloat16"
    x = jax.random.normal(jax.random.key(0), (4, 3), jnp.float32)
    y = jax.random.normal(jax.random.key(1), (3,)).astype(dtype)
    fun = lambda x, y: add_product(written_in(x, dtype), y)
    many = jax.vmap(fun, in_axes=(0, None))
    want = (x + y.astype(jnp.float32)[None]).astype(dtype)
    np.testing.assert_array_equal(many(x, y), want)
    other = jax.vmap(fun, in_axes=(None, 1), out_axes=1)(x[0], jnp.stack([y, y, y], 1))
    np.testing.assert_array_equal(other, jnp.stack([want[0]] * 3, 1))
    out, pullback = jax.vjp(many, x, y)
    to_x, to_y = pullback(jnp.ones_like(out))
    assert (to_x.dtype, to_y.dtype) == (jnp.float32, dtype)
    np.testing.assert_array_equal(to_x, np.ones((4, 3)))
    np.testing.assert_array_equal(to_y.astype(jnp.float32), np.full(3, 4.0))
    tangent = jax.jvp(many, (x, y), (x, y))[1]
    np.testing.assert_array_equal(tangent, want)
    text = program_for_gpu(jax.jit(fun), x[0], y)
    (add,) = (line for line in text.splitlines() if "stablehlo.add" in line)
    assert "tensor<3xbf16>" in add
    assert "optimization_barrier" in text
    text = jax.jit(fun).lower(x[0], y).as_text()
    assert "optimization_barrier" not in text

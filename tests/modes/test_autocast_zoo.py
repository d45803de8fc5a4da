"""Compares autocast of common layers, models, solvers and losses with float32."""

import equinox as eqx
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import HALVES, TOLERANCES, assert_half, equations, normal, scalar, tree_equal_bits

import mpx_pde as mpx


def split(model):
    """Splits a model into its parameters and a function that rebuilds it from them."""
    parameters, static = eqx.partition(model, eqx.is_inexact_array)
    return parameters, lambda p: eqx.combine(p, static)


KEY = jax.random.key(0)


def attention():
    p, build = split(eqx.nn.MultiheadAttention(2, 8, key=KEY))
    mask = jnp.tril(jnp.ones((6, 6), bool))
    return p, normal(1, (6, 8)), lambda p, x: build(p)(x, x, x, mask=mask)


def dot_product_attention():
    """JAX's `dot_product_attention` between projections."""

    def fun(p, x):
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, w) for w in p[:3])
        y = jax.nn.dot_product_attention(q, k, v, implementation="xla", is_causal=True)
        return jnp.einsum("btnh,dnh->btd", y, p[3])

    return normal(0, (4, 16, 2, 8), 0.25), normal(1, (2, 24, 16)), fun


def batch_norm():
    model, state = eqx.nn.make_with_state(
        lambda key: eqx.nn.Sequential(
            [
                # No bias, because the norm would cancel it.
                eqx.nn.Conv2d(2, 4, 3, padding=1, use_bias=False, key=key),
                eqx.nn.BatchNorm(4, "batch", mode="batch"),
                eqx.nn.Lambda(jax.nn.relu),
                eqx.nn.MaxPool2d(2),
                eqx.nn.Conv2d(4, 2, 3, key=key),
            ]
        )
    )(KEY)
    p, build = split(model)

    def fun(p, x):
        run = jax.vmap(build(p), axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        return run(x, state)[0]

    return p, normal(1, (3, 2, 8, 8)), fun


def flax_linen():
    layers = [linen.Conv(4, (3,)), linen.gelu, linen.LayerNorm()]
    net = linen.Sequential([*layers, linen.MultiHeadDotProductAttention(2), linen.Dense(2)])
    x = normal(1, (2, 6, 3))
    return net.init(KEY, x), x, net.apply


def losses():
    p, build = split(eqx.nn.Linear(4, 3, key=KEY))
    labels = jnp.array([0, 2, 1, 1])

    def fun(p, x):
        logits = jax.vmap(build(p))(x)
        return (
            optax.softmax_cross_entropy_with_integer_labels(logits, labels),
            optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, 3)),
            optax.sigmoid_binary_cross_entropy(logits, jnp.ones_like(logits)),
            optax.l2_loss(logits, jnp.ones_like(logits)),
            optax.huber_loss(logits, jnp.zeros_like(logits)),
            optax.cosine_distance(logits, jnp.ones_like(logits)),
        )

    return p, normal(1, (4, 4)), fun


def neural_ode():
    diffrax = pytest.importorskip("diffrax")
    p, build = split(eqx.nn.MLP(2, 2, 8, 1, activation=jnp.tanh, key=KEY))

    def fun(p, y0):
        term = diffrax.ODETerm(lambda t, y, net: net(y))
        given = term, diffrax.Euler(), 0.0, 1.0, 0.25, y0, build(p)
        return diffrax.diffeqsolve(*given, max_steps=4).ys

    y0 = normal(1, (2,))
    try:
        jax.eval_shape(jax.grad(lambda p: jnp.sum(fun(p, y0))), p)
    except AttributeError:
        pytest.skip("the oldest Equinox differentiates no loops on this JAX, autocast or not")
    return p, y0, fun


# Each returns parameters, an input and a function of both.
MAKE = attention, dot_product_attention, batch_norm, flax_linen, losses, neural_ode
ZOO = {make.__name__: make for make in MAKE}


def compiled(fun, p, x):
    """Compiles a function that returns the result of `fun` and its gradient."""
    return jax.jit(lambda p, x: (fun(p, x), jax.grad(scalar(fun))(p, x)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.usefixtures("standard_promotion")
def test_values_and_gradients_agree_with_float32(name):
    p, x, fun = ZOO[name]()
    want = compiled(fun, p, x)(p, x)
    for half in HALVES[name == "neural_ode" :]:  # one dtype, because it compiles slowly
        run = compiled(mpx.autocast(fun, half), p, x)
        if name != "neural_ode":  # diffrax lowers for the present backend
            assert_half(run, p, x, half=half)
        # These are deep or recurrent: two more bits than for two or three layers.
        for g, w in zip(jax.tree.leaves(run(p, x)), jax.tree.leaves(want), strict=True):
            assert g.dtype == w.dtype
            size = np.abs(w).max(initial=1e-2)
            assert np.abs(g - w).max(initial=0.0) <= 4 * TOLERANCES[half] * size


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.usefixtures("standard_promotion")
def test_no_value_changes_if_everything_is_listed_as_full(name):
    p, x, fun = ZOO[name]()
    full = jax.jit(mpx.autocast(fun, "float16", full="*"))(p, x)
    assert tree_equal_bits(full, jax.jit(fun)(p, x))


@pytest.mark.parametrize("dtype", HALVES)
def test_queries_keys_and_values_are_half_in_both_passes(dtype):
    p, x, fun = dot_product_attention()
    jaxpr = jax.make_jaxpr(jax.grad(scalar(mpx.autocast(fun, dtype))))(p, x)
    found = [e for e in equations(jaxpr) if e.primitive.name.endswith("dot_general")]
    assert {e.primitive.name for e in found} == {"mixed_dot_general"}
    # Two forward products and four backward ones have an axis of heads in both operands.
    between = [e for e in found if all(v.aval.ndim >= 4 for v in e.invars)]
    assert len(between) >= 6
    for e in between:
        assert {v.aval.dtype for v in (*e.invars, *e.outvars)} == {jnp.dtype(dtype)}

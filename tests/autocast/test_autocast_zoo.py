"""Autocast of the layers, models, solvers and losses that people use, against float32."""

import equinox as eqx
import flax.linen as linen
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    HALVES,
    TOLERANCES,
    equations,
    normal,
    products_are_half,
    program_for_gpu,
    scalar,
    tree_equal_bits,
)
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import mpx_pde as mpx


# Each entry makes parameters, an input and a function of both.
ZOO = {}


def zoo(make):
    ZOO[make.__name__] = make
    return make


def split(model):
    """A function of parameters out of a model."""
    parameters, static = eqx.partition(model, eqx.is_inexact_array)
    return parameters, lambda p: eqx.combine(p, static)


KEY = jax.random.key(0)


@zoo
def mlp():
    p, build = split(eqx.nn.MLP(4, 3, 16, 2, activation=jax.nn.gelu, key=KEY))
    return p, normal(1, (8, 4)), lambda p, x: jax.vmap(build(p))(x)


@zoo
def attention():
    p, build = split(eqx.nn.MultiheadAttention(2, 8, key=KEY))
    mask = jnp.tril(jnp.ones((6, 6), bool))
    return p, normal(1, (6, 8)), lambda p, x: build(p)(x, x, x, mask=mask)


@zoo
def norms():
    p, build = split([eqx.nn.Linear(8, 8, key=KEY), eqx.nn.LayerNorm(8), eqx.nn.RMSNorm(8)])

    def fun(p, x):
        linear, layer_norm, rms_norm = build(p)
        return jax.vmap(lambda x: rms_norm(linear(layer_norm(linear(x)))))(x)

    return p, normal(1, (4, 8)), fun


@zoo
def batch_norm():
    model, state = eqx.nn.make_with_state(
        lambda key: eqx.nn.Sequential(
            [
                # The norm would cancel a bias.
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


@zoo
def gru():
    p, build = split(eqx.nn.GRUCell(3, 8, key=KEY))

    def fun(p, xs):
        cell = build(p)
        return lax.scan(lambda h, x: (cell(x, h),) * 2, jnp.zeros(8), xs)

    return p, normal(1, (10, 3)), fun


@zoo
def flax_linen():
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.Conv(4, (3,))(x)
            x = linen.LayerNorm()(linen.gelu(x))
            x = linen.MultiHeadDotProductAttention(2)(x)
            return linen.Dense(2)(x)

    x = normal(1, (2, 6, 3))
    return Net().init(KEY, x), x, Net().apply


@zoo
def flax_nnx():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(3, 8, rngs=rngs)
            self.norm = nnx.LayerNorm(8, rngs=rngs)
            self.last = nnx.Linear(8, 2, rngs=rngs)

        def __call__(self, x):
            return self.last(nnx.silu(self.norm(self.first(x))))

    graph, state = nnx.split(Net(nnx.Rngs(0)))
    return state, normal(1, (5, 3)), lambda p, x: nnx.merge(graph, p)(x)


@zoo
def pinn():
    p, build = split(eqx.nn.MLP(2, "scalar", 16, 2, activation=jnp.tanh, key=KEY))

    def fun(p, points):
        net = build(p)

        def residual(point):
            def u(x):
                return net(jnp.stack([x, point[1]]))

            def u_x(x):
                return jax.jvp(u, (x,), (jnp.ones_like(x),))[1]

            slope, curvature = jax.jvp(u_x, (point[0],), (jnp.ones_like(point[0]),))
            return curvature + u(point[0]) * slope

        return jnp.mean(jax.vmap(residual)(points) ** 2)

    return p, normal(1, (8, 2)), fun


@zoo
def fourier_operator():
    """As an FNO: mixed channels in Fourier space, real weights with a trailing axis of 2."""
    p = {
        "lift": normal(2, (4, 1)),
        "modes": normal(3, (5, 4, 4, 2), 0.3),
        "skip": normal(4, (4, 4)),
    }

    def fun(p, x):
        h = jnp.tanh(p["lift"] @ x)
        modes = jnp.fft.rfft(h)[:, :5]
        weights = lax.complex(p["modes"][..., 0], p["modes"][..., 1])
        spectrum = (
            jnp.zeros((4, 9), jnp.complex64).at[:, :5].set(jnp.einsum("kio,ik->ok", weights, modes))
        )
        return jnp.tanh(jnp.fft.irfft(spectrum, 16) + p["skip"] @ h)

    return p, normal(1, (1, 16)), fun


@zoo
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


@zoo
def neural_ode():
    diffrax = pytest.importorskip("diffrax")
    p, build = split(eqx.nn.MLP(2, 2, 8, 1, activation=jnp.tanh, key=KEY))

    def fun(p, y0):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, net: net(y)),
            diffrax.Euler(),
            0.0,
            1.0,
            0.25,
            y0,
            build(p),
            max_steps=4,
        )
        return solution.ys

    y0 = normal(1, (2,))
    try:
        jax.eval_shape(jax.grad(lambda p: jnp.sum(fun(p, y0))), p)
    except AttributeError:
        pytest.skip("the oldest Equinox differentiates no loops on this JAX, autocast or not")
    return p, y0, fun


@zoo
def remat_and_shard_map():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    p = {"w": normal(2, (4, 4), 0.5), "b": jnp.ones(4)}

    def local(p, x):
        layer = jax.checkpoint(lambda x: jnp.tanh(x @ p["w"] + p["b"]))
        return lax.psum(jnp.sum(layer(layer(x)), 0), "data")

    fun = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    return p, normal(1, (6, 4)), fun


@pytest.fixture
def standard_promotion():
    """Solvers and layers of others are written for JAX's defaults."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def compiled(fun, p, x):
    """What `fun` returns and its gradient."""
    return jax.jit(lambda p, x: (fun(p, x), jax.grad(scalar(fun))(p, x)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.usefixtures("standard_promotion")
def test_values_and_gradients_agree_with_float32(name):
    p, x, fun = ZOO[name]()
    want = compiled(fun, p, x)(p, x)
    for half in HALVES:
        run = compiled(mpx.autocast(fun, half), p, x)
        if name != "neural_ode":  # diffrax lowers for the backend that is there
            products_are_half(program_for_gpu(run, p, x), half)
        # Deep or recurrent: two more bits than a network of two or three layers.
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


LISTED = ("exp", "log", "rsqrt", "sqrt", "reduce_sum", "square", "integer_pow", "pow", "cumsum")


@pytest.mark.slow
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.usefixtures("standard_promotion")
def test_products_are_mixed_and_listed_operations_are_float32(name, half):
    p, x, fun = ZOO[name]()
    cast = mpx.autocast(fun, half)
    seen = [*equations(jax.make_jaxpr(jax.value_and_grad(scalar(cast)))(p, x))]
    # These multiply halves and add up in float32: see the tests of `mixed_dot_general`.
    assert any("mixed" in e.primitive.name for e in seen)
    for e in seen:
        dtypes = {v.aval.dtype.name for v in e.invars}
        adds_nothing_up = e.invars and e.invars[0].aval.size == e.outvars[0].aval.size
        if e.primitive.name in LISTED and not (
            e.primitive.name == "reduce_sum" and adds_nothing_up
        ):
            assert half not in dtypes, e
        if e.primitive.name in ("dot_general", "conv_general_dilated"):
            asked = str(e.params["precision"])
            assert "HIGHEST" in asked or "complex64" in dtypes

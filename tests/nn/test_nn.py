"""Tests the network of a physics-informed model: the precision of its layers, and its accuracy."""

import copy
import pickle
import re
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import coordinate_mlp, equations, in_float64, relative

import mpx_pde as mpx
from mpx_pde import nn
from mpx_pde.nn._arithmetic import separate


def points(n=8, coords=2):
    return jax.random.uniform(jax.random.key(3), (n, coords))


@pytest.mark.slow
def test_frequencies_are_not_trained_and_a_copy_is_the_same_model():
    model = make(fourier_features=(4, 1.0))
    optimizer = optax.adamw(0.1, weight_decay=0.5)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    grads = jax.tree.map(jnp.zeros_like, eqx.filter(model, eqx.is_inexact_array))
    copied = copy.deepcopy(model)
    after, _ = mpx.optimizer_update(copied, optimizer, state, grads, True)
    assert eqx.tree_equal(after.embedding, model.embedding)
    assert not eqx.tree_equal(after.first, model.first)
    assert nn.soft_clip(4.0) == pickle.loads(pickle.dumps(nn.soft_clip(4.0)))


def test_values_in_a_kernel_of_their_own_are_the_same():
    """Also those below float16's normal numbers."""
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    for x in (every, np.array([1.0, 2.0**-120, 0.1], np.float32)):
        np.testing.assert_array_equal(jax.jit(separate)(x), x, strict=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "x"),
    [
        (partial(nn.CoordinateMLP, 2, 2, 16, 2), points()),
        (partial(nn.SpectralConv, 2, 2, 4, method="dft"), points().T[None]),
        pytest.param(partial(nn.FNO, 2, 2, 8, 1, 4), points().T[None], marks=pytest.mark.slow),
    ],
)
def test_a_half_dtype_of_a_layer_gives_way_to_full_precision(build, x):
    """Otherwise the float32 reference would have the same rounding as the precision under test."""
    full, half = build(key=jax.random.key(0)), build(key=jax.random.key(0), dtype="float16")
    evaluate = eqx.filter_jit(lambda model, x: jax.vmap(model)(x))
    want = evaluate(full, x)
    np.testing.assert_array_equal(evaluate(mpx.force_full_precision(half), x), want)
    loss = lambda model, x: jnp.mean((evaluate(model, x).astype(jnp.float32) - want) ** 2)
    scaling = mpx.DynamicLossScaling()
    run = lambda **options: eqx.filter_jit(mpx.filter_value_and_grad(loss, scaling, **options))
    for options in ({"forward": "float32"}, {"use_mixed_precision": False}):
        value, _, _, grads = run(**options)(half, x)
        assert value == mpx.global_norm(grads) == 0
    with pytest.warns(mpx.PrecisionWarning, match=" 0% of the work"):
        eqx.filter_eval_shape(run(forward="float32"), mpx.FullPrecision(half), x)
    if build.func is not nn.CoordinateMLP:  # it takes no split products
        split = build(key=jax.random.key(0), dtype="bfloat16_x3")
        assert run(forward="float32")(split, x)[0] == 0
    assert run(keep_full=True)(half, x)[0] > 0
    options = {"keep_full": True, "against": "full", "micro_batches": 1}
    floor = mpx.precision_floor(loss, mpx.DynamicLossScaling(), **options)
    assert floor(half, x).gradient > 0.5


VARIANTS = {
    "silu": {"activation": jax.nn.silu},
    "sine": {"activation": jnp.sin, "periodic": {1: 2.0}},
    "both": {"fourier_features": (16, 1.0), "periodic": {0: 2.0}},
    "full last": {"full_precision_last": True},
}


def make(out_size=2, width=16, depth=3, **options):
    return nn.CoordinateMLP(2, out_size, width, depth, key=jax.random.key(0), **options)


def exact_hessians(model):
    """Returns JAX's second derivatives in float64."""
    run, x = jax.jit(jax.vmap(jax.hessian(coordinate_mlp, 1), (None, 0))), points()
    with jax.enable_x64(True):
        return np.asarray(run(*in_float64((model, x))))


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_second_derivatives_and_laplacian(name):
    model = make(**VARIANTS[name])
    want = np.moveaxis(np.diagonal(exact_hessians(model), axis1=2, axis2=3), -1, 0)

    @eqx.filter_jit
    def run(model):
        d = mpx.partials(model, ["u_xx", "v_yy"], coords="xy", outputs="uv")
        terms = ["u", "v_y"]
        lap = mpx.laplacian(model, terms, coords="xy", outputs="uv")
        nested = mpx.laplacian(lambda p: model(p), terms, coords="xy", outputs="uv")
        return jax.vmap(lambda p: (d(p), lap(p), nested(p)))(points())

    # float16: some ten successive roundings of 2^-11, some of which cancel.
    for tolerance, this in ((1e-4, model), (0.02, mpx.cast_to_float16(model))):
        d, lap, nested = run(this)
        assert relative(d["u_xx"], want[0][:, 0]) < tolerance
        assert relative(d["v_yy"], want[1][:, 1]) < tolerance
        for got in (lap, nested):
            assert relative(got["lap_u"], (want[0] + want[1])[:, 0]) < tolerance
            assert relative(got["lap_v"], (want[0] + want[1])[:, 1]) < tolerance
        assert relative(lap["v_y"], nested["v_y"]) < tolerance
        assert relative(lap["u"], nested["u"]) < tolerance


@pytest.mark.slow
def test_shapes_and_dtypes():
    half = mpx.cast_to_float16(make("scalar"))
    assert half(points()[0]).shape == ()
    assert half(points()[0]).dtype == jnp.float16
    assert half.first.module.weight.dtype == jnp.float32
    assert half.hidden[0].weight.dtype == jnp.float16
    last = mpx.cast_to_float16(make(full_precision_last=True))
    assert last(points()[0]).dtype == jnp.float32
    lap = jax.vmap(mpx.laplacian(half, ["u_x"], coords="xy", outputs="u"))(points())
    assert lap["lap_u"].dtype == jnp.float32


@pytest.mark.slow
def test_the_laplacian_is_cheap():
    """folx needs 19.6 GFLOP for a batch of 4096 points at D = 2 and 256 × 4."""
    model = nn.CoordinateMLP(2, "scalar", 256, 4, key=jax.random.key(0))
    x = jax.ShapeDtypeStruct((4096, 2), jnp.float32)
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, x):
        lap = mpx.laplacian(eqx.combine(params, static), coords="xy", outputs="u")
        return jnp.mean((jax.vmap(lap)(x)["lap_u"] - 1.0) ** 2)

    flops = jax.jit(jax.grad(loss)).lower(params, x).compile().cost_analysis()["flops"]
    assert round(flops / 1e9, 1) <= 19.6


ACTIVATIONS = ("tanh", "silu", "sin", "gelu", "exact_gelu", "softplus")


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_do_not_overflow_inside(name):
    fun = getattr(nn, name)
    x = jnp.linspace(-6, 6, 25)

    def third(fun, x, s):
        for _ in range(3):
            fun = (lambda f: lambda x: jax.jvp(f, (x,), (jnp.full_like(x, s),))[1])(fun)
        return fun(x)

    half = jax.jit(lambda x: third(fun, x, 1.0))(x.astype(jnp.float16))
    assert half.dtype == jnp.float16
    want = np.asarray(jax.jit(lambda x: third(fun.fun, x, 1.0))(x))
    # Derivatives of each order are stored in half.
    assert np.abs(np.asarray(half, np.float32) - want).max() < 2.0**-7
    assert nn.safe(fun) is fun
    assert fun == nn.safe(fun.fun)
    assert hash(fun) == hash(nn.safe(fun.fun))
    assert re.match(r"safe\(\w+\)", repr(fun))


class Adaptive(eqx.Module):
    """An activation with a trainable slope."""

    slope: jax.Array

    def __call__(self, x):
        return jnp.tanh(self.slope * x)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*a loss scaling alone:mpx_pde.PrecisionWarning")
def test_the_parameters_of_an_activation_are_trained():
    model = make(out_size="scalar", activation=Adaptive(jnp.array(1.5)), dtype="float16")
    assert eqx.filter(model, eqx.is_inexact_array).activation.fun.slope is not None
    assert nn.safe(model.activation) is model.activation

    def loss(model, engine):
        fun = model if engine else lambda p: model(p)
        terms = mpx.partials(fun, ["u", "u_x", "u_xx"], coords="xt", outputs="u")
        return sum(jnp.mean(v**2) for v in jax.vmap(terms)(points()).values())

    # The oracle is nested derivatives of the same network in float32.
    full = make(out_size="scalar", activation=Adaptive(jnp.array(1.5)))
    grad = lambda m, engine: eqx.filter_jit(eqx.filter_grad(lambda m: loss(m, engine)))(m)
    want = grad(full, False)
    slope = lambda g: float(g.activation.fun.slope)
    assert abs(slope(want)) > 1e-2
    assert np.isclose(slope(grad(full, True)), slope(want), rtol=1e-4)  # float32, two orders
    # Three layers and two orders in float16.
    assert np.isclose(slope(grad(model, True)), slope(want), rtol=0.05)
    half = mpx.filter_grad(lambda m: loss(m, True), mpx.DynamicLossScaling(1))(full)[2]
    assert half.activation.fun.slope.dtype == jnp.float32
    assert np.isclose(slope(half), slope(want), rtol=0.05)


@pytest.mark.slow
def test_exact_gelu_is_that_of_jax_by_cheaper_means():
    exact = partial(jax.nn.gelu, approximate=False)
    assert nn.safe(exact) is nn.exact_gelu
    assert nn.safe(partial(jax.nn.gelu, approximate=True)) is not nn.exact_gelu
    x = jnp.linspace(-8, 8, 4001)
    with jax.enable_x64(True):
        wide = jnp.asarray(np.asarray(x), jnp.float64)
        want, slope = exact(wide), jax.vmap(jax.grad(exact))(wide)
    # If 1 + erf cancels, the error of erf near 1 (two units) remains, times |x| / 2.
    np.testing.assert_allclose(nn.exact_gelu(x), want, rtol=5e-7, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(jax.grad(nn.exact_gelu))(x), slope, rtol=5e-7, atol=1e-6)
    names = {e.primitive.name for e in equations(jax.make_jaxpr(nn.exact_gelu)(x))}
    assert "erf" in names
    assert "erfc" not in names

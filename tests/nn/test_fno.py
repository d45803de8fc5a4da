"""Tests the Fourier neural operator: any grid, only half products, and the arrays it keeps for the
backward pass."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import in_float64, over_devices, policy, products, relative, spectral_by_definition
from jax.sharding import PartitionSpec as P

import mpx_pde as mpx
from mpx_pde import nn


pytestmark = pytest.mark.slow


def make(modes=(6, 6), channels=(2, 1), width=8, layers=2, **options):
    return nn.FNO(*channels, width, layers, modes, key=jax.random.key(0), **options)


def fields(n=16, dims=2, batch=3, channels=2):
    """Returns smooth fields, which are the same functions on every grid."""
    t = 2 * np.pi * np.arange(n) / n
    grids = np.meshgrid(*[t] * dims, indexing="ij")
    c = np.arange(1, 1 + batch * channels).reshape(batch, channels, *[1] * dims)
    return jnp.asarray(sum(np.sin(g * (i + 1) + c) for i, g in enumerate(grids)), jnp.float32)


@eqx.filter_jit
def evaluate(model, x):
    return jax.vmap(model)(x)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def by_definition(model, x, padding=0):
    """Evaluates one sample in float64, layer by layer, with spectral convolutions by FFT."""

    def linear(layer, x):
        weight, bias = np.asarray(layer.weight, np.float64), np.asarray(layer.bias, np.float64)
        return np.einsum("oi,ixy->oxy", weight, x) + bias[:, None, None]

    def mlp(layers, x):
        return linear(layers.last, gelu(linear(layers.first, x)))

    def spectral(layer, x):
        with jax.enable_x64(True):
            return np.asarray(spectral_by_definition(in_float64(layer.weight), layer.modes, x))

    x = np.asarray(x, np.float64)
    _, n, m = x.shape
    grid = np.stack(np.meshgrid(np.arange(n) / n, np.arange(m) / m, indexing="ij"))
    x = mlp(model.lifting, np.concatenate([x, grid]))
    x = np.pad(x, [(0, 0), (0, round(padding * n)), (0, round(padding * m))])
    for i, block in enumerate(model.blocks):
        y = gelu(spectral(block.spectral, x) + linear(block.skip, x))
        x = mlp(block.mlp, y) + np.asarray(block.gate, np.float64)[:, None, None] * x
        x = gelu(x) if i < len(model.blocks) - 1 else x
    return mlp(model.projection, x[:, :n, :m])


@pytest.mark.parametrize(("padding", "out_channels"), [(0, 1), (0.25, 2)])
def test_it_is_its_definition(padding, out_channels):
    model = make(channels=(2, out_channels), domain_padding=padding)
    x = fields()
    want = np.stack([by_definition(model, x, padding) for x in x])
    for method, remat in (("dft", True), ("fft", False)):
        options = {"domain_padding": padding, "method": method, "remat": remat}
        same = make(channels=(2, out_channels), **options)
        assert relative(evaluate(same, x), want) < 1e-5
    # Some thirty roundings of 2^-12 and 2^-9, most of which cancel.
    for dtype, tolerance in (("float16", 2e-3), ("bfloat16", 2e-2)):
        y = evaluate(mpx.cast_tree(model, dtype), x)
        assert y.dtype == jnp.float32
        assert relative(y, want) < tolerance


@pytest.mark.parametrize(
    ("modes", "options"),
    [
        ((5,), {"factorization": "cp", "rank": 2}),
        ((4, 4, 4), {"grid_embedding": False, "stabilizer": "tanh", "domain_padding": (0, 0, 0.5)}),
    ],
)
def test_one_and_three_dimensions(modes, options):
    model, x = make(modes, **options), fields(8, len(modes))
    y = evaluate(model, x)
    assert y.shape == (3, 1, *[8] * len(modes))
    assert relative(evaluate(make(modes, method="fft", **options), x), y) < 1e-5
    assert relative(evaluate(mpx.cast_to_float16(model), x), y) < 5e-3


def test_one_set_of_weights_on_many_grids():
    """Fine grids agree at shared points, up to aliasing by the activations."""
    model = make()
    want = evaluate(model, fields(64))
    for n in (32, 96, 128):
        step = np.gcd(n, 64)
        got = evaluate(model, fields(n))[:, :, :: n // step, :: n // step]
        assert relative(got, want[:, :, :: 64 // step, :: 64 // step]) < 1e-2


@pytest.mark.parametrize(("masters", "dtype"), [(False, "float16"), (True, "bfloat16")])
def test_half_products_alone(dtype, masters):
    """Checks both passes of a model that is cast as a whole, and of one with uncast masters."""
    model = make(channels=(2, 2), method="dft", dtype=dtype if masters else None)
    loss = lambda m, x: jnp.mean(jax.vmap(m)(x) ** 2)
    arrays, static = eqx.partition(model, eqx.is_array)

    def step(arrays, x):
        m = eqx.combine(arrays, static)
        options = {"policy": policy("float32" if masters else dtype), "keep_full": (False, True)}
        run = mpx.filter_grad(loss, mpx.DynamicLossScaling(), **options)
        return eqx.filter(run(m, x)[2], eqx.is_array)

    found = products(step, arrays, fields())
    assert len(found) > 40
    multiplied = {(e.primitive.name, e.params["dtype"].name) for e in found}
    assert multiplied == {("mixed_dot_general", dtype)}
    grads = jax.eval_shape(step, arrays, fields())
    assert {g.dtype.name for g in jax.tree.leaves(grads)} == {"float32"}


def test_what_is_kept_is_half():
    """A half model keeps two fields per block and the input of the first block, none of them in
    float32."""
    model = mpx.cast_to_float16(make(layers=3, method="dft"))
    arrays, static = eqx.partition(model, eqx.is_array)
    run = lambda a, x: jax.vjp(lambda a: jax.vmap(eqx.combine(a, static))(x), a)[1]
    pullback = jax.eval_shape(run, arrays, fields(32).astype(jnp.float16))
    kept = [r for r in jax.tree.leaves(pullback) if r.size >= 4 * 3 * 32 * 32]
    assert {r.dtype.name for r in kept} == {"float16"}
    assert sum(r.size == 8 * 3 * 32 * 32 for r in kept) == 2 * 3 + 1


@pytest.mark.parametrize("how", ["plain", "cast", "autocast", "forward"])
def test_gradients_inside_of_shard_map(how):
    """JAX sums gradients of values that are equal on all devices, but only on request."""
    model = nn.FNO(1, 1, 4, 1, (4, 4), key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (4, 1, 8, 8))
    model = mpx.cast_to_float16(model) if how == "plain" else model
    arrays, static = eqx.partition(model, eqx.is_array)
    loss = lambda model, x: jnp.mean((jax.vmap(model)(x) - jnp.sin(x)) ** 2)
    options = {"cast": {"keep_full": (False, True)}, "autocast": {"autocast": True}}
    options["forward"] = {"forward": "float32"}

    def gradient(arrays, x, **axis):
        if how == "plain":
            return jax.grad(lambda arrays: loss(eqx.combine(arrays, static), x))(arrays)
        step = mpx.filter_grad(loss, mpx.StaticLossScaling(64.0), **options[how], **axis)
        return eqx.filter(step(eqx.combine(arrays, static), x)[2], eqx.is_array)

    def of_a_part(arrays, x):
        axis = {} if how == "plain" else {"axis_name": "data"}
        return jax.tree.map(lambda g: g / 2, gradient(arrays, x, **axis))

    sharded = over_devices(of_a_part, 2, (P(), P("data")), P())
    got, want = jax.jit(sharded)(arrays, x), jax.jit(gradient)(arrays, x)
    # Means that are rounded to half may differ by one rounding.
    assert all(x < 2.0**-9 for x in jax.tree.leaves(jax.tree.map(relative, got, want)))


def test_an_activation_that_was_replaced_by_any_function():
    """`equinox.tree_at` inserts it unchanged. `FNO(activation=...)` would wrap it in `safe`."""
    model = make((4,), (1, 1), layers=1)
    plain = eqx.tree_at(lambda m: m.activation, model, jnp.tanh)
    wanted = eqx.tree_at(lambda m: m.activation, model, nn.tanh)
    x = jnp.sin(jnp.arange(32.0))[None]

    gradient = eqx.filter_jit(eqx.filter_grad(lambda model: jnp.mean(model(x) ** 2)))
    # float32 operations are fused differently. The trees differ in their activation.
    for a, b in zip(*map(jax.tree.leaves, map(gradient, (plain, wanted))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)

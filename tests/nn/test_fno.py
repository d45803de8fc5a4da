"""The Fourier neural operator: any grid, half products alone, and what it keeps for the backward
pass."""

import re
from collections import Counter

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import equations
from jax.sharding import PartitionSpec as P

import mpx_pde as mpx
from mpx_pde import nn


def make(modes=(6, 6), channels=(2, 1), width=8, layers=2, **options):
    return nn.FNO(*channels, width, layers, modes, key=jax.random.key(0), **options)


def fields(n=16, dims=2, batch=3, channels=2):
    """Smooth ones, the same functions on every grid."""
    t = 2 * np.pi * np.arange(n) / n
    grids = np.meshgrid(*[t] * dims, indexing="ij")
    c = np.arange(1, 1 + batch * channels).reshape(batch, channels, *[1] * dims)
    return jnp.asarray(sum(np.sin(g * (i + 1) + c) for i, g in enumerate(grids)), jnp.float32)


@eqx.filter_jit
def evaluate(model, x):
    return jax.vmap(model)(x)


def relative(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def by_definition(model, x, padding=0):
    """One sample in float64, layer by layer, spectral convolutions by FFT."""

    def linear(layer, x):
        weight, bias = np.asarray(layer.weight, np.float64), np.asarray(layer.bias, np.float64)
        return np.einsum("oi,ixy->oxy", weight, x) + bias[:, None, None]

    def mlp(layers, x):
        return linear(layers.last, gelu(linear(layers.first, x)))

    def spectral(layer, x):
        a, b = layer.modes
        weight = np.asarray(layer.weight, np.float64) @ np.array([1, 1j])
        spectrum, out = (
            np.fft.rfft2(x),
            np.zeros((x.shape[0], x.shape[1], x.shape[2] // 2 + 1), complex),
        )
        k = np.ix_(np.arange(a) - a // 2, np.arange(b // 2 + 1))
        out[:, *k] = np.einsum("ixy,xyio->oxy", spectrum[:, *k], weight)
        return np.fft.irfft2(out, s=x.shape[1:])

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


@pytest.mark.slow
@pytest.mark.parametrize("padding", [0, 0.25])
@pytest.mark.parametrize("out_channels", [1, 2])
def test_it_is_its_definition(padding, out_channels):
    model = make(channels=(2, out_channels), domain_padding=padding)
    x = fields()
    want = np.stack([by_definition(model, x, padding) for x in x])
    for method in ("dft", "fft"):
        same = make(channels=(2, out_channels), domain_padding=padding, method=method)
        assert relative(evaluate(same, x), want) < 1e-5
    # Some thirty roundings of 2^-12 and 2^-9, of which most cancel.
    for dtype, tolerance in (("float16", 2e-3), ("bfloat16", 2e-2)):
        y = evaluate(mpx.cast_tree(model, dtype), x)
        assert y.dtype == jnp.float32
        assert relative(y, want) < tolerance


@pytest.mark.slow
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


@pytest.mark.slow
def test_one_set_of_weights_on_many_grids():
    """Fine grids agree where they meet, up to the aliases of the activations."""
    model = make()
    want = evaluate(model, fields(64))
    for n in (32, 96, 128):
        step = np.gcd(n, 64)
        got = evaluate(model, fields(n))[:, :, :: n // step, :: n // step]
        assert relative(got, want[:, :, :: 64 // step, :: 64 // step]) < 1e-2


def products(fun, *args):
    names = ("mixed_dot_general", "dot_general", "fft", "conv_general_dilated")
    jaxpr = jax.make_jaxpr(fun)(*args)
    return [e for e in equations(jaxpr) if e.primitive.name in names]


@pytest.mark.slow
@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_products_alone(dtype, masters):
    """In both passes, of a model that is cast as a whole, and of uncast masters."""
    model = make(channels=(2, 2), method="dft", dtype=dtype if masters else None)
    policy = f"params=float32,compute={'float32' if masters else dtype},output=float32"
    loss = lambda m, x: jnp.mean(jax.vmap(m)(x) ** 2)
    arrays, static = eqx.partition(model, eqx.is_array)

    def step(arrays, x):
        m = eqx.combine(arrays, static)
        scaling = mpx.DynamicLossScaling()
        run = mpx.filter_grad(loss, scaling, policy=policy, keep_full=(False, True))
        return eqx.filter(run(m, x)[2], eqx.is_array)

    found = products(step, arrays, fields())
    assert len(found) > 40
    for e in found:
        assert e.primitive.name == "mixed_dot_general"
        assert e.params["dtype"] == dtype
    grads = jax.eval_shape(step, arrays, fields())
    assert {g.dtype.name for g in jax.tree.leaves(grads)} == {"float32"}


@pytest.mark.slow
def test_what_is_kept_is_half():
    """Between the passes, in a half model, lie two fields a block and the one that the first takes,
    and no float32 one."""
    model = mpx.cast_to_float16(make(layers=3, method="dft"))
    kept = kept_between_the_passes(model, fields(32).astype(jnp.float16))
    assert {r.dtype.name for r in kept} == {"float16"}
    kept = [r for r in kept if r.size == 8 * 3 * 32 * 32]
    assert len(kept) == 2 * 3 + 1
    assert {r.dtype.name for r in kept} == {"float16"}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_is_kept_changes_no_result(dtype):
    models = [
        mpx.cast_tree(make((4,), remat=remat, method="dft", layers=1), dtype)
        for remat in (True, False)
    ]
    x = fields(16, 1)
    run = eqx.filter_jit(eqx.filter_value_and_grad(lambda m: jnp.mean(jax.vmap(m)(x) ** 2)))
    (value, gradient), (same, close) = map(run, models)
    assert value == same
    # The same operations in other kernels: what is rounded to half is so in both. A gradient is a
    # sum of 1,000 roundings of which most cancel.
    tolerance = 1e-5 if dtype == "float32" else 2e-3
    for g, h in zip(jax.tree.leaves(gradient), jax.tree.leaves(close), strict=True):
        if eqx.is_array(g):
            assert g.dtype == h.dtype == dtype
            assert relative(g, h) < tolerance


def kept_between_the_passes(model, x):
    arrays, static = eqx.partition(model, eqx.is_array)
    run = jax.jit(lambda a, x: jax.vjp(lambda a: jax.vmap(eqx.combine(a, static))(x), a)[1])
    pullback = jax.eval_shape(run, arrays, x)
    field = 3 * 32 * 32  # of one channel
    return [r for r in jax.tree.leaves(pullback) if r.size >= 4 * field]


@pytest.mark.slow
def test_operands_of_products_are_kept_on_request():
    model = mpx.cast_to_float16(make(layers=3, method="dft", remat=False))
    x = fields(32).astype(jnp.float16)
    kept = kept_between_the_passes(model, x)
    assert {r.dtype.name for r in kept} == {"float16"}
    # Of a block what comes in, its activation, the sum of the convolution and the skip, and the
    # activation of that; within the MLP a result and its activation. Beside them what goes in, what
    # comes out of the last block, and one field each of lifting and projection.
    channels = Counter(r.size // (3 * 32 * 32) for r in kept)
    assert channels == {8: 3 * 4 + 1, 4: 3 * 2 + 1, 16: 2}


@pytest.mark.usefixtures("unchecked_annotations")
def test_remat_is_a_bool():
    with pytest.raises(TypeError, match=r"`FNO`.*`remat=False`.*'all'"):
        make(remat="all")


@pytest.mark.slow
def test_matrices_are_stored_once():
    def constants(layers):
        model = make(layers=layers, method="dft")
        arrays, static = eqx.partition(model, eqx.is_array)
        run = jax.jit(lambda a, x: jax.vmap(eqx.combine(a, static))(x))
        text = run.lower(arrays, fields()).as_text()
        return len(re.findall(r"stablehlo\.constant dense<\"0x", text))

    assert constants(1) == constants(4) > 0


@pytest.mark.slow
def test_a_cpu_copies_no_field_to_transpose_it():
    """The batch stays behind the channels, and the gradients of weights are sums over rows."""
    arrays, static = eqx.partition(make(method="dft"), eqx.is_array)
    run = lambda a, x: jax.vmap(eqx.combine(a, static))(x)
    x = fields(32)
    forward = jax.jit(run).lower(arrays, x).compile().as_text()
    gradient = jax.jit(jax.grad(lambda a, x: jnp.sum(run(a, x) ** 2)))
    backward = gradient.lower(arrays, x).compile().as_text()
    points = 3 * 32 * 32
    assert f"f32[8,{points}]" in forward
    assert "f32[3,8,32,32]" not in forward
    assert not re.search(rf"f32\[{points},(4|8|16)\]", backward)
    # The one channel that comes out is a product, and no sum of 16 fields.
    assert "f32[3,16,32,32]" not in forward
    assert "f32[16,3,32,32]{3,2,1,0} broadcast" not in forward[forward.index("ENTRY") :]


FIELDS = {
    "outliers of 1e3": lambda x: x.at[:, 0, 3, 4].set(1e3),
    "outliers of 1e4": lambda x: x.at[:, 0, 3, 4].set(1e4),
    "a smooth field of 3000": lambda x: 3e3 * x,
    "an offset of 50": lambda x: x + 50,
    "a field of 1e-3": lambda x: 1e-3 * x,
    "one pixel above 65504": lambda x: x.at[:, 0, 3, 4].set(1e5),
}


@pytest.mark.slow
def test_hard_fields_in_float16():
    """With the field in float32, as recommended: finite and near float32, or a skipped step."""
    model = make(stabilizer="soft_clip")
    half = mpx.cast_to_float16(model)
    step = eqx.filter_jit(
        mpx.filter_value_and_grad(
            lambda m, x: jnp.mean(jax.vmap(m)(x) ** 2),
            mpx.DynamicLossScaling(2.0**4),
            keep_full=(False, True),
        )
    )
    for name, change in FIELDS.items():
        x = change(fields())
        _, _, finite, grads = step(model, x)
        leaves = jax.tree.leaves(eqx.filter(grads, eqx.is_array))
        assert bool(finite) == all(bool(jnp.all(jnp.isfinite(g))) for g in leaves)
        y = evaluate(half, x)
        assert jnp.all(jnp.isfinite(y)), name
        assert relative(y, evaluate(model, x)) < 0.01, name
        if name in ("an offset of 50", "a field of 1e-3"):
            assert finite, name


@pytest.mark.slow
def test_training():
    model, x = make(width=16), fields(batch=8)
    target = jnp.tanh(x[:, :1] * x[:, 1:])
    optimizer = optax.adam(3e-3)
    last = {}
    for dtype in ("float32", "float16", "bfloat16"):
        policy = f"params=float32,compute={dtype},output=float32"

        @eqx.filter_jit
        def run(model, policy=policy):
            arrays, static = eqx.partition(model, eqx.is_array)

            def step(carry, _):
                arrays, state, scaling = carry
                m = eqx.combine(arrays, static)
                loss, scaling, finite, grads = mpx.filter_value_and_grad(
                    lambda m, x: jnp.mean((jax.vmap(m)(x) - target) ** 2),
                    scaling,
                    policy=policy,
                    keep_full=(False, True),
                )(m, x)
                m, state = mpx.optimizer_update(m, optimizer, state, grads, finite)
                return (eqx.filter(m, eqx.is_array), state, scaling), loss

            state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
            carry = arrays, state, mpx.DynamicLossScaling(2.0**10)
            return jax.lax.scan(step, carry, length=30)[1]

        losses = run(model)
        assert losses[-1] < 0.3 * losses[0]
        last[dtype] = float(losses[-1])
    assert last["float16"] == pytest.approx(last["float32"], rel=0.05)
    assert last["bfloat16"] == pytest.approx(last["float32"], rel=0.2)


@pytest.mark.slow
def test_transformations():
    model, x = make(layers=1), fields()[0]
    tangent = jax.random.normal(jax.random.key(1), x.shape)

    @eqx.filter_jit
    def run(model, x):
        y, slope = jax.jvp(model, (x,), (tangent,))
        _, pullback = jax.vjp(model, x)
        return jnp.vdot(slope, y), jnp.vdot(tangent, pullback(y)[0])

    for this, tolerance in ((model, 1e-4), (mpx.cast_to_float16(model), 2e-2)):
        forward, reverse = run(this, x)
        assert float(forward) == pytest.approx(float(reverse), rel=tolerance)


@pytest.mark.usefixtures("unchecked_annotations")
def test_errors():
    with pytest.raises(ValueError, match=r"`FNO`.*`hidden_channels`"):
        make(width=0)
    with pytest.raises(ValueError, match=r"`FNO`.*`domain_padding`.*2 axes"):
        make(domain_padding=(0.1, 0.1, 0.1))
    with pytest.raises(ValueError, match=r"`FNO`.*`domain_padding`"):
        make(domain_padding=-1.0)
    with pytest.raises(ValueError, match=r"`FNO`.*`modes`"):
        make(modes=())
    with pytest.raises(ValueError, match=r"`FNO`.*2 channels.*`jax.vmap`"):
        make()(fields())
    with pytest.raises(TypeError, match=r"`FNO`.*complex64"):
        make()(fields()[0].astype(complex))
    with pytest.raises(ValueError, match=r"`SpectralConv`.*finer grid"):
        make()(fields(4)[0])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["plain", "cast", "autocast", "forward"])
def test_gradients_inside_of_shard_map(how):
    """JAX sums the gradients of what is the same on all devices; the sum has to be asked for."""
    model = nn.FNO(1, 1, 4, 1, (4, 4), key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (4, 1, 8, 8))
    arrays, static = eqx.partition(
        mpx.cast_to_float16(model) if how == "plain" else model, eqx.is_array
    )
    loss = lambda model, x: jnp.mean((jax.vmap(model)(x) - jnp.sin(x)) ** 2)
    options = {
        "cast": {"keep_full": (False, True)},
        "autocast": {"autocast": True},
        "forward": {"forward": "float32"},
    }

    def gradient(arrays, x, **axis):
        if how == "plain":
            return jax.grad(lambda arrays: loss(eqx.combine(arrays, static), x))(arrays)
        step = mpx.filter_grad(loss, mpx.StaticLossScaling(64.0), **options[how], **axis)
        return eqx.filter(step(eqx.combine(arrays, static), x)[2], eqx.is_array)

    def of_a_part(arrays, x):
        axis = {} if how == "plain" else {"axis_name": "batch"}
        return jax.tree.map(lambda g: g / 2, gradient(arrays, x, **axis))

    mesh = jax.make_mesh((2,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(of_a_part, mesh=mesh, in_specs=(P(), P("batch")), out_specs=P())
    got, want = jax.jit(sharded)(arrays, x), jax.jit(gradient)(arrays, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # Means that are rounded to half may differ by a rounding.
        assert relative(a.astype(jnp.float32), b.astype(jnp.float32)) < 2.0**-9


@pytest.mark.slow
def test_an_activation_that_was_replaced_by_any_function():
    """As one does with `equinox.tree_at`; `FNO(activation=...)` makes a `safe` one of it."""
    model = make((4,), (1, 1), layers=1)
    plain = eqx.tree_at(lambda m: m.activation, model, jnp.tanh)
    wanted = eqx.tree_at(lambda m: m.activation, model, nn.tanh)
    x = jnp.sin(jnp.arange(32.0))[None]

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(model):
        return jnp.mean(model(x) ** 2)

    got, want = map(jax.tree.leaves, map(gradient, (plain, wanted)))
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)  # float32, fused in other ways

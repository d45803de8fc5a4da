"""Tests spectral convolutions: the same operator by matrices and by FFT, only half products in half
precision, and fields that half precision cannot hold."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, dense, in_float64, normal, products, spectral_by_definition

import mpx_pde as mpx
from mpx_pde import nn
from mpx_pde.nn._spectral_cost import choose_method


METHODS = ("dft", "fft")

# Odd and even sizes and modes, and all modes of a grid, including the Nyquist mode.
CASES = [
    ((5,), (16,)),
    ((16,), (16,)),
    ((6, 8), (12, 11)),
    ((11, 9), (11, 9)),
    ((4, 5, 6), (6, 7, 6)),
]

# Error relative to the largest value. float32: sums over some hundred entries in another order
# than the oracle's, 2^6 unit roundoffs. Half: some eight successive roundings of field, matrices,
# modes, weights and results, most of which cancel, 2^3 unit roundoffs.
TOLERANCES = {"float32": 2.0**-18, "float16": 2.0**-8, "bfloat16": 2.0**-5}


def field(*shape):
    return normal(1, shape)


@eqx.filter_jit
def call(layer, x, **options):
    return layer(x, **options)


def make(modes, channels=(3, 4), **options):
    return nn.SpectralConv(*channels, modes, key=jax.random.key(0), **options)


def oracle(fun, *args):
    """Evaluates `fun` in float64."""
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, jax.jit(fun)(*in_float64(args)))


def weighted(fun, output):
    """Returns a loss that weights the results unevenly, so its gradient is not symmetric."""
    c = np.cos(np.arange(np.prod(output))).reshape(output)

    def loss(*args):
        y = fun(*args)
        y = y if y.dtype == jnp.float64 else y.astype(jnp.float32)
        return jnp.sum(y * c.astype(y.dtype))

    return loss


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modes", "grid", "factorization"), [(*case, None) for case in CASES] + [(*CASES[2], "cp")]
)
def test_values_and_gradients_are_those_of_the_definition(modes, grid, factorization):
    layer = make(modes, factorization=factorization, rank=3)
    x = field(3, *grid)
    definition = lambda w, x: spectral_by_definition(w, modes, x)
    loss = weighted(definition, (4, *grid))
    both = lambda w, x: (definition(w, x), jax.grad(loss, argnums=(0, 1))(w, x))
    want, slopes = oracle(both, layer.weight, x)
    for method in METHODS:

        @jax.jit
        def run(w, x, method=method):
            layer = make(modes, method=method)
            of_weight = lambda w, x: eqx.tree_at(lambda m: m.weight, layer, w)(x)
            return of_weight(w, x), jax.grad(weighted(of_weight, (4, *grid)), (0, 1))(w, x)

        y, gradient = run(layer.weight, x)
        assert y.dtype == jnp.float32
        assert_close((y, gradient), (want, slopes), TOLERANCES["float32"])
        if method == "dft" and modes in ((6, 8), (4, 5, 6)):
            for dtype in ("float16", "bfloat16"):
                w = mpx.cast_tree(layer.weight, dtype)
                y, gradient = run(w, x)
                assert y.dtype == dtype
                assert jax.tree.leaves(gradient[0])[0].dtype == dtype
                assert_close((y, gradient), (want, slopes), 2 * TOLERANCES[dtype])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modes", "grid", "output"),
    [((6,), (9,), (12,)), ((6, 4), (8, 9), (16, 27)), ((4, 4, 4), (5, 6, 8), (9, 7, 6))],
)
def test_another_output_grid(modes, grid, output):
    layer, x = make(modes), field(3, *grid)
    want = oracle(lambda w, x: spectral_by_definition(w, modes, x, output), layer.weight, x)
    for method in METHODS:
        y = call(make(modes, method=method), x, output_shape=output)
        assert_close(y, want, TOLERANCES["float32"])
    assert make(6)(field(3, 9), output_shape=12).shape == (4, 12)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "grid"), [("dft", (8,)), ("dft", (8, 6)), ("fft", (4, 6, 8))])
def test_a_finer_grid_interpolates_with_all_modes_kept(grid, method):
    """This includes the Nyquist mode, which plain zero padding of the spectrum would double."""
    layer, x = make(grid, method=method), field(3, *grid)
    fine = call(layer, x, output_shape=[2 * n for n in grid])
    assert_close(fine[:, *(slice(None, None, 2) for _ in grid)], call(layer, x), 1e-5)
    # A coarser grid samples the same function.
    twice = make([n // 2 for n in grid], method=method)
    coarse = call(twice, x, output_shape=[n // 2 for n in grid])
    assert_close(coarse, call(twice, x)[:, *(slice(None, None, 2) for _ in grid)], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("factorization", [None, "cp"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_products_alone_in_both_passes(dtype, factorization):
    layer = mpx.cast_tree(make((6, 6), factorization=factorization, method="dft"), dtype)
    x = field(5, 3, 12, 12).astype(dtype)
    arrays, static = eqx.partition((layer, x), eqx.is_array)

    def loss(arrays):
        layer, x = eqx.combine(arrays, static)
        return jnp.sum(jax.vmap(layer)(x).astype(jnp.float32) ** 2)

    found = products(jax.value_and_grad(loss), arrays)
    factors = 2 if factorization else 1
    # Two transforms each way and the weights, as many again for the field's cotangent, and one for
    # the cotangent of each weight.
    assert len(found) == (4 + factors) * 2 + factors
    multiplied = {(e.primitive.name, e.params["dtype"].name) for e in found}
    assert multiplied == {("mixed_dot_general", dtype)}
    # The mean is subtracted from the sums of the first transform before they are rounded. These
    # sums and their cotangent are a small part of a field.
    wide = [e for e in found if "float32" in {v.aval.dtype.name for v in (*e.invars, *e.outvars)}]
    assert len(wide) == 2
    assert {max(v.aval.size for v in e.outvars) for e in wide[:1]} == {5 * 3 * 12 * 4 * 2}
    # The weights are an operand of one product in each pass.
    shape = (6, 4, 3, 4, 2) if factorization is None else layer.weight.inputs.shape
    assert sum(any(v.aval.shape == shape for v in e.invars) for e in found) == 2


@pytest.mark.slow
@pytest.mark.parametrize("factorization", [None, "cp"])
def test_initial_weights_keep_the_size_of_a_field(factorization):
    layer = make((16, 16), (32, 32), factorization=factorization, rank=64)
    weight = np.asarray(dense(layer.weight))
    assert np.std(weight) == pytest.approx(np.sqrt(2 / 64), rel=0.25)
    assert np.std(weight.real) == pytest.approx(np.std(weight.imag), rel=0.25)


def smooth(n=64):
    t = 2 * np.pi * np.arange(n) / n
    return np.stack([np.sin(t[:, None] + c) * np.cos(2 * t[None, :]) for c in range(3)])


SPOTS = np.random.default_rng(0).random(smooth().shape)
FIELDS = {
    "outliers of 1e3": np.where(SPOTS < 1e-3, 1e3, smooth()),
    "outliers of 1e4": np.where(SPOTS < 1e-3, 1e4, smooth()),
    "a smooth field of 3000": 3e3 * smooth(),
    "an offset of 50": smooth() + 50,
    "a field of 1e-3": 1e-3 * smooth(),
    "one pixel above 65504": np.where(SPOTS == SPOTS.min(), 1e5, smooth()),
}


def test_a_smooth_field_above_the_range_of_float16():
    """Its modes are as large as the field, but the result is not."""
    layer = make((4, 4), method="dft")
    layer = eqx.tree_at(lambda layer: layer.weight, layer, layer.weight / 16)
    x = jnp.asarray(2e5 * smooth(16), jnp.float32)
    assert_close(mpx.cast_to_float16(layer)(x), layer(x), TOLERANCES["float16"])


@pytest.mark.slow
def test_hard_fields_in_float16():
    """Values and gradients are finite, and rounding explains all of their errors."""
    modes = (16, 16)
    layer = make(modes, method="dft")
    half = mpx.cast_to_float16(layer)
    loss = lambda w, x: jnp.mean(spectral_by_definition(w, modes, x) ** 2)
    exact = jax.jit(lambda w, x: (spectral_by_definition(w, modes, x), jax.grad(loss)(w, x)))

    @eqx.filter_jit
    def run(m, x, scale):
        y, slope = m(x), lambda m: jnp.mean(m(x).astype(jnp.float32) ** 2) * scale
        return y, eqx.filter_grad(slope)(m).weight

    for name, x in FIELDS.items():
        want, slope = oracle(exact, layer.weight, x.astype(np.float32))
        # A loss scaling finds such a scale.
        scale = 2.0 ** -np.ceil(np.log2(np.abs(slope).max()))
        y, gradient = run(half, jnp.asarray(x, jnp.float32), jnp.asarray(scale, jnp.float32))
        assert_close(y, want, TOLERANCES["float16"])
        assert_close(gradient, slope * scale, 4 * TOLERANCES["float16"])
        if name == "an offset of 50":
            # Apart from the offset of the result, which float16 rounds like any result, the field
            # is as accurate as without an offset.
            error = np.abs(np.asarray(y, np.float64) - want).max()
            rest = np.abs(want - np.mean(want, axis=(1, 2), keepdims=True)).max()
            assert error < np.abs(want).max() * 2.0**-11 + TOLERANCES["float16"] * rest


STABILIZED = {
    "tanh": np.tanh,
    "hard_clip": lambda x: np.clip(x, -1, 1),
    "soft_clip": lambda x: 8 * np.tanh(x / 8),
    "sigma_clip": lambda x: np.clip(
        x, *(x.mean((1, 2), keepdims=True) + s * 2 * x.std((1, 2), keepdims=True) for s in (-1, 1))
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STABILIZED)
def test_stabilizers_act_before_the_transform(name):
    x = 3 * field(3, 12, 12)
    layer = make((6, 6), stabilizer=name)
    bounded = jnp.asarray(STABILIZED[name](np.asarray(x, np.float64)), jnp.float32)
    assert_close(call(layer, x), np.asarray(call(make((6, 6)), bounded), np.float64), 1e-5)
    half = mpx.cast_to_float16(layer)
    wild = x.at[0, 0, 0].set(1e5)
    total = lambda x: jnp.sum(half(x).astype(jnp.float32))
    value, slope = jax.jit(jax.value_and_grad(total))(wild)
    assert jnp.isfinite(value)
    assert jnp.all(jnp.isfinite(slope))


@pytest.mark.slow
def test_autocast_multiplies_the_layer_in_half():
    layer, x = make((6, 6), method="dft"), field(3, 12, 12)
    assert not mpx.autocast(lambda m, x: m(x), "float16").report(layer, x).unknown
    want, got = np.float64(call(layer, x)), call(mpx.autocast(layer, "float16"), x)
    assert_close(got, want, 2.0**-8)  # a few roundings of 2^-11
    assert np.abs(got - want).max() > 2.0**-16 * np.abs(want).max()


def test_a_stabilizer_of_ones_own():
    x = 3 * field(3, 12, 12)
    layer = make((6, 6), stabilizer=nn.soft_clip(4.0))
    assert_close(call(layer, x), np.float64(call(make((6, 6)), 4 * jnp.tanh(x / 4))), 1e-5)


def test_the_cost_model():
    assert choose_method(32, (128, 128), (16, 16), "float32") == "dft"
    assert choose_method(32, (256, 256), (256, 256), "float32") == "fft"
    for n in (64, 256, 512):  # there is no half FFT
        for dtype in ("float16", "bfloat16"):
            assert choose_method(32, (n, n), (n, n), dtype) == "dft"
    x = field(3, 12, 12)
    assert_close(call(make((6, 6)), x), np.float64(call(make((6, 6), method="fft"), x)), 1e-5)

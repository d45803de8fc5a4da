"""Compares split products and TF32, which a CPU computes as hardware with them does, with NumPy."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import equations, normal, relative

import mpx_pde as mpx
from mpx_pde import nn
from mpx_pde.precision._split import IN_HALVES, SPLIT_PRODUCTS, split_by_halves
from mpx_pde.products._dot import split_dot_general


# The bits of each part, the number of parts, and the largest sum of the indices of two parts. Then
# two limits of the error of a product of some hundred terms against float64. They allow for the
# roundings of the format, most of which average out.
FORMATS = {
    "tensorfloat32": (11, 1, 0, 2.0**-15, 2.0**-10),
    "tensorfloat32_x3": (11, 2, 1, 2.0**-27, 2.0**-20),
    "bfloat16_x3": (8, 2, 1, 2.0**-21, 2.0**-14),
    "bfloat16_x6": (8, 3, 2, 2.0**-27, 2.0**-20),
    "bfloat16_x9": (8, 3, 4, 2.0**-27, 2.0**-20),
}
MATMUL = (((1,), (0,)), ((), ()))


def rounded(x, bits):
    """Rounds to the nearest number of `bits` significant bits, ties to even."""
    mantissa, exponent = np.frexp(np.asarray(x, np.float64))
    return np.ldexp(np.round(mantissa * 2.0**bits), exponent - bits)


def oracle(x, y, name):
    """Multiplies the parts in float64. The product omits the same pairs and rounds nothing else."""
    bits, parts, last, *_ = FORMATS[name]

    def cut(z):
        z, out = np.asarray(z, np.float64), []
        for _ in range(parts):
            out.append(rounded(z, bits))
            z = z - out[-1]
        return out

    xs, ys = cut(x), cut(y)
    return sum(xs[i] @ ys[j] for i in range(parts) for j in range(parts) if i + j <= last)


@pytest.mark.parametrize("name", FORMATS)
def test_a_product_is_that_of_the_parts(name):
    assert FORMATS.keys() == SPLIT_PRODUCTS.keys()
    x, y = normal(0, (8, 128)), normal(1, (128, 4))
    got = jax.jit(lambda x, y: split_dot_general(x, y, MATMUL, name))(x, y)
    # Sums of 128 terms in float32.
    assert relative(got, oracle(x, y, name)) < 2.0**-21
    *_, low, high = FORMATS[name]
    assert low < relative(got, np.asarray(x, np.float64) @ np.asarray(y, np.float64)) < high


@pytest.mark.parametrize("terms", [128, 8])
def test_products_of_halves_by_themselves_are_as_exact(terms):
    """This is the form for a GPU. If the small products, those with remainders of operands, are
    stored, they are rounded to bfloat16, as the remainders are. This makes three roundings of one
    size instead of the two of operands."""
    x, y = normal(0, (64, terms)), normal(1, (terms, 64))
    exact = np.asarray(x, np.float64) @ np.asarray(y, np.float64)
    product = lambda x, y, **options: jax.lax.dot_general(x, y, MATMUL, **options)
    by_halves = lambda x, y: split_by_halves(product, x, y, (1, 0))
    limit = 2.0**-16 if terms == 128 else 2.0**-21
    assert relative(by_halves(x, y), oracle(x, y, IN_HALVES)) < limit
    assert relative(by_halves(x, y), exact) < 2 * relative(oracle(x, y, IN_HALVES), exact)
    assert not jnp.isfinite(by_halves(x.at[0, 0].set(jnp.inf), y)[0]).any()


@pytest.mark.parametrize(("columns", "count"), [(512, 3), (256, 1), (4096, 1)])
def test_a_gpu_takes_wide_products_by_halves_and_narrow_ones_at_once(columns, count):
    product = lambda x, y: split_dot_general(x, y, MATMUL, IN_HALVES)
    operands = normal(0, (columns, 512)), normal(1, (512, columns))
    text = jax.jit(product).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) == count
    assert all(("xbf16>" in line) == (columns > 256) for line in products)


@pytest.mark.parametrize("shapes", [((8, 16), (16, 1)), ((16,), (16, 4)), ((8, 1), (1, 4))])
def test_a_product_with_a_vector_is_one_of_float32(shapes):
    """XLA for GPUs makes it elementwise. Products of parts would then be rounded to half."""
    x, y = map(normal, range(2), shapes)
    axes = (((x.ndim - 1,), (0,)), ((), ()))
    product = jax.jit(lambda x, y: split_dot_general(x, y, axes, IN_HALVES))
    assert relative(product(x, y), np.asarray(x, np.float64) @ np.asarray(y, np.float64)) < 2.0**-21
    text = product.trace(x, y).lower(lowering_platforms=("cuda",)).as_text()
    (line,) = (line for line in text.splitlines() if "stablehlo.dot_general" in line)
    assert "precision = [HIGHEST, HIGHEST]" in line
    assert "algorithm" not in line


@pytest.mark.slow
def test_gradients_are_products_of_the_parts_too():
    x, y, g = normal(0, (8, 16)), normal(1, (16, 4)), normal(2, (8, 4))

    @jax.jit
    def gradients(x, y, g):
        product = lambda x, y: split_dot_general(x, y, MATMUL, "tensorfloat32")
        return jax.vjp(product, x, y)[1](g)

    g_x, g_y = gradients(x, y, g)
    assert relative(g_x, oracle(g, np.asarray(y).T, "tensorfloat32")) < 2.0**-21
    assert relative(g_y, oracle(np.asarray(x).T, g, "tensorfloat32")) < 2.0**-21
    batched = jax.vmap(lambda x: split_dot_general(x, y, (((0,), (0,)), ((), ())), "bfloat16_x3"))
    assert relative(jax.jit(batched)(x), oracle(x, y, "bfloat16_x3")) < 2.0**-21


def test_infinities_stay():
    x, y = jnp.array([[jnp.inf, 1.0]] * 2), 1.0 + jnp.arange(8.0).reshape(2, 4) / 7
    for name in SPLIT_PRODUCTS:  # a remainder of `y` may be negative
        np.testing.assert_array_equal(split_dot_general(x, y, MATMUL, name), np.inf)
    assert jnp.all(jnp.isnan(split_dot_general(jnp.nan * x, y, MATMUL, "tensorfloat32")))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*derivative terms:mpx_pde.PrecisionWarning")
def test_derivative_terms_in_tf32():
    model = nn.CoordinateMLP(2, "scalar", 32, 3, key=jax.random.key(0))
    points = jax.random.uniform(jax.random.key(1), (16, 2))

    def loss(model, points):
        d = jax.vmap(mpx.partials(model, ["u_xx"], coords="xy", outputs="u"))(points)
        return jnp.sum(d["u_xx"])

    def value(name):
        step = mpx.filter_value_and_grad(loss, mpx.NoOpLossScaling(), forward=name)
        return eqx.filter_jit(step)(model, points)[0]

    full = value("float32")
    assert 2.0**-19 < relative(value("tensorfloat32"), full) < 2.0**-8
    assert relative(value("bfloat16_x6"), full) < 2.0**-19
    # Coordinates and the first layer stay float32.
    step = mpx.filter_value_and_grad(loss, mpx.NoOpLossScaling(), forward="tensorfloat32")
    with jax.numpy_dtype_promotion("standard"):
        jaxpr = jax.make_jaxpr(lambda p: step(model, p)[0])(points)
    split = [e for e in equations(jaxpr) if e.params.get("algorithm") == "tensorfloat32"]
    assert split
    assert all(2 not in e.invars[1].aval.shape for e in split)

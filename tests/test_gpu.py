"""Tests of excess precision, tensor cores and TF32, which only a GPU shows. Skipped without one.

Statements that also hold on a CPU are tested on both, which shows that the tests themselves
work.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import HALVES, normal, relative

import mpx_pde as mpx


POLICY = "params=float32,compute=float16,output=float32"
ON_GPU = jax.default_backend() == "gpu"
NEEDS_GPU = pytest.mark.skipif(not ON_GPU, reason="there is no GPU")


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=[pytest.mark.gpu, NEEDS_GPU])])
def device(request):
    """Makes the device the default inside the test."""
    found = jax.devices(request.param)[0]
    with jax.default_device(found):
        yield found


def operands(n=256):
    x, y = normal(0, (n, n)), normal(1, (n, n))
    return x, y, np.float64(x) @ np.float64(y)


# --- Overflow -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("excess", [True, False])
def test_an_overflow_in_a_gradient_is_seen_whatever_the_compiler_elides(device, excess):
    """A GPU's compiler may drop a cast to float16 and back, and with it an infinity. Values that
    are stored in float16 still overflow."""
    model = normal(0, (64, 64))
    x = normal(1, (64, 64))

    def loss(model, x):
        return 1e4 * jnp.sum(jnp.square((x @ model).astype(jnp.float32)))

    def step(scale, model, x):
        scaling = mpx.DynamicLossScaling(scale)
        gradient = mpx.filter_value_and_grad(loss, scaling, policy=POLICY)
        return gradient(model, x)

    options = {"xla_allow_excess_precision": excess} if device.platform == "gpu" else None
    for scale, finite in ((2.0**15, False), (2.0**-16, True)):
        run = jax.jit(step, static_argnums=0).lower(scale, model, x).compile(options)
        value, scaling, grads_finite, grads = run(model, x)
        assert grads_finite == finite
        assert jnp.isfinite(value)
        assert jnp.all(jnp.isfinite(grads)) == finite
        assert scaling.skipped_steps == int(not finite)


# --- Products -------------------------------------------------------------------------------------


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("half", HALVES)
def test_no_product_of_a_training_step_is_float32(half):
    model = eqx.nn.MLP(64, 64, 256, 2, activation=jnp.tanh, key=jax.random.key(0))
    x = normal(1, (128, 64))

    def loss(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    def gradient(model):
        return eqx.filter_grad(mpx.autocast(loss, half))(model, x)

    text = eqx.filter_jit(gradient).lower(model).compile().compiled.as_text()
    name = {"float16": "f16", "bfloat16": "bf16"}[half]
    # A product is a dot, by itself or inside a Triton kernel, or a call of cuBLAS.
    lines = [t for t in text.splitlines() if " dot(" in t or 'custom_call_target="__cublas' in t]
    assert lines
    named = [t.strip().removeprefix("ROOT ") for t in text.splitlines() if " = " in t]
    types = dict(t.split(" = ", 1) for t in named)
    for line in lines:
        _, right = line.split(" = ", 1)
        start = right.index("dot(") + 4 if " dot(" in line else right.index("custom-call(") + 12
        operands = right[start : right.index(")", start)].split(",")
        for x in [x.strip().split(" ")[-1] for x in operands[:2]]:
            assert types[x].lstrip("(").startswith(f"{name}["), line


@pytest.mark.parametrize("half", HALVES)
def test_sums_are_accumulated_in_float32(device, half):
    """There are 4096 terms of about 1e-3. A half accumulator would stop once a term is half a unit
    in the last place of the sum (at 2 in float16, at 0.25 in bfloat16)."""
    n = 4096
    x, y = jnp.ones((16, n)), jnp.full((n, 16), 1e-3)
    want = n * float(jnp.asarray(1e-3, half))
    dot = jax.jit(lambda x, y: mpx.mixed_matmul(x, y, dtype=half, out_dtype=jnp.float32))
    got = dot(x, y)
    # Products are exact, and 2^12 float32 additions each round by 2^-24.
    assert np.max(np.abs(np.float64(got) - want)) <= 2.0**-12 * want


def test_full_precision_is_no_tf32(device):
    x, y, want = operands()
    got = jax.jit(mpx.force_full_precision(jnp.matmul))(x, y)
    # Sums of 256 float32 products.
    assert relative(got, want) <= 1e-6
    mixed = jax.jit(lambda x, y: mpx.mixed_matmul(x, y, dtype=jnp.float32))(x, y)
    assert relative(mixed, want) <= 1e-6


@pytest.mark.gpu
@NEEDS_GPU
def test_the_default_is_tf32():
    """Otherwise the test above would show nothing. JAX's default may change, so it is named."""
    x, y, want = operands()
    got = jax.jit(lambda x, y: jnp.matmul(x, y, precision="tensorfloat32"))(x, y)
    # Two roundings to 11 bits.
    assert 1e-4 <= relative(got, want) <= 1e-3


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize(
    ("algorithm", "largest"),
    # The bits that all parts of an operand hold together, and a factor for the sums.
    [("bfloat16_x3", 2.0**-15), ("bfloat16_x6", 2.0**-19), ("tensorfloat32_x3", 2.0**-19)],
)
def test_split_products(algorithm, largest):
    x, y, want = operands()
    assert relative(jax.jit(mpx.autocast(jnp.matmul, algorithm))(x, y), want) <= largest

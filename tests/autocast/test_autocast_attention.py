"""`jax.nn.dot_product_attention` under `autocast`: half in and out in both passes, on a GPU too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import HALVES, equations

import mpx_pde as mpx


BATCH, TOKENS, HEADS, SIZE = 2, 24, 2, 8
WIDTH = HEADS * SIZE


def network(weights, x, half=None, **options):
    """Attention between projections; with `half`, queries, keys and values are cast to it."""
    q, k, v = (jnp.einsum("btd,dnh->btnh", x, w) for w in weights[:3])
    if half is not None:
        q, k, v = (z.astype(half) for z in (q, k, v))
    y = jax.nn.dot_product_attention(q, k, v, **options)
    y = jnp.einsum("btnh,dnh->btd", y.astype(x.dtype), weights[3])
    return jnp.mean(y**2)


def arguments(tokens=TOKENS, size=SIZE):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    weights = draw(4, HEADS * size, HEADS, size) / np.float32(np.sqrt(HEADS * size))
    return weights, draw(BATCH, tokens, HEADS * size)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_products_are_half_and_results_are_near_float32(dtype, causal):
    args = arguments()
    fun = lambda *args: network(*args, implementation="xla", is_causal=causal)
    run = lambda fun: jax.jit(jax.value_and_grad(fun))
    value, gradient = run(mpx.autocast(fun, dtype))(*args)
    want, exact = run(fun)(*args)
    assert (value.dtype, gradient.dtype) == (jnp.float32, jnp.float32)
    # Some ten roundings follow one another.
    tolerance = {"float16": 2e-3, "bfloat16": 2e-2}[jnp.dtype(dtype).name]
    assert abs(value - want) < tolerance * abs(want)
    assert np.linalg.norm(gradient - exact) < tolerance * np.linalg.norm(exact)


@pytest.mark.parametrize("dtype", HALVES)
def test_queries_keys_and_values_are_half_in_both_passes(dtype):
    fun = mpx.autocast(lambda *args: network(*args, implementation="xla"), dtype)
    jaxpr = jax.make_jaxpr(jax.grad(fun))(*arguments())
    found = [e for e in equations(jaxpr) if e.primitive.name.endswith("dot_general")]
    assert {e.primitive.name for e in found} == {"mixed_dot_general"}
    # Two products forward and four backward have an axis of heads in both operands.
    between = [e for e in found if all(v.aval.ndim >= 4 for v in e.invars)]
    assert len(between) >= 6
    for e in between:
        assert {v.aval.dtype for v in (*e.invars, *e.outvars)} == {jnp.dtype(dtype)}


def _program(fun, tokens, size):
    deviceless = pytest.importorskip("benchmarks._deviceless")
    weights, x = arguments(tokens, size)
    fun = jax.grad(mpx.autocast(fun, "float16"))
    try:
        return deviceless.compile_for(
            "h100", fun, weights, x, compiler_options=deviceless.CUBLAS
        ).text
    except deviceless.TargetUnavailable as e:
        pytest.skip(str(e))


def _launched(text):
    from benchmarks._hlo import Module

    return [launch.instruction for launch in Module.parse(text).launched()]


def test_a_gpu_writes_no_float32_queries_and_pads_nothing():
    tokens, size = 40, 16
    found = _launched(_program(lambda *a: network(*a, implementation="xla"), tokens, size))
    wide = [s for i in found for s in i.shapes if s.dtype == "f32"]
    # Beside the gradient of the weights, what is float32 is of scores, within the softmax.
    elements = BATCH * tokens * HEADS * size
    assert not [s for s in wide if s.elements == elements and s.sizes[-1] != tokens]
    assert not [i for i in found if "pad" in i.name]


def test_attention_of_cudnn_takes_halves_that_are_cast_before_it():
    tokens, size = 128, 64
    fun = lambda *a: network(*a, half="float16", implementation="cudnn")
    try:
        text = _program(fun, tokens, size)
    except RuntimeError as e:
        pytest.skip(str(e))  # cuDNN itself is asked for its version
    calls = [i for i in _launched(text) if "cudnn$fmha" in i.target]
    assert len(calls) == 2
    for i in calls:
        assert {s.dtype for s in i.shapes if s.elements > BATCH * HEADS * tokens} <= {"f16", "u8"}

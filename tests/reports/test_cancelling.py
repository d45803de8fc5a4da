"""Tests that sums in which rounded values cancel are told by the runs that look at values."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_tells

import mpx_pde as mpx


KEYS = jax.random.split(jax.random.key(0), 5)
WEIGHTS = jax.random.normal(KEYS[0], (32, 64)) / 5, jax.random.normal(KEYS[1], (64, 1)) / 8
FAR = 100 + jax.random.uniform(KEYS[2], (128, 32))
"""Data in [100, 101], of which float16 keeps multiples of 1/16, and bfloat16 of 1/2."""

NEAR = jax.random.normal(KEYS[3], (128, 32))
CENTERING = jnp.eye(128) - 1 / 128
TARGETS = jnp.sin(FAR[:, :1])


def network(weights, x, bias=0.0):
    return jnp.tanh(x @ weights[0] + bias) @ weights[1]


def mean_square(r):
    return jnp.mean(r.astype(jnp.float32) ** 2)


def normalized(weights, x):
    z = (x - jnp.mean(x, 0, keepdims=True)) / jnp.std(x, 0, keepdims=True)
    return mean_square(network(weights, z) - TARGETS.astype(z.dtype))


def on_walls(weights, x):
    u = (x[:, :1] - 100) * network(weights, x - 100)
    return mean_square(u - TARGETS.astype(x.dtype))


def with_a_bias(parameters, x):
    weights, bias = parameters
    return mean_square(network(weights, x, bias) - TARGETS.astype(x.dtype))


def by_a_matrix(weights, x):
    z = CENTERING.astype(x.dtype) @ x
    return mean_square(network(weights, z) - TARGETS.astype(x.dtype))


BIASED = WEIGHTS, -jnp.mean(FAR, 0, keepdims=True) @ WEIGHTS[0]
CASES = {
    "normalized data": (normalized, WEIGHTS, {}),
    "a hard boundary condition": (on_walls, WEIGHTS, {}),
    "a bias": (with_a_bias, BIASED, {}),
    "a bias, autocast": (with_a_bias, BIASED, {"autocast": True}),
    "a matrix": (by_a_matrix, WEIGHTS, {}),
    "a matrix, autocast": (by_a_matrix, WEIGHTS, {"autocast": True}),
}


def report_of(loss, arguments, **options):
    return mpx.range_report(mpx.filter_grad(loss, mpx.NoOpLossScaling(), **options))(*arguments)


def error(loss, arguments, **options):
    """Returns the largest error of a leaf of the gradient."""
    _, _, got = mpx.filter_grad(loss, mpx.NoOpLossScaling(), **options)(*arguments)
    want = jax.grad(loss)(*arguments)
    size = lambda x: float(jnp.linalg.norm(jnp.ravel(x)))
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(size(x - y) / size(y) for x, y in pairs)


@pytest.mark.parametrize("half", [pytest.param(jnp.float16, marks=pytest.mark.slow), jnp.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_data_that_cancel_are_told_with_their_line(name, half):
    loss, parameters, options = CASES[name]
    with mpx.half_precision(half):
        if half == jnp.bfloat16:  # what is told is wrong
            assert error(loss, (parameters, FAR), **options) > 0.1
        report = report_of(loss, (parameters, FAR), **options)
        row = report.cancelling()[0]
    source, first = inspect.getsourcelines(loss)
    network_source, network_first = inspect.getsourcelines(network)
    lines = {*range(first, first + len(source))}
    lines |= {*range(network_first, network_first + len(network_source))}
    assert int(row.line.rsplit(":", 1)[1]) in lines
    assert row.rounded == jnp.dtype(half).name
    # A spread of 0.3 around 100, or the sum of 32 products of 100 and a weight beside their own.
    assert 6 < row.cancels < 11
    assert_tells(str(report), "loses digits", f"`{row.primitive}`", row.rounded)


@pytest.mark.slow
@pytest.mark.parametrize("half", [jnp.bfloat16, jnp.float16])
def test_data_around_zero_and_a_forward_pass_in_full_are_not_told(half):
    cases = [
        *((loss, (parameters, NEAR), options) for loss, parameters, options in CASES.values()),
        *((loss, (p, FAR), {"forward": "float32"}) for loss, p, _ in CASES.values()),
        # `autocast` subtracts in float32.
        (normalized, (WEIGHTS, FAR), {"autocast": True}),
    ]
    for loss, arguments, options in cases:
        if loss is with_a_bias and "forward" not in options:
            arguments = (WEIGHTS, 0 * BIASED[1]), arguments[1]
        with mpx.half_precision(half):
            assert report_of(loss, arguments, **options).cancelling() == ()


def test_a_loop_passes_on_what_it_rounds():
    def loss(weights, x):
        u = jax.lax.scan(lambda u, _: (jnp.sin(u), None), 0 * x + 1, length=3)[0]
        total = jax.lax.scan(lambda s, a: (s, s + 300 * a - 300 * u), u, 1 + x[None] / 300)[1]
        return mean_square(network(weights, total[0] + 300 * u - 300))

    with mpx.half_precision(jnp.bfloat16):
        assert report_of(loss, (WEIGHTS, NEAR)).cancelling()


def test_a_float32_function_is_told_what_would_cancel_in_half():
    report = mpx.range_report(normalized)(WEIGHTS, FAR)
    assert report.cancelling("float16")
    assert report.cancelling("bfloat16")
    assert mpx.range_report(normalized)(WEIGHTS, NEAR).cancelling("bfloat16") == ()
    with pytest.raises(ValueError, match="RangeReport"):
        report.cancelling("float32")


def test_explain_nonfinite_names_the_line():
    text = mpx.explain_nonfinite(mpx.filter_grad(normalized, mpx.NoOpLossScaling()))(WEIGHTS, FAR)
    assert_tells(text, "Digits are lost at", "test_cancelling.py", "`sub`", 'forward="float32"')


def test_zero_differences_are_exact():
    """Straight-through estimators subtract equal numbers."""

    def loss(weights, x):
        y = network(weights, x)
        return mean_square(y + (jax.lax.stop_gradient(y) - y))

    with mpx.half_precision(jnp.bfloat16):
        report = report_of(loss, (WEIGHTS, NEAR))
    assert report.cancelling() == ()

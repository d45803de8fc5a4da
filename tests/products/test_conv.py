"""Compares the mixed convolution with JAX's own convolution in float64."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import HALVES, TOLERANCES, assert_close, in_float64, normal, products_are_half
from jax import lax

import mpx_pde as mpx


# The arguments are lhs, rhs and the window. The cases have strides, padding of either kind,
# dilations, groups of channels and of the batch, other layouts, and one to three spatial axes.
def _case(x, y, strides, padding="SAME", **window):
    return x, y, {"window_strides": strides, "padding": padding, **window}


CASES = {
    "1d": _case((2, 3, 9), (4, 3, 3), (1,)),
    "2d": _case((2, 3, 8, 7), (4, 3, 3, 2), (2, 1), "VALID"),
    "3d": _case((1, 2, 4, 5, 3), (3, 2, 2, 2, 2), (1, 2, 1), [(1, 0), (0, 2), (0, 0)]),
    "dilated": _case(
        *((2, 3, 6, 6), (4, 3, 2, 3), (1, 1), [(1, 1), (2, 2)]),
        lhs_dilation=(2, 1),
        rhs_dilation=(1, 2),
    ),
    "grouped": _case((2, 4, 6, 6), (6, 2, 3, 3), (1, 1), feature_group_count=2),
    "batch groups": _case((4, 3, 6, 6), (6, 3, 3, 3), (1, 1), batch_group_count=2),
    "channels last": _case(
        (2, 8, 7, 3), (3, 3, 3, 4), (1, 1), dimension_numbers=("NHWC", "HWIO", "NHWC")
    ),
}
each_case = pytest.mark.parametrize("case", list(CASES)[2:])


def _oracle(window, x, y, seed=None):
    """Returns the convolution in float64, or its gradients for the cotangent `seed`."""
    with jax.enable_x64(True):
        conv = lambda x, y: lax.conv_general_dilated(x, y, **window)
        if seed is None:
            return np.asarray(conv(*in_float64((x, y))))
        return jax.vjp(conv, *in_float64((x, y)))[1](in_float64(seed))


@pytest.mark.slow
@each_case
def test_values_and_gradients(case):
    dtype = HALVES[len(case) % 2]
    x_shape, y_shape, window = CASES[case]
    # The activation is half, and the weight is a float32 master.
    x, y = normal(0, x_shape, dtype=dtype), normal(1, y_shape)
    want = _oracle(window, x, y)
    seed = normal(2, want.shape, dtype=dtype)

    @jax.jit
    def run(x, y, seed):
        conv = ft.partial(mpx.mixed_conv_general_dilated, dtype=dtype, **window)
        out, pullback = jax.vjp(conv, x, y)
        return out, pullback(seed)

    out, got = run(x, y, seed)
    assert out.dtype == dtype
    assert [g.dtype for g in got] == [dtype, "float32"]
    assert_close((out, got), (want, _oracle(window, x, y, seed)), TOLERANCES[dtype])


def test_dtype_of_the_result():
    x_shape, y_shape, window = CASES["2d"]
    x, y = normal(0, x_shape), normal(1, y_shape)
    conv = ft.partial(mpx.mixed_conv_general_dilated, x, y, **window)
    assert conv(dtype="float16").dtype == jnp.float16
    assert conv(dtype="float16", out_dtype="float32").dtype == jnp.float32
    assert_close(conv(dtype="float32"), _oracle(window, x, y), TOLERANCES["float32"])


@each_case
def test_every_convolution_is_half(case):
    x_shape, y_shape, window = CASES[case]
    x, y = normal(0, x_shape), normal(1, y_shape)

    def loss(x, y):
        out = mpx.mixed_conv_general_dilated(x, y, dtype="bfloat16", out_dtype="float32", **window)
        return jnp.sum(out**2)

    def second(x, y):
        gradient = jax.grad(loss, argnums=(0, 1))
        return jax.jvp(gradient, (x, y), (x, y))

    text = jax.jit(second).trace(x, y).lower(lowering_platforms=("cuda",)).as_text()
    assert "HIGHEST" not in text
    in_full = ["xf32>" in line.split("->")[-1] for line in products_are_half(text, "bfloat16")]
    # The float32 result and its two tangents. cuDNN has no such cotangents.
    assert in_full.count(True) <= 3
    assert in_full.count(False) >= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "axes"),
    [
        ("1d", (-1, 1)),
        ("dilated", (None, 0)),
        ("grouped", (0, 0)),
        ("batch groups", (-1, None)),
        ("channels last", (0, 0)),
    ],
    ids=str,
)
def test_vmap(case, axes):
    x_shape, y_shape, window = CASES[case]

    def batched(shape, axis):
        return shape if axis is None else tuple(np.insert(shape, axis % (len(shape) + 1), 3))

    x, y = normal(0, batched(x_shape, axes[0])), normal(1, batched(y_shape, axes[1]))
    conv = ft.partial(mpx.mixed_conv_general_dilated, dtype="float16", **window)
    got = jax.jit(jax.vmap(conv, axes))(x, y)
    for i in range(3):
        part = lambda a, axis, i=i: a if axis is None else jnp.take(a, i, axis)
        xi, yi = map(part, (x, y), axes)
        assert_close(got[i], _oracle(window, xi, yi), TOLERANCES["float16"])

"""Tests products without a given dtype, and products of halves on every backend."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    HALVES,
    TOLERANCES,
    assert_half,
    assert_tells,
    normal,
    relative,
    scalar,
    tree_allclose,
    tree_equal_bits,
)
from jax import lax
from jax.experimental import jet
from jax.experimental.ode import odeint

import mpx_pde as mpx


# --- On the present backend -----------------------------------------------------------------------


@pytest.mark.parametrize("half", HALVES)
def test_products_on_this_backend_are_those_of_the_rounded_operands(half):
    """Halves multiply exactly in float32, so only the order of sums may differ."""
    x, y = normal(0, (5, 7, 33)), normal(1, (33, 9))
    rounded = [np.asarray(z.astype(half)).astype(np.float64) for z in (x, y)]
    exact = np.einsum("abk,kc->abc", *rounded)
    got = mpx.mixed_matmul(x, y, dtype=half, out_dtype="float32")
    assert np.abs(got - exact).max() <= TOLERANCES["float32"] * np.abs(exact).max()
    # The result is rounded to half once, at the end. Except for ties, that rounds the exact result.
    ulp = float(jnp.finfo(half).eps)
    got = np.asarray(mpx.mixed_matmul(x, y, dtype=half), np.float64)
    assert np.all(np.abs(got - exact) <= 0.51 * ulp * np.abs(exact) + 1e-6)


# --- Without a dtype ------------------------------------------------------------------------------


def test_the_narrowest_of_the_operands():
    x, w = normal(0, (4, 8)), normal(1, (8, 8))
    for half in HALVES:
        got = mpx.mixed_matmul(x.astype(half), w)
        assert tree_equal_bits(got, mpx.mixed_matmul(x.astype(half), w, dtype=half))
        got = mpx.mixed_einsum("ij,jk", x.astype(half), w, out_dtype="float32")
        assert got.dtype == jnp.float32
    assert mpx.mixed_matmul(x, w).dtype == jnp.float32


def _mixed(**options):
    conv = ft.partial(mpx.mixed_conv_general_dilated, window_strides=(1,), padding="SAME")

    def fun(w, x):
        y = jnp.tanh(mpx.mixed_matmul(x, w, **options))
        y = jnp.tanh(mpx.mixed_einsum("bi,ij->bj", y, w, **options))
        return conv(y[:, None], w[:2, None, :3], **options)

    return fun


@pytest.mark.slow
def test_autocast_supplies_it():
    half, w, x = "float16", normal(0, (8, 8), 0.4), normal(1, (4, 8))
    fun = mpx.autocast(_mixed(), half)
    run = lambda f: jax.jit(lambda w, x: (f(w, x), jax.grad(scalar(f))(w, x)))(w, x)
    assert tree_allclose(run(fun), run(_mixed()), computed_in=half)
    assert_half(jax.grad(scalar(fun)), w, x, half=half)
    assert_half(mpx.autocast(jax.grad(scalar(_mixed())), half), w, x, half=half)
    products = [o for o in fun.report(w, x).operations if o.multiplied]
    assert [o.multiplied for o in products] == [half] * 3
    assert f"{half}: a mixed product without a dtype" in str(fun.report(w, x))


def test_autocast_honors_one_that_was_given():
    w, x = normal(0, (8, 8), 0.4), normal(1, (4, 8))
    for dtype in ("float32", "bfloat16"):
        fun = mpx.autocast(_mixed(dtype=dtype), "float16")
        products = [o for o in fun.report(w, x).operations if o.multiplied]
        assert [o.multiplied for o in products] == [dtype] * 3
        assert mpx.precision_report(fun)(w, x).count(dtype) == 3
    out = mpx.autocast(lambda w, x: mpx.mixed_matmul(x, w, out_dtype="float32"), "float16")
    [row] = mpx.precision_report(out)(w, x).rows
    assert (row.dtype, row.out_dtype) == ("float16", "float32")


def test_overrides_reach_mixed_products():
    w, x = normal(0, (8, 8), 0.4), normal(1, (4, 8))
    full = mpx.autocast(_mixed(), "float16", full="mixed_*")
    assert mpx.precision_report(full)(w, x).by_dtype().keys() == {"float32"}
    assert tree_allclose(jax.jit(full)(w, x), jax.jit(_mixed())(w, x))
    assert not full.report(w, x).unused
    half = mpx.autocast(_mixed(dtype="float32"), "float16", half="mixed_*")
    assert mpx.precision_report(half)(w, x).by_dtype().keys() == {"float16"}
    split = mpx.autocast(_mixed(), "bfloat16_x3")
    assert mpx.precision_report(split)(w, x).count("BF16_BF16_F32_X3") == 2
    assert {o.multiplied for o in split.report(w, x).operations} >= {"BF16_BF16_F32_X3", "float32"}


# --- Arguments as users pass them -----------------------------------------------------------------


def test_pythons_float_is_the_default_of_jax():
    x = normal(0, (4, 4))
    assert mpx.mixed_matmul(x, x, dtype="float16", out_dtype=float).dtype == jnp.float32
    assert mpx.mixed_matmul(x, x, dtype="float16", out_dtype="float64").dtype == jnp.float32
    assert mpx.cast_tree(x.astype("float16"), float).dtype == jnp.float32
    assert mpx.force_full_precision(jnp.sin, float)(x).dtype == jnp.float32
    with jax.enable_x64(True):
        out = mpx.mixed_matmul(x, x, dtype="float16", out_dtype=float)
        assert out.dtype == mpx.cast_tree(x, float).dtype == jnp.float64


# --- Taylor mode ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_jet_against_nested_derivatives():
    w, kernel = normal(0, (4, 4), 0.5), normal(1, (1, 1, 3))
    x, v = normal(2, (4,)), normal(3, (4,))
    options = {"dtype": "float16", "out_dtype": "float32"}

    def fun(x):
        y = jnp.tanh(mpx.mixed_matmul(x, w, **options))
        y = mpx.mixed_conv_general_dilated(y[None, None], kernel, (1,), "SAME", **options)
        return mpx.mixed_matmul(y[0, 0], y[0, 0], **options)

    zero = jnp.zeros_like(x)
    _, got = jax.jit(lambda x: jet.jet(fun, (x,), ((v, zero, zero),)))(x)
    want, along = [], fun
    for _ in range(3):
        along = lambda x, f=along: jax.jvp(f, (x,), (v,))[1]
        want.append(along(x))
    # The products are the same, in another order and with operands rounded at other places.
    assert tree_allclose(jnp.stack(got), jnp.stack(want), computed_in="float16")


# --- Operations that have no half-precision form --------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operation", "half"),
    [
        (lambda x: jnp.abs(jnp.fft.rfft(x)), "bfloat16"),
        (lambda x: lax.complex(x, x).real, "float16"),
        (lambda x: jnp.interp(x, jnp.arange(3.0).astype(x.dtype), x[:3]), "bfloat16"),
    ],
)
def test_an_error_that_a_cast_led_to_names_the_mend(operation, half):
    loss = lambda w, x: jnp.sum(operation(w * x).astype(jnp.float32))
    options, x = {"policy": f"params=float32,compute={half},output=float32"}, jnp.ones(8)
    with pytest.raises((TypeError, ValueError)) as caught:
        mpx.filter_grad(loss, mpx.DynamicLossScaling(), **options)(x, x)
    [note] = [n for n in caught.value.__notes__ if "mpx_pde" in n]
    for told in (
        f"cast the arguments of this function to {half}",
        "FullPrecision",
        "autocast=True",
    ):
        assert told in note
    # The suggestion works.
    mpx.filter_grad(loss, mpx.DynamicLossScaling(), **options, autocast=True)(x, x)


KEY = jax.random.key(0)


def recurrent(cell, x):
    step = lambda h, x: (cell(x, h), None)
    return lax.scan(step, jnp.zeros(3, cell.weight_ih.dtype), x)[0]


# Layers after one with a float32 result. JAX does not promote it with their half weights.
BEHIND = {
    "conv": eqx.nn.Conv1d(4, 3, 3, key=KEY),
    "recurrent": eqx.Partial(recurrent, eqx.nn.GRUCell(8, 3, key=KEY)),
    "branch": eqx.Partial(lambda w, x: lax.cond(True, lambda: w, lambda: x), jnp.ones((4, 8))),
    "strict": eqx.Partial(jnp.add, jnp.ones((4, 8))),
}


class _Two(eqx.Module):
    first: eqx.Module
    second: eqx.Module

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)).reshape(4, 8))


@pytest.mark.parametrize(
    "call", [pytest.param("filter_grad", marks=pytest.mark.slow), "cast_function"]
)
@pytest.mark.parametrize("behind", BEHIND)
def test_float32_beside_half_names_the_mend(behind, call):
    half, linear, x = "float16", eqx.nn.Linear(4, 32, key=KEY), jnp.ones(4)

    def run(first):
        model = _Two(first, BEHIND[behind])
        with mpx.half_precision(half), jax.numpy_dtype_promotion(promotion):
            if call == "cast_function":
                # The points are cast too, so a layer must widen them again.
                return mpx.cast_function(model, half)(x)
            loss = lambda model, x: jnp.mean(model(x).astype(jnp.float32) ** 2)
            options = {"keep_full": (False, True)}
            return mpx.filter_grad(loss, mpx.DynamicLossScaling(), **options)(model, x)

    promotion = "strict" if behind == "strict" else "standard"
    wrong = [mpx.FullPrecision(linear, out_dtype="float32")]
    if call == "filter_grad":
        wrong.append(mpx.FullPrecision(linear))
        if behind != "strict":
            wrong.append(linear)
    for first in wrong:
        with pytest.raises((TypeError, ValueError), match=half) as caught:
            run(first)
        [note] = [n for n in caught.value.__notes__ if "mpx_pde" in n]
        assert note.startswith(f"`{call}` has cast the arguments of this function to {half}")
        assert_tells(note, '`mpx_pde.FullPrecision(layer, out_dtype="half")`', "jnp.arange(9.0)")
    # The suggestion works.
    run(mpx.FullPrecision(linear, out_dtype="half"))


def test_a_function_that_refuses_halves_names_the_mend():
    """The message of the exponential of a matrix has the words in another order than others."""
    loss = lambda w: jnp.sum(jax.scipy.linalg.expm(w))
    with pytest.raises(TypeError, match="float16") as caught:
        mpx.filter_grad(loss, mpx.NoOpLossScaling())(jnp.eye(2))
    [note] = [n for n in caught.value.__notes__ if "filter_grad" in n]
    assert "JAX has no such operation" in note


ONES = jnp.ones(3)


def _custom_rule(w):
    rule = jax.custom_vjp(jnp.sin)
    rule.defvjp(lambda w: (jnp.sin(w), w), lambda w, g: (lax.mul(g, ONES),))
    return rule(w)


# Functions whose derivatives meet two dtypes, and words of the note.
OF_DERIVATIVES = {
    "vjp": (lambda w: jax.vjp(jnp.sin, w)[1](ONES)[0], "ones_like"),
    "a number": (lambda w: jax.vjp(jnp.sin, w[0])[1](1.0)[0], "numbers"),
    "linear_transpose": (lambda w: jax.linear_transpose(lambda v: w * v, w)(ONES)[0], "ones_like"),
    "jvp": (lambda w: jax.jvp(jnp.sin, (w,), (ONES,))[1], "ones_like"),
    "linearize": (lambda w: jax.linearize(jnp.sin, w)[1](ONES), "ones_like"),
    "a rule": (_custom_rule, "backward pass meets two dtypes"),
    "odeint": (
        lambda w: odeint(lambda y, t, w: -w * y, w, jnp.linspace(0.0, 1.0, 3), w),
        "`odeint`",
    ),
}


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", OF_DERIVATIVES)
def test_errors_of_derivatives_inside_of_a_loss_name_the_mend(name):
    fun, words = OF_DERIVATIVES[name]
    loss = lambda w: jnp.sum(fun(w).astype(jnp.float32))
    run = lambda **options: mpx.filter_grad(loss, mpx.DynamicLossScaling(1.0), **options)(ONES / 2)
    with pytest.raises((TypeError, ValueError)) as caught:
        run()
    [note] = [n for n in caught.value.__notes__ if "mpx_pde" in n or "filter_grad" in n]
    for told in ("cast the arguments", words, "forward='float32'", "autocast=True"):
        assert told in note
    assert "no such operation" not in note
    # The suggestions work.
    want = jax.grad(loss)(ONES / 2)
    for options in ({"forward": "float32"}, {"autocast": True}):
        assert relative(run(**options)[2], want) < 1e-3


def test_other_errors_have_no_note():
    def loss(w, x):
        raise ValueError("my own, of float16 too")

    with pytest.raises(ValueError, match=r"^my own") as caught:
        mpx.filter_grad(loss, mpx.DynamicLossScaling())(jnp.ones(3), jnp.ones(3))
    assert not [n for n in getattr(caught.value, "__notes__", []) if "mpx_pde" in n]

"""Tests derivatives by name against float64, in and out of the range of float16."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx_pde as mpx


def test_primitives_scale_and_unscale():
    fun = lambda x: jnp.sin(300 * x)
    x = jnp.asarray([0.1, 0.2], jnp.float16)
    out, dot = mpx.scaled_jvp(fun, (x,), (jnp.ones_like(x),), 2.0**-6)
    assert out.dtype == jnp.float16
    assert dot.dtype == jnp.float32
    _, still = mpx.scaled_jvp(fun, (x,), (jnp.ones_like(x),), 2.0**-6, unscale=False)
    assert still.dtype == jnp.float16
    assert np.array_equal(still.astype(jnp.float32) * 64, dot)
    out, vjp = mpx.scaled_vjp(fun, x, scale=jnp.float32(2.0**-6))
    (grad,) = vjp(jnp.ones_like(out))
    assert grad.dtype == jnp.float32
    # A few roundings of float16 in another order of operations.
    assert np.allclose(grad, dot, rtol=2.0**-8)
    (still,) = mpx.scaled_vjp(fun, x, scale=2.0**-6, unscale=False)[1](jnp.ones_like(out))
    assert still.dtype == jnp.float16


def wave(p):
    """Solves u_xx + u_yy = -2 (0.8)^2 u, and has an unrelated time derivative."""
    return jnp.exp(-p[0]) * jnp.sin(0.8 * p[1]) * jnp.cos(0.8 * p[2])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["over", "coords"])
def test_a_laplacian_takes_no_scale_from_another_coordinate(how):
    point = jnp.array([0.1, 0.7, 0.3], jnp.float16)
    fun, coords, over = wave, "txy", "xy"
    if how == "coords":
        time, point, coords, over = point[0], point[1:], "xy", None
        fun = lambda p: wave(jnp.stack([time, *p]))

    @jax.jit
    def value(scaling, big):
        def lap(scaling):
            options = {"coords": coords, "outputs": "u", "over": over, "scaling": scaling}
            return mpx.laplacian(lambda p: big * fun(p), ["u_x"], **options)(point)["lap_u"]

        value, grads = jax.value_and_grad(lap, allow_int=True)(scaling)
        return value, grads.counts

    want = -2 * 0.8**2 * np.exp(-0.1) * np.sin(0.56) * np.cos(0.24)
    start = mpx.DerivativeScaling.per_direction("txy", max_scale=2.0**8)
    for exponents in [(-14, 0, 0), (-14, 2, -3), (0, -1, 4)]:
        scaling = start.with_exponents(exponents)
        got, counts = value(scaling, jnp.float16(1))
        assert np.isclose(got, want, rtol=0.01)  # some ten roundings to 2^-11
        # An overflow is counted for its own coordinates, and shrinks their scales. A requested term
        # counts even if it is not used.
        seen = np.asarray(counts).sum(axis=1)
        counted = [n for n, c in zip(scaling.row_names, seen, strict=True) if c]
        assert {*counted} == {"_x", "_xx", "_yy"}
        _, counts = value(scaling, jnp.float16(jnp.inf))
        shrunk = scaling.adjust(counts).exponents - scaling.exponents
        np.testing.assert_array_equal(shrunk, [0, -1, -1])


def test_a_laplacian_over_all_coordinates_has_its_own_histogram():
    scaling = mpx.DerivativeScaling.per_direction("txy")
    lap = lambda s: mpx.laplacian(wave, coords="ytx", outputs="u", scaling=s)(jnp.ones(3))["lap_u"]
    seen = np.asarray(jax.grad(lap, allow_int=True)(scaling).counts).sum(axis=1)
    assert {n for n, c in zip(scaling.row_names, seen, strict=True) if c} == {"laplacian"}


def test_a_special_term_is_known_whatever_the_order_of_its_letters():
    scaling = mpx.DerivativeScaling.per_order(2, special=["u_yx"])
    given = {"coords": "xy", "outputs": "u"}
    mixed = lambda s: mpx.partials(lambda p: p[0] * p[1], ["u_xy"], scaling=s, **given)(jnp.ones(2))
    seen = jax.grad(lambda s: mixed(s)["u_xy"], allow_int=True)(scaling).counts.sum(axis=1)
    assert {n for n, c in zip(scaling.row_names, seen, strict=True) if c} == {"u_yx"}


def test_an_output_that_does_not_depend_on_the_point_is_float32():
    """In float16 its zeros times a scale of 2^16 are NaN. A scale is clipped to its bounds."""
    scaling = mpx.DerivativeScaling.per_direction("x", order=2).with_exponents(np.int64(2**40))
    given = {"coords": "x", "outputs": "u", "scaling": scaling}
    d = mpx.partials(lambda p: jnp.float16(300.0), ["u", "u_xx"], **given)(jnp.ones(1))
    assert all((d["u"] ** 2 == 90_000.0, d["u_xx"] == 0, scaling.exponents == 15))


def test_names_of_several_letters():
    # Options after the point are not coordinates.
    fun = lambda p, gain=1.0: gain * jnp.stack([p[0] ** 2 * p[1], p[1] ** 3])
    terms = ["temp_x1x1", "temp_x1x2", "nu_x2x2", "nu"]
    d = mpx.partials(fun, terms, coords=["x1", "x2"], outputs=["temp", "nu"])(jnp.array([2.0, 3.0]))
    assert [float(v) for v in d.values()] == [6.0, 4.0, 18.0, 27.0]


def test_one_term_may_be_a_name_alone():
    one = mpx.partials(jnp.prod, "u_xt", coords="xt", outputs="u")(jnp.array([2.0, 3.0]))
    assert one == {"u_xt": 1.0}


@pytest.mark.parametrize("name", ["relu", "leaky_relu", "hard_tanh"])
def test_second_derivatives_of_a_piecewise_linear_network_are_told(name):
    options = {"coords": "xy", "outputs": "u"}
    network = lambda activation: eqx.nn.MLP(
        2, "scalar", 8, 2, activation=activation, key=jax.random.key(0)
    )
    model = network(getattr(jax.nn, name))
    for fun in (model, lambda p: model(p)):
        with pytest.warns(UserWarning, match=f"u_xx of this network is zero.*`{name}` is piece"):
            d = mpx.partials(fun, ["u", "u_xx"], **options)(jnp.ones(2))
        assert d["u_xx"] == 0
    # Warnings are errors.
    mpx.partials(model, ["u_x"], **options)(jnp.ones(2))
    assert mpx.partials(network(jnp.tanh), ["u_xx"], **options)(jnp.ones(2))["u_xx"] != 0

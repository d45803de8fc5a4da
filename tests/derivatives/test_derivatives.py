"""Derivatives by name against float64, in and out of the range of float16."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx_pde as mpx


def points():
    return jax.random.uniform(jax.random.key(7), (16, 2))


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
    # In another order of operations: a few roundings of float16.
    assert np.allclose(grad, dot, rtol=2.0**-8)
    (still,) = mpx.scaled_vjp(fun, x, scale=2.0**-6, unscale=False)[1](jnp.ones_like(out))
    assert still.dtype == jnp.float16
    with pytest.raises(ValueError, match="power of two"):
        mpx.scaled_jvp(fun, (x,), (x,), 3.0)
    with pytest.raises(TypeError, match="shape"):
        mpx.scaled_vjp(fun, x, scale=jnp.ones(2))


def wave(p):
    """u_xx + u_yy = -2 (0.8)^2 u, and a time derivative that has nothing to do with it."""
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
        # What overflows is counted with its own coordinates, and shrinks theirs. A term that was
        # asked for counts, be it used or not.
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


def test_names_of_coordinates_that_run_into_each_other():
    """`_xx` is the second derivative in `x` as well as the first in `xx`."""
    scaling = mpx.DerivativeScaling.per_direction(["x", "xx"], order=2).with_exponents([-3, -5])
    given = {"coords": ["x", "xx"], "outputs": "u", "scaling": scaling}
    terms = mpx.partials(lambda p: p[0] * p[1], ["u_xx"], **given)
    assert terms(jnp.array([2.0, 3.0]))["u_xx"] == 2.0
    lap = mpx.laplacian(lambda p: p[0] ** 2 * p[1], over=["x"], **given)
    assert lap(jnp.array([2.0, 3.0]))["lap_u"] == 6.0


def raises(error, words, call):
    with pytest.raises(error, match=re.compile(words, re.DOTALL)):
        call()


def test_errors():
    network = eqx.nn.MLP(2, 2, 8, 1, key=jax.random.key(0))
    scaling = mpx.DerivativeScaling.per_direction("xt", order=2)

    def get(terms, coords="xt", outputs="uv", **kwargs):
        return mpx.partials(network, terms, coords=coords, outputs=outputs, **kwargs)

    raises(ValueError, "'y'.*coordinates are x, t", lambda: get(["u_y"]))
    raises(ValueError, "'w'.*outputs are u, v", lambda: get(["w_x"]))
    raises(ValueError, "'q'.*outputs are u, v", lambda: get(["q"]))
    raises(ValueError, "'u_x' twice", lambda: get(["u_x", "u_x"]))
    raises(TypeError, "list of names", lambda: get("u_x"))
    raises(ValueError, "'x' twice", lambda: get(["u_x"], coords="xx"))
    raises(ValueError, "order 3.*up to 2", lambda: get(["u_xxx"], scaling=scaling))
    build = mpx.DerivativeScaling
    raises(ValueError, "order 2.*up to 1", lambda: get(["u_xx"], scaling=build.per_order(1)))
    unknown = "no scaler for the term 'u_t'.*knows u_x"
    raises(ValueError, unknown, lambda: get(["u_t"], scaling=build.per_term(["u_x"])))
    raises(ValueError, "coordinates x.*'t'", lambda: get(["u_t"], scaling=build.per_direction("x")))
    both = mpx.Scaling(None, scaling)
    raises(TypeError, "DerivativeScaling.*Scaling", lambda: get(["u"], scaling=both))
    one = get(["u"], outputs="u")
    raises(ValueError, "1 outputs, u,.*shape \\(2,\\)", lambda: one(points()[0]))
    raises(ValueError, "jax.vmap", lambda: get(["u"])(points()))
    raises(TypeError, "int32", lambda: get(["u"])(jnp.arange(2)))
    two = "2 coordinates x, t, but got 2 arguments.*stack"
    raises(TypeError, two, lambda: get(["u"])(1.0, 2.0))
    raises(TypeError, "coordinates x, t, but got .'x'.*stack", lambda: get(["u"])({"x": 1.0}))
    # A network that takes its coordinates one by one.
    one_by_one = lambda x, t: x * t
    mend = r"takes \(x, t\).*lambda point: fun\(point\[0\], point\[1\]\)"
    for make in (mpx.partials, lambda f, _, **given: mpx.laplacian(f, **given)):
        given = {"coords": "xt", "outputs": "u"}
        raises(TypeError, mend, lambda make=make, given=given: make(one_by_one, ["u"], **given))
        make(lambda point, gain=2.0: gain * one_by_one(*point), ["u"], **given)
    raises(ValueError, "'u_x' twice", lambda: build.per_term(["u_x", "u_x"]))
    raises(ValueError, "'u'", lambda: build.per_term(["u"]))
    raises(TypeError, "list of names", lambda: build.per_term("u_x"))
    raises(ValueError, "'x' twice", lambda: build.per_direction("xx"))
    raises(ValueError, "power of two", lambda: build.per_order(2, factor=3))
    raises(ValueError, "order", lambda: build.per_order(0))
    raises(TypeError, "unknown options speed", lambda: build.per_order(2, speed=1))
    raises(ValueError, "init_scale.*outside", lambda: build.per_order(2, init_scale=2.0**16))
    raises(ValueError, "mapping.*x, t", lambda: build.per_direction("xt", max_scale={"x": 1}))
    raises(ValueError, "positive", lambda: build.per_direction("xt", max_scale=-1))
    raises(ValueError, "'cap'", lambda: build.per_order(2, special={"nu_x": {"cap": 1}}))
    raises(TypeError, "Scaling.*derivatives", lambda: mpx.Scaling())
    none = "`derivatives`.*takes none.*plain loss scaling"
    raises(TypeError, none, lambda: mpx.filter_grad(lambda m, x: jnp.sum(x), both))
    laplacian = lambda **given: mpx.laplacian(network, coords="xt", outputs="uv", **given)
    raises(ValueError, "over.*twice|twice.*over", lambda: laplacian(over="xx"))
    raises(ValueError, "cannot sum over 'y'", lambda: laplacian(over="xy"))
    per_term = build.per_term(["u_x"])
    raises(ValueError, "Laplacian.*'laplacian'", lambda: laplacian(scaling=per_term))


def test_names_of_several_letters():
    fun = lambda p: jnp.stack([p[0] ** 2 * p[1], p[1] ** 3])
    terms = ["temp_x1x1", "temp_x1x2", "nu_x2x2", "nu"]
    d = mpx.partials(fun, terms, coords=["x1", "x2"], outputs=["temp", "nu"])(jnp.array([2.0, 3.0]))
    assert [float(v) for v in d.values()] == [6.0, 4.0, 18.0, 27.0]

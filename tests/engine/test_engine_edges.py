"""Tests the derivative engine at the edges of its rules: ends of arrays, zeros, functions with a
derivative of their own, and loops in half precision."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import HALVES, TOLERANCES, in_float64, normal, policy, program_for_gpu, relative
from jax import lax
from program_functions import magnitude, own, swish

import mpx_pde as mpx
from mpx_pde.engine._derivatives import Derivatives
from mpx_pde.engine.taylor import _together


POINT = jnp.array([0.3, 0.7])
COORDS = {"coords": "xy", "outputs": "u"}


def test_powers_and_roots_at_zero():
    at = lambda fun, *names: mpx.partials(fun, list(names), coords="x", outputs="u")(jnp.zeros(1))
    square = at(lambda p: lax.pow(p[0], 2.0), "u_xx", "u_xxx", "u_xxxx")
    # A vanishing factor multiplies a power of zero that is infinite.
    assert {k: float(x) for k, x in square.items()} == {"u_xx": 2.0, "u_xxx": 0.0, "u_xxxx": 0.0}
    assert at(lambda p: lax.pow(p[0], 1.0), "u_xx")["u_xx"] == 0
    for n, second in ((jnp.arange(4), 2), (jnp.arange(4.0), 2), (jnp.array([0.0, 1, 3]), 0)):
        found = at(lambda p, n=n: jnp.sum(p[0] ** n), "u", "u_x", "u_xx", "u_xxx")
        assert [float(x) for x in found.values()] == [1, 1, second, 6]
    for root in (jnp.sqrt, jnp.cbrt):
        slopes = at(lambda p, root=root: root(p[0]), "u_x", "u_xx")
        assert (slopes["u_x"], slopes["u_xx"]) == (jnp.inf, -jnp.inf)
        assert at(lambda p, root=root: lax.clamp(0.1, root(p[0]), 1.0), "u_x")["u_x"] == 0


# Loops and branches of a network in half precision.

MODEL = {
    "first": jax.random.normal(jax.random.key(2), (2, 8)),
    "one": jax.random.normal(jax.random.key(1), (8, 8)) / 3,
    "stack": jax.random.normal(jax.random.key(3), (3, 8, 8)) / 3,
}


def _scan(m, h):
    half = lambda w: w * w.dtype.type(0.5)
    step = lambda h, w: (jnp.tanh(h @ w) + jnp.tanh(h @ half(m["one"])), None)
    return lax.scan(step, h, m["stack"])[0]


def _while(m, h):
    two, more = (np.asarray(x, h.dtype) for x in (2.0, 1.5))
    step = lambda c: (c[0] * more, jnp.tanh(c[1] @ m["one"]))
    return lax.while_loop(lambda c: c[0] < two, step, (h[0] * h[0] + more / two, h))[1]


def _cond(m, h):
    half = np.asarray(0.5, h.dtype)
    positive = jnp.sum(m["one"]) > 0
    return lax.cond(positive, lambda h: h @ m["one"], lambda h: jnp.tanh(h @ (m["one"] * half)), h)


@pytest.mark.parametrize(
    ("loop", "half"), [(_scan, "float16"), (_while, "bfloat16"), (_cond, "float16")]
)
def test_loops_of_a_network_in_half_multiply_in_half(loop, half):
    """The operands that its weights are multiplied and compared with are halves as well."""
    with jax.numpy_dtype_promotion("standard"):
        run = lambda m: lambda p: jnp.sum(loop(m, jnp.tanh(p.astype(m["one"].dtype) @ m["first"])))
        cast = mpx.cast_tree(MODEL, half)
        terms = lambda model: mpx.partials(run(model), ["u", "u_x", "u_xy"], **COORDS)
        got, want = (jax.jit(terms(m))(POINT) for m in (cast, mpx.cast_tree(cast, "float32")))
        products = terms(cast).report(POINT).products
    # The first product meets the point in float32.
    assert {e.precision.split()[0] for e in products[1:]} == {half}
    # A few roundings of a layer's results.
    assert relative(got, want) < {"float16": 2.0**-8, "bfloat16": 2.0**-5}[half]


# Functions of JAX and of the user, of one entry and of all, and called inside of others.
OF_THEIR_OWN = {
    "relu6": lambda h: h * jax.nn.relu6(3 * h + 1),
    "softmax": lambda h: h * jax.nn.softmax(h),
    "in a jit": jax.jit(lambda h: swish(h + 1) - jax.nn.relu(h)),
    "complex": lambda h: magnitude(h.astype("c16" if h.dtype == jnp.float64 else "c8") + 1j),
    # A scatter-add also holds a program, for the sum of two numbers.
    "scatter": lambda h: h.at[jnp.array([0, 3])].add(h[1:3] * h[2:4]),
}


def of_their_own(name, point, first, weights):
    hidden = jnp.tanh(jnp.dot(first.astype(point.dtype), point)).astype(weights.dtype)
    return jnp.sum(OF_THEIR_OWN[name](weights @ hidden) * weights[0])


@pytest.mark.parametrize(
    ("name", "half", "size"),
    list(zip(OF_THEIR_OWN, 3 * HALVES, (*(3e4,) * 3, 1.0, 1.0), strict=False)),
)
def test_functions_with_a_derivative_of_their_own_in_half(name, half, size):
    """They are computed in float32, like all operations between products. In half, streams of a
    network of long coordinates would vanish."""
    first, weights = (0.7 * jax.random.normal(jax.random.key(i), (8, 2 + 6 * i)) for i in (0, 1))
    first, weights = first / size, weights.astype(half)
    point, terms = size * jnp.array([0.3, -0.7]), ["u", "u_x", "u_xy", "u_xx"]
    scaling = mpx.DerivativeScaling.per_direction("xy").with_exponents(14 if size > 1 else 0)
    fun = lambda p: of_their_own(name, p, first, weights)
    with mpx.half_precision(half):
        got = jax.jit(mpx.partials(fun, terms, coords="xy", outputs="u", scaling=scaling))(point)
    with jax.enable_x64(True):
        *wide, p = in_float64((first, weights.astype(jnp.float32), point))
        fun = lambda p: of_their_own(name, p, *wide)
        value, slopes, bends = jax.jit(lambda p: (fun(p), jax.grad(fun)(p), jax.hessian(fun)(p)))(p)
        wanted = map(float, [value, slopes[0], bends[0, 1], bends[0, 0]])
    for term, want in zip(terms, wanted, strict=True):
        # Second derivatives cancel to about an eighth of their summands.
        error = 8 * TOLERANCES[half] * max(abs(want), 0.1 * size ** -len(term[2:]))
        assert abs(float(got[term]) - want) < error
    assert all(x.dtype == jnp.float32 for x in got.values())


solved = lambda w: jnp.linalg.solve(w.T @ w + jnp.eye(8, dtype=w.dtype), w)


def sine(x):
    total = lambda p: jnp.sum(jnp.sin(p))
    return mpx.partials(total, ["u"], coords="txyzabcd", outputs="u")(x)["u"]


IN_FLOAT64 = {
    "loop of parameters": lambda w, x: lax.fori_loop(0, 2, lambda _, c: jnp.sin(c @ w), w),
    "branch of parameters": lambda w, x: lax.cond(w[0, 0] > 0, jnp.sin, jnp.cos, w),
    "solve": lambda w, x: solved(jnp.tanh(x @ w)),
    "solve of parameters": lambda w, x: solved(w),
    "numbers": lambda w, x: 0.1 * jax.nn.gelu(x @ w, approximate=False) + jnp.pi,
    "a cast to float32": lambda w, x: (x @ w).astype(jnp.float32),
    "gradients around derivatives": lambda w, x: jax.vmap(jax.grad(sine))(x) @ w,
}


@pytest.mark.usefixtures("standard_promotion")  # strict promotion forbids the cast to float32
@pytest.mark.parametrize("name", IN_FLOAT64)
def test_a_forward_pass_in_float64_rounds_nothing_to_float32(name):
    fun = IN_FLOAT64[name]
    loss = lambda w, x: jnp.mean((jnp.tanh(x @ fun(w, x)) - 0.5) ** 2)
    exact = loss
    if name == "a cast to float32":
        exact = lambda w, x: jnp.mean((jnp.tanh(x @ (x @ w)) - 0.5) ** 2)
    w, x = (normal(i, (8, 8), 0.5) for i in (0, 1))
    with jax.enable_x64(True):
        options = {"forward": "float64", "policy": policy("float32")}
        run = mpx.filter_value_and_grad(loss, mpx.NoOpLossScaling(), **options)
        value, _, finite, grads = eqx.filter_jit(run)(w, x)
        want, full = jax.jit(jax.value_and_grad(exact))(*in_float64((w, x)))
        np.testing.assert_allclose(value, want, rtol=2.0**-48)
        assert finite
        assert grads.dtype == jnp.float32
        assert relative(grads, full) < 2.0**-18  # float32's 2^-24, times the condition of a solve


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "result"), [("eigh", 1), ("svd", 0), ("qr", 0)])
def test_factors_are_those_of_the_forward_pass(factor, result):
    """Vectors come with any sign: at rounded operands with another one, maybe."""

    def loss(w, x):
        h = jnp.tanh(x @ w[0])
        vectors = getattr(jnp.linalg, factor)(h.T @ h / 4)[result]
        return jnp.mean((jnp.tanh(jnp.tanh(x @ vectors) @ vectors.T) @ w[1] - 1) ** 2)

    options = {"forward": "float32", "policy": policy("bfloat16")}
    run = eqx.filter_jit(mpx.filter_value_and_grad(loss, mpx.NoOpLossScaling(), **options))
    for seed in range(8):
        w, x = normal(2 * seed, (2, 6, 6)), normal(2 * seed + 1, (10, 6))
        with jax.enable_x64(True):
            want = jax.jit(jax.grad(loss))(*in_float64((w / 2, x)))
        *_, grads = run(w / 2, x)
        assert relative(grads, want) < 2.0**-3, seed  # the derivative is steep


def test_a_rule_of_two_arrays_that_fit_no_other_function():
    """Such a function is compared with `jnp.logaddexp`, which takes no such shapes."""

    @jax.custom_jvp
    def series(coefficients, x):
        return jnp.polyval(coefficients, x)

    @series.defjvp
    def _(primals, tangents):
        coefficients, x = primals
        slope = jnp.polyval(jnp.polyder(coefficients), x) * tangents[1]
        return series(*primals), slope + jnp.polyval(tangents[0], x)

    def u(p):
        return jnp.sum(series(jnp.arange(5.0) * p[0], jnp.linspace(0, 1, 8) * p[1]))

    p = jnp.array([0.7, 0.5])
    found = mpx.partials(u, ["u_x", "u_xx", "u_xy"], coords="xy", outputs="u")(p)
    hessian = jax.jacfwd(jax.jacfwd(u))(p)
    want = {"u_x": jax.jacfwd(u)(p)[0], "u_xx": hessian[0, 0], "u_xy": hessian[0, 1]}
    for name, x in want.items():
        np.testing.assert_allclose(found[name], x, rtol=1e-5, atol=1e-6)


def test_what_a_rule_of_the_users_keeps_is_an_array_of_jax():
    """JAX's `odeint` reads its times, which are constants, at a traced index."""
    from jax.experimental.ode import odeint

    times = jnp.array([0.0, 0.5])
    loss = lambda p, x: jnp.mean(odeint(lambda y, t: -y * y * p[0], x @ p[1], times)[1] ** 2)
    model, x = (jnp.float32(0.5), jnp.eye(3)), jnp.ones((4, 3))
    step = mpx.filter_value_and_grad(loss, mpx.NoOpLossScaling(), forward="float32")
    with pytest.warns(mpx.PrecisionWarning):  # hardly any product is the network's
        value, *_ = eqx.filter_jit(step)(model, x)
    # Steps in float32 add up their roundings.
    np.testing.assert_allclose(value, 0.8**2, rtol=1e-5)


@pytest.mark.slow
def test_functions_with_a_derivative_of_their_own_under_float64():
    """Checks that a float64 forward pass of a float32 program rounds nothing to float32."""
    first, weights = (0.7 * jax.random.normal(jax.random.key(i), (8, 2 + 6 * i)) for i in (0, 1))
    points = jax.random.uniform(jax.random.key(2), (4, 2))

    def loss(model, points):
        fun = lambda p: sum(of_their_own(name, p, *model) for name in OF_THEIR_OWN)
        d = jax.vmap(mpx.partials(fun, ["u", "u_xx"], coords="xy", outputs="u"))(points)
        return jnp.mean((d["u_xx"] - d["u"]) ** 2)

    with jax.enable_x64(True):
        run = mpx.filter_value_and_grad(loss, mpx.DynamicLossScaling(2.0**8), forward="float64")
        value, *_ = eqx.filter_jit(run)((first, weights), points)
        wide = mpx.cast_tree(((first, weights), points), "float64")
        np.testing.assert_allclose(value, jax.jit(loss)(*wide), rtol=2.0**-44)


WIDE = {
    "inside": lambda q: ((1e8 + jnp.sin(q[0].astype(jnp.float64))) - 1e8).astype(jnp.float32),
    "loop": lambda q: lax.fori_loop(
        0, 2, lambda _, h: (h.astype(jnp.float64) + 1e8 - 1e8).astype(jnp.float32), jnp.sin(q[0])
    ),
    "complex": lambda q: jnp.real(
        jnp.exp(1j * q[0].astype(jnp.float64)) * 1e8 - 1e8
    ).astype(jnp.float32),
}  # fmt: skip


@pytest.mark.parametrize(("name", "half"), [*((n, None) for n in WIDE), ("inside", "float16")])
def test_what_a_program_says_in_float64_is_computed_in_it(name, half):
    """The width of each value counts, not that of the result, also with half weights."""
    weight = jnp.ones((), half or "float32")
    net = lambda q: WIDE[name](q) * weight.astype(jnp.float32)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        q = jnp.array([0.3], jnp.float32)
        got = mpx.partials(net, ["u", "u_x", "u_xx"], coords="x", outputs="u")(q)
        assert {v.dtype.name for v in got.values()} == {"float32"}
        slope = lambda q: jax.jvp(net, (q,), (jnp.ones_like(q),))[1]
        bend = jax.jvp(slope, (q,), (jnp.ones_like(q),))[1]
        for key, value in {"u": net(q), "u_x": slope(q), "u_xx": bend}.items():
            # A few float32 roundings of values near one, after float64 roundings of 1e8.
            assert abs(got[key] - value) < 2.0**-21 * max(1, abs(value)), key


@pytest.mark.parametrize(
    "function",
    [jnp.abs, lambda x: jnp.hypot(x, 1.0), jax.nn.soft_sign, lambda x: jnp.maximum(x, 0.0) ** 3],
    ids=["abs", "hypot", "soft_sign", "maximum"],
)
def test_derivatives_where_a_function_has_a_kink_are_those_of_jax(function):
    """At 0, as on the boundary of a domain: what JAX takes for the slope of `abs` there counts in
    the second derivative of a smooth function of it."""
    terms, want = ["u", "u_x", "u_xx", "u_xxx"], function
    got = mpx.partials(lambda p: function(p[0]), terms, coords="x", outputs="u")(jnp.zeros(1))
    for term in terms:
        np.testing.assert_allclose(got[term], want(jnp.float32(0)), atol=1e-6)
        want = jax.jacfwd(want)


@pytest.mark.parametrize("number", [123.4, 1e4])
def test_equal_entries_have_no_variance(number):
    """Rounding may make the variance negative, and its root NaN."""
    fun = lambda p: jnp.std(jnp.full(7, 1.1 * number) * (1 + p[0]))
    got = mpx.partials(fun, ["u", "u_x"], coords="x", outputs="u")(jnp.full(1, 0.3))
    assert 0 <= got["u"] <= 1e-6 * number


def test_a_network_of_many_coordinates_is_traced_as_fast_as_one_of_few():
    """A slice for each of a thousand coordinates was compiled separately, which took minutes."""
    size = 1000
    model = mpx.nn.CoordinateMLP(size, "scalar", 8, 1, periodic={3: 1.0}, key=jax.random.key(0))
    lap = mpx.laplacian(model, coords=[f"x{i}" for i in range(size)], outputs="u")
    jaxpr = jax.make_jaxpr(lambda p: lap(p)["lap_u"])(jnp.zeros(size))
    assert len(jaxpr.eqns) < 150


def test_an_effect_behind_the_last_layer_sees_the_value():
    """The value is not requested, and is not carried on for the derivative."""
    seen = []

    def fun(p):
        z = jnp.array([[1.0, 2.0], [0.5, -1.0]]) @ jnp.tanh(3 * p)
        jax.debug.callback(lambda z: seen.append(np.asarray(z)), z)
        return jnp.sum(z)

    mpx.partials(fun, ["u_x"], coords="xy", outputs="u")(POINT)["u_x"].block_until_ready()
    jax.effects_barrier()
    t = np.tanh(3 * np.array([0.3, 0.7]))
    np.testing.assert_allclose(seen, [[t[0] + 2 * t[1], t[0] / 2 - t[1]]], rtol=1e-5)


WEIGHT = jnp.arange(1.0, 6.0)


def by_hand(a, b):
    s, t = _together.sum_together([a, b], (0,))
    s, t = _together.spread_together([s, t * s], (4, 5), (1,))
    weight, row, two = _together.broadcast_like([WEIGHT, a[0], jnp.float32(2)], s)
    return _together.joined([s * weight * row + t * two, b], 0)


def as_jax_has_it(a, b):
    s, t = (jnp.broadcast_to(x, (4, 5)) for x in (a.sum(0), b.sum(0) * a.sum(0)))
    return jnp.concatenate([s * WEIGHT[None] * a[0][None] + 2 * t, b])


@pytest.mark.parametrize("place", [_together._concatenated, _together._padded_sum])
def test_arrays_are_joined_on_every_platform(place):
    arrays = [jnp.asarray(np.random.default_rng(n).random((2, n, 3)), "float16") for n in (1, 4, 2)]
    got = place(*arrays, dimension=1)
    assert got.dtype == "float16"
    np.testing.assert_array_equal(got, np.concatenate(arrays, axis=1))


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(0, 0), (0, None), (None, 0), (2, 1)])
def test_sums_and_spreads_in_every_transformation(dims):
    arrays = [jnp.asarray(np.random.default_rng(i).random((3, 4, 5)), "float32") for i in (0, 1)]
    pairs = zip(arrays, dims, strict=True)
    args = [x[0] if d is None else jnp.moveaxis(x, 0, d) for x, d in pairs]

    def told(fun):
        total = lambda *z: jnp.sum(jnp.sin(jax.vmap(fun, in_axes=dims)(*z)))
        gradient = jax.grad(total, (0, 1))
        return total(*args), gradient(*args), jax.jvp(gradient, args, args)

    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3)
    jax.tree.map(close, told(by_hand), told(as_jax_has_it))


def test_on_a_gpu_the_sums_of_all_streams_are_one_reduction():
    norm, weights = eqx.nn.LayerNorm(4), jnp.arange(8.0).reshape(4, 2)
    fun = lambda p: jnp.sum(norm(jnp.tanh(weights @ p)) ** 3)
    names = ["u", "u_x", "u_xx", "u_xy", "u_yy"]
    run = jax.vmap(mpx.partials(fun, names, coords="xy", outputs="u"))
    text = program_for_gpu(jax.jit(run), jnp.stack([POINT, -POINT]))
    reductions = [line for line in text.splitlines() if "stablehlo.reduce(" in line]
    # The value and five derivatives, of the entries and of their squares.
    assert max(line.count(" init:") for line in reductions) == 12


# Similar layers, which one function evaluates.

NUMBERS = (0.5, 1.5, 1.1)
SHAPES = ((8,), (2, 4), (4, 2))
ROWS = tuple(np.linspace(0.5, 1.5, 8).astype(np.float32) * x for x in NUMBERS)
MADE = tuple(map(jnp.asarray, ROWS))
ALIKE = {
    "a number": lambda i, y: jnp.tanh(NUMBERS[i] * y),
    "an array of JAX": lambda i, y: jnp.tanh(jnp.float32(NUMBERS[i]) * y),
    "an array made before": lambda i, y: jnp.tanh(MADE[i] * y),
    "known entries": lambda i, y: jnp.tanh(ROWS[i] * y),
    "an order": lambda i, y: jnp.tanh(y)[np.roll(np.arange(8), i)],
    "an entry": lambda i, y: jnp.tanh(y) + y[i],
    "a shape": lambda i, y: jnp.tanh(y.reshape(SHAPES[i])).reshape(8),
    "a key": lambda i, y: jnp.tanh(y + jax.random.normal(jax.random.key(i), (8,), "float32")),
    "a branch": lambda i, y: lax.cond(y[0] > NUMBERS[i], jnp.tanh, lambda y: NUMBERS[i] * y, y),
    "a rule": lambda i, y: own(lambda x: NUMBERS[i] * jnp.tanh(x))(y),
    "a derivative": lambda i, y: jnp.tanh(y) * (lax.stop_gradient(y) if i else y),
}


def deep(layer, weights, p):
    h = jnp.tile(p, 4)
    for i, w in enumerate(weights):
        h = layer(i % len(NUMBERS), w @ h)
    return jnp.sum(h)


@pytest.mark.slow
@pytest.mark.parametrize("differ", ALIKE)
def test_layers_that_differ_are_not_taken_for_one(differ):
    # The first layer and the last one are unlike all others.
    weights = [jax.random.normal(k, (8, 8)) / 2 for k in jax.random.split(jax.random.key(0), 5)]

    fun = lambda weights: lambda p: deep(ALIKE[differ], weights, p)

    def ours(weights):
        d = mpx.partials(fun(weights), ["u_xx", "u_y"], **COORDS)(POINT)
        return d["u_xx"] + d["u_y"]

    def jaxs(weights):
        return jax.hessian(fun(weights))(POINT)[0, 0] + jax.grad(fun(weights))(POINT)[1]

    value, grads = jax.jit(jax.value_and_grad(ours))(weights)
    want, want_grads = jax.jit(jax.value_and_grad(jaxs))(weights)
    # Some ten roundings of float32 in a row. A wrong number changes the first digit.
    np.testing.assert_allclose(value, want, rtol=1e-4)
    assert relative(grads, want_grads) < 1e-4


LITERALS = "jax_use_simplified_jaxpr_constants"
"""The setting that makes arrays that a program closes over its literals instead of operands."""


@pytest.mark.skipif(not hasattr(jax.config, LITERALS), reason="a passing setting of JAX's")
def test_layers_that_differ_in_a_literal_array_are_not_taken_for_one():
    jax.config.update(LITERALS, True)
    try:
        test_layers_that_differ_are_not_taken_for_one("an array made before")
    finally:
        jax.config.update(LITERALS, False)


def test_layers_that_are_alike_are_traced_once(monkeypatch):
    made = []
    make = Derivatives._again
    monkeypatch.setattr(Derivatives, "_again", lambda *args: made.append(args) or make(*args))

    def layers(depth):
        made.clear()
        model = eqx.nn.MLP(2, "scalar", 8, depth, jnp.tanh, key=jax.random.key(0))
        jax.make_jaxpr(mpx.partials(model, ["u_xx"], **COORDS))(POINT)
        return len(made)

    assert layers(6) == layers(4)


# --- Values that are not differentiated -----------------------------------------------------------


@pytest.mark.parametrize("options", [{"use_mixed_precision": False}, {"forward": "float32"}])
def test_points_have_no_cotangent_that_nobody_asks_for(options):
    size, points = 16, 24
    model = eqx.nn.MLP(size, "scalar", 8, 2, jnp.tanh, key=jax.random.key(0))
    arrays, static = eqx.partition(model, eqx.is_array)

    def loss(model, points):
        u = mpx.laplacian(model, coords=[f"x{i}" for i in range(size)], outputs="u")
        return jnp.mean(jax.vmap(lambda p: u(p)["lap_u"])(points) ** 2)

    def gradient(arrays, points):
        grad = mpx.filter_grad(loss, mpx.StaticLossScaling(1.0), **options)
        return grad(eqx.combine(arrays, static), points)[-1]

    text = jax.jit(gradient).lower(arrays, jnp.ones((points, size))).as_text()
    # The first layer's product has only the gradient of the weight.
    shapes = re.findall(r"dot_general.*-> tensor<([\dx]+)xf32>", text)
    assert {"8x16", f"{points}x{size}", f"{size}x{points}"} & {*shapes} == {"8x16"}


def test_a_choice_in_a_rule_of_its_own_by_points_that_are_not_differentiated():
    # When mapped, JAX makes it a `select` with `stop_gradient`, which it cannot transpose.
    either = own(lambda v: lax.cond(jnp.sum(v) > 0, lambda f: f[::-1], lambda f: f, v))
    w, q = jnp.array([[0.29, 0.09], [-0.39, -0.01]]), jnp.array([[0.728, 0.592], [-0.3, -0.1]])
    model = lambda w, p: jnp.sin(either(p) @ w @ either(p))
    plain = lambda w: jnp.mean(jax.vmap(lambda p: jax.grad(model, 1)(w, p)[1])(q) ** 2)

    def loss(w):
        d = jax.vmap(mpx.partials(lambda p: model(w, p), ["u_y"], **COORDS))(q)
        return jnp.mean(d["u_y"] ** 2)

    # A few roundings of float32 in a row.
    assert jnp.allclose(jax.grad(loss)(w), jax.grad(plain)(w), rtol=1e-5)

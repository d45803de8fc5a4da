"""The derivative engine at the edges of its rules: ends of arrays, zeros, functions with a
derivative of their own, and loops of half precision."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import HALVES, TOLERANCES, equations, relative
from jax import lax

import mpx_pde as mpx


POINT = jnp.array([0.3, 0.7])


def terms(fun, names, **options):
    return jax.jit(mpx.partials(fun, names, coords="xy", outputs="u", **options))(POINT)


@jax.custom_jvp
def centred(x):
    """The identity, whose derivative subtracts the mean of all entries."""
    return x * 1.0


@centred.defjvp
def _centred_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    return centred(x), t - jnp.mean(t)


@jax.custom_jvp
def outer(x):
    """The derivative of its derivative is not one of entries."""
    return x * 1.0


@outer.defjvp
def _outer_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    return outer(x), centred(jnp.sin(x)) * t


@jax.custom_jvp
def squared(z):
    """Of a complex number: not holomorphic."""
    return jnp.abs(z) ** 2


@squared.defjvp
def _squared_jvp(primals, tangents):
    (z,), (t,) = primals, tangents
    return squared(z), 2 * jnp.real(jnp.conj(z) * t)


@jax.custom_jvp
def logaddexp(x, y):
    """Of the name of JAX's."""
    return jnp.sin(x) * y


@logaddexp.defjvp
def _logaddexp_jvp(primals, tangents):
    (x, y), (tx, ty) = primals, tangents
    return logaddexp(x, y), jnp.cos(x) * y * tx + jnp.sin(x) * ty


def features(p):
    return jnp.sin(jnp.array([[1.0, 2.0], [0.5, -1.0], [-1.5, 0.3]]) @ p)


OWN = {
    "a rule that mixes entries": lambda p: jnp.sum(centred(features(p)) ** 2),
    "so does its derivative": lambda p: jnp.sum(outer(features(p)) ** 2),
    "complex": lambda p: jnp.sum(squared(lax.complex(features(p), p[0] * features(p)[::-1]))),
    "another logaddexp": lambda p: jnp.sum(logaddexp(features(p), jnp.array([1.0, 2.0, 3.0]))),
    "that of jax": lambda p: jnp.sum(jnp.logaddexp(features(p), 0.5)) + jax.nn.softplus(p[0]),
    "read beyond the end": lambda p: jnp.sum(
        features(p).at[jnp.array([0, 2, 5])].get(mode="fill", fill_value=3.0) ** 2
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_derivatives_are_those_of_nested_forward_mode(name):
    fun = OWN[name]
    got = terms(fun, ["u_x", "u_xx", "u_xy"])
    slope, curvature = jax.jit(lambda p: (jax.jacfwd(fun)(p), jax.jacfwd(jax.jacfwd(fun))(p)))(
        POINT
    )
    # float32, by some ten operations.
    np.testing.assert_allclose(got["u_x"], slope[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["u_xx"], curvature[0, 0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got["u_xy"], curvature[0, 1], rtol=1e-5, atol=1e-5)


def test_softplus_has_its_derivatives_in_closed_form():
    jaxpr = jax.make_jaxpr(
        mpx.partials(lambda p: jax.nn.softplus(p[0]), ["u_xxx"], coords="xy", outputs="u")
    )(POINT)
    names = [e.primitive.name for e in equations(jaxpr.jaxpr)]
    # One exponential of the value, and the logistic function.
    assert names.count("exp") <= 1
    assert names.count("logistic") == 1


def test_powers_and_roots_at_zero():
    at = lambda fun, *names: mpx.partials(fun, list(names), coords="x", outputs="u")(jnp.zeros(1))
    square = at(lambda p: lax.pow(p[0], 2.0), "u_xx", "u_xxx", "u_xxxx")
    # The power of zero that a vanishing factor multiplies is infinite.
    assert {k: float(x) for k, x in square.items()} == {"u_xx": 2.0, "u_xxx": 0.0, "u_xxxx": 0.0}
    assert at(lambda p: lax.pow(p[0], 1.0), "u_xx")["u_xx"] == 0
    for root in (jnp.sqrt, jnp.cbrt):
        slopes = at(lambda p, root=root: root(p[0]), "u_x", "u_xx")
        assert (slopes["u_x"], slopes["u_xx"]) == (jnp.inf, -jnp.inf)
        assert at(lambda p, root=root: lax.clamp(0.1, root(p[0]), 1.0), "u_x")["u_x"] == 0


def test_streams_without_a_rule_share_their_derivatives():
    """Two operators and the terms beside them are made of the same three second derivatives, and
    of what each stream adds to itself."""
    fun = lambda p: jnp.sum(jnp.arctan2(features(p), 1.0))
    operators = {"a": "laplacian", "b": {"xx": 2.0, "xy": 1.0}}
    linear = mpx.linear_operator(fun, operators, ["u_xx", "u_xy"], coords="xy", outputs="u")
    number = lambda f: len(list(equations(jax.make_jaxpr(f)(POINT).jaxpr)))
    one = number(mpx.partials(fun, ["u_xy"], coords="xy", outputs="u"))
    # All of them one by one come to three and a half times one of them.
    assert number(linear) < 3 * one
    got, want = jax.jit(linear)(POINT), jax.jit(jax.hessian(fun))(POINT)
    # float32: summands of about one, which partly cancel.
    np.testing.assert_allclose(got["a_u"], jnp.trace(want), atol=1e-5)
    np.testing.assert_allclose(got["b_u"], 2 * want[0, 0] + want[0, 1], atol=1e-5)


# Loops and branches of a network in half precision.

MODEL = {
    "first": jax.random.normal(jax.random.key(2), (2, 8)),
    "one": jax.random.normal(jax.random.key(1), (8, 8)) / 3,
    "stack": jax.random.normal(jax.random.key(3), (3, 8, 8)) / 3,
}


def _scan(m, h):
    step = lambda h, w: (
        jnp.tanh(h @ w) + jnp.tanh(h @ (m["one"] * m["one"].dtype.type(0.5))),
        None,
    )
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
    """What its weights are multiplied and compared with in there are halves as well."""
    with jax.numpy_dtype_promotion("standard"):
        run = lambda m: lambda p: jnp.sum(loop(m, jnp.tanh(p.astype(m["one"].dtype) @ m["first"])))
        names = ["u", "u_x", "u_xy"]
        cast = mpx.cast_tree(MODEL, half)
        wide = mpx.cast_tree(cast, "float32")
        got, want = terms(run(cast), names), terms(run(wide), names)
        products = mpx.partials(run(cast), names, coords="xy", outputs="u").report(POINT).products
    # The first meets the point in float32.
    assert {e.precision.split()[0] for e in products[1:]} == {half}
    error, scale = (np.array([float(f[k]) for k in names]) for f in (got, want))
    # A few roundings of what a layer hands on.
    assert relative(error, scale) < {"float16": 2.0**-8, "bfloat16": 2.0**-5}[half]


@jax.custom_jvp
def bent(x):
    return x * jnp.tanh(x)


@bent.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return bent(x), (jnp.tanh(x) + x / jnp.cosh(x) ** 2) * t


# JAX's own and the user's, of one entry and of all, called inside of others.
OF_THEIR_OWN = {
    "relu": jax.nn.relu,
    "relu cubed": lambda h: jax.nn.relu(h) ** 3,
    "relu6": lambda h: h * jax.nn.relu6(3 * h + 1),
    "hard_silu": jax.nn.hard_silu,
    "entropy": lambda h: jax.scipy.special.entr(h + 3),
    "softmax": lambda h: h * jax.nn.softmax(h),
    "of the user": bent,
    "in a jit": jax.jit(lambda h: bent(h + 1) - jax.nn.relu(h)),
    # A sum into places holds a program too: that of two numbers.
    "scatter": lambda h: h.at[jnp.array([0, 3])].add(h[1:3] * h[2:4]),
    "segments": lambda h: jax.ops.segment_sum(h * h, jnp.arange(8) % 3, num_segments=8),
}


def of_their_own(name, point, first, weights):
    hidden = jnp.tanh(jnp.dot(first.astype(point.dtype), point)).astype(weights.dtype)
    return jnp.sum(OF_THEIR_OWN[name](weights @ hidden) * weights[0])


@pytest.mark.parametrize(
    ("name", "half", "size"),
    [
        *zip(OF_THEIR_OWN, itertools.cycle(HALVES), itertools.repeat(3e4), strict=False),
        ("softmax", "float16", 1.0),
        ("scatter", "bfloat16", 1.0),
    ],
)
def test_functions_with_a_derivative_of_their_own_in_half(name, half, size):
    """In registers, as all between products: where the program has half, streams of a network of
    long coordinates would vanish."""
    first, weights = (0.7 * jax.random.normal(jax.random.key(i), (8, 2 + 6 * i)) for i in (0, 1))
    first, weights = first / size, weights.astype(half)
    point, terms = size * jnp.array([0.3, -0.7]), ["u", "u_x", "u_xy", "u_xx"]
    scaling = mpx.DerivativeScaling.per_direction("xy").with_exponents(14 if size > 1 else 0)
    fun = lambda p: of_their_own(name, p, first, weights)
    with mpx.half_precision(half):
        got = jax.jit(mpx.partials(fun, terms, coords="xy", outputs="u", scaling=scaling))(point)
    with jax.enable_x64(True):
        wide = [
            jnp.asarray(np.asarray(x.astype(jnp.float32), np.float64)) for x in (first, weights)
        ]
        p = jnp.asarray(np.asarray(point, np.float64))
        fun = lambda p: of_their_own(name, p, *wide)
        value, slopes, bends = jax.jit(lambda p: (fun(p), jax.grad(fun)(p), jax.hessian(fun)(p)))(p)
        want = [value, slopes[0], bends[0, 1], bends[0, 0]]
        want = dict(zip(terms, map(float, want), strict=True))
    for term in terms:
        # Second derivatives cancel to about an eighth of their summands.
        error = 8 * TOLERANCES[half] * max(abs(want[term]), 0.1 * size ** -len(term[2:]))
        assert abs(float(got[term]) - want[term]) < error
    assert all(x.dtype == jnp.float32 for x in got.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", list(OF_THEIR_OWN))
def test_functions_with_a_derivative_of_their_own_under_float64(name):
    """A forward pass in float64 of a program in float32 rounds nothing to float32."""
    first, weights = (0.7 * jax.random.normal(jax.random.key(i), (8, 2 + 6 * i)) for i in (0, 1))
    points = jax.random.uniform(jax.random.key(2), (4, 2))

    def loss(model, points):
        fun = lambda p: of_their_own(name, p, *model)
        d = jax.vmap(mpx.partials(fun, ["u", "u_xx"], coords="xy", outputs="u"))(points)
        return jnp.mean((d["u_xx"] - d["u"]) ** 2)

    with jax.enable_x64(True):
        run = mpx.filter_value_and_grad(loss, mpx.DynamicLossScaling(2.0**8), forward="float64")
        value, *_ = eqx.filter_jit(run)((first, weights), points)
        wide = mpx.cast_tree(((first, weights), points), "float64")
        np.testing.assert_allclose(value, jax.jit(loss)(*wide), rtol=2.0**-44)


# A number that depends on the point meets an array: with directions stacked, which they are from
# nine coordinates on and where they are sampled, a stack of numbers is no array.
MATRIX = np.sin(np.arange(1.0, 257.0)).reshape(16, 16)


def hidden(q):
    return jnp.tanh(jnp.asarray(MATRIX[: q.size, : q.size], q.dtype) @ q)


NUMBERS_AND_ARRAYS = {
    "product": lambda q: q[0] * hidden(q),
    "product, the other way": lambda q: hidden(q) * q[0],
    "hard boundary": lambda q: (1 - q @ q) * hidden(q),
    "quotient": lambda q: hidden(q) / (2 + q[0] ** 2),
    "quotient of a number": lambda q: q[0] / (2 + hidden(q)),
    "unit vector": lambda q: hidden(q / jnp.linalg.norm(q)),
    "sum": lambda q: jnp.sin(hidden(q) + jnp.sin(q[0])),
    "difference": lambda q: jnp.sin(q[1] ** 2 - hidden(q)),
    "constant array": lambda q: jnp.sin(q[0] * jnp.linspace(1.0, 2.0, q.size, dtype=q.dtype)),
    "power": lambda q: (2 + q[0]) ** jnp.linspace(0.5, 2.5, q.size, dtype=q.dtype),
    "power of both": lambda q: (2 + hidden(q)) ** q[0],
    "maximum": lambda q: jnp.maximum(q[0] ** 2, hidden(q)) ** 3,
    "atan2": lambda q: jnp.arctan2(q[0], 2 + hidden(q)),
    "choice": lambda q: jnp.where(q[0] > 0, q[0] ** 2, hidden(q)) ** 2,
    "root mean square norm": lambda q: hidden(q / jnp.sqrt(jnp.mean(q**2) + 1e-3)),
    "layer norm": lambda q: (hidden(q) - jnp.mean(hidden(q))) / jnp.std(1.0 + hidden(q)),
    "softmax": lambda q: jax.nn.softmax(hidden(q)) * q,
    "equinox": lambda q: eqx.nn.RMSNorm(q.size, use_bias=False, dtype=q.dtype)(hidden(q)),
    "matrix": lambda q: (q[0] * jnp.outer(hidden(q), q)).sum(1),
    "loop": lambda q: lax.fori_loop(0, 3, lambda _, h: q[1] * h + q[0], hidden(q)),
}


@pytest.mark.parametrize("name", NUMBERS_AND_ARRAYS)
def test_numbers_that_depend_on_the_point_beside_arrays(name):
    size = 9
    coords = [f"x{i}" for i in range(size)]
    weights = np.cos(np.arange(size))
    net = lambda q: jnp.asarray(weights, q.dtype) @ NUMBERS_AND_ARRAYS[name](q)
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        q = jnp.asarray(0.3 + 0.5 * np.sin(np.arange(size) * 2.0))
        key = jax.random.key(0)
        exact = mpx.laplacian(net, coords=coords, outputs="u")
        # All coordinates drawn once each: the sum itself.
        drawn = mpx.linear_operator(
            net, {"lap": "laplacian"}, coords=coords, outputs="u", samples=size, key=key
        )
        run = lambda q: (jnp.diag(jax.hessian(net)(q)), [f(q)["lap_u"] for f in (exact, drawn)])
        diagonal, found = jax.jit(run)(q)
        for got in found:
            # Sums of n² terms in another order, by float64's rounding.
            assert abs(got - jnp.sum(diagonal)) < 2.0**-44 * (1 + jnp.sum(jnp.abs(diagonal)))


# What is picked by an index that depends on the point.
PICKED = {
    "box": lambda q: q[jnp.argmax(jnp.abs(q))] ** 2 * q[0],
    "smallest": lambda q: q[jnp.argmin(q)] ** 3,
    "slice": lambda q: jnp.sum(lax.dynamic_slice(q, (jnp.floor(q[0]).astype(int) + 2,), (2,)) ** 3),
    "several": lambda q: jnp.sum(q[jnp.argsort(q)] * jnp.arange(1.0, 5.0, dtype=q.dtype)) ** 2,
    "table": lambda q: hidden(q)[jnp.floor(4 * jnp.abs(q[1])).astype(int)] * q[0],
    "placed": lambda q: jnp.sum(
        jnp.arange(4.0, dtype=q.dtype) * jnp.zeros_like(q).at[jnp.argmax(q)].set(q[0] ** 2)
    ),
    "updated": lambda q: jnp.sum(
        lax.dynamic_update_slice(q, q[:1] ** 2, (jnp.argmax(q),)) * jnp.arange(4.0, dtype=q.dtype)
    ),
    "branch": lambda q: lax.switch(
        jnp.argmax(q), [lambda q: q[0] ** 2, lambda q: q[1] ** 3] * 2, q
    ),
}


@pytest.mark.parametrize("name", PICKED)
def test_an_index_that_depends_on_the_point(name):
    net = PICKED[name]
    names = ["u", *(f"u_{c}" for c in "xyzt"), *(f"u_{c}{c}" for c in "xyzt"), "u_xy"]
    with jax.enable_x64(True):
        q = jnp.array([0.3, -0.6, 0.2, 0.9])
        evaluate = mpx.partials(net, names, coords="xyzt", outputs="u")
        run = jax.jit(lambda q: (evaluate(q), net(q), jax.grad(net)(q), jax.hessian(net)(q)))
        got, value, slope, bend = run(q)
        want = {"u": value, "u_xy": bend[0, 1]}
        for i, c in enumerate("xyzt"):
            want |= {f"u_{c}": slope[i], f"u_{c}{c}": bend[i, i]}
        for key, value in want.items():
            assert abs(got[key] - value) < 2.0**-45, key


def filtered(x):
    return lax.scan(lambda c, a: (0.5 * c + a, 0.5 * c + a), jnp.zeros_like(x[0]), x)[1]


def mixing(kind):
    """A function with a derivative of its own, around a program that mixes entries."""
    bodies = {
        "scan": filtered,
        "loop": lambda x: lax.fori_loop(0, 2, lambda _, y: jnp.roll(y, 1) + y, x),
        "while": lambda x: lax.while_loop(
            lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] + c[1][::-1]), (0, x)
        )[1],
        "cond": lambda x: lax.cond(jnp.sum(x) > 0, lambda y: y[::-1], lambda y: y, x),
        "call": jax.jit(lambda x: jnp.cumsum(x)),
        "entries": jax.jit(lambda x: jnp.sin(x)),
    }
    fun = jax.custom_jvp(bodies[kind])
    fun.defjvp(lambda primals, tangents: jax.jvp(bodies[kind], primals, tangents))
    return fun


@pytest.mark.parametrize("kind", ["scan", "loop", "while", "cond", "call", "entries"])
def test_a_custom_derivative_around_what_mixes_entries(kind):
    def net(q, fun):
        scale = jnp.array([1.0, 2.0, 3.0], q.dtype)
        return jnp.sum(jnp.array([1.0, -2.0, 0.5], q.dtype) * fun(jnp.sin(q * scale)) ** 2)

    with jax.enable_x64(True):
        q = jnp.array([0.1, 0.2, 0.3])
        evaluate = mpx.partials(
            lambda q: net(q, mixing(kind)), ["u_xx", "u_xy", "u_yz"], coords="xyz", outputs="u"
        )
        hessian = jax.jacfwd(jax.jacfwd(lambda q: net(q, mixing(kind))))
        got, bend = jax.jit(lambda q: (evaluate(q), hessian(q)))(q)
        for key, (i, j) in {"u_xx": (0, 0), "u_xy": (0, 1), "u_yz": (1, 2)}.items():
            assert abs(got[key] - bend[i, j]) < 2.0**-45, key


WIDE = {
    "inside": lambda q: ((1e8 + jnp.sin(q[0].astype(jnp.float64))) - 1e8).astype(jnp.float32),
    "loop": lambda q: lax.fori_loop(
        0, 2, lambda _, h: (h.astype(jnp.float64) + 1e8 - 1e8).astype(jnp.float32), jnp.sin(q[0])
    ),
    "product": lambda q: (
        jnp.array([[1e8, 1.0]]) @ jnp.stack([1.0 + 0 * q[0], q[0]]).astype(jnp.float64) - 1e8
    )[0].astype(jnp.float32),
    "complex": lambda q: jnp.real(
        jnp.exp(1j * q[0].astype(jnp.float64)) * 1e8 - 1e8
    ).astype(jnp.float32),
    "callee": jax.jit(lambda q: (jnp.tanh(q[0].astype("float64")) + 1e8 - 1e8).astype("float32")),
}  # fmt: skip


@pytest.mark.parametrize(("name", "half"), [*((n, None) for n in WIDE), ("inside", "float16")])
def test_what_a_program_says_in_float64_is_computed_in_it(name, half):
    """By the width of each value, not by that of the result; beside half weights too."""
    weight = jnp.ones((), half or "float32")
    net = lambda q: WIDE[name](q) * weight.astype(jnp.float32)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        q = jnp.array([0.3], jnp.float32)
        got = mpx.partials(net, ["u", "u_x", "u_xx"], coords="x", outputs="u")(q)
        assert {v.dtype.name for v in got.values()} == {"float32"}
        slope = lambda q: jax.jvp(net, (q,), (jnp.ones_like(q),))[1]
        bend = jax.jvp(slope, (q,), (jnp.ones_like(q),))[1]
        for key, value in {"u": net(q), "u_x": slope(q), "u_xx": bend}.items():
            # A few roundings of float32 of values of about one, behind 1e8 by float64's.
            assert abs(got[key] - value) < 2.0**-21 * max(1, abs(value)), key


@pytest.mark.parametrize("base", [0.0, 0.5])
@pytest.mark.parametrize("exponents", [jnp.arange(4), jnp.arange(4.0), jnp.array([0.0, 1.0, 3.0])])
def test_powers_with_an_array_of_exponents(base, exponents):
    net = lambda q: jnp.sum(q[0] ** exponents)
    q = jnp.array([base, 1.0])
    got = mpx.partials(net, ["u", "u_x", "u_xx", "u_xxx"], coords="xy", outputs="u")(q)
    fall = lambda k: sum(
        float(np.prod([n - j for j in range(k)])) * (base ** (n - k) if n >= k else 0.0)
        for n in np.asarray(exponents, float)
    )
    for k, key in enumerate(got):
        assert abs(float(got[key]) - fall(k)) < 2.0**-20, key


@pytest.mark.parametrize(
    "function",
    [jnp.abs, lambda x: jnp.hypot(x, 1.0), jax.nn.soft_sign, lambda x: jnp.maximum(x, 0.0) ** 3],
    ids=["abs", "hypot", "soft_sign", "maximum"],
)
def test_derivatives_where_a_function_has_a_kink_are_those_of_jax(function):
    """At 0, as on the boundary of a domain: what JAX takes for the slope of `abs` there counts in
    the second derivative of a smooth function of it."""
    wanted = [function]
    for _ in range(3):
        wanted.append(jax.jacfwd(wanted[-1]))
    terms = ["u", "u_x", "u_xx", "u_xxx"]
    got = mpx.partials(lambda p: function(p[0]), terms, coords="x", outputs="u")(jnp.zeros(1))
    for term, want in zip(terms, wanted, strict=True):
        np.testing.assert_allclose(got[term], want(jnp.float32(0)), atol=1e-6)

"""The derivative engine at the edges of its rules: ends of arrays, zeros, functions with a
derivative of their own, and loops of half precision."""

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


@pytest.mark.parametrize("size", [1.0, 3e4])
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", list(OF_THEIR_OWN))
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


@pytest.mark.parametrize("derive", [False, True])
@pytest.mark.parametrize("name", list(OF_THEIR_OWN))
def test_functions_with_a_derivative_of_their_own_under_float64(name, derive):
    """A forward pass in float64 of a program in float32 rounds nothing to float32."""
    first, weights = (0.7 * jax.random.normal(jax.random.key(i), (8, 2 + 6 * i)) for i in (0, 1))
    points = jax.random.uniform(jax.random.key(2), (4, 2))

    def loss(model, points):
        fun = lambda p: of_their_own(name, p, *model)
        if derive:
            fun = mpx.partials(fun, ["u_xx"], coords="xy", outputs="u")
            return jnp.mean((jax.vmap(fun)(points)["u_xx"] - 1.0) ** 2)
        return jnp.mean((jax.vmap(fun)(points) - 1.0) ** 2)

    with jax.enable_x64(True):
        run = mpx.filter_value_and_grad(loss, mpx.DynamicLossScaling(2.0**8), forward="float64")
        value, *_ = eqx.filter_jit(run)((first, weights), points)
        wide = mpx.cast_tree(((first, weights), points), "float64")
        np.testing.assert_allclose(value, jax.jit(loss)(*wide), rtol=2.0**-44)

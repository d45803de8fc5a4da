"""Tests derivatives of a softmax and of its relatives, also where one share is nearly 1.

There plain JAX has no digit in float32, and few in float64. The oracles are in float64 and do not
cancel: the largest share is 1 less the others, and logarithms of shares are those of 1 less the
others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forward_passes import CLOSE, step_of
from helpers import HALVES, relative
from jax import lax

import mpx_pde as mpx
from mpx_pde.engine.taylor._shifts import with_shifts
from mpx_pde.program._flat import flatten


pytestmark = pytest.mark.usefixtures("standard_promotion")

WEIGHT = np.array([[-0.61, -0.55, -0.66, 1.16], [-0.54, 0.09, 0.23, 1.22]])
POINTS = np.array([[0.508, 0.39], [0.742, 0.329], [0.865, 0.175]])
LARGEST = 3
MASK = np.array([True, False, True, True])
DERIVATIVES = {"_x": (0,), "_xx": (0, 0), "_xxy": (0, 0, 1), "_xyyy": (0, 1, 1, 1)}


def exact_shares(y, b=1.0):
    others = jnp.delete(b * jnp.exp(y - y[LARGEST]), LARGEST)
    shares = others / (1 + jnp.sum(others))
    return jnp.insert(shares, LARGEST, 1 - jnp.sum(shares))


def exact_log_sum(y):
    others = jnp.delete(jnp.exp(y - y[LARGEST]), LARGEST)
    return y[LARGEST] + jnp.log1p(jnp.sum(others))


def by_hand(y):
    e = jnp.exp(y)
    return e / jnp.sum(e)


def by_inverse(y):
    e = jnp.exp(y - lax.stop_gradient(jnp.max(y)))
    return e * (1 / jnp.sum(e))


def by_norm(y):
    e = jnp.exp(y / 2)
    return jnp.square(e * lax.rsqrt(jnp.sum(e * e)))


def masked(y):
    e = jnp.exp(y) * MASK
    return e / jnp.sum(e)


def of_two(y):
    """Returns the logarithm of a product, with the sum of one exponential twice."""
    y = y - lax.stop_gradient(jnp.max(y))
    a, b = jnp.exp(y), jnp.exp(2 * y)
    return jnp.log(jnp.sum(a) ** 2 * jnp.sum(b))[None]


def columns(y):
    return jnp.stack([y, y], 1)


PAIRS = {
    "softmax": (jax.nn.softmax, exact_shares),
    "by hand": (by_hand, exact_shares),
    "by an inverse": (by_inverse, exact_shares),
    "by a norm": (by_norm, exact_shares),
    "an axis": (lambda y: jax.nn.softmax(columns(y), axis=0)[:, 1], exact_shares),
    "where": (lambda y: jax.nn.softmax(y, where=MASK), lambda y: exact_shares(y, MASK)),
    "masked": (masked, lambda y: exact_shares(y, MASK)),
    "log_softmax": (jax.nn.log_softmax, lambda y: y - exact_log_sum(y)),
    "logsumexp": (
        lambda y: jax.nn.logsumexp(columns(y), axis=0, keepdims=True)[0],
        lambda y: jnp.stack(2 * [exact_log_sum(y)]),
    ),
    "of two": (of_two, lambda y: (2 * exact_log_sum(y) + exact_log_sum(2 * y))[None]),
    "in a loop": (
        lambda y: lax.map(jax.nn.softmax, columns(y).T)[1],
        exact_shares,
    ),
}


def exponents(p):
    return p @ jnp.asarray(WEIGHT, p.dtype) / 0.05


def along(f, dirs):
    for d in np.eye(2)[list(dirs)]:
        f = lambda p, f=f, d=d: jax.jvp(f, (p,), (jnp.asarray(d, p.dtype),))[1]
    return f


@pytest.mark.parametrize(
    "name",
    [
        x if x in ("softmax", "log_softmax") else pytest.param(x, marks=pytest.mark.slow)
        for x in PAIRS
    ],
)
def test_derivatives_where_a_share_is_nearly_one(name):
    got_of, exact_of = PAIRS[name]
    with jax.enable_x64(True):
        f = lambda p: exact_of(exponents(p))
        want = {k: jax.jit(jax.vmap(along(f, dirs)))(POINTS) for k, dirs in DERIVATIVES.items()}
    outputs = "uvwr"[: want["_x"].shape[-1]]
    terms = [f"{u}{k}" for u in outputs for k in DERIVATIVES]
    run = mpx.partials(lambda p: got_of(exponents(p)), terms, coords="xy", outputs=outputs)
    got = jax.jit(jax.vmap(run))(jnp.asarray(POINTS, "float32"))
    for k in DERIVATIVES:
        # The slopes of exponents, up to 35, are in those of logarithms.
        least = 35 * 2.0**-22 if name == "log_softmax" and k == "_x" else 0
        for i, u in enumerate(outputs):
            # Exponents up to 100 are rounded by 2^-18. Derivatives have some ten factors.
            got_k = got[f"{u}{k}"]
            np.testing.assert_allclose(got_k, want[k][:, i], rtol=1e-4, atol=least, err_msg=u + k)


BY = {
    "partials": lambda f, p: mpx.partials(f, ["u_xxy"], coords="xy", outputs="u")(p)["u_xxy"],
    "jvp": lambda f, p: along(f, (0,))(p),
    "jvp of jvp of jvp": lambda f, p: along(f, (0, 0, 1))(p),
    "grad": lambda f, p: jax.grad(f)(p),
    "hessian": lambda f, p: jax.hessian(f)(p),
    "grad of a logarithm": lambda f, p: jax.grad(lambda p: jnp.log(f(p) + 2))(p),
}


@pytest.mark.filterwarnings("ignore:.*is done in half")  # the product with the point is not
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    "by", [x if x in ("partials", "grad") else pytest.param(x, marks=pytest.mark.slow) for x in BY]
)
def test_a_loss_of_them_keeps_their_size(by, half):
    """Rounded as the rule of a quotient takes them, kept values would be some thousand times the
    derivatives that are left of them."""

    def loss(weights, shares, points):
        f = lambda p: jnp.vdot(weights["mixed"], shares(p @ weights["first"] / 0.3))
        return jnp.mean(jax.vmap(lambda p: BY[by](f, p))(points) ** 2)

    weights = {"first": jnp.asarray(WEIGHT, "float32"), "mixed": jnp.array([0.4, -1.1, 0.7, 0.2])}
    got = jax.jit(step_of(lambda w, p: loss(w, jax.nn.softmax, p), half))
    *_, finite, grads = got(weights, jnp.asarray(POINTS, "float32"))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: np.asarray(x, "float64"), weights)
        want = jax.jit(jax.grad(lambda w: loss(w, exact_shares, POINTS)))(wide)
    assert finite
    assert relative(grads, want) < CLOSE[half]


OTHERS = {
    "another use": lambda e: e / jnp.sum(e) + e,
    "the sum itself": lambda e: jnp.append(e / jnp.sum(e), jnp.sum(e)),
    "a number added": lambda e: e / (1e-3 + jnp.sum(e)),
    "another degree": lambda e: e / jnp.sum(e * e),
    "a sum without derivative": lambda e: e / lax.stop_gradient(jnp.sum(e)),
    "another axis": lambda e: e.reshape(2, 2) / jnp.sum(e.reshape(2, 2), axis=1),
    "another axis of a logarithm": lambda e: (
        jnp.log(jnp.sum(e.reshape(2, 2), axis=1)) - e.reshape(2, 2) / e.reshape(2, 2)[0]
    ),
    "each pair": lambda e: e[:, None] / e,
    "a product": lambda e: (jnp.asarray(WEIGHT, e.dtype) @ e) / jnp.sum(e),
    "only compared": lambda e: jnp.where(e > 1, 2.0, 1.0),
    "no sum": lambda e: jnp.log(2 * e),
    "chosen": lambda e: jnp.where(e > 1, e, 1) / jnp.sum(e),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_a_shift_would_change_stays(name):
    closed = jax.make_jaxpr(lambda y: OTHERS[name](jnp.exp(y)))(jnp.ones(4))
    flat = flatten(closed, forward_mode=True)
    assert with_shifts(flat, flat.inputs) is flat


def test_magnitudes_of_complex_exponentials():
    def magnitudes(y):
        e = jnp.abs(jnp.exp(lax.complex(y, 2 * y)))
        return (e / jnp.sum(e))[0]

    f = lambda p: magnitudes(exponents(p) / 20)
    p = jnp.asarray(POINTS[0], "float32")
    got = jax.jit(mpx.partials(f, ["u_xy"], coords="xy", outputs="u"))(p)["u_xy"]
    np.testing.assert_allclose(got, jax.jit(jax.hessian(f))(p)[0, 1], rtol=1e-5)

"""Tests that autocast uses the float32 sum of a product as it is up to a difference, a solve or the
end of the program, and rounds it elsewhere. The operands of the first products are exact in half,
so rounded sums are all that can be wrong with a value."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import HALVES, in_float64, normal, relative
from jax import lax
from jax.experimental import sparse

import mpx_pde as mpx


def exact(seed, *shape):
    """Returns random numbers that every half format holds."""
    return np.round(16 * normal(seed, shape)) / 16


W, COLUMN, X = exact(0, 32, 8), exact(1, 32), exact(2, 256, 32) / 8
Y = normal(3, (256,))
ROWS = sparse.BCOO.fromdense(np.eye(255, 256, 1) - np.eye(255, 256))


def table(u):
    at = jnp.linspace(290.0, 310.0, 41, dtype=u.dtype)
    return jnp.interp(u, at, jnp.sin(at) + 2)


def variation(u):
    return jnp.mean(jnp.sqrt((u[1:] - u[:-1]) ** 2 + 1e-6))


ORDER = np.argsort(Y).astype(np.int32)


def chosen(u):
    """A select and a gather, which end a layer."""
    return jnp.where(Y > 0, u, u + 0.5)[ORDER]


def scanned(w, x):
    def step(total, x):
        u = 300 + x @ w
        return total + jnp.sum(jnp.where(u[1:] > 300, u[1:] - u[:-1], 0) ** 2), u

    total, u = lax.scan(step, jnp.zeros((), x.dtype), x.reshape(8, 32, 32))
    return total + jnp.mean(table(u.reshape(-1)))


def regression(w, x):
    """Fits 256 numbers by the normal equations."""
    f = jnp.tanh(x @ w)
    fit = jnp.linalg.solve(f.T @ f + 1e-3 * jnp.eye(8, dtype=f.dtype), f.T @ Y.astype(f.dtype))
    return jnp.sum(fit**2)


def into_a_product(d):
    return jnp.sum((d[:, None] @ jnp.ones((1, 8), d.dtype)) ** 2)


LOSSES = {
    "interpolation": lambda w, x: jnp.mean(table(300 + x @ w)),
    "select": lambda w, x: variation(chosen(300 + x @ w)),
    "negative": lambda w, x: jnp.mean((chosen(300 + x @ w)[1:] + (-300 - x @ w)[:-1]) ** 2),
    "gradient": lambda w, x: jnp.mean(jnp.gradient(chosen(300 + x @ w)) ** 2),
    "sparse": lambda w, x: jnp.mean((ROWS.astype(x.dtype) @ (300 + x @ w)) ** 2),
    "two networks": lambda w, x: variation(x @ w - 1.01 * chosen(x @ w[::-1])),
    "loop": scanned,
    "checkpoint": jax.checkpoint(lambda w, x: variation(chosen(300 + x @ w))),
}


def compared(loss, w, x, half):
    """Returns the relative errors of the value and of the gradient."""
    gradient = lambda fun, *args: jax.jit(jax.value_and_grad(fun))(*args)
    with jax.enable_x64(True):
        value, grad = jax.tree.map(np.asarray, gradient(loss, *in_float64((w, x))))
    got, got_grad = gradient(mpx.autocast(loss, half), w, x)
    return relative(got, value), relative(got_grad, grad)


@pytest.mark.parametrize("half", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LOSSES)
def test_a_difference_behind_a_product_has_the_digits_of_float32(name, half):
    value, gradient = compared(LOSSES[name], COLUMN, X, half)
    # 300 in float32 has an error of 1.5e-5, and neighbors differ by about 5. The cotangents of a
    # product are rounded.
    assert value < 1e-5
    assert gradient < 4 * float(jnp.finfo(half).eps)


@pytest.mark.parametrize("half", HALVES)
def test_only_the_difference_is_rounded_before_the_next_product(half):
    loss = lambda w, x: into_a_product(jnp.diff(chosen(300 + x @ w)))
    value, gradient = compared(loss, COLUMN, X, half)
    assert max(value, gradient) < 4 * float(jnp.finfo(half).eps)


@pytest.mark.parametrize("half", HALVES)
def test_normal_equations_are_in_full(half):
    value, gradient = compared(regression, W, X, half)
    assert value < 1e-5
    assert gradient < 2 * float(jnp.finfo(half).eps)
    report = mpx.autocast(regression, half).report(W, X)
    rules = [x.rule for x in report.operations if x.primitive == "dot_general"]
    assert rules == ["product", "full", "full"]
    reasons = {x.reason for x in report.operations if x.rule == "full"}
    assert "its result goes into a factorization or a solve, which magnifies errors" in reasons


SOLVES = {
    "slogdet": lambda a: jnp.linalg.slogdet(a)[1],
    "cholesky": lambda a: jnp.sum(jnp.linalg.cholesky(a)),
    "inv": lambda a: jnp.sum(jnp.linalg.inv(a)),
    "eigvalsh": lambda a: jnp.sum(jnp.log(jnp.linalg.eigvalsh(a))),
    "cg": lambda a: jnp.sum(jax.scipy.sparse.linalg.cg(lambda v: a @ v, jnp.ones_like(a[0]))[0]),
    "in a loop": lambda a: lax.fori_loop(
        0, 2, lambda _, t: t + jnp.sum(jnp.linalg.inv(a)), 0 * a[0, 0]
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SOLVES)
def test_every_solve_gets_a_product_in_full(name):
    def loss(w, x):
        f = jnp.tanh(x @ w)
        gram = lax.map(lambda f: f.T @ f, f.reshape(1, 256, 8))[0]  # also out of a loop
        return SOLVES[name](gram + 0.1 * jnp.eye(8, dtype=f.dtype))

    with jax.enable_x64(True):
        want = loss(*in_float64((W, X)))
    # A Gram matrix of rounded features is off by 2^-8 where all is well conditioned.
    assert relative(mpx.autocast(loss, "bfloat16")(W, X), np.asarray(want)) < 1e-5


def test_a_user_may_ask_for_the_half_of_a_product_before_a_solve():
    report = mpx.autocast(regression, "float16", half="dot_general").report(W, X)
    rules = [x.rule for x in report.operations if x.primitive == "dot_general"]
    assert rules == ["product"] * 3


@pytest.mark.parametrize("half", HALVES)
def test_a_covariance_may_be_larger_than_float16(half):
    """±600 have products up to 9e7."""
    loss = lambda w, x: jnp.sum(jnp.cov((200 * x @ w).T))
    value, gradient = compared(loss, W, X, half)
    assert max(value, gradient) < 4 * float(jnp.finfo(half).eps)


NORMALIZED = {
    "layer norm": lambda h: (h - h.mean(-1, keepdims=True)) / (h.std(-1, keepdims=True) + 1e-3),
    "softmax": jax.nn.softmax,
    "batch norm": lambda h: (h - jnp.arange(8.0)[None]) * jnp.arange(8.0)[None],
    "softplus": jax.nn.softplus,
    "logsumexp": lambda h: h * jax.nn.logsumexp(h, axis=-1, keepdims=True),
}


@pytest.mark.parametrize("name", NORMALIZED)
def test_a_norm_between_products_takes_rounded_ones(name):
    """To keep them in float32 would double the memory of a transformer."""
    loss = lambda w, x: jnp.sum(NORMALIZED[name](x @ w) @ w.T)
    report = mpx.autocast(loss, "bfloat16").report(W, X)
    first, last = (x.results for x in report.operations if x.primitive == "dot_general")
    assert (first, last) == (("bfloat16",), ("float32",))

"""Tests Gram matrices by blocks of rows, and their factorization."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpx_pde.second_order import _gram
from mpx_pde.second_order._gram import Lower, factored, first_leading, next_leading, summed


def with_singular_values(rows, values, seed=0):
    rng = np.random.default_rng(seed)
    left, _ = np.linalg.qr(rng.standard_normal((rows, len(values))))
    right, _ = np.linalg.qr(rng.standard_normal((len(values), len(values))))
    return left * values @ right


def solver_of(jac, damping, precision, *, of=None, leading=None, steps=0, blocks=1, solver=None):
    """Returns a function that solves with `Jᵀ J + damping`, after `steps` towards the leading
    directions of the Jacobian `of`, by default `jac`."""
    dtype = "float64" if precision == "float64" else "float32"
    if leading is None:
        several = min(192, jac.shape[1] // 4) if precision != "float64" else 0
        leading = first_leading(jac.shape[1], several, dtype)
    stacked = lambda x: jnp.asarray(x, dtype).reshape(blocks, -1, x.shape[1])
    for _ in range(steps):
        before = stacked(jac if of is None else of)
        leading = next_leading(summed(lambda x: x, before, leading, precision), leading)
    sums = summed(lambda x: x, stacked(jac), leading, precision)
    return factored(sums, leading, jnp.asarray(damping, dtype), solver, precision)


def unturned(columns):
    return _gram.Reflector.spanning(jnp.zeros((columns, 0)))


@pytest.mark.parametrize("columns", [3, 200])
def test_half_of_the_products_make_a_gram_matrix(columns):
    x = np.random.default_rng(0).standard_normal((50, columns)).astype("float32")
    got = np.tril(Lower.gram(jnp.asarray(x), "float32").matrix())
    want = np.tril(x.T.astype("float64") @ x)
    np.testing.assert_allclose(got, want, atol=1e-5 * want.max())  # rounding of float32
    if columns == 200:  # three panels of columns: two thirds of the entries
        rows = Lower.zeros(columns, "float32").rows
        assert sum(block.size for row in rows for block in row) < 0.68 * columns**2


@pytest.mark.parametrize(
    ("precision", "error"),
    # Roundings of 2^-24, about 2^-17, 2^-11 and 2^-8, a few times as large in a sum of 50 terms.
    [("float32", 1e-6), ("bfloat16_x3", 1e-4), ("float16", 2e-3), ("bfloat16", 2e-2)],
)
def test_gram_matrices_are_multiplied_as_asked(precision, error):
    """The entries leave the range of float16."""
    x = np.random.default_rng(0).standard_normal((50, 20)).astype("float32") * 1e-7
    got = np.tril(Lower.gram(jnp.asarray(x), precision).matrix())
    want = np.tril(x.T.astype("float64") @ x)
    off = np.abs(got - want).max() / want.max()
    assert off < error
    if precision != "float32":
        assert off > error / 1e3


@pytest.mark.parametrize("solver", [None, "Cholesky", "QR"])
@pytest.mark.parametrize("precision", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
def test_the_factorization_solves(precision, solver):
    """Compares with NumPy in float64, at singular values from 1 to 1e-3 and a damping of 1e-6, with
    one block and with four."""
    if solver is not None:
        solver = getattr(pytest.importorskip("lineax"), solver)()
    with jax.enable_x64(precision == "float64"):
        jac = with_singular_values(12, np.logspace(0, -3, 5))
        for blocks in (1, 4):
            solve = solver_of(jac, 1e-6, precision, blocks=blocks, solver=solver)
            for b in np.random.default_rng(1).standard_normal((2, 12)) @ jac:
                want = np.linalg.solve(jac.T @ jac + 1e-6 * np.eye(5), b)
                got = solve(jnp.asarray(b, precision))
                assert got.dtype == precision
                # The square of the condition is 5e5, times the rounding.
                rtol = 1e-9 if precision == "float64" else 0.2
                assert np.linalg.norm(got - want) < rtol * np.linalg.norm(want)


@pytest.mark.slow
def test_rounding_is_relative_to_what_the_leading_directions_leave():
    """The singular values fall to 1e-5, whose square is below the rounding of float32."""
    spreads = []
    for seed in range(5):
        jac = with_singular_values(80, np.logspace(0, -5, 40), seed)
        plain = solver_of(jac, 1e-11, "float32", leading=unturned(40))
        both = plain, solver_of(jac, 1e-11, "float32", steps=3)
        spreads.append([preconditioned(jac, 1e-11, solve) for solve in both])
    # 1e3 and about 40. The median is compared, because rounding remains, with much scatter.
    plain, deflated = np.median(spreads, axis=0)
    assert plain > 500
    assert deflated < plain / 10


def preconditioned(jac, damping, solve):
    """Returns the condition that remains after preconditioning, in float64."""
    inverse = np.asarray(jax.vmap(solve)(jnp.eye(jac.shape[1])), "float64")
    values = np.linalg.eigvals(inverse @ (jac.T @ jac + damping * np.eye(jac.shape[1]))).real
    return values.max() / np.abs(values).min()


def test_a_matrix_that_rounding_makes_indefinite_is_shifted():
    """All columns are equal."""
    x = np.random.default_rng(0).standard_normal((300, 1)).astype("float32")
    jac = np.concatenate([x] * 30, axis=1)
    solve = solver_of(jac, 1e-30, "float32", leading=unturned(30))
    assert np.isfinite(solve(jnp.ones(30))).all()


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "error"), [("bfloat16_x3", 1e-3), ("bfloat16", 0.3)])
def test_a_wide_matrix_is_factorized_by_narrow_products(precision, error, monkeypatch):
    """The panels end behind the matrix. The errors are those of a Gram matrix in that precision,
    about 2^-17 and 2^-8, times its condition of a hundred."""
    monkeypatch.setattr(_gram, "WIDE", 100)
    jac = with_singular_values(300, np.geomspace(1, 0.1, 200))
    b = np.random.default_rng(1).standard_normal(200)
    got = solver_of(jac, 1e-4, precision)(jnp.asarray(b, "float32"))
    want = np.linalg.solve(jac.T @ jac + 1e-4 * np.eye(200), b)
    assert np.linalg.norm(got - want) < error * np.linalg.norm(want)


def test_a_factor_by_steps_is_that_of_cholesky():
    x = np.random.default_rng(0).standard_normal((300, 200))
    gram = jnp.asarray(np.tril(x.T @ x), "float32")
    raised = jnp.linspace(0.0, 9.0, 200)
    want = np.linalg.cholesky(x.T @ x + np.diag(raised)).T
    np.testing.assert_allclose(_gram.by_steps(gram, raised, "bfloat16_x9", 5), want, atol=2e-4)
    assert np.isnan(_gram.by_steps(-gram, raised, "bfloat16_x3", 5)).any()


@pytest.mark.slow
@pytest.mark.parametrize(("turned", "damping"), [(0.0, 1e-14), (1e-2, 1e-11)])
def test_a_float32_gram_matrix_solves_in_float64(turned, damping):
    """It takes 9 iterations at a condition of 1e7. The leading directions are those of a Jacobian
    with these singular vectors or `turned` ones, as from step to step. A factorization applied in
    float32 along them takes 21; with `turned` and their coupling in float32 it takes 25."""
    values = np.append(np.logspace(0, -6, 50), np.full(150, 1e-8))
    if not turned:
        values = np.append(np.logspace(0, -4, 50), np.logspace(-5, -7, 150))
    jac, b = with_singular_values(300, values), np.random.default_rng(1).standard_normal(300)
    turn = np.random.default_rng(2).standard_normal((200, 200)) * turned / np.sqrt(200)
    before, after = np.eye(200) + (turn - turn.T) / 2, np.eye(200) - (turn - turn.T) / 2
    with jax.enable_x64(True):
        x, iterations = _gram.conjugate_gradients(
            lambda v: jac @ v,
            lambda b: jac.T @ b,
            solver_of(jac, damping, "float32", of=jac @ np.linalg.solve(after, before), steps=8),
            jnp.asarray(damping),
            jnp.asarray(b),
            jnp.asarray(jac.T @ b),
            jnp.sum(jnp.asarray(jac) ** 2, axis=0),
            most=100,
            close=1e-9,
        )
    left, _, right = np.linalg.svd(jac, full_matrices=False)
    part = values / np.sqrt(values**2 + damping)
    off = (right @ np.asarray(x)) * values / part - part * (left.T @ b)
    assert iterations <= 12
    # The requested share of the decrease.
    assert np.sum(off**2) < 1e-9 * np.sum((part * (left.T @ b)) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("damping", [1e-14, 1e-9])
def test_more_leading_directions_than_rows_are_factorized(damping):
    """The rest without the leading directions is rounding, of either sign."""
    jac = np.random.default_rng(0).standard_normal((5, 400))
    solve = solver_of(jac, damping, "float32")
    assert np.isfinite(solve(jnp.asarray(jac.sum(axis=0), "float32"))).all()

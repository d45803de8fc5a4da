"""Conjugate gradients behind a rounded Jacobian."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_gram import solver_of, with_singular_values

from mpx_pde.second_order._conjugate import refined


@pytest.mark.parametrize("most", [0, 20])
def test_products_in_full_refine_a_solve_by_a_rounded_jacobian(most):
    """Singular values from 1 to 1e-3, and a Jacobian with eight bits."""
    jac = with_singular_values(20, np.logspace(0, -3, 6))
    b, damping = jac @ np.ones(6), 1e-7
    solve = solver_of(jnp.asarray(jac, "bfloat16"), damping, "float32")
    full, rows = jnp.asarray(jac, jnp.float32), jnp.asarray(b, jnp.float32)
    pull, damped = lambda b: b @ full, jnp.array(damping, jnp.float32)
    with jax.default_matmul_precision("highest"):
        got = solve(pull(rows))
        if most:
            push = lambda x: full @ x
            got, taken = refined(push, pull, solve, damped, rows, most=most, close=1e-9)
            assert 2 < taken <= most
    want = np.linalg.solve(jac.T @ jac + damping * np.eye(6), jac.T @ b)
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    # The rounded one is off by its smallest singular values; conjugate gradients are not.
    assert (error > 0.1) if not most else (error < 1e-2)


@pytest.mark.slow
def test_more_refinements_than_rounding_allows_do_no_harm():
    """In float32, with singular values from 1 to 1e-7 and a residual that stays, conjugate
    gradients are not conjugate for long; with the classical formulas these end at 1e30."""
    rng = np.random.default_rng(0)
    jac, damping = with_singular_values(120, np.logspace(0, -7, 60)), 1e-9
    b = jac @ rng.standard_normal(60) + 1e-3 * rng.standard_normal(120)
    full, rows = jnp.asarray(jac, jnp.float32), jnp.asarray(b, jnp.float32)
    small = jnp.array(damping, jnp.float32)
    solve = solver_of(full.astype(jnp.float16), small, "float32", leading=jnp.zeros((60, 0)))
    objective = lambda x: np.sum((jac @ x - b) ** 2) + damping * np.sum(x**2)

    def found(most, close=0.0):
        push, pull = lambda x: full @ x, lambda b: b @ full
        x, taken = refined(push, pull, solve, small, rows, most=most, close=close)
        return objective(np.asarray(x, np.float64)), int(taken)

    with jax.default_matmul_precision("highest"):
        first, *more = (found(most)[0] for most in (1, 20, 60, 1000))
        enough, taken = found(1000, 0.01)
    best = objective(np.linalg.solve(jac.T @ jac + damping * np.eye(60), jac.T @ b))
    assert first > 10 * best
    assert max(more) < 1.01 * best
    # To a hundredth of what it falls, in a few.
    assert enough - best < 0.01 * (objective(np.zeros(60)) - best)
    assert taken < 20


def test_a_good_preconditioner_needs_one_iteration():
    jac = with_singular_values(20, np.logspace(0, -1, 6))
    full = jnp.asarray(jac, jnp.float32)
    solve = solver_of(jac, 1e-3, "float32")
    push, pull = lambda x: full @ x, lambda b: b @ full
    b, damping = jnp.ones(20), jnp.array(1e-3, jnp.float32)
    assert refined(push, pull, solve, damping, b, most=20, close=0.01)[1] == 1

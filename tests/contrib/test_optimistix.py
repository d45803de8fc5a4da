"""Tests Levenberg–Marquardt steps in the loop of optimistix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx_pde as mpx


optx = pytest.importorskip("optimistix")


@pytest.mark.slow
def test_it_finds_what_the_solver_of_optimistix_finds():
    """A circle through noisy points, with a PyTree as `y`, arguments and `aux`."""
    angles = np.linspace(0, 3, 20)
    noise = 0.1 * np.random.default_rng(0).standard_normal((20, 2))
    points = np.stack([1 + 2 * np.cos(angles), -1 + 2 * np.sin(angles)], axis=1) + noise

    def circle(y, args):
        away = jnp.sqrt(jnp.sum((args - y["center"][None]) ** 2, axis=1))
        return {"off": away - y["radius"]}, away

    with jax.enable_x64(True):
        start = {"center": jnp.zeros(2), "radius": jnp.ones(())}
        ours = mpx.contrib.least_squares_solver(1e-9, 1e-9, forward="float64")
        theirs = optx.LevenbergMarquardt(1e-9, 1e-9)
        found, want = (
            optx.least_squares(circle, solver, start, jnp.asarray(points), has_aux=True)
            for solver in (ours, theirs)
        )
    assert found.result == optx.RESULTS.successful
    # Both end where a step is below 1e-9.
    np.testing.assert_allclose(found.value["center"], want.value["center"], rtol=1e-7)
    np.testing.assert_allclose(found.value["radius"], want.value["radius"], rtol=1e-7)
    np.testing.assert_allclose(found.aux, want.aux, rtol=1e-7)
    assert found.stats["state"].steps > 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fn", "start", "want"),
    [
        (lambda y, _: y**3 - 8, 1.0, 2.0),  # the first step is seven times too long
        (lambda y, _: jnp.arctan(50 * y), 3.0, 0.0),
        (lambda y, _: jnp.log(y) + 5, 1.0, np.exp(-5)),  # at the first step it is NaN
        (lambda y, _: jnp.stack([y - 1, y + 1]), 3.0, 0.0),  # the loss does not vanish
    ],
)
def test_rejected_steps_do_not_end_it(fn, start, want):
    """The damping may have to grow by many powers of two before the loss falls."""
    with jax.enable_x64(True):
        solver = mpx.contrib.least_squares_solver(1e-10, 1e-10)
        solve = lambda y: optx.least_squares(fn, solver, y, max_steps=100)
        found = jax.jit(solve)(jnp.array(start))  # raises if it did not succeed
    assert found.value.dtype == np.float64
    np.testing.assert_allclose(found.value, want, rtol=1e-7, atol=1e-7)


@pytest.mark.slow
def test_what_is_not_finite_is_no_success():
    solver = mpx.contrib.least_squares_solver(1e-5, 1e-5)
    start = jnp.array(-1.0)
    found = optx.least_squares(lambda y, _: jnp.log(y), solver, start, throw=False)
    assert found.result == optx.RESULTS.nonlinear_divergence
    np.testing.assert_array_equal(found.value, start)


@pytest.mark.slow
def test_a_residual_may_be_narrower_than_what_is_optimized():
    with jax.enable_x64(True):
        solver = mpx.contrib.least_squares_solver(1e-6, 1e-6, forward="float32")
        found = optx.least_squares(lambda y, _: y**2 - 2, solver, jnp.array(1.0))
    np.testing.assert_allclose(found.value, np.sqrt(2), rtol=1e-6)

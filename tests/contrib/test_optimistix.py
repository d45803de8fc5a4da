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

"""Tests the code that the problems share, and the references of some problems."""

import dataclasses
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import avals, oscillation, tree_equal_bits
from pages import module

import mpx_pde as mpx


shared, runner, naive, spectral = map(module, ("_problem", "_runner", "_naive", "references"))


# Examples are programs of users.
pytestmark = pytest.mark.usefixtures("standard_promotion")


# --- The loop, with a small problem -----------------------------------------------------------


GIVEN = {"title": "small", "coords": "x", "order": 2, "optimizer": "adam", "learning_rate": 1e-3}
SMALL_PROBLEM = shared.Problem(
    **GIVEN,
    network=lambda key: mpx.nn.CoordinateMLP(1, "scalar", 8, 2, key=key),
    loss=oscillation,
    sample=lambda key: jax.random.uniform(key, (16, 1)),
    errors=lambda u: {"u(0)": float(u(jnp.zeros(1)))},
)


def trainer(precision="float16", **given):
    return runner.Trainer(dataclasses.replace(SMALL_PROBLEM, **given), precision, steps=200)


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["derivatives", "gradients"])
def test_a_skipped_step_changes_the_scaling_alone(broken):
    given = {"loss": lambda *a, **k: 1e12 * oscillation(*a, **k)} if broken == "gradients" else {}
    training, points = trainer(), jax.random.uniform(jax.random.key(1), (16, 1))
    state, _ = training.initial(0)
    state, _ = training.step(state, points)  # gives it moments and an average
    if broken == "derivatives":
        # Hidden products are about 2^20, beyond float16.
        heavy = lambda u: eqx.tree_at(lambda u: u.hidden[0].weight, u, replace_fn=lambda w: w * 1e6)
        state = state._replace(model=heavy(state.model))
    new, (_, finite) = trainer(**given).step(state, points)
    assert not finite
    for name in ("model", "opt_state", "average"):
        assert tree_equal_bits(getattr(new, name), getattr(state, name))
    before, after = state.scaling, new.scaling
    if broken == "derivatives":
        assert after.derivatives.exponents[0] == before.derivatives.exponents[0] - 1
        assert after.loss.loss_scaling == before.loss.loss_scaling
    else:
        assert after.derivatives.exponents[0] == before.derivatives.exponents[0]
        assert after.loss.loss_scaling == before.loss.loss_scaling / 2


@pytest.mark.slow
def test_naive_float16_is_float16_everywhere():
    options = {"fourier_features": (4, 1.0), "key": jax.random.key(0)}
    network = mpx.nn.CoordinateMLP(2, "scalar", 8, 2, **options)
    plain = mpx.cast_to_float16(naive.without_protection({"u": network})["u"])
    slopes = mpx.partials(plain, ["u_x", "u_xx"], coords="xy", outputs="u").report(jnp.zeros(2))
    assert [e.rule for e in slopes.equations if e.primitive == "custom_jvp_call"] == ["nested"]
    assert all(dtype.startswith("float16") for dtype, _ in avals(plain))
    point = jnp.asarray([0.3, 0.7], jnp.float16)
    assert plain(point).dtype == jnp.float16
    # The function is the same up to some ten roundings of 2^-11 of values of about 1.
    assert np.isclose(plain(point), network(point.astype(jnp.float32)), atol=2.0**-6)


# --- The references --------------------------------------------------------------------------


def test_burgers_reference_solves_the_equation():
    burgers = module("burgers_1d")
    exact, nu = burgers.solution, burgers.NU
    x = np.linspace(-1, 1, 9)
    assert np.allclose(exact(0.0, x), -np.sin(np.pi * x), atol=1e-14)
    assert np.allclose(exact(np.linspace(0, 1, 5), 1.0), 0, atol=1e-14)
    t, x, h = 0.4, np.linspace(-0.9, 0.9, 19), 1e-4
    u = exact(t, x)
    u_t = (exact(t + h, x) - exact(t - h, x)) / (2 * h)
    u_x = (exact(t, x + h) - exact(t, x - h)) / (2 * h)
    u_xx = (exact(t, x + h) - 2 * u + exact(t, x - h)) / h**2
    # Central differences err by h² times third and fourth derivatives, up to 1e4 near the shock.
    assert np.allclose(u_t + u * u_x, nu * u_xx, atol=1e-3)


def test_spectral_solver_is_of_fourth_order():
    x = np.linspace(-1, 1, 64, endpoint=False)
    u = np.cos(np.pi * x) * (1 + 0.3 * np.sin(np.pi * x))
    given = {"diffusivity": 1e-2, "reaction": 5.0, "length": 2.0, "time": 0.5}
    solve = lambda steps: spectral.allen_cahn(u, steps=steps, every=steps, **given)[-1]
    fine = solve(2560)
    errors = [np.linalg.norm(solve(steps) - fine) for steps in (40, 80, 160)]
    for coarse, half in itertools.pairwise(errors):
        assert 12 < coarse / half < 20  # 2⁴


def test_allen_cahn_reference_is_fine_enough():
    """The trainings have errors above 1e-5."""
    example = module("allen_cahn")
    coarse, fine = example.reference(2048, 400).values, example.reference().values
    assert np.linalg.norm(coarse - fine) < 2e-6 * np.linalg.norm(fine)


@pytest.mark.slow
def test_the_right_hand_side_in_many_dimensions_is_the_laplacian():
    example = module("poisson_1000d")
    x = 0.9 * example.ball(jax.random.key(1), 2)
    # The trace sums 1,000 second derivatives, by columns of the Hessian.
    gradient = jax.grad(example.solution)
    column = lambda p, e: jnp.vdot(jax.jvp(gradient, (p,), (e,))[1], e)
    trace = jax.jit(jax.vmap(lambda p: jnp.sum(jax.vmap(lambda e: column(p, e))(jnp.eye(1000)))))
    # Sums of 1,000 terms of either sign in float32.
    assert np.allclose(trace(x), jax.vmap(example.right_hand_side)(x), rtol=1e-4)


@pytest.mark.slow
def test_helmholtz_source_and_residual_against_float64():
    example = module("helmholtz")
    points = np.random.default_rng(0).uniform(-1, 1, (32, 2))
    u = example.network(jax.random.key(0))
    got = np.asarray(jax.jit(example.residuals)(u, jnp.float32(points)))

    def laplacian(fun, points):
        return jax.vmap(lambda p: jnp.trace(jax.hessian(fun)(p)))(points)

    with jax.enable_x64(True):
        points = jnp.asarray(points)
        exact = example.solution
        source = laplacian(exact, points) + example.K**2 * jax.vmap(exact)(points)
        assert np.allclose(example.source(points), source, rtol=1e-11, atol=1e-11)
        wide = mpx.cast_tree(naive.without_protection(u), "float64")
        want = laplacian(wide, points) + example.K**2 * jax.vmap(wide)(points) - source
        want = np.asarray(want) / example.SIZE
    # The float32 Laplacian sums many terms of either sign.
    assert np.allclose(got, want, atol=1e-4 * np.abs(want).max())

"""The examples run, and what they measure themselves against is right."""

import dataclasses
import importlib
import inspect
import itertools
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import avals, tree_equal_bits
from rich.progress import Progress
from scipy.integrate import solve_ivp
from test_docs import ROOT

import mpx_pde as mpx


sys.path.insert(0, str(ROOT / "examples"))
pinn = importlib.import_module("_pinn")
spectral = importlib.import_module("_spectral_reference")
EXAMPLES = ("burgers", "allen_cahn", "helmholtz", "high_dimensions")


@pytest.fixture(autouse=True)
def promotion_of_numpy():
    """Examples are programs of users, who have JAX's own promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


# --- The programs ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_trains_tells_and_draws(name, tmp_path, monkeypatch):
    monkeypatch.setattr(pinn, "STEPS_PER_CALL", 4)
    example = importlib.import_module(name)
    [result] = example.main(["float16"], steps=5, out=tmp_path).values()
    assert result.loss.shape == (8,)
    assert np.isfinite(result.loss).all()
    assert not result.skipped.any()
    assert len(result.history) == 2
    assert 0 < result.error < 10
    assert {p.name for p in tmp_path.iterdir()} == {f"{name}.png", f"{name}-float16-ranges.png"}


def test_the_command_line_has_the_options_of_run():
    options = vars(pinn.arguments("An example.", small(), out="folder").parse_args([]))
    known = inspect.signature(pinn.run).parameters
    assert set(options) == set(known) - {"problem"}
    for name, value in options.items():
        assert value == known[name].default or name == "out"


# --- The loop, with a small problem -----------------------------------------------------------


def small(loss_scale=2.0**10):
    """u'' = −u on points in [0, 1], by a small network."""

    def loss(u, points, *, derivatives=None):
        d = mpx.partials(u, ["u", "u_xx"], coords="x", outputs="u", scaling=derivatives)
        d = jax.vmap(d)(points)
        return jnp.mean((d["u_xx"] + d["u"]) ** 2)

    return pinn.Problem(
        name="small",
        title="small",
        network=lambda key: mpx.nn.CoordinateMLP(1, "scalar", 8, 2, key=key),
        loss=loss,
        points=lambda _, key: jax.random.uniform(key, (pinn.STEPS_PER_CALL, 16, 1)),
        errors=lambda u: {"u(0)": float(u(jnp.zeros(1)))},
        draw=lambda figure, results: None,
        derivatives=lambda _, mode: mpx.DerivativeScaling.per_direction("x", order=2, mode=mode),
        full=pinn.Training(200, 1e-3),
        quick=pinn.Training(100, 1e-3),
        loss_scale=loss_scale,
    )


def train(precision, problem=None, **options):
    with Progress(disable=True) as progress:
        options = {"steps": 200, "learning_rate": 1e-3, "seed": 0, **options}
        return pinn.train(problem or small(), precision, progress=progress, **options)


def test_a_run_climbs_a_ladder(monkeypatch):
    half = train("bfloat16", steps=300)
    monkeypatch.setattr(mpx.PrecisionFloor, "reached", property(lambda floor: True))
    both = train("bfloat16", steps=300, rungs=("half", "float32", "full"))
    assert both.climbs == {"float32": 100, "full": 200}
    assert both.label == "bfloat16, climbing"
    assert len(both.history) == 2  # none in full
    assert np.array_equal(both.loss[:100], half.loss[:100])
    assert not np.array_equal(both.loss[100:], half.loss[100:])
    # The loss is that of float32 from there on, and the weights are no longer rounded.
    assert both.errors_as_trained == both.errors
    assert half.errors_as_trained != half.errors
    assert train("float32", rungs=("half", "full")).climbs == {}


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16", "naive-float16"])
def test_a_step_of_any_precision_takes_and_gives_the_same_state(precision):
    problem, optimizer = small(), optax.adam(1e-3)
    state, points = start(problem, optimizer, precision)
    new, (_, finite) = pinn.step(problem, optimizer, precision, 0.1, state, points)
    assert finite
    assert jax.tree.structure(new) == jax.tree.structure(state)
    assert avals(new) == avals(state)
    assert not tree_equal_bits(new.model, state.model)


def start(problem, optimizer, precision="float16"):
    model = problem.network(jax.random.key(0))
    scaling = mpx.DynamicLossScaling(problem.loss_scale)
    if precision == pinn.NAIVE:
        model = pinn.without_protection(model)
    else:
        scaling = mpx.Scaling(scaling, problem.derivatives(model, "paper"))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    state = pinn.State(model, opt_state, scaling, average=model)
    return state, jax.random.uniform(jax.random.key(1), (16, 1))


@pytest.mark.parametrize("broken", ["derivatives", "gradients"])
def test_a_skipped_step_changes_the_scaling_alone(broken):
    problem, optimizer = small(), optax.adam(1e-3)
    state, points = start(problem, optimizer)
    state, _ = pinn.step(problem, optimizer, "float16", 0.1, state, points)  # moments, an average
    if broken == "derivatives":
        # Hidden products of about 2^20, beyond float16.
        heavy = lambda u: eqx.tree_at(lambda u: u.hidden[0].weight, u, replace_fn=lambda w: w * 1e6)
        state = state._replace(model=heavy(state.model))
    else:
        loss = lambda *args, **kwargs: 1e12 * small().loss(*args, **kwargs)
        problem = dataclasses.replace(problem, loss=loss)
    new, (_, finite) = pinn.step(problem, optimizer, "float16", 0.1, state, points)
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


def test_skipped_steps_are_counted_early_and_late():
    # Points that are no numbers, in two of each hundred steps.
    def points(_, key):
        return small().points(_, key).at[jnp.array([5, 15])].set(jnp.nan)

    result = train("float16", dataclasses.replace(small(), points=points))
    assert np.array_equal(np.flatnonzero(result.skipped), [5, 15, 105, 115])
    assert result.skipped_late == 3  # of 200 steps the first ten are warm-up


def test_the_first_step_finds_a_scale_that_it_survives():
    loss = lambda *args, **kwargs: 2.0**20 * small().loss(*args, **kwargs)
    result = train("float16", dataclasses.replace(small(), loss=loss, loss_scale=2.0**15))
    assert not result.skipped.any()
    assert result.scale[0] < 2.0**15


def test_naive_float16_is_float16_everywhere():
    network = mpx.nn.CoordinateMLP(
        2, "scalar", 8, 2, key=jax.random.key(0), fourier_features=(4, 1.0)
    )
    plain = mpx.cast_to_float16(pinn.without_protection({"u": network})["u"])
    slopes = mpx.partials(plain, ["u_x", "u_xx"], coords="xy", outputs="u").report(jnp.zeros(2))
    assert [e.rule for e in slopes.equations if e.primitive == "custom_jvp_call"] == ["nested"]
    dtypes = {dtype for dtype, _ in avals(plain)}
    assert all(d.startswith("float16") for d in dtypes)
    point = jnp.asarray([0.3, 0.7], jnp.float16)
    assert plain(point).dtype == jnp.float16
    # The same function, but for rounding: some ten roundings of 2^-11 of values of about 1.
    assert np.isclose(plain(point), network(point.astype(jnp.float32)), atol=2.0**-6)


def test_points_are_chosen_where_residuals_are_large():
    points = jnp.linspace(0, 1, 1000)[:, None]
    residuals = jnp.where(points[:, 0] < 0.1, 1.0, 0.0)
    batches = pinn.choose(jax.random.key(0), points, residuals, 64)
    assert batches.shape == (pinn.STEPS_PER_CALL, 64, 1)
    # A tenth of the points with density 10 + 4, the others with 4: 28 %, give or take 6400 draws.
    assert np.isclose(np.mean(batches < 0.1), 0.28, atol=0.03)


# --- The references --------------------------------------------------------------------------


def test_burgers_reference_solves_the_equation():
    exact, nu = (
        getattr(importlib.import_module("_burgers_exact"), n) for n in ("exact_solution", "NU")
    )
    x = np.linspace(-1, 1, 9)
    assert np.allclose(exact(0.0, x), -np.sin(np.pi * x), atol=1e-14)
    assert np.allclose(exact(np.linspace(0, 1, 5), 1.0), 0, atol=1e-14)
    t, x, h = 0.4, np.linspace(-0.9, 0.9, 19), 1e-4
    u = exact(t, x)
    u_t = (exact(t + h, x) - exact(t - h, x)) / (2 * h)
    u_x = (exact(t, x + h) - exact(t, x - h)) / (2 * h)
    u_xx = (exact(t, x + h) - 2 * u + exact(t, x - h)) / h**2
    # Central differences: h² times third and fourth derivatives, of up to 1e4 near the shock.
    assert np.allclose(u_t + u * u_x, nu * u_xx, atol=1e-3)


def periodic(n):
    return np.linspace(-1, 1, n, endpoint=False)


SMALL = {"diffusivity": 1e-2, "reaction": 5.0, "length": 2.0, "time": 0.5}


def test_spectral_solver_is_of_fourth_order():
    u = np.cos(np.pi * periodic(64)) * (1 + 0.3 * np.sin(np.pi * periodic(64)))
    solve = lambda steps: spectral.allen_cahn(u, steps=steps, every=steps, **SMALL)[-1]
    fine = solve(2560)
    errors = [np.linalg.norm(solve(steps) - fine) for steps in (40, 80, 160)]
    for coarse, half in itertools.pairwise(errors):
        assert 12 < coarse / half < 20  # 2⁴


def test_spectral_solver_against_another_integrator():
    u = np.cos(np.pi * periodic(64))
    k = np.pi * np.arange(33)
    diffuse = lambda u: np.fft.irfft(-SMALL["diffusivity"] * k**2 * np.fft.rfft(u), 64)
    rate = lambda _, u: diffuse(u) + SMALL["reaction"] * (u - u**3)
    other = solve_ivp(rate, (0, 0.5), u, method="DOP853", rtol=1e-11, atol=1e-12).y[:, -1]
    assert np.allclose(spectral.allen_cahn(u, steps=200, **SMALL)[-1], other, atol=1e-8)


@pytest.mark.parametrize("value", [1.0, -1.0, 0.0])
def test_spectral_solver_rests_at_the_fixed_points(value):
    u = spectral.allen_cahn(np.full(32, value), steps=100, **SMALL)
    assert u.shape == (101, 32)
    assert np.allclose(u, value, atol=1e-13)


def test_allen_cahn_reference_is_fine_enough():
    """Errors of the trainings are above 1e-3."""
    example = importlib.import_module("allen_cahn")
    x = periodic(2048)
    fine = spectral.allen_cahn(
        x**2 * np.cos(np.pi * x),
        diffusivity=example.D,
        reaction=example.REACTION,
        length=2.0,
        time=1.0,
        steps=400,
        every=4,
    )[:, ::8]
    error = np.linalg.norm(example.REFERENCE[:, :-1] - fine) / np.linalg.norm(fine)
    assert error < 1e-5


def test_the_right_hand_side_in_many_dimensions_is_the_laplacian():
    example = importlib.import_module("high_dimensions")
    x = 0.9 * example.ball(jax.random.key(1), 2)
    # Of 1,000 second derivatives, by columns of the Hessian.
    gradient = jax.grad(example.solution)
    column = lambda p, e: jnp.vdot(jax.jvp(gradient, (p,), (e,))[1], e)
    trace = jax.jit(jax.vmap(lambda p: jnp.sum(jax.vmap(lambda e: column(p, e))(jnp.eye(1000)))))
    # Sums of 1,000 terms of either sign in float32.
    assert np.allclose(trace(x), jax.vmap(example.right_hand_side)(x), rtol=1e-4)


def test_allen_cahn_network_meets_the_initial_values_and_is_periodic():
    example = importlib.import_module("allen_cahn")
    u = example.AllenCahnNetwork(key=jax.random.key(0))
    values = pinn.evaluate(u, example.T, example.X)
    assert np.allclose(values[0], example.REFERENCE[0], atol=1e-6)
    assert np.allclose(values[:, 0], values[:, -1], atol=1e-5)
    slope = jax.jit(jax.vmap(mpx.partials(u, ["u_x"], coords="tx", outputs="u")))
    edges = [slope(jnp.asarray([[0.9, x]]))["u_x"][0] for x in (-1.0, 1.0)]
    # What is left of the jump by 4 of the initial slope: 4 e^(−9).
    assert np.isclose(*edges, atol=1e-3)


def test_helmholtz_source_and_residual_against_float64():
    example = importlib.import_module("helmholtz")
    points = np.random.default_rng(0).uniform(-1, 1, (32, 2))
    u = example.HelmholtzNetwork(key=jax.random.key(0))
    got = np.asarray(jax.jit(example.residuals)(u, jnp.float32(points)))

    def laplacian(fun, points):
        return jax.vmap(lambda p: jnp.trace(jax.hessian(fun)(p)))(points)

    with jax.enable_x64(True):
        points = jnp.asarray(points)
        exact = lambda p: (
            jnp.sin(example.A[0] * jnp.pi * p[0]) * jnp.sin(example.A[1] * jnp.pi * p[1])
        )
        assert np.allclose(jax.vmap(exact)(points), example.exact_solution(*points.T), atol=1e-13)
        source = laplacian(exact, points) + example.K**2 * jax.vmap(exact)(points)
        assert np.allclose(example.source(points), source, rtol=1e-11, atol=1e-11)
        wide = mpx.cast_tree(pinn.without_protection(u), "float64")
        want = laplacian(wide, points) + example.K**2 * jax.vmap(wide)(points) - source
        want = np.asarray(want) / example.SIZE
    # float32: a Laplacian of many terms of either sign.
    assert np.allclose(got, want, atol=1e-4 * np.abs(want).max())

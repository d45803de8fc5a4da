"""First scales, telemetry, and whole training runs."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx_pde as mpx
from mpx_pde import nn
from mpx_pde.derivatives import plot, telemetry
from mpx_pde.derivatives._calibrate import _chosen


def points(n=64):
    return jax.random.uniform(jax.random.key(1), (n, 2), minval=-1.0)


def sine_network(frequency, width=32):
    """A network whose first layer has large weights: its third derivatives overflow float16."""
    model = nn.CoordinateMLP(2, "scalar", width, 3, key=jax.random.key(0), activation=jnp.sin)
    return eqx.tree_at(lambda m: m.first.module.weight, model, replace_fn=lambda w: frequency * w)


def kdv(model, x, *, derivatives):
    terms = ["u", "u_t", "u_x", "u_xxx"]
    d = jax.vmap(mpx.partials(model, terms, coords="xt", outputs="u", scaling=derivatives))(x)
    residual = d["u_t"] + d["u"] * d["u_x"] + 0.0025 * d["u_xxx"]
    return jnp.mean(residual**2) + jnp.mean((d["u"] - jnp.cos(jnp.pi * x[:, 0])) ** 2)


def train(model, scaling, steps, **options):
    optimizer = optax.adam(1e-4)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state, scaling, x):
        run = mpx.filter_value_and_grad(kdv, scaling, keep_full=(False, True), **options)
        value, scaling, finite, grads = run(model, x)
        model, state = mpx.optimizer_update(model, optimizer, state, grads, finite)
        return model, state, scaling, value, finite

    losses, finites = [], []
    for _ in range(steps):
        model, state, scaling, value, finite = step(model, state, scaling, points())
        losses.append(float(value))
        finites.append(bool(finite))
    return losses, finites, scaling


def test_kdv_trains_only_with_derivative_scaling():
    model = sine_network(60.0)
    loss_scaling = mpx.DynamicLossScaling(2.0**-2)
    plain = mpx.DerivativeScaling.per_direction("xt", order=3, min_scale=1.0)
    _, never, _ = train(model, mpx.Scaling(loss_scaling, plain), 12)
    assert not any(never)
    free = mpx.DerivativeScaling.per_direction("xt", order=3)
    losses, finite, _ = train(model, mpx.Scaling(loss_scaling, free), 40)
    assert all(finite[20:])
    want, _, _ = train(model, mpx.Scaling(loss_scaling, free), 40, use_mixed_precision=False)
    assert losses[-1] < 1.1 * want[len(want) - 1 - finite.count(False)]
    # Calibrated at the start, nothing is lost.
    start = free.calibrate(model, points(), ["u_t", "u_x", "u_xxx"], coords="xt", outputs="u")
    _, finite, _ = train(model, mpx.Scaling(loss_scaling, start), 8)
    assert finite.count(False) <= 1  # the loss scale may have to settle


@pytest.mark.parametrize("make", ["direction", "order", "term"])
def test_calibration_finds_the_window(make):
    model = sine_network(150.0)
    options = {"min_scale": 2.0**-40} if make != "direction" else {}
    scaling = {
        "direction": partial(mpx.DerivativeScaling.per_direction, "xt"),
        "order": partial(mpx.DerivativeScaling.per_order, 3),
        "term": partial(mpx.DerivativeScaling.per_term, ["u_t", "u_xxx", "laplacian"]),
    }[make](**options)
    terms = ["u", "u_t", "u_xxx", "laplacian"]
    found = scaling.calibrate(model, points(), terms, coords="xt", outputs="u")
    assert jax.tree.structure(found) == jax.tree.structure(scaling)
    fun = lambda m, s: jax.vmap(
        mpx.partials(m, ["u_t", "u_xxx"], coords="xt", outputs="u", scaling=s)
    )(points())
    want = eqx.filter_jit(fun)(model, None)
    got = eqx.filter_jit(fun)(mpx.cast_to_float16(model), found)
    for name in got:
        error = np.linalg.norm(got[name] - want[name]) / np.linalg.norm(want[name])
        # Three orders through three layers in float16, some of them cancelling.
        assert error < 0.04
    assert not np.isfinite(eqx.filter_jit(fun)(mpx.cast_to_float16(model), scaling)["u_xxx"]).all()
    with mpx.half_precision("bfloat16"):
        assert scaling.calibrate(model, points(), terms, coords="xt", outputs="u") is scaling


@pytest.mark.parametrize("seed", [0, 1])
def test_calibration_does_not_take_a_scale_that_is_right_by_luck(seed):
    """Of a derivative that is nearly the same at all points there is one error, which is small now
    and then where half of its digits are lost."""
    fun = nn.CoordinateMLP(1, "scalar", 16, 2, key=jax.random.key(seed))
    shrink = lambda w: 1e-3 * w
    fun = eqx.tree_at(lambda m: m.first.module.weight, fun, replace_fn=shrink)
    scaling = mpx.DerivativeScaling.per_term(["u_x"])
    found = scaling.calibrate(fun, points()[:, :1], ["u_x"], coords="x", outputs="u")

    @eqx.filter_jit
    def derivative(fun, scaling):
        terms = mpx.partials(fun, ["u_x"], coords="x", outputs="u", scaling=scaling)
        return jax.vmap(terms)(points()[:, :1])["u_x"]

    # In the middle of its window a scale may fall or rise, and changes next to nothing.
    half = mpx.cast_to_float16(fun)
    here = derivative(half, found)
    for by in (-2, 2):
        other = scaling.with_exponents(found.exponents + by)
        np.testing.assert_allclose(derivative(half, other), here, rtol=2.0**-12)


@pytest.mark.parametrize(
    ("table", "steps", "chosen"),
    [
        # Underflow, a scale of luck, underflow, the window, overflow.
        ([1, 0.2, 3e-5, 0.02, *[3e-4] * 5, np.inf], 2, 1),
        ([1, 0.2, 3e-5, 0.02, *[3e-4] * 5, np.inf], 9, 1),
        # Next to nothing is as good as what float16 can do.
        ([1, *[2e-4] * 4, *[1e-7] * 5], 1, 0),
        # A window of one scale, of none.
        ([1] * 5 + [1e-3] + [np.inf] * 4, 3, 0),
        ([np.inf] * 4 + [1e-3] + [np.inf] * 5, 3, -1),
        ([np.inf] * 10, 3, -5),
    ],
)
def test_the_scale_that_is_chosen(table, steps, chosen):
    assert _chosen(range(-5, 5), np.array([table]), steps) == chosen


def test_calibration_of_a_laplacian_over_some_coordinates():
    model = mpx.nn.CoordinateMLP(3, "scalar", 8, 2, activation=jnp.sin, key=jax.random.key(0))
    x = jax.random.uniform(jax.random.key(1), (16, 3))
    scaling = mpx.DerivativeScaling.per_direction("txy", order=2)
    # Time in seconds and space in units of 10 µm: no scale serves both.
    stretch = jnp.array([[1.0, 1e5, 1e5]])
    x = x / stretch
    fun = eqx.tree_at(lambda m: m.first.module.weight, model, replace_fn=lambda w: w * stretch.T)
    options = {"coords": "txy", "outputs": "u"}
    found = scaling.calibrate(fun, x, ["u_t", "laplacian"], over="xy", **options)
    np.testing.assert_array_less(found.exponents[1:], found.exponents[0])
    # Where no scale helps, the smallest.
    lost = eqx.tree_at(lambda m: m.first.module.weight, fun, replace_fn=lambda w: w * 1e10)
    found = scaling.calibrate(lost, x, ["u_t", "laplacian"], over="xy", **options)
    np.testing.assert_array_equal(found.exponents[1:], scaling.rule.lowest[1:])
    for case in (
        mpx.DerivativeScaling.per_order(1),
        mpx.DerivativeScaling.per_direction("txy", order=1),
        mpx.DerivativeScaling.per_term(["u_x"]),
    ):
        with pytest.raises(ValueError, match=r"`DerivativeScaling\.calibrate`.*Laplacian"):
            case.calibrate(fun, x, ["laplacian"], **options)
    with pytest.raises(ValueError, match=r"`DerivativeScaling\.calibrate`.*no scale for 't', 'y'"):
        mpx.DerivativeScaling.per_direction("x").calibrate(fun, x, ["u_x"], **options)


def test_telemetry_and_its_picture(tmp_path):
    model = sine_network(20.0)
    scaling = mpx.Scaling(
        mpx.NoOpLossScaling(),
        mpx.DerivativeScaling.per_direction("xt", order=3, init_scale=2.0**-4, terms=["u_x"]),
    )
    step = eqx.filter_jit(
        lambda s: mpx.filter_grad(kdv, s, keep_full=(False, True))(model, points())[0]
    )
    new = step(scaling)
    log = eqx.filter_jit(telemetry)(new)
    assert all(eqx.is_array(x) for x in jax.tree.leaves(log))
    total = {
        n: int(log["counts"][n].sum() + log["zeros"][n] + log["nonfinite"][n])
        for n in log["counts"]
    }
    assert {n: c for n, c in total.items() if c} == {"u_x": 64, "_t": 64, "_xxx": 64}
    assert int(log["shift"]["_xxx"]) == -12
    # The exponents are those of the unscaled derivative.
    u_x = jax.vmap(mpx.partials(model, ["u_x"], coords="xt", outputs="u"))(points())["u_x"]
    seen = np.asarray(log["exponents"]["u_x"])[np.asarray(log["counts"]["u_x"]) > 0]
    assert abs(seen.max() - np.floor(np.log2(np.abs(u_x).max()))) <= 1
    assert set(log["scale"]) == {"x", "t"}
    figure = plot([telemetry(new), telemetry(step(new))])
    figure.savefig(tmp_path / "ranges.png")
    with pytest.raises(ValueError, match="empty"):
        plot([])
    with pytest.raises(TypeError, match="DerivativeScaling"):
        telemetry(mpx.NoOpLossScaling())

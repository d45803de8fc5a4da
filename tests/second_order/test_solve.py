"""Tests the loop of one call, and the points that it draws."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tree_equal_bits

import mpx_pde as mpx


def fit(w, x):
    return jnp.tanh(w["in"] @ x) @ w["out"] - jnp.sin(3 * x[0])


def weights():
    keys = jax.random.split(jax.random.key(0))
    return {"in": jax.random.normal(keys[0], (6, 2)), "out": jax.random.normal(keys[1], (6,)) / 3}


POINTS = mpx.Points((-1.0, 1.0), (1.0, 2.0), 40, residual=fit)


def test_points_are_even_and_lie_where_the_residual_is_large():
    key = jax.random.key(1)
    even = mpx.Points((0.0, -1.0), (1.0, 3.0), 256)(None, key=key)
    assert even.shape == (256, 2)
    counts, *_ = np.histogram2d(*np.asarray(even).T, bins=4, range=[(0, 1), (-1, 3)])
    assert np.ptp(counts) <= 6  # 16 each; uniform ones differ by about 14
    corner = lambda _, x: jnp.where(jnp.all(x < 0.25), 1.0, 1e-3)
    drawn = mpx.Points((0.0, 0.0), (1.0, 1.0), 64, residual=corner)(None, key=key)
    inside = jnp.all(drawn < 0.25, axis=1)
    assert jnp.sum(inside[32:]) >= 24  # of 512 candidates, 32 are there
    assert jnp.sum(inside[:32]) <= 4


def test_points_on_faces():
    found = np.asarray(
        mpx.Points((0.0, -1.0), (1.0, 3.0), 40, faces=(0, 1))(None, key=jax.random.key(0))
    )
    for axis, ends in ((0, (0.0, 1.0)), (1, (-1.0, 3.0))):
        for end in ends:
            assert np.sum(found[:, axis] == end) == 10


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"high": (0.0, 2.0)}, "`low` below `high`"),
        ({"share": 2.0}, "`share` from 0 to 1"),
        ({"faces": (2,)}, "axes from 0 to 1"),
        ({"faces": 0}, "a tuple of axes"),
        ({"high": 1.0}, "`low` below `high`"),
        ({"high": (1.0, float("inf"))}, "one finite number"),
        ({"count": 4.5}, "a `count` and `candidates`"),
        ({"dtype": int}, "a floating-point `dtype`"),
    ],
)
def test_wrong_points(options, match, unchecked_annotations):
    with pytest.raises(ValueError, match=match):
        mpx.Points(**{"low": (0.0, 0.0), "high": (1.0, 1.0), "count": 4, **options})


@pytest.mark.parametrize(
    ("dtype", "size"), [("float16", 1e-4), ("float16", 1e4), ("float32", 1e25)]
)
def test_residuals_of_any_size_draw_points(dtype, size):
    """Their squares are beyond the dtype. Three quarters are drawn where they are large."""
    steep = lambda _, x: (jnp.where(x[0] < 0.5, 1.0, 3.0) * size).astype(dtype)
    draw = mpx.Points((0.0,), (1.0,), 400, residual=steep, candidates=20)
    drawn = draw(None, key=jax.random.key(1))[200:, 0]
    assert 0.65 < jnp.mean(drawn > 0.5) < 0.85  # 0.75 with a standard deviation of 0.03


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_residuals_that_tell_nothing_draw_other_points_than_the_even_ones(value):
    draw = mpx.Points((0.0,), (1.0,), 40, residual=lambda _, x: jnp.full((), value))
    drawn = draw(None, key=jax.random.key(1))
    assert len(np.unique(drawn)) > 32  # of 20, one or two are even ones too


def test_points_may_be_half():
    even = mpx.Points((0.0, -1.0), (1.0, 3.0), 64)
    half = mpx.Points((0.0, -1.0), (1.0, 3.0), 64, dtype="float16")(None, key=jax.random.key(1))
    assert half.dtype == jnp.float16
    want = np.asarray(even(None, key=jax.random.key(1)))
    np.testing.assert_allclose(half.astype(jnp.float32), want, atol=2e-3)  # half an ulp of 3


def test_limits_are_needed():
    with pytest.raises(ValueError, match="one of `steps`, `seconds` and `tolerance`"):
        mpx.solve(fit, weights(), POINTS)
    with pytest.raises(ValueError, match="a number `redraw` above 0"):
        mpx.solve(fit, weights(), POINTS, steps=3, redraw=0)


@pytest.mark.slow
def test_it_ends_for_the_reason_that_it_names(capsys):
    solved = mpx.solve(fit, weights(), POINTS, steps=60, tolerance=1e-3, redraw=5)
    assert solved.reason == "tolerance"
    assert solved.history["loss"][-1] == solved.state.loss <= 1e-3
    assert capsys.readouterr().err.endswith("\nended: tolerance\n")
    fixed = POINTS(weights(), key=jax.random.key(3))
    again = mpx.solve(fit, weights(), fixed, seconds=1e-9, progress=False)
    assert (again.reason, again.history["step"]) == ("seconds", [1, 2])  # the first compiles
    assert capsys.readouterr().err == ""
    exact = lambda w, x: w - x
    done = mpx.solve(exact, jnp.zeros(()), (jnp.zeros(3),), steps=50, progress=False)
    assert (done.reason, len(done.history["step"])) == ("stuck", 3)


@pytest.mark.slow
def test_a_run_continues_from_its_checkpoint_bit_for_bit(tmp_path):
    """It ends between draws and at one."""
    make = functools.partial(mpx.LevenbergMarquardt, method="dual", jacobian="bfloat16")
    whole, each = (fit,), (POINTS,)
    options = {"optimizer": make, "redraw": 4, "progress": False, "key": jax.random.key(7)}
    want = mpx.solve(whole, weights(), each, steps=11, **options)
    for steps in (6, 8, 11):
        file = tmp_path / "run" / "checkpoint"
        got = mpx.solve(whole, weights(), each, steps=steps, checkpoint=file, **options)
        assert len(got.history["step"]) == steps
    same = lambda run: eqx.filter((run.model, run.state), eqx.is_array)
    assert tree_equal_bits(same(got), same(want))
    assert got.history["loss"] == want.history["loss"]


@pytest.mark.slow
def test_examples_that_are_passed_are_those_of_a_continued_run(tmp_path):
    """More and other examples than those of the checkpoint."""
    file, model = tmp_path / "checkpoint", weights()
    first = POINTS(model, key=jax.random.key(3))
    before = mpx.solve(fit, model, first, steps=2, progress=False, checkpoint=file)
    got = mpx.solve(fit, model, first[:9], steps=3, progress=False, checkpoint=file)
    optimizer = mpx.LevenbergMarquardt(fit)
    want, _ = eqx.filter_jit(optimizer.update)(before.model, before.state, first[:9])
    assert tree_equal_bits(got.model, want)


@pytest.mark.slow
def test_draws_may_differ_in_number_and_in_kind(tmp_path):
    """Two residuals, one with points that stay, and a model with a key, which is no parameter."""
    model = {**weights(), "key": jax.random.key(1)}
    numbers = []

    def several(model, *, key):
        numbers.append(4 + int(jax.random.randint(key, (), 0, 9)))
        return jax.random.uniform(key, (numbers[-1], 2))

    run = functools.partial(
        mpx.solve, (fit, fit), model, (several, jnp.ones((3, 2))), redraw=2, progress=False
    )
    want = run(steps=7)
    assert len(set(numbers)) > 1
    file = tmp_path / "checkpoint"
    run(steps=5, checkpoint=file)
    got = run(steps=7, checkpoint=file)
    assert got.history["loss"] == want.history["loss"]
    assert jax.random.key_data(got.model["key"]).tolist() == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", None])
def test_keys_may_be_drawn(tmp_path, impl):
    """A residual with noise of its own for each example."""

    def noisy(w, example):
        point, key = example
        return fit(w, point) + 1e-2 * jax.random.normal(key)

    def keyed(model, *, key):
        n = 4 + int(jax.random.randint(key, (), 0, 9))
        words = jax.random.bits(key, (n, 4 if impl == "rbg" else 2), jnp.uint32)
        keys = words if impl is None else jax.random.wrap_key_data(words, impl=impl)
        return jax.random.uniform(key, (n, 2)), keys

    run = functools.partial(mpx.solve, noisy, weights(), keyed, redraw=2, progress=False)
    want, file = run(steps=7), tmp_path / "checkpoint"
    run(steps=5, checkpoint=file)
    assert run(steps=7, checkpoint=file).history["loss"] == want.history["loss"]


@pytest.mark.slow
def test_numpy_may_draw(tmp_path):
    """In float64, which no array of JAX's is by default."""

    def drawn(model, *, key):
        return np.random.default_rng(np.asarray(jax.random.key_data(key))).uniform(size=(9, 2))

    run = functools.partial(mpx.solve, fit, weights(), drawn, redraw=2, progress=False)
    want, file = run(steps=5), tmp_path / "checkpoint"
    run(steps=3, checkpoint=file)
    assert run(steps=5, checkpoint=file).history["loss"] == want.history["loss"]


@pytest.mark.slow
def test_the_checkpoint_of_another_run_is_told(tmp_path):
    file, options = tmp_path / "checkpoint", {"steps": 2, "progress": False}
    mpx.solve(fit, weights(), POINTS, checkpoint=file, **options)
    other = {"in": jnp.ones((5, 2)), "out": jnp.ones(5)}
    with pytest.raises(ValueError, match="not of a run with this model"):
        mpx.solve(fit, other, POINTS, checkpoint=file, **options)
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(ValueError, match="cannot continue from the checkpoint"):
        mpx.solve(fit, weights(), POINTS, checkpoint=file, **options)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"optimizer": mpx.LevenbergMarquardt(fit)}, TypeError, "function of these as `optimizer`"),
        ({"steps": "3"}, ValueError, "a number `steps` above 0"),
        ({"steps": 3, "redraw": 2.5}, ValueError, "an integer as `redraw`"),
    ],
)
def test_wrong_options(options, error, match, unchecked_annotations):
    with pytest.raises(error, match=match):
        mpx.solve(fit, weights(), POINTS, **options)

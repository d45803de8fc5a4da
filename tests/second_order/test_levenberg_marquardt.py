"""Tests Levenberg–Marquardt steps."""

import dataclasses
import importlib
from contextlib import nullcontext
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from helpers import equations, line_here, relative, tree_equal_bits
from jax.flatten_util import ravel_pytree

import mpx_pde as mpx
from mpx_pde.second_order import _dual, _low_rank, _primal
from mpx_pde.second_order._gram import PATIENCE
from mpx_pde.second_order._residuals import Linearized, parts_of


def first_step(optimizer, model, batch):
    return updated(optimizer, model, optimizer.init(model), batch)


def updated(optimizer, *args):
    out = eqx.filter_jit(optimizer.update)(*args)
    jax.effects_barrier()  # waits for warnings
    return out


def linear(w, example):
    a, b = example
    return jnp.sum(a * w) - b


def test_narrow_parameters_are_told_at_the_line_of_the_user():
    with pytest.warns(mpx.PrecisionWarning, match=r"LevenbergMarquardt.init.*float32") as told:
        mpx.LevenbergMarquardt(linear).init(jnp.ones(2, "bfloat16"))
    line = line_here(-1)
    assert [(warning.filename, warning.lineno) for warning in told] == [(__file__, line)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forward", "solver"),
    [
        ("float32", None),
        ("float64", None),
        pytest.param("float32", "Cholesky", marks=pytest.mark.slow),
        pytest.param("float64", "QR", marks=pytest.mark.slow),
    ],
)
def test_a_linear_problem_is_solved_at_once(forward, solver):
    """Compares one step of a negligible damping with NumPy."""
    solver = solver and getattr(pytest.importorskip("lineax"), solver)()
    with jax.enable_x64(forward == "float64"):
        rng = np.random.default_rng(0)
        a, b = rng.standard_normal((30, 6)).astype(forward), rng.standard_normal(30).astype(forward)
        options = {"forward": forward, "damping": 1e-12, "solver": solver}
        optimizer = mpx.LevenbergMarquardt(linear, **options)
        batch = (jnp.asarray(a), jnp.asarray(b))
        w, state = first_step(optimizer, jnp.zeros(6, forward), batch)
        want, rest, *_ = np.linalg.lstsq(a.astype("float64"), b.astype("float64"))
        # Rounding of the solve at a condition of 3.
        rtol = {"float32": 1e-5, "float64": 1e-10}[forward]
        np.testing.assert_allclose(w, want, rtol=rtol)
        np.testing.assert_allclose(state.loss, rest[0] / 30, rtol=rtol)
        assert state.taken
        assert (state.steps, state.rejected) == (1, 0)
        # Only rounding is left to solve for, and there is no warning of it.
        assert optimizer.update(w, state, batch)[1].iterations <= 1


def test_what_the_product_of_jacobians_loses_is_found():
    """The square of the singular value 1e-4 is below the rounding of float32."""
    jac = jnp.array([[1.0, 1.0], [1e-4, 0.0], [0.0, 1e-4]])
    batch = ((jac, jnp.array([0.0, 1e-4, -1e-4])),)
    w, state = run(mpx.LevenbergMarquardt(linear, damping=1e-14), jnp.zeros(2), batch, 3)
    np.testing.assert_allclose(w, [1.0, -1.0], rtol=1e-3)
    assert state.iterations >= 1


@pytest.mark.slow
@pytest.mark.parametrize("jacobian", [pytest.param("float32", marks=pytest.mark.slow), "float64"])
def test_blocks_of_points_take_the_same_step(jacobian, monkeypatch):
    """One block is not full, and the residuals have different numbers of examples."""
    with jax.enable_x64(True):
        model = eqx.nn.MLP(1, 1, 8, 2, jnp.tanh, key=jax.random.key(0), dtype="float64")
        options = {"forward": "float64", "jacobian": jacobian, "damping": 1.0, "method": "primal"}
        optimizer = mpx.LevenbergMarquardt((interior, boundary), **options)
        ends = jnp.array([[-1.0], [1.0]])

        def step(rows):
            monkeypatch.setattr(_primal, "_BLOCK", 1)
            monkeypatch.setattr(_primal, "_ROWS", rows)
            return first_step(optimizer, model, (POINTS.astype("float64"), ends))

        one, several = step(1024), step(10)  # 26 rows in three blocks
        assert one[1].taken
        flat = lambda tree: ravel_pytree(eqx.filter(tree, eqx.is_inexact_array))[0]
        # A float32 factorization and a conjugate gradient differ by more than float64 rounding.
        rtol = {"float32": 1e-5, "float64": 1e-9}[jacobian]
        np.testing.assert_allclose(flat(several[0]), flat(one[0]), rtol=rtol, atol=rtol)
        np.testing.assert_allclose(several[1].loss, one[1].loss, rtol=rtol)


def test_blocks_are_filled_by_parts_of_residuals():
    """A block has rows that count, and at most an eighth more rows than these."""
    assert _primal.count(3000, 2000, 1) == 1
    assert _dual.cut(3000, 2000, 1, "float64") == (1, 1)
    for length, size, count in ((1, 4096, 7), (6, 1000, 10), (100, 3, 48), (1000, 2, 9), (3, 0, 2)):
        parts, each = parts_of(length, size, count)
        assert parts * each >= size > (parts - 1) * each or size == 0
        rows = -(-length * parts // count) * count * each
        assert rows <= 9 / 8 * length * size
    assert parts_of(5, 1, 3) == (1, 1)  # one number is in one part


@pytest.mark.parametrize(
    ("method", "jacobian"),
    [
        pytest.param("dual", "bfloat16", marks=pytest.mark.slow),
        pytest.param("primal", "float32", marks=pytest.mark.slow),
        pytest.param("dual", "float64", marks=pytest.mark.slow),
        pytest.param("low_rank", "float64", marks=pytest.mark.slow),
    ],
)
def test_a_residual_of_a_whole_grid_is_cut_into_blocks(method, jacobian, monkeypatch):
    """One example of seven numbers beside nine examples of one, in blocks of four rows."""
    grid, inside = jnp.linspace(-1.0, 1.0, 7), jnp.linspace(0.1, 0.8, 9)
    net = lambda w, x: jnp.tanh(w["in"] * x) @ w["out"]
    whole = lambda w, xs: jax.vmap(lambda x: net(w, x))(xs) - jnp.sin(xs)
    one = lambda w, x: net(w, x) - jnp.cos(x)
    keys = jax.random.split(jax.random.key(0))
    with jax.enable_x64(True):
        w = {
            k: jax.random.normal(key, (8,), "float64")
            for k, key in zip(("in", "out"), keys, strict=True)
        }
        grid, inside = grid.astype("float64"), inside.astype("float64")
        options = {"forward": "float64", "jacobian": jacobian, "method": method, "damping": 1e-2}
        # The loss is the mean over examples, so the sum over the grid counts as often.
        sevenfold = lambda w, x: jnp.sqrt(7.0) * (net(w, x) - jnp.sin(x))
        each = mpx.LevenbergMarquardt((sevenfold, one), **options)
        want, told = first_step(each, w, (grid, inside))
        for module in (_dual, _primal, _low_rank):
            monkeypatch.setattr(module, "_BLOCK", 1)
            monkeypatch.setattr(module, "_ROWS", 4)
        monkeypatch.setattr(_dual, "_STRIP", 1)
        monkeypatch.setattr(_dual, "_KERNELS", 6)
        got, state = first_step(
            mpx.LevenbergMarquardt((whole, one), **options), w, (grid[None], inside)
        )
    assert state.taken
    rtol = 1e-8 if jacobian == "float64" and method != "low_rank" else 1e-3  # as a solve leaves
    np.testing.assert_allclose(state.loss, told.loss, rtol=rtol)
    for name in w:
        np.testing.assert_allclose(got[name], want[name], rtol=rtol, atol=rtol)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "most"), [("dual", 8e9), ("low_rank", 2e9)])
def test_the_jacobian_at_one_example_is_never_whole(method, most):
    """Pulls a block of 4,096 entries at one example back through all of it. Pulled back at once,
    they took 71 GB and 103 GB."""
    with jax.enable_x64(True):
        model = eqx.nn.MLP(2, 1, 256, 2, jnp.tanh, key=jax.random.key(0), dtype="float64")
        residual = lambda model, points: jax.vmap(model)(points) - 1.0
        optimizer = mpx.LevenbergMarquardt(residual, forward="float64", method=method)
        arrays, static = eqx.partition((model, optimizer.init(model)), eqx.is_array)
        update = lambda arrays, points: optimizer.update(*eqx.combine(arrays, static), points)
        step = lambda arrays, points: eqx.filter(update(arrays, points), eqx.is_array)
        memory = jax.jit(step).lower(arrays, jnp.ones((1, 4096, 2))).compile().memory_analysis()
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < most


@pytest.mark.slow
@pytest.mark.parametrize("method", ["primal", "dual"])
def test_a_solve_at_a_minimum_that_is_not_zero_takes_few_iterations(method):
    """Each point has two values to fit. Without an end at the rounding of the loss, solves took a
    hundred iterations there, and told of a Jacobian that is too narrow."""
    with jax.enable_x64(True):
        model = eqx.nn.MLP(2, "scalar", 8, 1, jnp.tanh, key=jax.random.key(0), dtype="float64")
        points = jax.random.uniform(jax.random.key(1), (12, 2), "float64")
        examples = jnp.concatenate([points] * 2), jnp.repeat(jnp.array([0.0, 1.0]), 12)
        residual = lambda model, example: model(example[0]) - example[1]
        options = {"forward": "float64", "jacobian": "float32", "method": method}
        optimizer = mpx.LevenbergMarquardt(residual, **options)
        step, state, most = eqx.filter_jit(optimizer.update), optimizer.init(model), 0
        for _ in range(30):
            model, state = step(model, state, examples)
            most = max(most, int(state.iterations))
    np.testing.assert_allclose(state.loss, 0.25, rtol=1e-12)
    assert most <= PATIENCE


def test_a_residual_may_be_empty_and_a_batch_named():
    class Batch(NamedTuple):
        x: jax.Array

    batch = Batch(jnp.ones(4))
    some, none = lambda w, b: w * b.x - 1, lambda w, b: jnp.zeros(0)
    w, state = first_step(mpx.LevenbergMarquardt(some), jnp.zeros(()), batch)
    both = first_step(mpx.LevenbergMarquardt((some, none)), jnp.zeros(()), (batch, batch))
    assert (w, state.loss) == (both[0], both[1].loss)
    assert state.loss < 1e-5


@pytest.mark.slow
def test_the_jacobian_is_never_whole():
    """A float64 Jacobian of 30,000 points and 5,000 parameters takes 1.2 GB."""
    with jax.enable_x64(True):
        model = eqx.nn.MLP(1, "scalar", 48, 3, jnp.tanh, key=jax.random.key(0), dtype="float64")
        residual = lambda model, x: model(x) - x[0]
        optimizer = mpx.LevenbergMarquardt(residual, forward="float64", jacobian="float32")
        arrays, static = eqx.partition((model, optimizer.init(model)), eqx.is_array)
        update = lambda arrays, points: optimizer.update(*eqx.combine(arrays, static), points)
        step = lambda arrays, points: eqx.filter(update(arrays, points), eqx.is_array)
        compiled = jax.jit(step).lower(arrays, jnp.ones((30_000, 1))).compile()
        memory = compiled.memory_analysis()
    assert sum(x.size for x in jtu.tree_leaves(model) if eqx.is_array(x)) > 4800
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 2**31


def test_a_jacobian_that_is_too_narrow_is_told():
    """A float16 Jacobian of columns that differ by less than its rounding, and one iteration."""
    residual = lambda w, x: jnp.sin(x * w[0]) + jnp.sin(1.001 * x * w[1]) - x
    options = {"damping": 1e-8, "refinements": 1, "acceleration": 0.0}
    optimizer = mpx.LevenbergMarquardt(residual, jacobian="float16", **options)
    with pytest.warns(mpx.PrecisionWarning, match="jacobian='float32'"):
        first_step(optimizer, jnp.array([0.3, 0.2]), jnp.linspace(0.0, 1.0, 9))


@pytest.mark.slow
def test_a_float32_jacobian_of_a_float64_residual_is_no_tf32():
    with jax.enable_x64(True):
        model = mpx.cast_tree(eqx.nn.MLP(1, "scalar", 8, 2, key=jax.random.key(0)), "float64")
        residual = lambda model, x: model(x) - x[0]
        options = {"forward": "float64", "jacobian": "float32", "method": "primal"}
        optimizer = mpx.LevenbergMarquardt(residual, **options)
        step = eqx.filter_make_jaxpr(optimizer.update)
        jaxpr = step(model, optimizer.init(model), jnp.ones((4, 1)))[0]
    products = [e for e in equations(jaxpr) if "dot_general" in e.primitive.name]
    full = [e for e in products if e.invars[0].aval.dtype == jnp.float32]
    mixed = [e for e in full if e.primitive.name == "mixed_dot_general"]  # no TF32 in float32
    assert {e.params["dtype"] for e in mixed} == {jnp.dtype("float32")}
    plain = {e.params["precision"] for e in full if e not in mixed}
    assert plain == {(jax.lax.Precision.HIGHEST,) * 2}


def test_the_step_follows_the_bend_of_the_residual():
    """From 0 towards `w + w²/2 = 0.1`: `v = 0.1`, `a = -v²/2`, and the rest is of third order."""
    bend = lambda w, x: w[0] + w[0] ** 2 / 2 - x
    for acceleration, want in ((0.75, 0.1 - 0.005), (0.0, 0.1)):
        optimizer = mpx.LevenbergMarquardt(bend, damping=1e-6, acceleration=acceleration)
        w, state = first_step(optimizer, jnp.zeros(1), jnp.array([0.1]))
        assert state.taken
        np.testing.assert_allclose(w, [want], rtol=1e-5)  # to the damping, 1e-6, and rounding


def run(optimizer, w, batch, steps):
    state, update = optimizer.init(w), eqx.filter_jit(optimizer.update)
    for _ in range(steps):
        before, kept = w, state.loss
        w, state = update(w, state, batch)
        assert state.loss < kept if state.taken else tree_equal_bits(w, before)
    return w, state


def test_it_converges_quadratically_where_the_residual_vanishes():
    rosenbrock = lambda w, x: jnp.stack([10 * (w[1] - w[0] ** 2), 1 - w[0]]) + x
    optimizer = mpx.LevenbergMarquardt(rosenbrock)
    w, state = run(optimizer, jnp.array([-1.2, 1.0]), jnp.zeros((1, 1)), 30)
    np.testing.assert_allclose(w, [1.0, 1.0], rtol=1e-6)
    assert state.loss < 1e-12
    assert state.rejected > 0  # the valley bends


@pytest.mark.slow
def test_a_step_that_is_not_finite_changes_nothing():
    root = lambda w, x: jnp.sqrt(w[0]) * x - 1
    for start, batch in ((4.0, jnp.full(3, jnp.nan)), (0.0, jnp.ones(3))):
        optimizer, w = mpx.LevenbergMarquardt(root), jnp.array([start])
        after, new = first_step(optimizer, w, batch)
        assert tree_equal_bits((after, new.damping), (w, optimizer.init(w).damping))
        assert (new.taken, new.rejected) == (False, 1)


@pytest.mark.parametrize("target", [1.0, np.nan])
def test_examples_that_nothing_can_be_learnt_from_do_not_hinder_the_next(target):
    """The damping does not rise after a step below rounding, because more would not help."""
    optimizer = mpx.LevenbergMarquardt(lambda w, x: w * x[0] - x[1])
    t, w = jnp.linspace(0.0, 1.0, 8), jnp.array(1.0)
    state, step = optimizer.init(w), eqx.filter_jit(optimizer.update)
    for slope in 10 * [target] + 20 * [3]:
        w, state = step(w, state, ((t, slope * t),))
    assert abs(w - 3) < 1e-6  # a rounding of float32 or two
    assert w.weak_type  # as it was


@pytest.mark.parametrize("jacobian", ["float32", "float64"])
def test_what_no_residual_depends_on_stays(jacobian):
    residual = lambda w, x: jnp.sin(w["used"] @ x) - x[0]
    with jax.enable_x64(True):
        optimizer = mpx.LevenbergMarquardt(residual, forward="float64", jacobian=jacobian)
        w = {"used": jnp.ones(3), "unused": jnp.ones(40)}
        examples = jnp.linspace(-1.0, 1.0, 24).reshape(8, 3)
        after, state = first_step(optimizer, w, examples)
        assert state.taken
        assert tree_equal_bits(after["unused"], w["unused"])
        # Orbax does not save empty arrays.
        assert all(x.size for x in jtu.tree_leaves(state))


POINTS = jnp.linspace(-1.0, 1.0, 24)[:, None]


def interior(model, point):
    d = mpx.partials(model, ["u_xx"], coords="x", outputs="u")(point)
    return (d["u_xx"] + jnp.pi**2 * jnp.sin(jnp.pi * point[0])) / 10


def boundary(model, point):
    return model(point)


TOLD_LATE = pytest.param(
    "bfloat16", marks=pytest.mark.filterwarnings("ignore:`LevenbergMarquardt` ended the solve")
)


@pytest.mark.slow
@pytest.mark.parametrize("jacobian", ["float32", TOLD_LATE, "float16"])
def test_a_network_is_trained_below_the_rounding_of_half(jacobian):
    """Any Jacobian reaches the error of float32 (4e-4 to 9e-4 after these steps, and falling)."""
    model = mpx.nn.CoordinateMLP(1, 1, 8, 2, key=jax.random.key(0))
    optimizer = mpx.LevenbergMarquardt((interior, boundary), jacobian=jacobian)
    model, state = run(optimizer, model, (POINTS, jnp.array([[-1.0], [1.0]])), 60)
    assert state.steps > 20
    assert relative(jax.vmap(model)(POINTS)[:, 0], jnp.sin(jnp.pi * POINTS[:, 0])) < 2e-3


def test_a_residual_that_is_not_finite_keeps_the_scale_of_a_float16_jacobian():
    optimizer = mpx.LevenbergMarquardt(lambda w, x: w * x - 1, jacobian="float16", method="primal")
    w, state = first_step(optimizer, jnp.ones(()), jnp.array([1.0, jnp.nan]))
    assert (w, state.taken, state.scaling.loss_scaling) == (1.0, False, 1.0)


def test_a_float16_jacobian_that_is_not_finite_lowers_its_scale_alone():
    optimizer = mpx.LevenbergMarquardt(lambda w, x: jnp.sqrt(w[0]) * x - 1, jacobian="float16")
    w = jnp.zeros(1)
    state = optimizer.init(w)
    after, new = first_step(optimizer, w, jnp.ones(3))
    assert new.scaling.loss_scaling == 0.5
    assert tree_equal_bits((after, new.damping, new.growth), (w, state.damping, state.growth))


@pytest.mark.slow
def test_residuals_below_their_precision_are_told():
    """One that casts its result, beside one without entries. The loss ends at 3e-10."""
    fit = lambda w, x: (jnp.tanh(w * x).sum() - x[0]).astype(jnp.float32)
    none = lambda w, x: jnp.zeros(0, jnp.float32)
    with jax.enable_x64(True):
        optimizer = mpx.LevenbergMarquardt((fit, none), forward="float64")
        points = jnp.linspace(0.0, 1.0, 8).reshape(4, 2)
        with pytest.warns(mpx.PrecisionWarning, match="residuals in float32, although `forward`"):
            first_step(optimizer, jnp.ones(2), (points, points))


@pytest.mark.slow
@pytest.mark.parametrize("forwards", [("float32", "float64"), ("float64", "float32")])
def test_a_state_goes_on_in_another_precision(forwards):
    with jax.enable_x64(True):
        w, points = jnp.array([0.5, 2.0], "float64"), np.linspace(0.0, 1.0, 6).reshape(3, 2)
        residual = lambda w, x: jnp.exp(w @ x.astype(w.dtype)) - 1
        first, then = (mpx.LevenbergMarquardt(residual, forward=x, method="dual") for x in forwards)
        w, state = first_step(first, w, points)
        after, state = updated(then, w, state, points)
    assert state.taken
    assert state.loss.dtype == state.damping.dtype == state.growth.dtype == forwards[1]
    want = np.mean((np.exp(points @ np.asarray(after)) - 1) ** 2)
    np.testing.assert_allclose(state.loss, want, rtol=1e-4)  # of float32, near a loss of zero


def test_parameters_below_the_precision_of_the_residual_are_told():
    with jax.enable_x64(True):
        model = mpx.nn.CoordinateMLP(1, 1, 8, 2, key=jax.random.key(0))
        optimizer = mpx.LevenbergMarquardt(boundary, forward="float64")
        with pytest.warns(mpx.PrecisionWarning, match=r"\.first\S+ \(float32\) and 1 more"):
            optimizer.init(mpx.cast_tree(model, "float64"))
        optimizer.init(jax.tree.map(lambda x: mpx.cast_tree(x, "float64"), model))


@pytest.mark.slow
def test_a_float16_jacobian_that_always_overflows_is_told():
    model = eqx.nn.MLP(1, "scalar", 8, 2, key=jax.random.key(0))
    residual = lambda model, x: 1e14 * (model(x) - x[0])
    optimizer = mpx.LevenbergMarquardt(residual, jacobian="float16", method="primal")
    low = mpx.DynamicLossScaling(2.0**-24)
    state = dataclasses.replace(optimizer.init(model), scaling=low)
    with pytest.warns(mpx.PrecisionWarning, match="overflows at the smallest loss scale"):
        after, new = updated(optimizer, model, state, POINTS)
    assert tree_equal_bits(after, model)
    assert jnp.isfinite(new.loss)  # the loss of the residual is known


@pytest.mark.parametrize("method", ["primal", "dual", "low_rank"])
def test_squares_that_overflow_are_told(method):
    def residual(w, x):
        return 1e20 * (w[0] * jnp.sin(x) + w[1])

    optimizer = mpx.LevenbergMarquardt(residual, forward="float32", method=method)
    w, points = jnp.ones(2), jnp.linspace(0.0, 3.0, 5)
    with pytest.warns(mpx.PrecisionWarning, match="overflows in float32"):
        after, state = updated(optimizer, w, optimizer.init(w), points)
    assert tree_equal_bits(after, w)
    assert jnp.isinf(state.loss)
    assert not state.taken


def test_the_rows_of_a_half_jacobian_are_half():
    """But for a first layer in `FullPrecision`, up to the rounding of its cotangents."""
    model = mpx.nn.CoordinateMLP(1, 1, 8, 2, key=jax.random.key(0))

    def rows(jacobian):
        of = mpx.LevenbergMarquardt(boundary, jacobian=jacobian)._residuals
        compute, blocks = Linearized(of, model, (POINTS,), mpx.DynamicLossScaling(1.0)).rows(1)
        return jax.jit(compute)(jax.tree.map(lambda x: x[0], blocks))

    # The rounding of float16, 2^-11, in a few terms; that of float32 is below 1e-6.
    assert 1e-5 < relative(rows("float16"), rows("float32")) < 3e-3


@pytest.mark.slow
@pytest.mark.parametrize(("width", "depth", "warns"), [(8, 1, True), (22, 2, False)])
def test_a_half_jacobian_that_is_hardly_one_is_told(width, depth, warns):
    """The first layer and the values stay in float32."""
    options = {"fourier_features": (8, 1.0) if warns else None, "key": jax.random.key(0)}
    model = mpx.nn.CoordinateMLP(1, 1, width, depth, **options)
    residual = lambda model, x: model(x)[0] - x[0] ** 2

    def trace(jacobian):
        options = {"jacobian": jacobian, "method": "primal"}
        optimizer = mpx.LevenbergMarquardt(residual, **options, acceleration=0.0)
        eqx.filter_eval_shape(optimizer.update, model, optimizer.init(model), POINTS)

    asked = "`LevenbergMarquardt` was asked for float16, but \\d+% .*`jacobian='float32'`"
    with pytest.warns(mpx.PrecisionWarning, match=asked) if warns else nullcontext():
        trace("float16")
    trace("float32")


def test_a_residual_of_all_examples():
    network = eqx.nn.MLP(2, "scalar", 8, 1, key=jax.random.key(0))
    optimizer = mpx.LevenbergMarquardt(lambda model, points: jax.vmap(model)(points))
    with pytest.raises((ValueError, TypeError, IndexError)) as caught:
        optimizer.update(network, optimizer.init(network), (jnp.ones((20, 2)),))
    [note] = [n for n in caught.value.__notes__ if "LevenbergMarquardt" in n]
    assert "one* example, here of shape (2,), and not with a batch. Leave `jax.vmap`" in note


@pytest.mark.slow
def test_the_example_converges_and_draws_its_error(tmp_path):
    """Trains on reaction with a twelfth of the steps, to twice the measured error of 3.2e-2."""
    out = tmp_path / "error.png"
    result = importlib.import_module("second_order").main("reaction", steps=24, plot=out)
    assert result.error < 0.07
    assert out.stat().st_size > 10_000


@pytest.mark.slow
def test_a_loss_in_place_of_a_residual_is_told():
    """One number from an example that holds a whole batch."""
    model, points = jnp.ones(2), jnp.array([[1.0, 2.0], [3.0, 4.0], [0.0, 1.0]])
    loss = lambda w, points: jnp.mean((points @ w - 1) ** 2)
    optimizer = mpx.LevenbergMarquardt(loss)
    with pytest.warns(mpx.PrecisionWarning, match=r"one number .*\(1, 3, 2\).*\*one\* example"):
        optimizer.update(model, optimizer.init(model), points[None])
    # One example with one residual is none.
    optimizer = mpx.LevenbergMarquardt(lambda w, point: point @ w - 1)
    optimizer.update(model, optimizer.init(model), points[:1])


def test_the_state_of_an_ensemble_is_told():
    model = jnp.ones(2)
    optimizer = mpx.LevenbergMarquardt(lambda w, point: point @ w - 1)
    state = jtu.tree_map(lambda x: jnp.stack([x, x]), optimizer.init(model))
    with pytest.raises(ValueError, match=r"`damping` has shape \(2,\)"):
        optimizer.update(model, state, jnp.ones((3, 2)))
    assert "damping=[" in repr(state)
    after = eqx.tree_at(lambda x: x.system, state, jnp.array([[0, 3, 2]] * 2))
    assert "primal: of the two matrices, the one of parameters²" in repr(after)

"""Levenberg–Marquardt steps, and the loss for a line search."""

import importlib
from contextlib import nullcontext

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from helpers import equations, tree_equal_bits
from jax.flatten_util import ravel_pytree

import mpx_pde as mpx
from mpx_pde.training._conjugate import refined


pytest.importorskip("lineax")


def linear(w, example):
    a, b = example
    return jnp.sum(a * w) - b


@pytest.mark.parametrize("forward", ["float32", "float64"])
def test_a_linear_problem_is_solved_at_once(forward):
    """Against NumPy, in one step of a damping that is next to nothing."""
    with jax.enable_x64(forward == "float64"):
        rng = np.random.default_rng(0)
        a, b = rng.standard_normal((30, 6)).astype(forward), rng.standard_normal(30).astype(forward)
        optimizer = mpx.LevenbergMarquardt(linear, forward=forward, damping=1e-12)
        w = jnp.zeros(6, forward)
        state = optimizer.init(w)
        w, state = eqx.filter_jit(optimizer.update)(w, state, ((jnp.asarray(a), jnp.asarray(b)),))
        want, rest, *_ = np.linalg.lstsq(a.astype("float64"), b.astype("float64"))
        # Rounding of the solve, at a condition of 3.
        rtol = {"float32": 1e-5, "float64": 1e-10}[forward]
        np.testing.assert_allclose(w, want, rtol=rtol)
        np.testing.assert_allclose(state.loss, rest[0] / 30, rtol=rtol)
        assert state.taken
        assert (state.steps, state.rejected) == (1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("solver", [None, "Cholesky", "QR"])
@pytest.mark.parametrize("forward", ["float32", "float64"])
def test_the_decomposition_solves_with_many_right_hand_sides(forward, solver):
    """Against NumPy in float64, at singular values from 1 to 1e-3 and a damping of 1e-6."""
    lx = pytest.importorskip("lineax")
    with jax.enable_x64(forward == "float64"):
        rng = np.random.default_rng(0)
        left, _ = np.linalg.qr(rng.standard_normal((12, 5)))
        right, _ = np.linalg.qr(rng.standard_normal((5, 5)))
        jac = left * np.logspace(0, -3, 5) @ right
        solver = None if solver is None else getattr(lx, solver)()
        optimizer = mpx.LevenbergMarquardt(linear, forward=forward, solver=solver)
        solve = optimizer._factored(jnp.asarray(jac, forward), jnp.asarray(1e-6, forward))
        for b in rng.standard_normal((2, 12)) @ jac:
            want = np.linalg.solve(jac.T @ jac + 1e-6 * np.eye(5), b)
            got = solve(jnp.asarray(b, forward))
            # The square of the condition, which R does not lose: 5e5 times the rounding.
            rtol = 1e-9 if forward == "float64" else 1e-2 if solver is None else 0.2
            assert np.linalg.norm(got - want) < rtol * np.linalg.norm(want)


def test_r_keeps_what_the_product_of_jacobians_loses():
    """A singular value of 1e-4, whose square is below the rounding of float32."""
    jac = jnp.array([[1.0, 1.0], [1e-4, 0.0], [0.0, 1e-4]])
    r = jnp.array([0.0, 1e-4, -1e-4])
    solve = mpx.LevenbergMarquardt(linear)._factored(jac, jnp.array(1e-14))
    np.testing.assert_allclose(solve(r @ jac), [1.0, -1.0], rtol=1e-3)


@pytest.mark.parametrize("most", [0, 20])
def test_products_in_full_refine_a_solve_by_a_rounded_jacobian(most):
    """Singular values from 1 to 1e-3, and a Jacobian with eight bits."""
    rng = np.random.default_rng(0)
    left, _ = np.linalg.qr(rng.standard_normal((20, 6)))
    right, _ = np.linalg.qr(rng.standard_normal((6, 6)))
    jac = left * np.logspace(0, -3, 6) @ right
    b, damping = jac @ np.ones(6), 1e-7
    rounded = jnp.asarray(jac, "bfloat16").astype(jnp.float32)
    optimizer = mpx.LevenbergMarquardt(linear)
    solve = optimizer._factored(rounded, jnp.array(damping, jnp.float32))
    full, rows = jnp.asarray(jac, jnp.float32), jnp.asarray(b, jnp.float32)
    pull, damped = lambda b: b @ full, jnp.array(damping, jnp.float32)
    with jax.default_matmul_precision("highest"):
        got = solve(pull(rows))
        if most:
            got = refined(lambda x: full @ x, pull, solve, damped, rows, most=most)
    want = np.linalg.solve(jac.T @ jac + damping * np.eye(6), jac.T @ b)
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    # The rounded one is off by its smallest singular values; conjugate gradients are not.
    assert (error > 0.1) if not most else (error < 1e-2)


@pytest.mark.slow
def test_more_refinements_than_rounding_allows_do_no_harm():
    """In float32, with singular values from 1 to 1e-7 and a residual that stays, conjugate
    gradients are not conjugate for long; with the classical formulas these end at 1e30."""
    rng = np.random.default_rng(0)
    left, _ = np.linalg.qr(rng.standard_normal((120, 60)))
    right, _ = np.linalg.qr(rng.standard_normal((60, 60)))
    jac, damping = left * np.logspace(0, -7, 60) @ right, 1e-9
    b = jac @ rng.standard_normal(60) + 1e-3 * rng.standard_normal(120)
    full, rows = jnp.asarray(jac, jnp.float32), jnp.asarray(b, jnp.float32)
    small = jnp.array(damping, jnp.float32)
    rounded = full.astype(jnp.float16).astype(jnp.float32)
    solve = mpx.LevenbergMarquardt(linear)._factored(rounded, small)
    objective = lambda x: np.sum((jac @ x - b) ** 2) + damping * np.sum(x**2)

    def found(most):
        solved = refined(lambda x: full @ x, lambda b: b @ full, solve, small, rows, most=most)
        return objective(np.asarray(solved, np.float64))

    with jax.default_matmul_precision("highest"):
        first, *more = map(found, (1, 20, 60, 1000))
    best = objective(np.linalg.solve(jac.T @ jac + damping * np.eye(60), jac.T @ b))
    assert first > 100 * best
    assert max(more) < 1.01 * best


@pytest.mark.slow
def test_a_float32_jacobian_of_a_float64_residual_is_no_tf32():
    with jax.enable_x64(True):
        model = mpx.cast_tree(eqx.nn.MLP(1, "scalar", 8, 2, key=jax.random.key(0)), "float64")
        residual = lambda model, x: model(x) - x[0]
        optimizer = mpx.LevenbergMarquardt(residual, forward="float64", jacobian="float32")
        step = eqx.filter_make_jaxpr(optimizer.update)
        jaxpr = step(model, optimizer.init(model), jnp.ones((4, 1)))[0]
    products = [e for e in equations(jaxpr) if "dot_general" in e.primitive.name]
    full = [e for e in products if e.invars[0].aval.dtype == jnp.float32]
    assert full
    assert {e.params.get("precision") for e in full} == {(jax.lax.Precision.HIGHEST,) * 2}


def test_the_step_follows_the_bend_of_the_residual():
    """From 0 towards `w + w²/2 = 0.1`: `v = 0.1`, `a = -v²/2`, and the rest is of third order."""
    bend = lambda w, x: w[0] + w[0] ** 2 / 2 - x
    after = {}
    for acceleration in (0.75, 0.0):
        optimizer = mpx.LevenbergMarquardt(bend, damping=1e-6, acceleration=acceleration)
        w = jnp.zeros(1)
        w, state = eqx.filter_jit(optimizer.update)(w, optimizer.init(w), jnp.array([0.1]))
        assert state.taken
        after[acceleration] = float(w[0])
    # To the damping, 1e-6, and rounding.
    np.testing.assert_allclose(after[0.0], 0.1, rtol=1e-5)
    np.testing.assert_allclose(after[0.75], 0.1 - 0.005, rtol=1e-5)


def test_an_acceleration_that_is_too_long_is_left_out():
    bend = lambda w, x: w[0] + 10 * w[0] ** 2 - x
    optimizer = mpx.LevenbergMarquardt(bend, damping=1e-6)
    v = jax.jit(lambda w: optimizer._step(*pieces(optimizer, w, jnp.array([0.09])))[0])(
        jnp.zeros(1)
    )
    np.testing.assert_allclose(v, 0.09, rtol=1e-5)  # half of the acceleration is 0.9 times as long


def pieces(optimizer, w, batch):
    """What `_step` takes, at `w`."""
    values = lambda flat: optimizer._values(flat, None, (batch,))
    jac = jax.jacfwd(values)(w)
    solve = optimizer._factored(jac, jnp.array(1e-6))
    return values, w, values(w), lambda b: b @ jac, lambda b: solve(b @ jac)


@pytest.mark.slow
def test_beside_a_rounded_jacobian_the_gradient_is_in_full(monkeypatch):
    """So that a step leads downhill also where the residual does not vanish."""
    model = mpx.nn.CoordinateMLP(1, 1, 8, 2, key=jax.random.key(0))
    points = jnp.linspace(-1.0, 1.0, 8)[:, None]
    asked = []

    def factored(self, jac, damping):
        asked.append(jac)
        return lambda b: asked.append(b) or b

    monkeypatch.setattr(mpx.LevenbergMarquardt, "_factored", factored)

    @eqx.filter_jit
    def both(model):
        residual = lambda model, x: model(x)[0] - x[0] ** 2
        whole = lambda model: jnp.mean(jax.vmap(lambda x: residual(model, x))(points) ** 2) / 2
        optimizer = mpx.LevenbergMarquardt(residual, jacobian="bfloat16", acceleration=0.0)
        optimizer.update(model, optimizer.init(model), points)
        r = optimizer._values(*eqx.partition(model, eqx.is_inexact_array), (points,))
        jac, g = asked[:2]
        return g, r @ jac, ravel_pytree(eqx.filter_grad(whole)(model))[0]

    got, rounded, want = both(model)
    distance = lambda g: float(jnp.linalg.norm(g - want) / jnp.linalg.norm(want))
    assert distance(got) < 1e-5  # rounding of float32
    assert distance(rounded) > 1e-4  # and what is seen if it is not in full


def rosenbrock(w, shift):
    return jnp.stack([10 * (w[1] - w[0] ** 2), 1 - w[0]]) + shift


def run(optimizer, w, batch, steps):
    state, update = optimizer.init(w), eqx.filter_jit(optimizer.update)
    losses = []
    for _ in range(steps):
        before, kept = w, state.loss
        w, state = update(w, state, batch)
        if not state.taken:
            assert tree_equal_bits(w, before)
        else:
            assert state.loss < kept
        losses.append(float(state.loss))
    return w, state, losses


def test_it_converges_quadratically_where_the_residual_vanishes():
    w, state, losses = run(
        mpx.LevenbergMarquardt(rosenbrock), jnp.array([-1.2, 1.0]), jnp.zeros((1, 1)), 30
    )
    np.testing.assert_allclose(w, [1.0, 1.0], rtol=1e-6)
    assert state.loss < 1e-12
    assert state.rejected > 0  # the valley bends


@pytest.mark.slow
def test_a_step_that_is_not_finite_changes_nothing_but_the_damping():
    root = lambda w, x: jnp.sqrt(w[0]) * x - 1
    for start, batch in ((4.0, jnp.full(3, jnp.nan)), (0.0, jnp.ones(3))):
        optimizer = mpx.LevenbergMarquardt(root)
        w = jnp.array([start])
        state = optimizer.init(w)
        after, new = eqx.filter_jit(optimizer.update)(w, state, batch)
        assert tree_equal_bits(after, w)
        assert not new.taken
        assert new.damping > state.damping
        assert new.rejected == 1


POINTS = jnp.linspace(-1.0, 1.0, 24)[:, None]


def interior(model, point):
    d = mpx.partials(model, ["u_xx"], coords="x", outputs="u")(point)
    return (d["u_xx"] + jnp.pi**2 * jnp.sin(jnp.pi * point[0])) / 10


def boundary(model, point):
    return model(point)


def poisson(jacobian, steps):
    model = mpx.nn.CoordinateMLP(1, 1, 8, 2, key=jax.random.key(0))
    optimizer = mpx.LevenbergMarquardt((interior, boundary), jacobian=jacobian)
    model, state, _ = run(optimizer, model, (POINTS, jnp.array([[-1.0], [1.0]])), steps)
    u, want = jax.vmap(model)(POINTS)[:, 0], jnp.sin(jnp.pi * POINTS[:, 0])
    return float(jnp.linalg.norm(u - want) / jnp.linalg.norm(want)), state


@pytest.mark.slow
@pytest.mark.parametrize("jacobian", ["float32", "bfloat16", "float16"])
def test_a_network_is_trained_below_the_rounding_of_half(jacobian):
    """With any Jacobian as far as in float32 (4e-4 to 9e-4 after these steps, and falling)."""
    error, state = poisson(jacobian, 60)
    assert state.steps > 20
    assert error < 2e-3


def test_a_float16_jacobian_that_is_not_finite_lowers_its_scale_alone():
    optimizer = mpx.LevenbergMarquardt(lambda w, x: jnp.sqrt(w[0]) * x - 1, jacobian="float16")
    w = jnp.zeros(1)
    state = optimizer.init(w)
    after, new = eqx.filter_jit(optimizer.update)(w, state, jnp.ones(3))
    assert tree_equal_bits(after, w)
    assert new.scaling.loss_scaling == 0.5
    assert tree_equal_bits((new.damping, new.growth), (state.damping, state.growth))


@pytest.mark.slow
@pytest.mark.parametrize(("width", "depth", "warns"), [(8, 1, True), (22, 2, False)])
def test_a_half_jacobian_that_is_hardly_one_is_told(width, depth, warns):
    """The first layer stays in float32, and so do the values."""
    features = (8, 1.0) if warns else None
    model = mpx.nn.CoordinateMLP(
        1, 1, width, depth, key=jax.random.key(0), fourier_features=features
    )
    residual = lambda model, x: model(x)[0] - x[0] ** 2

    def trace(jacobian):
        optimizer = mpx.LevenbergMarquardt(residual, jacobian=jacobian, acceleration=0.0)
        jax.eval_shape(
            eqx.filter_closure_convert(
                lambda points: optimizer.update(model, optimizer.init(model), points)[1].loss,
                POINTS,
            ),
            POINTS,
        )

    asked = "`LevenbergMarquardt` was asked for float16, but \\d+% .*`jacobian='float32'`"
    with pytest.warns(mpx.PrecisionWarning, match=asked) if warns else nullcontext():
        trace("float16")
    trace("float32")


def test_it_compiles_once():
    optimizer = mpx.LevenbergMarquardt(rosenbrock)
    w, state = jnp.array([-1.2, 1.0]), optimizer.init(jnp.ones(2))
    types = lambda tree: [(x.dtype, x.shape, x.weak_type) for x in jtu.tree_leaves(tree)]
    after = eqx.filter_jit(optimizer.update)(w, state, jnp.zeros((1, 1)))
    assert types(after) == types((w, state))


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: mpx.LevenbergMarquardt(3), TypeError, "takes a function of the model"),
        (lambda: mpx.LevenbergMarquardt(linear, forward="half"), ValueError, "as `forward`"),
        (lambda: mpx.LevenbergMarquardt(linear, jacobian="float64"), ValueError, "no wider"),
        (lambda: mpx.LevenbergMarquardt(linear, forward="float64"), ValueError, "64-bit"),
        (lambda: mpx.LevenbergMarquardt(linear, damping=0.0), ValueError, "`damping`"),
        (lambda: mpx.LevenbergMarquardt(linear, acceleration=-1.0), ValueError, "`acceleration`"),
        (lambda: mpx.LevenbergMarquardt(linear, refinements=-1), ValueError, "`refinements` >= 0"),
        (lambda: mpx.LevenbergMarquardt(linear).init({}), ValueError, "floating-point arrays"),
    ],
)
def test_wrong_arguments(make, error, match, unchecked_annotations):
    with pytest.raises(error, match=match):
        make()


def test_wrong_batches():
    optimizer = mpx.LevenbergMarquardt((interior, boundary))
    w = jnp.ones(2)
    with pytest.raises(ValueError, match=r"a tuple with the examples of each of the 2 residuals"):
        optimizer.update(w, optimizer.init(w), POINTS)
    single = mpx.LevenbergMarquardt(linear)
    with pytest.raises(ValueError, match=r"a leading axis of one length"):
        single.update(w, single.init(w), ((jnp.ones((3, 2)), jnp.ones(4)),))


# --- Line searches -----------------------------------------------------------------------------


def loss(model, x):
    return jnp.mean((jax.vmap(model)(x)[:, 0] - jnp.sin(3 * x[:, 0])) ** 2)


OPTIONS = {"policy": "params=float32,compute=float16,output=float32", "forward": "float32"}


@pytest.mark.slow
def test_value_and_slope_are_of_one_scaled_evaluation():
    model = mpx.nn.CoordinateMLP(1, 1, 8, 1, key=jax.random.key(0))
    scaling = mpx.DynamicLossScaling(2.0**10)
    tiny = lambda model, x: 1e-7 * loss(model, x)  # unscaled, its gradients are zero in float16
    value, _, finite, grads = mpx.filter_value_and_grad(tiny, scaling, **OPTIONS)(model, POINTS)
    search = mpx.line_search_value(tiny, scaling, **OPTIONS)
    assert finite
    assert tree_equal_bits(eqx.filter_value_and_grad(search)(model, POINTS), (value, grads))
    assert mpx.global_norm(grads) > 0
    # As the backtracking search of Optax does it, with a cotangent that is a number of Python.
    params, static = eqx.partition(model, eqx.is_inexact_array)
    fun = lambda params: search(eqx.combine(params, static), POINTS)
    (slope,) = jax.linear_transpose(jax.linearize(fun, params)[1], params)(1.0)
    assert tree_equal_bits(slope, eqx.filter(grads, eqx.is_inexact_array))
    backtracking = optax.scale_by_backtracking_linesearch(9, store_grad=True)
    optimizer = optax.lbfgs(linesearch=backtracking)
    searched = {"value": value, "grad": grads, "value_fn": fun}
    state = optimizer.init(params)
    new, _ = mpx.optimizer_update(model, optimizer, state, grads, finite, **searched)
    assert tiny(new, POINTS) < value


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: mpx.line_search_value(1.0, None), TypeError),
        (lambda: mpx.line_search_value(loss, None), TypeError),
        (lambda: mpx.line_search_value(loss, mpx.NoOpLossScaling(), forward="half?"), ValueError),
        (lambda: mpx.line_search_value(loss, mpx.NoOpLossScaling(), policy=1.0), TypeError),
        (lambda: mpx.line_search_value(lambda w: w, mpx.NoOpLossScaling())(jnp.ones(3)), TypeError),
    ],
)
def test_a_line_search_names_itself(make, error, unchecked_annotations):
    with pytest.raises(error, match="`line_search_value`") as raised:
        make()
    assert "filter_value_and_grad" not in str(raised.value)


@pytest.mark.slow
def test_lbfgs_with_a_half_backward_pass_ends_where_float32_does():
    optimizer = optax.lbfgs()

    def train(mixed):
        model = mpx.nn.CoordinateMLP(1, 1, 8, 2, key=jax.random.key(0))
        state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        scaling = mpx.DynamicLossScaling()

        @eqx.filter_jit
        def step(model, state, scaling):
            options = {**OPTIONS, "use_mixed_precision": mixed}
            run = mpx.filter_value_and_grad(loss, scaling, **options)
            value, scaling, finite, grads = run(model, POINTS)
            search = mpx.line_search_value(loss, scaling, **options)
            static = eqx.filter(model, eqx.is_inexact_array, inverse=True)
            model, state = mpx.optimizer_update(
                model,
                optimizer,
                state,
                grads,
                finite,
                value=value,
                grad=grads,
                value_fn=lambda params: search(eqx.combine(params, static), POINTS),
            )
            return model, state, scaling, value

        for _ in range(60):
            model, state, scaling, value = step(model, state, scaling)
        return float(value)

    # The two take other ways; half throughout stalls a hundred times higher.
    assert train(True) < 10 * train(False)


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "bound"), [("lm", 0.1), ("lbfgs", 2.0), ("muon", 2.0)])
def test_the_example_runs(optimizer, bound):
    """A few steps each: all have begun, Levenberg-Marquardt has left the others behind."""
    result = example().train(optimizer, "float32", "bfloat16", steps=25, width=8)
    assert result.error < bound


@pytest.mark.slow
@pytest.mark.parametrize(("forward", "bound"), [("float64", 5e-5), ("float32", 5e-5)])
def test_the_example_converges_fast(forward, bound):
    """A network half as wide as that of the example, some times the error after these steps."""
    with jax.enable_x64(forward == "float64"):
        assert example().train("lm", forward, steps=60, width=12).error < bound


def example():
    return importlib.import_module("second_order")

"""Tests the systems for more parameters than residuals: dual and low rank."""

from contextlib import nullcontext

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from helpers import tree_equal_bits
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mpx_pde as mpx
from mpx_pde.second_order import _dual
from mpx_pde.second_order._choice import MEMORY, METHODS, chosen
from mpx_pde.second_order._dual import Blocks, Rounded, Rows, cut, dual_conjugate_gradients
from mpx_pde.second_order._gram import first_leading


def wave(w, x):
    """A vector of two entries; `w["both"]` enters twice."""
    hidden = jnp.tanh(w["in"] @ x + w["both"])
    return jnp.stack([hidden @ w["out"] - 1.0, jnp.sum(hidden * w["both"]) - x[0]])


def edge(w, x):
    return jnp.sin(w["out"] @ jnp.tanh(w["in"] @ x))


def weights(width=24, dtype="float64"):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"in": (width, 3), "both": (width,), "out": (width,)}
    named = zip(shapes.items(), keys, strict=True)
    return {name: jax.random.normal(key, shape, dtype) / 2 for (name, shape), key in named}


def examples(inside=11, outside=5, dtype="float64"):
    keys = jax.random.split(jax.random.key(1))
    return tuple(
        jax.random.normal(k, (n, 3), dtype) for k, n in zip(keys, (inside, outside), strict=True)
    )


def dense_step(w, batches, damping):
    """Returns a step by NumPy from a Jacobian by `jax.jacobian`, and the loss after it."""
    flat, unravel = ravel_pytree(w)

    def values(flat):
        parts = [
            jnp.ravel(jax.vmap(fun, (None, 0))(unravel(flat), batch)) / np.sqrt(len(batch))
            for fun, batch in zip((wave, edge), batches, strict=True)
        ]
        return jnp.concatenate(parts)

    jac, r = np.asarray(jax.jacobian(values)(flat)), np.asarray(values(flat))
    mu = damping * np.max(np.sum(jac**2, axis=0))
    step = -np.linalg.solve(jac.T @ jac + mu * np.eye(len(flat)), jac.T @ r)
    return step, np.sum(np.asarray(values(flat + step)) ** 2)


JACOBIANS = [
    pytest.param("dual", "bfloat16", True, marks=pytest.mark.slow),
    pytest.param("dual", "float64", False, marks=pytest.mark.slow),
    pytest.param("dual", "float64", True, marks=pytest.mark.slow),
    ("dual", "float32", False),
    pytest.param("dual", "float16", False, marks=pytest.mark.slow),
    pytest.param("dual", "bfloat16_x3", True, marks=pytest.mark.slow),
    pytest.param("low_rank", "float64", False, marks=pytest.mark.slow),
    pytest.param("low_rank", "float32", False, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("method", "jacobian", "cut_up"), JACOBIANS)
def test_a_step_is_that_of_a_dense_jacobian(method, jacobian, cut_up, monkeypatch):
    """Rows in four strips of blocks that are not full, or in one."""
    if cut_up:
        monkeypatch.setattr(_dual, "_BLOCK", 1)
        monkeypatch.setattr(_dual, "_ROWS", 4)
        monkeypatch.setattr(_dual, "_STRIP", 1)
        monkeypatch.setattr(_dual, "_KERNELS", 6)
    with jax.enable_x64(True):
        w, batches = weights(), examples()
        options = {"forward": "float64", "jacobian": jacobian, "method": method}
        optimizer = mpx.LevenbergMarquardt((wave, edge), **options, acceleration=0.0, damping=1e-2)
        after, state = eqx.filter_jit(optimizer.update)(w, optimizer.init(w), batches)
        want, loss = dense_step(w, batches, 1e-2)
        got = np.asarray(ravel_pytree(after)[0] - ravel_pytree(w)[0])
    assert state.taken
    direct = jacobian == "float64" and method == "dual"
    # A solve by conjugate gradients leaves 1e-9 of the model's decrease, the square of its error.
    assert np.linalg.norm(got - want) < (1e-11 if direct else 1e-4) * np.linalg.norm(want)
    np.testing.assert_allclose(state.loss, loss, rtol=1e-10 if direct else 1e-4)
    assert state.iterations <= (0 if direct else 6 if method == "dual" else 25)


def with_singular_values(rows, columns, values, seed=0):
    rng = np.random.default_rng(seed)
    left, _ = np.linalg.qr(rng.standard_normal((rows, len(values))))
    right, _ = np.linalg.qr(rng.standard_normal((columns, len(values))))
    return left * values @ right.T


@pytest.mark.parametrize("strips", [1, 3])
def test_a_kernel_by_strips_is_that_of_numpy(strips):
    jac = np.random.default_rng(0).standard_normal((18, 70))
    with jax.enable_x64(True):
        leading = first_leading(70, 5).first(5, "float64")
        blocks = jnp.asarray(jac).reshape(6, 3, 70)
        found = Rows(lambda x: x, blocks, strips, "float64").kernel(leading)
        whole = np.asarray(found.along @ found.along.T) + np.asarray(found.rest)
        directions = np.asarray(leading.spans())
        new = np.asarray(found.leading.spans())
    at = np.tril_indices(18)
    np.testing.assert_allclose(whole[at], (jac @ jac.T)[at], rtol=1e-12, atol=1e-11)
    np.testing.assert_allclose(found.squares, np.sum(jac**2, axis=0), rtol=1e-12)
    power = jac.T @ jac @ directions
    np.testing.assert_allclose(found.along, jac @ new, rtol=1e-12, atol=1e-11)
    np.testing.assert_allclose(new @ (new.T @ power), power, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize(("blocks", "strips"), [(1, 1), (6, 3)])
def test_many_columns_are_filled_up_to_what_tensor_cores_take(blocks, strips):
    """`J Jᵀ` stays within the rounding of bfloat16, 2^-9, of each of two factors."""
    jac = np.random.default_rng(0).standard_normal((18, 4100)).astype("float32")
    assert Rounded.of(jnp.asarray(jac), "bfloat16").rows.shape == (18, 4160)
    assert Rounded.of(jnp.asarray(jac[:, :70]), "bfloat16").rows.shape == (18, 70)
    stacked = jnp.asarray(jac).reshape(blocks, -1, 4100)
    found = Rows(lambda x: x, stacked, strips, "bfloat16").kernel(first_leading(4100, 5))
    along, at = np.asarray(found.along), np.tril_indices(18)
    wrong = along @ along.T + np.asarray(found.rest) - jac @ jac.T
    assert np.max(np.abs(wrong[at])) < 2**-8 * 4100


@pytest.mark.slow
def test_reflections_are_orthogonal_in_float64_and_may_be_missing():
    with jax.enable_x64(True):
        some = first_leading(40, 6)
        for leading in (some.first(4, "float64"), some.first(2, "float64").padded(6)):
            found = leading.first(leading.y.shape[1], "float64")(jnp.eye(40))
            np.testing.assert_allclose(found @ found.T, np.eye(40), atol=1e-14)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_rows_beyond_float16_are_scaled(size):
    """Rows of very different size too. The error is that of float16, 2^-11, in a few terms."""
    x = np.random.default_rng(0).standard_normal((6, 40)) * size ** np.linspace(0.5, 1, 6)[:, None]
    with jax.enable_x64(True):
        rows = Rounded.of(jnp.asarray(x), "float16")
        found = np.tril(rows.by_itself("float16")), np.tril(rows.by(rows, "float16"))
    norms = np.linalg.norm(x, axis=1)
    for got in found:
        wrong = np.abs(got - np.tril(x @ x.T)) / np.outer(norms, norms)
        assert 1e-7 < wrong.max() < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16_x3", "bfloat16", "float16"])
def test_few_iterations_solve_in_float64_once_directions_are_tracked(precision):
    """The singular values fall to 1e-7, and those behind the 64 that are tracked to 1e-4 and less.
    The Jacobian turns by a tenth from step to step, as between late steps of a training."""
    values = np.concatenate([np.logspace(0, -4, 64), np.logspace(-4, -7, 236)])
    jac = with_singular_values(300, 900, values)
    turn = np.random.default_rng(2).standard_normal((900, 900)) * 0.1 / np.sqrt(900)
    rng = np.random.default_rng(1)
    with jax.enable_x64(True):
        leading = first_leading(900, 64)
        for _ in range(6):
            jac = jac + jac @ (turn - turn.T) / 2
            first = leading.first(64, "float64")
            blocks = jnp.asarray(jac, "float32")[None]
            sums = Rows(lambda x: x, blocks, 1, precision).kernel(first)
            leading = jax.tree.map(lambda x: x.astype("float32"), sums.leading)
        damping = jnp.asarray(1e-9)
        b = jnp.asarray(jac @ rng.standard_normal(900))
        x, iterations = dual_conjugate_gradients(
            lambda v: jac @ v,
            lambda b: jac.T @ b,
            Blocks.of(sums).factored(damping, None, precision),
            damping,
            b,
            most=100,
            close=1e-9,
        )
    jac, b = np.asarray(jac), np.asarray(b)
    model = lambda x: np.sum((jac @ x - b) ** 2) + 1e-9 * np.sum(x**2)
    best = jac.T @ np.linalg.solve(jac @ jac.T + 1e-9 * np.eye(300), b)
    assert model(np.asarray(x)) - model(best) < 1e-9 * (np.sum(b**2) - model(best))
    assert iterations <= 5


@pytest.mark.slow
def test_rows_in_float32_precondition_far_below_their_rounding():
    """The damping is a hundredth of the rounding of float32 relative to `J Jᵀ`. Float64 rows take
    6 iterations. A test by `rᵀ J Jᵀ z`, which may be negative here, would end the solve early."""
    jac = with_singular_values(300, 1800, np.logspace(0, -7, 300))
    rng, damping = np.random.default_rng(1), 1e-10
    with jax.enable_x64(True):
        leading, rows = first_leading(1800, 75), jnp.asarray(jac, "float32")[None]
        for _ in range(5):
            first = leading.first(75, "float64")
            sums = Rows(lambda x: x, rows, 1, "bfloat16").kernel(first)
            leading = jax.tree.map(lambda x: x.astype("float32"), sums.leading)
        b = jac @ rng.standard_normal(1800) + 1e-3 * rng.standard_normal(300)
        solve = Blocks.of(sums).factored(jnp.asarray(damping), None, "bfloat16")
        x, iterations = dual_conjugate_gradients(
            lambda v: jac @ v,
            lambda b: jac.T @ b,
            solve,
            jnp.asarray(damping),
            jnp.asarray(b),
            most=100,
            close=1e-9,
        )
    model = lambda x: np.sum((jac @ x - b) ** 2) + damping * np.sum(x**2)
    best = jac.T @ np.linalg.solve(jac @ jac.T + damping * np.eye(300), b)
    assert model(np.asarray(x)) - model(best) < 1e-9 * (np.sum(b**2) - model(best))
    assert iterations <= 10


@pytest.mark.slow
@pytest.mark.parametrize(("method", "jacobian"), [("dual", "bfloat16"), ("low_rank", "float32")])
def test_what_is_not_finite_changes_nothing_and_new_points_are_taken(method, jacobian):
    w = weights(dtype="float32")
    optimizer = mpx.LevenbergMarquardt((wave, edge), jacobian=jacobian, method=method)
    update = eqx.filter_jit(optimizer.update)
    bad = (jnp.full((11, 3), jnp.nan), examples(dtype="float32")[1])
    after, state = update(w, optimizer.init(w), bad)
    assert tree_equal_bits(after, w)
    assert (state.taken, state.rejected) == (False, 1)
    assert all(jnp.all(jnp.isfinite(x)) for x in jtu.tree_leaves(state.leading))
    for inside in (11, 7):
        after, state = update(after, state, examples(inside, dtype="float32"))
        assert state.taken


@pytest.mark.slow
def test_points_may_be_sharded():
    """The step is that of one device, to rounding of sums in another order."""
    mesh = jax.make_mesh((2,), ("i",), (AxisType.Auto,), devices=jax.devices()[:2])
    w, batches = weights(dtype="float32"), examples(16, 8, dtype="float32")
    optimizer = mpx.LevenbergMarquardt((wave, edge), method="dual")
    update = eqx.filter_jit(optimizer.update)
    want = update(w, optimizer.init(w), batches)[0]
    shared = jax.device_put(batches, NamedSharding(mesh, PartitionSpec("i")))
    got = update(w, optimizer.init(w), shared)[0]
    for x, y in zip(jtu.tree_leaves(got), jtu.tree_leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"method": "svd"}, "'low_rank'.* as `method`.*'svd'"),
        ({"memory": 0.0}, "above 0, as `memory`"),
    ],
)
def test_wrong_methods(options, match):
    with pytest.raises(ValueError, match=match):
        mpx.LevenbergMarquardt(wave, **options)


@pytest.mark.parametrize(
    ("jacobian", "told"),
    [("bfloat16", True), pytest.param("float32", False, marks=pytest.mark.slow)],
)
def test_a_low_rank_jacobian_in_half_is_told_to_be_float32(jacobian, told):
    w, batches = weights(dtype="float32"), examples(dtype="float32")
    optimizer = mpx.LevenbergMarquardt((wave, edge), jacobian=jacobian, memory=1e3)
    assert optimizer.choice(w, batches).method == "low_rank"
    asked = "asked for bfloat16, but .* low-rank .* float32.*`method='dual'`"
    with pytest.warns(mpx.PrecisionWarning, match=asked) if told else nullcontext():
        eqx.filter_eval_shape(optimizer.update, w, optimizer.init(w), batches)


@pytest.mark.slow
def test_auto_takes_the_smaller_matrix_and_says_so():
    w, batches = weights(dtype="float32"), examples(dtype="float32")
    optimizer = mpx.LevenbergMarquardt((wave, edge))
    assert optimizer.choice(w, batches).method == "dual"
    few = tuple(jnp.repeat(x, 20, axis=0) for x in batches)
    assert optimizer.choice(w, few).method == "primal"
    tight = mpx.LevenbergMarquardt((wave, edge), memory=1e3).choice(w, batches)
    assert "low_rank: a matrix of residuals² takes more than 1 kB" in repr(tight)
    state = optimizer.init(w)
    assert state.choice is None
    state = eqx.filter_jit(optimizer.update)(w, state, batches)[1]
    assert state.choice is not None
    assert "dual: of the two matrices, the one of residuals² takes fewer operations (27" in repr(
        state
    )
    tight = mpx.LevenbergMarquardt((wave, edge), memory=1e3)
    state = eqx.filter_jit(tight.update)(w, state, batches)[1]  # a state of another optimizer
    assert "low_rank: a matrix of residuals² takes more than 1 kB" in repr(state)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"jacobian": "float32"}, "primal: of the two matrices, the one of parameters²"),
        ({}, "dual: of the two matrices, the one of residuals² takes fewer operations"),
        ({"method": "dual", "jacobian": "float32"}, "dual: as asked for"),
        ({"memory": 1e5}, "low_rank: a matrix of residuals² takes more than 100 kB"),
    ],
)
def test_a_state_tells_the_choice_of_its_own_optimizer(options, told):
    """As many residuals as parameters, where the choice depends on the precision."""
    with jax.enable_x64(True):
        w, batches = weights(), examples(57, 6)
        optimizer = mpx.LevenbergMarquardt((wave, edge), forward="float64", **options)
        choice = optimizer.choice(w, batches)
        system = METHODS.index(choice.method), choice.rows, choice.parameters
        state = eqx.tree_at(lambda s: s.system, optimizer.init(w), jnp.asarray(system))
        assert (choice.rows, choice.parameters) == (120, 120)
        assert state.choice == choice
        assert told in repr(state)


def test_auto_takes_the_method_that_was_measured_faster():
    """CPU seconds of a float64 step, of networks of three sizes (see the guide)."""
    faster = {(400, 337): "dual", (700, 697): "dual", (1200, 697): "primal", (1100, 1185): "dual"}
    for (rows, parameters), method in faster.items():
        assert chosen("auto", "float64", MEMORY, rows, parameters).method == method
    assert chosen("auto", "float32", MEMORY, 700, 697).method == "primal"


def test_blocks_and_strips_hold_all_rows_in_bounded_memory():
    for rows, columns in ((500, 8_577), (2_000, 101_697), (16_384, 1_000_000)):
        for precision, size in (("float64", 8), ("bfloat16", 2)):
            blocks, strips = cut(rows, columns, rows, precision)
            assert blocks % strips == 0
            assert strips % 2 == 1
            each = -(-rows // blocks)
            room = max(2**28, 48 * rows**2)
            assert blocks // strips * each * columns * size < 1.2 * room


@pytest.mark.slow
@pytest.mark.parametrize(("method", "most"), [("dual", 1.5e9), ("low_rank", 0.25e9)])
def test_memory_of_a_large_network(method, most):
    """100,000 parameters and 2,000 Laplacians: a float64 Jacobian takes 1.6 GB, `JᵀJ` 80 GB."""
    with jax.enable_x64(True):
        network = eqx.nn.MLP(2, "scalar", 222, 3, jnp.tanh, key=jax.random.key(0), dtype="float64")
        lap = lambda model, x: mpx.laplacian(model, coords="xy", outputs="u")(x)["lap_u"] - x[0]
        optimizer = mpx.LevenbergMarquardt((lap, lap), forward="float64", method=method)
        arrays, static = eqx.partition((network, optimizer.init(network)), eqx.is_array)
        update = lambda arrays, points: optimizer.update(*eqx.combine(arrays, static), points)
        step = lambda arrays, points: eqx.filter(update(arrays, points), eqx.is_array)
        points = jax.ShapeDtypeStruct((1000, 2), "float64")
        memory = jax.jit(step).lower(arrays, (points, points)).compile().memory_analysis()
    assert sum(x.size for x in jtu.tree_leaves(network) if eqx.is_array(x)) > 99_000
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < most

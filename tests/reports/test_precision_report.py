"""Tests the products that are counted against counts by hand, and the cases that are warned of."""

import functools as ft
import warnings
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import assert_tells, line_here, normal, over_devices, tree_allclose
from jax import lax
from jax.experimental import pallas
from jax.sharding import PartitionSpec as P

import mpx_pde as mpx


BATCH, WIDTH = 16, 32
# Multiplications and additions of a forward pass through 2 → 32 → 32 → 32 → 1.
FIRST, HIDDEN, LAST = (2 * BATCH * n for n in (2 * WIDTH, 2 * WIDTH * WIDTH, WIDTH))


def network():
    return eqx.nn.MLP(2, 1, WIDTH, 3, activation=jnp.tanh, key=jax.random.key(0))


def loss(model, points):
    return jnp.mean(jax.vmap(model)(points) ** 2)


def first_layer(model, **options):
    wrap = lambda layer: mpx.FullPrecision(layer, **options)
    return eqx.tree_at(lambda m: m.layers[0], model, replace_fn=wrap)


def gradient(call=mpx.filter_grad, **options):
    return call(loss, mpx.DynamicLossScaling(2.0**8), **options)


POINTS = normal(1, (BATCH, 2))


# --- Products that are counted --------------------------------------------------------------------


@pytest.mark.slow
def test_forward_and_backward_of_a_network_by_hand():
    report = mpx.precision_report(eqx.filter_grad(loss))(network(), POINTS)
    # Weight gradients repeat the forward work. So do the cotangents of the inputs of each layer
    # except the first.
    flops = 2 * FIRST + 3 * HIDDEN + 3 * LAST
    assert report.by_dtype() == {"float32": (4 + 4 + 3, flops)}
    assert (report.flops, report.half_share) == (flops, 0.0)

    cast = mpx.precision_report(gradient())(network(), POINTS)
    assert cast.by_dtype() == {"float16": (11, flops)}
    assert cast.half_share == 1.0
    auto = mpx.precision_report(gradient(autocast=True))(network(), POINTS)
    assert auto.by_dtype() == {"float16": (11, flops)}
    assert {row.primitive for row in auto.rows} == {"mixed_dot_general"}


def test_lines_are_the_users_and_print_as_a_table():
    def two(x, y):
        z = x @ y  # the first
        return mpx.mixed_matmul(z, y, dtype="bfloat16")  # the second

    report = mpx.precision_report(two)(jnp.ones((4, 8)), jnp.ones((8, 8)))
    line = two.__code__.co_firstlineno
    first, second = (f"{__file__}:{line + i}" for i in (1, 2))
    rows = [(r.line, r.dtype, r.out_dtype, r.half, r.count, r.flops) for r in report.rows]
    assert rows == [
        (first, "float32", "float32", False, 1, 512),
        (second, "bfloat16", "bfloat16", True, 1, 512),
    ]
    assert_tells(str(report), "50%", first, without=("mixed",))
    assert report.count("bfloat16") == report.count(jnp.float32) == 1
    assert str(mpx.precision_report(jnp.sin)(1.0)) == "no products"


def test_inside_of_everything_as_often_as_it_runs():
    x = jnp.ones((4, 4))
    once = 2 * 4**3

    product = lambda x: x @ x
    custom = jax.custom_vjp(product)
    custom.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x,))

    def steps(n, body):
        return lambda x: lax.scan(lambda c, _: (body(c), None), x, length=n)[0]

    cases = {
        "jit": (jax.jit(product), 1),
        "scan": (steps(5, product), 5),
        "scan in scan": (steps(5, steps(3, product)), 15),
        "static loop": (lambda x: lax.fori_loop(0, 7, lambda _, c: c @ c, x), 7),
        "checkpoint": (jax.checkpoint(product), 1),
        "value and gradient": (jax.value_and_grad(lambda x: jax.checkpoint(product)(x).sum()), 3),
        # The gradient does not need the value of a sum of products, and the compiler drops it.
        "gradient": (jax.grad(lambda x: jax.checkpoint(product)(x).sum()), 2),
        "one of two results": (lambda x: jax.jit(lambda x: (x @ x, x @ x @ x))(x)[0], 1),
        "custom_vjp": (custom, 1),
        "with its backward rule": (jax.value_and_grad(lambda x: custom(x).sum()), 2),
        "its backward rule": (lambda x: jax.vjp(custom, x)[1](x), 1),
        "cond": (lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, product, x), 2),
        "vmap": (lambda x: jax.vmap(lambda a: x @ a)(jnp.stack([x] * 3)), 3),
    }
    for name, (fun, times) in cases.items():
        report = mpx.precision_report(fun)(x)
        assert report.flops == times * once, name
        assert not report.loops

    unknown = lambda x: lax.while_loop(lambda c: c[0, 0] < 100, product, x)
    report = mpx.precision_report(unknown)(x)
    [line] = report.loops
    assert (report.flops, line.rpartition(":")[0]) == (once, __file__)
    assert "unknown length" in str(report)
    # JAX traces the solver in a separate trace.
    solve = lambda b: jax.scipy.sparse.linalg.cg(jnp.eye(4), b)[0]
    [line] = mpx.precision_report(solve)(x[0]).loops
    assert line.rpartition(":")[0] == __file__


def test_groups_and_batches_by_hand():
    conv = ft.partial(lax.conv_general_dilated, window_strides=(1,), padding="VALID")
    grouped = lambda x, w: lax.ragged_dot(x, w, jnp.array([1, 2, 3]))

    # For the weights, each group has a product of its own rows.
    def back(x, w):
        out, pull = jax.vjp(grouped, x, w)
        return out, pull(jnp.ones((6, 5)))

    for fun, shapes, products in (
        (ft.partial(conv, feature_group_count=2), [(2, 4, 9), (6, 2, 3)], (2 * 6 * 7) * (2 * 3)),
        (lambda a: jnp.einsum("bij,bjk->bik", a, a), [(3, 4, 4)], 3 * 4**3),
        (grouped, [(6, 8), (3, 8, 5)], 6 * 8 * 5),
        (back, [(6, 8), (3, 8, 5)], 3 * 6 * 8 * 5),
    ):
        assert mpx.precision_report(fun)(*map(jnp.ones, shapes)).flops == 2 * products


@pytest.mark.parametrize("other", ["complex64", "float32"])
def test_the_share_is_of_all_floating_point_work(other):
    """Complex products count as four real ones: plain ones, convolutions, in a loop, under vmap,
    and in a gradient."""
    half = jnp.ones((4, 4), "float16")
    x = jnp.ones((4, 4), other)
    parts = 4 if other == "complex64" else 1

    def check(fun, of_half, of_other, z=x):
        report = mpx.precision_report(fun)(half, z)
        assert report.half_share == of_half / (of_half + parts * of_other)
        assert report.flops == 2 * 4**3 * (of_half + parts * of_other)

    check(lambda a, z: (a @ a, z @ z), 1, 1)
    check(lambda a, z: (a @ a @ a, lax.fori_loop(0, 3, lambda i, w: w @ z, z)), 2, 3)
    check(lambda a, z: (a @ a, jax.vmap(jnp.matmul, (None, 0))(z, jnp.stack([z, z]))), 1, 2)
    check(lambda a, z: (a @ a, lax.conv(z[None], z[:, :, None], (1,), "SAME")), 1, 1)
    loss = lambda z: jnp.real(jnp.sum(jnp.square(z @ z)))
    check(lambda a, z: (a @ a, jax.grad(loss)(z)), 1, 3)


def test_a_kernel_runs_once_for_each_point_of_its_grid():
    def kernel(x, y, out):
        out[...] = jnp.dot(x[...], y[...])

    rows = pallas.BlockSpec((2, 16), lambda i: (i, 0))
    fun = pallas.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((6, 16), jnp.float32),
        grid=(3,),
        in_specs=[rows, pallas.BlockSpec((16, 16), lambda i: (0, 0))],
        out_specs=rows,
    )
    [row] = mpx.precision_report(fun)(jnp.ones((6, 16)), jnp.ones((16, 16))).rows
    assert (row.count, row.flops) == (3, 2 * 6 * 16 * 16)


def test_integers_have_no_half_precision():
    fun = lambda x, table: (x.astype("float16") @ x.astype("float16"), table @ table @ table)
    report = mpx.precision_report(fun)(jnp.ones((4, 4)), jnp.ones((8, 8), jnp.int32))
    assert (report.count("int32"), report.half_share) == (2, 1.0)


def test_shapes_will_do_and_split_products_are_named():
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    split = mpx.autocast(lambda x: x @ x, "bfloat16_x3")
    [row] = mpx.precision_report(split)(shape).rows
    assert (row.dtype, row.half) == ("BF16_BF16_F32_X3", True)


TF32 = lax.DotAlgorithmPreset.TF32_TF32_F32
TF32_X3 = lax.DotAlgorithmPreset.TF32_TF32_F32_X3


@pytest.mark.parametrize(
    ("precision", "marked"),
    [(None, True), ("high", True), ("highest", False), (TF32, True), (TF32_X3, False)],
)
def test_float32_that_a_gpu_multiplies_in_tensorfloat32_is_marked(precision, marked):
    x, n = jnp.ones((4, 4)), 2 * 4**3
    square = lambda x: x @ x
    fun = lambda x: (jnp.matmul(x, x, precision=precision), square(x.astype("float16")))
    report = mpx.precision_report(fun)(x)
    full, half = sorted(report.rows, key=lambda row: row.half)
    assert (full.tensorfloat32, half.tensorfloat32) == (marked, False)
    assert (report.flops, report.tensorfloat32_share) == (2 * n, marked / 2)
    assert (f"{full.dtype} (TF32)" in str(report)) == marked
    assert ("(TF32) for 50% of the work: a GPU" in str(report)) == marked


def test_tensorfloat32_is_marked_however_it_is_requested():
    x = jnp.ones((4, 4))
    by_default = lambda x: jax.default_matmul_precision("TF32_TF32_F32")(jnp.matmul)(x, x)
    of_forward = mpx.autocast(lambda x: x @ x, "tensorfloat32")
    for fun in (by_default, of_forward):
        assert mpx.precision_report(fun)(x).tensorfloat32_share == 1.0
    exact = mpx.autocast(lambda x: x @ x, "tensorfloat32_x3")
    assert mpx.precision_report(exact)(x).tensorfloat32_share == 0.0


def test_products_of_the_library_in_float32_are_not_marked():
    own = lambda x: mpx.mixed_matmul(x, x, dtype="float32")
    z, n = jnp.ones((4, 4), "complex64"), jnp.ones((4, 4), "int32")
    plain = lambda x: (own(x), z @ z, x @ x, n @ n)
    with jax.default_matmul_precision("highest"):
        assert mpx.precision_report(plain)(jnp.ones((4, 4))).tensorfloat32_share == 0
    report = mpx.precision_report(plain)(jnp.ones((4, 4)))
    marked = [(row.dtype, row.primitive) for row in report.rows if row.tensorfloat32]
    assert sorted(marked) == [("complex64", "dot_general"), ("float32", "dot_general")]


# --- Half behind a layer --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_derivatives_of_a_foreign_network_are_half_behind_the_first_layer():
    def residual(model, points, *, derivatives):
        fun = mpx.partials(model, ["u", "u_xx"], coords="xy", outputs="u", scaling=derivatives)
        d = jax.vmap(fun)(points)
        return jnp.mean((d["u_xx"] + d["u"]) ** 2)

    scaling = mpx.Scaling(derivatives=mpx.DerivativeScaling.per_direction("xy"))
    run = mpx.filter_grad(residual, scaling, keep_full=(False, True))
    model = eqx.nn.MLP(2, "scalar", WIDTH, 3, activation=jnp.tanh, key=jax.random.key(0))
    own = mpx.nn.CoordinateMLP(2, "scalar", WIDTH, 2, key=jax.random.key(0))
    line = residual.__code__.co_firstlineno
    for network in (model, first_layer(model), first_layer(model, out_dtype="half"), own):
        report = mpx.precision_report(run)(network, POINTS)
        assert report.half_share > 0.9
        # The line that requests derivatives of the library's network.
        assert {row.line for row in report.rows} == {f"{__file__}:{line + 2}"}


# --- Warnings -------------------------------------------------------------------------------------


ACCUMULATED = ft.partial(mpx.filter_accumulated_value_and_grad, micro_batches=2, in_axes=(0,))


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("call", [mpx.filter_grad, mpx.calculate_scaled_grad, ACCUMULATED])
def test_a_network_that_multiplies_in_float32_after_all(call):
    options = {} if call is ACCUMULATED else {"keep_full": (False, True)}
    model = mpx.FullPrecision(network()) if call is ACCUMULATED else first_layer(network())
    run = eqx.filter_jit(gradient(call, **options))
    with pytest.warns(mpx.PrecisionWarning, match=r"asked for float16, but 0% of the work") as seen:
        run(model, POINTS)
    assert [w.filename for w in seen] == [__file__]
    # The compiled function issues no further warning.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(model, POINTS + 1)


@pytest.mark.usefixtures("standard_promotion")
def test_less_than_half_of_the_work():
    model = network()
    for i in (1, 2):
        full = lambda m, i=i: m.layers[i]
        wrap = lambda layer: mpx.FullPrecision(layer, out_dtype="half")
        model = eqx.tree_at(full, model, replace_fn=wrap)
        if i == 1:  # one of two large layers leaves half or more of the work
            eqx.filter_eval_shape(gradient(), model, POINTS)
    with pytest.warns(mpx.PrecisionWarning, match=r"but \d% of the work"):
        eqx.filter_eval_shape(gradient(), model, POINTS)


@pytest.mark.slow
def test_values_in_full_are_not_held_against_half():
    """With `forward=` a third of the work is requested in full, and no wrapper can change that."""

    def loss(model, points):
        u = lambda p: jnp.reshape(model(p), ())
        terms = mpx.partials(u, ["u_x"], coords="xy", outputs="u")
        return jnp.mean(jax.vmap(terms)(points)["u_x"] ** 2)

    run = mpx.filter_grad(loss, mpx.DynamicLossScaling(), forward="float32")
    model = mpx.nn.CoordinateMLP(2, 1, 16, 2, fourier_features=(8, 1.0), key=jax.random.key(0))
    assert 1 / 3 < mpx.precision_report(run)(model, POINTS).half_share < 0.5
    eqx.filter_eval_shape(run, model, POINTS)  # warnings are errors
    with pytest.warns(mpx.PrecisionWarning, match="With `forward=`") as seen:
        eqx.filter_eval_shape(run, mpx.FullPrecision(model), POINTS)
    assert "out_dtype" not in str(seen[0].message)


def test_advice_is_for_what_was_asked():
    precise = lambda w, x: jnp.mean(jnp.matmul(x, w, precision="highest") ** 2)
    for autocast in (True, {"full": "integer_pow"}):
        grad = mpx.filter_grad(precise, mpx.DynamicLossScaling(), autocast=autocast)
        with pytest.warns(mpx.PrecisionWarning, match="`precision`") as seen:
            eqx.filter_eval_shape(grad, jnp.ones((4, 4)), jnp.ones((8, 4)))
        assert "pass `autocast=True`" not in str(seen[0].message)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("options", [{}, {"autocast": True}, {"forward": "float32"}])
def test_complex_products_are_held_against_half_if_they_are_nearly_all_of_the_work(options):
    def step(size):
        def loss(w, x):
            waves = jnp.exp(1j * jnp.arange(64.0 * size).reshape(64, size))
            return jnp.mean(jnp.abs((x @ w) @ waves).astype("float32"))

        return mpx.filter_grad(loss, mpx.DynamicLossScaling(), **options)

    given = jnp.ones((64, 64)) / 64, jnp.ones((128, 64))
    eqx.filter_eval_shape(step(16), *given)  # half of the work; warnings are errors
    with pytest.warns(mpx.PrecisionWarning, match="of the work") as told:
        eqx.filter_eval_shape(step(1024), *given)
    says = "complex64, at", f"test_precision_report.py:{line_here(-8)}", "real and imaginary parts"
    assert_tells(str(told[0].message), *says)


@pytest.mark.slow
def test_what_asks_for_values_runs_as_it_would():
    steps, scaling = jnp.array(3), mpx.DynamicLossScaling(2.0**8)

    def powers(w, steps):
        for _ in range(int(steps)):
            w = w @ w
        return jnp.mean(w)

    # Known inside of a `jit`, and outside of the batch of a `vmap` that is run step by step.
    w, run = jnp.full((4, 4), 0.25), lambda w, steps: mpx.filter_grad(powers, scaling)(w, steps)[2]
    jitted = jax.jit(lambda w: run(w, steps))(w)
    mapped = jax.vmap(lambda w: run(w, steps))(w[None])[0]
    assert tree_allclose([jitted, mapped], 2 * [jax.grad(powers)(w, 3)], "float16")
    with pytest.raises(jax.errors.ConcretizationTypeError):
        jax.jit(run)(w, steps)


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_who_is_not_warned():
    # Warnings are errors in this suite. They are issued when a program is traced.
    full = first_layer(network())
    for options in (
        {"use_mixed_precision": False},
        {"policy": "float32"},
        {"autocast": True},
        {"autocast": {"full": "dot_general"}},  # this names float32 itself
    ):
        eqx.filter_eval_shape(gradient(**options), full, POINTS)
    eqx.filter_eval_shape(gradient(), network(), POINTS)
    squares = lambda x: jnp.sum(x**2)
    eqx.filter_eval_shape(mpx.filter_grad(squares, mpx.DynamicLossScaling()), jnp.ones(3))
    # In eager mode there is no program to check.
    gradient(keep_full=(False, True))(full, POINTS)


# --- One meaning of the user's line ---------------------------------------------------------------


@eqx.filter_jit
def _jitted(model, x):
    return model(x)


CALLS = {
    "as it is": lambda model, x: model(x),
    "jit": lambda model, x: _jitted(model, x),
    "checkpoint": lambda model, x: eqx.filter_checkpoint(model)(x),
    "scan": lambda model, x: lax.scan(lambda c, _: (model(c), None), x, length=2)[0],
    "jit in map": lambda model, x: lax.map(lambda x: _jitted(model, x), x[None]),
}


@pytest.mark.parametrize("name", CALLS)
def test_all_reports_name_the_same_line(name):
    """It is the user's line that calls a layer of Equinox, also in a trace of its own."""
    model, x = eqx.nn.MLP(4, 4, 8, 2, key=jax.random.key(0)), jnp.ones(4)
    call = CALLS[name]
    fun = lambda model, x: jnp.sum(call(model, x))
    _jitted(model, x)  # traced elsewhere first

    def lines(rows, name="primitive"):
        return {row.line for row in rows if "dot_general" in getattr(row, name)}

    counted = lines(mpx.precision_report(fun)(model, x).rows)
    assert all(Path(__file__).name in line for line in counted)
    assert lines(mpx.autocast(fun, "float16").report(model, x).operations) == counted
    if name == "as it is":
        assert counted == {f"{__file__}:{call.__code__.co_firstlineno}"}
    rows = mpx.range_report(fun)(model, x).rows
    assert lines(rows) == counted
    assert {row.layer for row in rows if row.primitive == "dot_general"} == {"eqx.nn.Linear"}
    derivative = mpx.partials(lambda x: fun(model, x), ["u_x"], coords="xyzt", outputs="u")
    assert lines(derivative.report(x).equations) == counted


def test_work_of_all_devices():
    product = ft.partial(mpx.mixed_matmul, dtype="float16", out_dtype="float32")
    sharded = over_devices(product, 4, (P("data"), P()), P("data"))
    x, w = jnp.ones((8, 4)), jnp.ones((4, 4))
    assert mpx.precision_report(sharded)(x, w).by_dtype() == {"float16": (4, 2 * 8 * 4 * 4)}


@pytest.mark.parametrize("options", [{"forward": "float32"}, {"autocast": True}])
def test_products_in_compiled_functions_of_jax_have_the_line_of_their_call(options):
    def step(h, w):
        return jnp.tanh(h @ jnp.linalg.matrix_power(w, 5)), None

    def loss(w, x):
        first = jnp.linalg.matrix_power(w, 5)
        second = jnp.linalg.matrix_power(2 * w, 5)  # JAX records the line of the first call only
        h, _ = lax.scan(lambda h, _: step(h, w), x @ first @ second, length=3)
        return jnp.mean(h**2)

    gradient = mpx.filter_grad(loss, mpx.NoOpLossScaling(), **options)
    report = mpx.precision_report(gradient)(0.1 * jnp.eye(8), jnp.ones((4, 8)))
    lines = {int(row.line.rpartition(":")[2]) for row in report.rows}
    assert lines == {line_here(x) for x in (-11, -8, -7, -6)}

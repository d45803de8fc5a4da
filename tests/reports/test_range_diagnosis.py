"""Tests that a range report names the right precision, the right line and a fix that works."""

import inspect
import re
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_tells, line_here
from jax import lax
from jax.experimental import pallas

import mpx_pde as mpx
from mpx_pde.reports._explain import explain


HALF = jnp.float16
LARGE = np.float32(60000.0)


# --- Overflow of float16 is not blamed on float32 -------------------------------------------------


# Each takes four values of 60,000 in float16 and exceeds 65,504. Some multiply first, and then only
# move the values.
IN_HALF = {
    "stack": lambda x: jnp.stack([x * 2] * 2),
    "segment_sum": lambda x: jax.ops.segment_sum(x, jnp.array([0, 0, 1, 1]), 2),
    "scatter": lambda x: jnp.zeros(4, HALF).at[jnp.array([0, 1])].set(x[:2] * 2),
    "indexing, backwards": lambda x: jax.grad(
        lambda v: jnp.sum(v[jnp.array([0, 0, 1, 1])] * v[jnp.array([1, 1, 0, 0])])
    )(x),
    "reduce": lambda x: lax.reduce(x, HALF(0), lambda a, b: a + b * HALF(1), (0,)),
    "reduce_window": lambda x: lax.reduce_window(
        x, HALF(0), lambda a, b: a + b, (2,), (1,), "VALID"
    ),
    "ragged_dot": lambda x: lax.ragged_dot(
        2 * x[:, None], jnp.ones((2, 1, 3), HALF), jnp.array([2, 2])
    ),
    "reduce_precision": lambda x: lax.reduce_precision(x.astype(jnp.float32) * 2, 5, 10),
    "float8": lambda x: (x * 2).astype(jnp.float8_e4m3fn).astype(jnp.float32),
    "custom_linear_solve": lambda x: jax.scipy.sparse.linalg.cg(
        lambda v: v * HALF(1e-3), x, maxiter=1
    )[0],
    "tap": lambda x: mpx.partials(
        lambda p: p[0] * (x[0] * 2), ["u_x"], coords="x", outputs="u",
        scaling=mpx.DerivativeScaling.per_direction("x"),
    )(jnp.ones(1, HALF))["u_x"],
}  # fmt: skip


@pytest.mark.parametrize("name", IN_HALF)
def test_overflow_of_half_is_not_blamed_on_float32(name):
    fun, x = IN_HALF[name], np.full(4, LARGE, HALF)
    report = mpx.range_report(fun)(x)
    assert (report.first_nonfinite, report.mixed) == (None, True)
    assert "float16 overflows first at" in mpx.explain_nonfinite(fun, "float16")(x)
    [result] = jax.tree.leaves(report.result)
    assert result.dtype == jnp.float32
    assert np.all(np.isfinite(result))
    # The largest result is 6e4 squared, apart from the solve, which divides by 1e-3.
    assert 65504 < np.max(np.abs(result)) <= 4e9


def test_callbacks_get_the_dtype_that_they_were_written_for():
    def host(x):
        assert x.dtype == HALF
        return np.asarray(x)

    fun = lambda x: jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, HALF), x * 2)
    assert mpx.range_report(fun)(np.full(4, LARGE, HALF)).first_nonfinite is None


# --- Inputs ---------------------------------------------------------------------------------------

NAN = np.array([1.0, np.nan], np.float32)


def test_nan_in_closed_over_data():
    data = jnp.asarray(NAN)

    @jax.jit
    def inner(w):
        return w * data

    line = line_here(-2)
    for fun in (inner, lambda w: jnp.sum(inner(w) ** 2), lambda w: jnp.sum(w * NAN)):
        text = mpx.explain_nonfinite(fun)(jnp.ones(2))
        told = "There are NaNs in the constant at closed-over float32 2 in", "50 %"
        assert_tells(text, *told, without=("division",))
    assert f"test_range_diagnosis.py:{line}" in mpx.explain_nonfinite(inner)(jnp.ones(2))


def test_nan_in_an_argument():
    fun = lambda batch: jnp.mean(batch["x"] ** 2)
    for x, told in ((NAN, "NaNs"), (np.float32([np.inf, 1.0]), "infinities")):
        text = mpx.explain_nonfinite(fun)({"x": jnp.asarray(x)})
        assert f"There are {told} in the input at argument [0]['x'] (50 %)" in text
        assert mpx.range_report(fun)({"x": jnp.asarray(x)}).first_nonfinite is None


@pytest.mark.parametrize(
    ("large", "small", "told"), [(1e5, 1.0, "above 65504"), (1.0, 1e-10, "below 2^-24 is zero")]
)
def test_a_number_that_float16_does_not_hold(large, small, told):
    """While JAX traces the cast model, it turns the number into an infinity or zero, unlike in
    float32."""

    loss = lambda w, x: jnp.mean((w * x * large / large) ** 2 + jnp.log(jnp.abs(w - 1) + small))
    line = line_here(-1)
    given = jnp.ones(3), jnp.ones(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, about the cast of 1e5
        half = mpx.filter_grad(loss, mpx.DynamicLossScaling())
        text = mpx.explain_nonfinite(half)(*given)
    assert_tells(text, told, f"test_range_diagnosis.py:{line}", without=("float32 itself",))
    # The suggested fix works.
    in_full = mpx.filter_grad(loss, mpx.DynamicLossScaling(), forward="float32")
    assert told not in mpx.explain_nonfinite(in_full)(*given)


def test_a_derivative_in_the_loss_is_of_its_forward_pass():
    loss = lambda w, x: jnp.mean(jax.vmap(jax.grad(lambda x: jnp.sin(w * x)))(x))
    half = mpx.filter_grad(loss, mpx.StaticLossScaling(1.0))
    text = mpx.explain_nonfinite(half)(jnp.float32(7e4), jnp.zeros(4))
    assert_tells(text, "overflows first", without=("backward pass",))


CLOSEST = lambda x: jnp.min(jnp.where(x > 2, x, jnp.inf), initial=9.0)
LARGEST = lambda x: jax.ops.segment_max(x, jnp.array([0, 0, 1, 1]), num_segments=2)
# One segment is empty, and its infinity reaches no other value.
WITH_EMPTY = lambda x: jax.ops.segment_min(x, jnp.array([0, 0, 2, 2]), num_segments=3)[::2]
NOT_NUMBERS = lambda x: jnp.nansum(jnp.where(x > 2, x, jnp.nan))


def test_masks_of_infinity_are_harmless():
    """An infinity or a NaN that reaches no result is harmless, but half may harm the rest."""

    def attention(scores):
        masked = jnp.where(jnp.tril(jnp.ones((4, 4), bool)), scores, -jnp.inf)
        return jax.nn.softmax(masked)

    scores = jnp.ones((4, 4))
    slope = lambda f: jax.grad(lambda s: jnp.sum(f(s) ** 2))
    masked = (attention, slope(attention), slope(LARGEST), slope(WITH_EMPTY), CLOSEST, NOT_NUMBERS)
    for fun in masked:
        text = mpx.explain_nonfinite(fun, "float16")(scores)
        assert_tells(text, "othing overflows float16", without=("but:", "Everything is finite"))
    # An infinity that meets arithmetic may be a mistake.
    text = mpx.explain_nonfinite(lambda x: jnp.minimum(x + jnp.inf, 1.0), "float16")(scores)
    assert text.startswith("Nothing overflows float16. What the function returns is finite; but:")
    text = mpx.explain_nonfinite(lambda x: 1e6 * jnp.nansum(x))(jnp.asarray(NAN))
    assert text.startswith("float16 overflows first at")
    assert "What the function returns is finite; but: There are NaNs in the input" in text


def test_float64_is_looked_at_as_it_is():
    x = np.array([1e200, 1.0])
    text = mpx.explain_nonfinite(lambda x: x * 0.5, "float16")(x)
    assert text.startswith("The input at argument [0] is beyond float32")
    assert "largest 2^664.4" in text
    with jax.enable_x64(True):
        report = mpx.range_report(lambda x: x * 2)(x)
        text = mpx.explain_nonfinite(lambda x: x * 0.5, "float16")(x)
    for row in report.rows:
        assert (row.float16.overflow, row.bfloat16.overflow, row.nonfinite) == (0.5, 0.5, 0)
    assert report.rows[0].exponents == (0.0, pytest.approx(200 * np.log2(10)))
    assert text.startswith("float16 overflows first at the input at argument [0]: 50 %")
    assert "largest 2^664.4" in text


# --- Lines ----------------------------------------------------------------------------------------


# The first layer is float32, and it is most of so small a network.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::mpx_pde.PrecisionWarning")
def test_a_healthy_network_of_the_library():
    """Tests a physics-informed loss, written as in the documentation."""
    model = mpx.nn.CoordinateMLP(2, "scalar", 8, 1, key=jax.random.key(0))
    points = jax.random.uniform(jax.random.key(1), (4, 2))

    def loss(model, points, *, derivatives):
        d = mpx.partials(model, ["u", "u_xx"], coords="xt", outputs="u", scaling=derivatives)
        d = jax.vmap(d)(points)
        return jnp.mean((d["u"] - 0.01 * d["u_xx"]) ** 2)

    directions = mpx.DerivativeScaling.per_direction("xt")
    scaling = mpx.Scaling(mpx.DynamicLossScaling(2.0**10), directions)
    grad = mpx.filter_grad(loss, scaling, keep_full=(False, True))
    report = mpx.range_report(grad)(model, points)
    assert report.mixed
    assert report.first_overflow("float16") is None
    assert "othing overflows float16" in explain(report, "float16")
    # Lines are always the user's. A few rows that name the layer stand for the library's own work.
    lines = [row.line for row in report.rows if row.primitive not in ("input", "constant")]
    assert all(re.search(r"test_range_diagnosis\.py:\d+$", line) for line in lines)
    folded = [row for row in report.folded if row.operations > 1]
    assert {"CoordinateMLP", "partials"} <= {row.primitive for row in folded}
    assert sum(row.operations for row in report.folded) == len(report.rows)
    assert len(report.rows) > 5 * len(folded)
    per_line = [(r.line, r.layer, r.dtype, r.backward) for r in report.folded if r.operations > 1]
    assert len(set(per_line)) == len(per_line)
    assert "mpx_pde/" not in str(report)
    # Folded rows sum the sizes of their operations.
    total = sum(row.size for row in report.rows)
    assert sum(row.size for row in report.folded) == total


@pytest.mark.parametrize("wrap", [lambda fun: fun, mpx.autocast])
def test_functions_of_jax_stand_where_they_are_called(wrap):
    """JAX traces its own functions once, and gives all calls the line of the first."""
    x = jnp.full(3, 200.0)
    jnp.linalg.norm(x)

    def fun(x):
        a = jnp.linalg.norm(x * 1e-3)
        return a + jnp.linalg.norm(x)

    report = mpx.range_report(wrap(fun))(x)
    line = fun.__code__.co_firstlineno
    where = {row.line.rpartition(":")[2] for row in report.rows if row.primitive == "sqrt"}
    assert where == {str(line + 1), str(line + 2)}


ruled = jax.custom_vjp(lambda w, x: x @ w)


def _ruled_forward(w, x):
    return x @ w, (w, x)


def _ruled_backward(kept, cotangent):
    (w, x), large = kept, cotangent * 2.0**13
    return (x.T @ large) / 2.0**13, (large @ w.T) / 2.0**13


ruled.defvjp(_ruled_forward, _ruled_backward)

# Places of a call to the function with a custom rule.
CALLED = {
    "plain": ruled,
    "jit": lambda w, x: jax.jit(ruled)(w, x),
    "scan": lambda w, x: lax.scan(lambda c, row: (c, ruled(w, row[None])[0]), 0, x)[1],
}


@pytest.mark.filterwarnings("ignore::mpx_pde.PrecisionWarning")  # with `forward=` it is float32
@pytest.mark.parametrize(
    ("call", "options"),
    [
        *((call, {}) for call in CALLED),
        ("jit", {"autocast": True}),
        ("scan", {"forward": "float32"}),
    ],
    ids=str,
)
def test_a_backward_rule_is_told_as_one(call, options):
    """JAX knows the lines of a forward rule, but for a backward rule only the line of the call."""

    loss = lambda w, x: jnp.mean(CALLED[call](w, x).astype(jnp.float32) ** 2)
    w, x = jnp.ones((4, 4)), jnp.ones((3, 4))
    gradient = mpx.filter_grad(loss, mpx.StaticLossScaling(2.0**8), **options)
    report = mpx.range_report(gradient)(w, x)
    rows = [row for row in report.rows if row.inside and row.backward]
    assert any("dot_general" in row.primitive for row in rows)
    assert all("in the backward rule of the `jax.custom" in row.where for row in rows)
    # JAX differentiates the mean.
    assert any(row.backward and not row.inside for row in report.rows)
    if not options:
        text = explain(report, "float16")
        assert text.startswith("float16 overflows first at")
        assert "`mul` in the backward rule of the `jax.custom_vjp` called there: 100 %" in text
        assert "mul in a custom_vjp" in str(report)
    products = mpx.precision_report(gradient)(w, x)
    told = [row for row in products.rows if row.inside]
    assert told
    assert str(products).count("in the `jax.custom_vjp` called there") == len(told)
    # The forward rule has a line of its own unless JAX has dropped it.
    if call == "plain" and not options:
        assert {row.line for row in report.rows if "dot" in row.primitive and not row.inside} == {
            f"{__file__}:{inspect.getsourcelines(_ruled_forward)[1] + 1}"
        }


# --- Fixes ----------------------------------------------------------------------------------------


def scaled_product(x, w):
    return (x * 1e3) @ w * 1e-6


def scoped(x, w):
    with jax.named_scope("energy"):
        y = (x @ w) * 1e5
    return y * 1e-6


def scoped_by_number(x, w):
    with jax.named_scope("layers[0]"):
        return scaled_product(x, w)


@pytest.mark.parametrize("fun", [scaled_product, scoped, scoped_by_number])
def test_the_override_that_is_named_mends(fun):
    x, w = jnp.full((4, 4), 40.0), jnp.full((4, 4), 10.0)
    text = mpx.explain_nonfinite(fun, "float16")(x, w)
    assert "overflows first" in text
    # One override may lead to the next.
    names = []
    for _ in range(3):
        found = re.search(r"full='([^']+)'", text)
        if not found:
            break
        assert found[1] not in names
        names.append(found[1])
        mended = mpx.autocast(fun, "float16", full=names)
        text = mpx.explain_nonfinite(mended, "float16")(x, w)
    assert names
    assert "othing overflows float16" in text
    assert mended.report(x, w).unused == ()
    np.testing.assert_allclose(mended(x, w), fun(x, w), rtol=2e-3)  # an operand in float16


def test_a_mixed_product_is_mended_by_its_dtype():
    x, w = jnp.full((4, 4), 300.0), jnp.full((4, 4), 300.0)
    fun = lambda x, w, dtype="float16": mpx.mixed_matmul(x, w, dtype=dtype)
    text = mpx.explain_nonfinite(fun, "float16")(x, w)
    assert "Pass `dtype=jnp.float32` to `mpx.mixed_matmul` there" in text
    wide = mpx.explain_nonfinite(lambda x, w: fun(x, w, jnp.float32).astype(HALF) * 0, "float16")
    assert "operand of" not in wide(x, w)
    # The report also covers values that the product itself rounds to half.
    text = mpx.explain_nonfinite(fun, "float16")(x * 1e3, w * 1e-6)
    assert "`operand of mixed_dot_general` in `mixed_matmul`" in text


# --- The backward pass ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::mpx_pde.PrecisionWarning")  # no derivative is scaled
@pytest.mark.parametrize(("size", "told"), [(2.0**22, "overflows"), (2.0**-30, "lost to zero")])
def test_no_loss_scale_is_changed_where_there_is_none(size, told):
    loss = lambda w, x: size * jnp.mean((x @ w).astype(jnp.float32))

    def text(gradient):
        found = mpx.explain_nonfinite(gradient, "float16")(jnp.ones((4, 4)), jnp.ones((8, 4)))
        assert_tells(found, told, "It belongs to the backward pass")
        return found

    known = "scale is too large" if told == "overflows" else ": a larger loss scale"
    assert known in text(mpx.filter_grad(loss, mpx.StaticLossScaling(2.0**5)))
    both = mpx.Scaling(mpx.StaticLossScaling(2.0**5), mpx.DerivativeScaling.per_direction("x"))
    ignoring = lambda w, x, *, derivatives: loss(w, x)
    assert known in text(mpx.filter_grad(ignoring, both))
    for scaling in (mpx.NoOpLossScaling(), mpx.Scaling(mpx.NoOpLossScaling(), both.derivatives)):
        fun = loss if isinstance(scaling, mpx.NoOpLossScaling) else ignoring
        none = text(mpx.filter_grad(fun, scaling))
        assert_tells(none, "`mpx.DynamicLossScaling`", without=("lower", "larger loss scale"))
    # The scaling of a user's function is unknown.
    unknown = text(lambda w, x: jax.grad(mpx.cast_function(loss, "float16", "float32"))(w, x))
    assert "If the loss is scaled" in unknown or "a loss scale, or a larger one" in unknown


# --- Other containers, cost, arguments ------------------------------------------------------------


def test_only_the_branch_of_this_platform_is_lowered():
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    elsewhere = pallas.pallas_call(lambda x_ref, o_ref: None, out_shape=shape)
    large = lambda x: x * 1e6
    fun = lambda x: jnp.sum(lax.platform_dependent(x, tpu=elsewhere, default=large))
    for transform in (lambda f: f, jax.jit, jax.checkpoint):
        report = mpx.range_report(transform(fun))(jnp.ones(3))
        assert report.first_overflow().primitive == "mul"
        assert report.result == 3e6


def test_arrays_go_to_the_host_in_parts(monkeypatch):
    """Nonfinite values are tracked from one part to the next."""

    def fun(x):
        y = jnp.log(x)
        return lax.scan(lambda c, _: (jnp.exp(c) * c - c, None), y, None, length=3)[0] + y

    x = jnp.array([0.0, 1.0])
    whole = mpx.range_report(fun)(x)
    monkeypatch.setattr("mpx_pde.reports._meter._BYTES", 1)
    parts = mpx.range_report(fun)(x)
    assert parts.rows == whole.rows
    assert [row.primitive for row in parts.rows if row.creates_nonfinite] == ["log"]


def test_a_cast_of_autocast_has_the_line_of_what_is_cast():
    """The cast value is not an argument, and `autocast=True` is not suggested if it was passed."""

    def loss(model, x):
        large = x * 1e6
        return jnp.mean(jax.vmap(model)(large) ** 2)

    model = eqx.nn.MLP(4, "scalar", 8, 1, key=jax.random.key(0))
    gradient = mpx.filter_grad(loss, mpx.StaticLossScaling(1.0), autocast=True)
    report = mpx.range_report(gradient)(model, jnp.ones((8, 4)))
    line = f"{__file__}:{loss.__code__.co_firstlineno}"
    assert line not in {row.line for row in report.rows if row.half and not row.backward}
    told = f":{loss.__code__.co_firstlineno + 1} `convert_element_type`: 100 %"
    told = told, "for the products that take it. Divide the data"
    assert_tells(explain(report, "float16"), *told, without=("keep_full",))


def test_a_derivative_that_overflows_where_a_layer_stores_it():
    """The cast has the line of `partials`, and is no argument."""

    def loss(model, points):
        terms = mpx.partials(model, ["u_xx"], coords="xy", outputs="u")
        return jnp.mean(jax.vmap(terms)(points)["u_xx"].astype(jnp.float32) ** 2) / 2.0**80

    model = eqx.nn.MLP(2, "scalar", 8, 2, jnp.sin, key=jax.random.key(0))
    model = eqx.tree_at(lambda m: m.layers[0].weight, model, 2000 * jnp.ones((8, 2)))
    gradient = mpx.filter_grad(loss, mpx.StaticLossScaling(1.0), keep_full=(False, True))
    report = mpx.range_report(gradient)(model, jnp.ones((4, 2)) / 7)
    line = f":{loss.__code__.co_firstlineno + 2} `convert_element_type` in `partials`"
    told = explain(report, "float16")
    assert_tells(told, line, "If it is a derivative, pass `partials` the derivative scales")


@pytest.mark.slow
def test_a_cast_in_a_network_of_the_library_is_no_argument():
    model = mpx.nn.FNO(1, 1, 8, 1, 4, key=jax.random.key(0))
    loss = lambda model, x: jnp.mean(jax.vmap(model)(x * 1e7) ** 2)
    gradient = mpx.filter_grad(loss, mpx.StaticLossScaling(1.0), keep_full=(False, True))
    text = mpx.explain_nonfinite(gradient, "float16")(model, jnp.ones((2, 1, 16)))
    assert_tells(text, "sets its precision itself", without=("keep_full",))


@pytest.mark.slow
@pytest.mark.parametrize("forward", ["float32", "half"])
def test_scales_are_the_advice_for_derivatives(forward):
    def loss(model, points, *, derivatives):
        steep = lambda p: model(p * 1e3)
        d = mpx.partials(steep, ["u_xx"], coords="x", outputs="u", scaling=derivatives)
        return jnp.mean((jax.vmap(d)(points)["u_xx"] * 1e-6) ** 2)

    model = eqx.nn.MLP(1, "scalar", 64, 2, activation=jnp.tanh, key=jax.random.key(0))
    scaling = mpx.Scaling(derivatives=mpx.DerivativeScaling.per_direction("x"))
    gradient = mpx.filter_grad(loss, scaling, forward=forward)
    points = jnp.linspace(-1e-3, 1e-3, 16)[:, None]
    text = mpx.explain_nonfinite(gradient, "float16")(model, points)
    assert_tells(text, "ass `partials` the derivative scales", "which `mpx.initial_scaling` finds")


def test_what_is_kept_for_the_backward_pass_has_its_line():
    layer = eqx.nn.Linear(4, 64, use_bias=False, key=jax.random.key(0))
    loss = lambda layer, x: jnp.mean(jax.vmap(layer)(x) ** 2)
    gradient = mpx.filter_grad(loss, mpx.StaticLossScaling(1.0), forward="float32")
    batch = jnp.full((8, 4), 1e6)
    rows = mpx.range_report(gradient)(layer, batch).rows
    (row,) = [x for x in rows if x.half and not x.backward and x.float16.overflow]
    assert row.line == f"{__file__}:{loss.__code__.co_firstlineno}"
    text = mpx.explain_nonfinite(gradient, "float16")(layer, batch)
    assert_tells(text, row.line, "kept in half")


def test_an_epsilon_that_is_zero_in_half_is_no_fault_of_float32():
    """This holds even if float32 divides by it."""
    cast = lambda w, x: (w[0] / 2).astype(x.dtype) / (0 * w + 1e-8).astype(x.dtype)
    loss = lambda w, x: jnp.mean(x * cast(w, x))
    gradient = mpx.filter_grad(loss, mpx.StaticLossScaling(1.0), keep_full=(False, True))
    text = mpx.explain_nonfinite(gradient, "float16")(jnp.ones(3), jnp.ones(3))
    told = "what comes before, the code holds as float16"
    assert_tells(text, told, without=("float32 itself",))


def test_a_result_that_is_cast_back_is_no_argument():
    large = mpx.force_full_precision(lambda x: jnp.exp(20 * x))
    gradient = mpx.filter_grad(lambda w: jnp.mean(jnp.log1p(large(w))), mpx.StaticLossScaling(1.0))
    text = mpx.explain_nonfinite(gradient, "float16")(jnp.ones(3))
    assert "returns half there: `mpx.force_full_precision(f, jnp.float32)`" in text


OPTIONS = {"casts": {}, "forward": {"forward": "float32"}, "autocast": {"autocast": True}}


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("jitted", [False, True])
def test_what_fails_in_float32_too_is_not_blamed_on_halves(options, jitted):
    """It is so in every mode, where the operands are exact in each precision."""

    def loss(w, x):
        return jnp.mean(jnp.log(w * x - 10.0)) + jnp.mean(jnp.sqrt(jnp.abs(w - w)))

    gradient = mpx.filter_grad(loss, mpx.DynamicLossScaling(), **options)
    gradient = eqx.filter_jit(gradient) if jitted else gradient
    text = mpx.explain_nonfinite(gradient, "float16")(jnp.ones(3), jnp.ones(3))
    assert_tells(text, "float32 itself is not finite first", "`log`", without=("holds as float16",))
    # The same from a step, of which nothing is known but its program.
    step = lambda w, x: mpx.filter_grad(loss, mpx.DynamicLossScaling(), **options)(w, x)
    text = mpx.explain_nonfinite(step, "float16")(jnp.ones(3), jnp.ones(3))
    assert ("holds as float16" in text) == (options == {})


def test_a_loss_that_is_not_finite_is_told_though_its_gradient_is():
    loss = lambda w, x: jnp.mean(jnp.log(w - 100.0 * x))
    gradient = mpx.filter_grad(loss, mpx.DynamicLossScaling(), forward="float32")
    text = mpx.explain_nonfinite(gradient, "float16")(jnp.ones(3), jnp.ones(3))
    assert text.startswith("float32 itself is not finite first")


def test_a_loss_scale_that_is_too_large_is_told_by_how_much():
    loss = lambda w, x: jnp.sum(w * x)
    run = lambda scale: mpx.filter_grad(loss, mpx.StaticLossScaling(scale))
    x = jnp.array([3.0, 100.0])
    text = mpx.explain_nonfinite(run(2.0**20), "float16")(jnp.ones(2), x)
    # The largest cotangent is 100 2^20, and float16 ends at 2^16.
    assert_tells(text, "divide it by 2^11", "`mpx.initial_scaling`")
    assert not mpx.range_report(run(2.0**9))(jnp.ones(2), x).first_overflow("float16")
    assert mpx.range_report(run(2.0**10))(jnp.ones(2), x).first_overflow("float16")


@pytest.mark.parametrize(("lowest", "helps"), [(2.0**-24, False), (2.0**-100, True)])
def test_a_loss_scale_is_not_told_to_fall_below_its_minimum(lowest, helps):
    """The cotangent is 2^60 times the scale, here 2, and float16 ends at 2^16."""
    loss = lambda w, x: 2.0**60 * jnp.sum(x @ w)
    gradient = mpx.filter_grad(loss, mpx.DynamicLossScaling(2.0, lowest), forward="float32")
    for run in (gradient, eqx.filter_jit(gradient)):
        text = mpx.explain_nonfinite(run, "float16")(jnp.ones((2, 2)), jnp.ones((2, 2)))
        fall = "divide it by 2^46" if helps else "would have to fall by 2^46, and can fall by 2^25"
        assert_tells(text, "It belongs to the backward pass", fall)
        assert ("no loss scale helps" in text) != helps

"""Tests range reports: their counts, and the lines that they name."""

import dataclasses
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_tells, line_here, over_devices
from jax import lax
from jax.sharding import PartitionSpec as P

import mpx_pde as mpx


def row_of(report, primitive):
    rows = [row for row in report.rows if row.primitive == primitive]
    assert len(rows) == 1
    return rows[0]


# --- Counting -------------------------------------------------------------------------------------

# Maps each value to the half formats that lose it, and to the kind of loss.
VALUES = {
    0.0: {},
    1.0: {},
    65519.0: {},
    65520.0: {"float16": "overflow"},
    -1e30: {"float16": "overflow"},
    3.4e38: {"float16": "overflow", "bfloat16": "overflow"},
    2.0**-14: {},
    2.0**-15: {"float16": "subnormal"},
    2.0**-24: {"float16": "subnormal"},
    2.0**-25: {"float16": "zero"},
    1.1 * 2.0**-25: {"float16": "subnormal"},
    2.0**-126: {"float16": "zero"},
    2.0**-130: {"float16": "zero", "bfloat16": "subnormal"},
    2.0**-140: {"float16": "zero", "bfloat16": "zero"},
}


@pytest.mark.parametrize("value", VALUES)
def test_what_a_format_loses(value):
    x = jnp.full(4, value, jnp.float32).at[0].set(1.0)
    row = row_of(mpx.range_report(lambda x: x)(x), "input")
    for name in ("float16", "bfloat16"):
        how = VALUES[value].get(name)
        loss = row.loss(name)
        for kind in ("overflow", "subnormal", "zero"):
            assert getattr(loss, kind) == (0.75 if how == kind else 0.0)
        # NumPy's rounding agrees.
        with np.errstate(over="ignore", under="ignore"):
            back = np.asarray(x)[1].astype(jnp.dtype(name))
        assert np.isinf(back) == (how == "overflow")
        assert (back == 0 and value != 0) == (how == "zero")


def test_ranges_zeros_and_infinities():
    x = jnp.array([0.0, 0.0, -0.25, 8.0, jnp.inf, jnp.nan, 1.0, 1.0])
    row = row_of(mpx.range_report(lambda x: x)(x), "input")
    assert (row.size, row.exponents) == (8, (-2.0, 3.0))
    assert (row.zeros, row.nonfinite, row.float16.overflow) == (0.25, 0.25, 0)
    assert sum(row.histogram) == pytest.approx(0.5)
    assert row_of(mpx.range_report(jnp.negative)(jnp.zeros(3)), "neg").exponents is None


def test_loops_add_up():
    fun = lambda x: lax.scan(lambda c, _: (c * 2, None), x, None, length=20)[0]
    row = row_of(mpx.range_report(fun)(jnp.ones(4)), "mul")
    assert (row.size, row.exponents, row.float16.overflow) == (80, (1.0, 20.0), 5 / 20)


def test_the_first_overflow_in_a_loop_is_that_of_the_first_step():
    """The addition comes first in the program, but it overflows a step later than the product."""

    def fun(x):
        def outer(c, _):
            step = lambda c, _: ((c + 1) * 100, None)
            return lax.scan(step, c, None, length=2)[0] - 1, None

        return lax.scan(outer, x, None, length=3)[0]

    report = mpx.range_report(fun)(jnp.ones(4))
    assert report.first_overflow().primitive == "mul"
    assert row_of(report, "add").float16.overflow > 0
    assert row_of(report, "mul").first["float16"] < row_of(report, "sub").first["float16"]


def test_while_and_cond():
    def fun(x):
        x = lax.while_loop(lambda c: jnp.max(c) < 1e6, lambda c: c * 4, x)
        return lax.cond(x[0] > 0, jnp.sqrt, jnp.exp, x)

    report = mpx.range_report(fun)(jnp.ones(2))
    assert row_of(report, "mul").exponents == (2.0, 20.0)
    assert row_of(report, "sqrt").exponents == (10.0, 10.0)
    # The other branch never ran.
    assert not [row for row in report.rows if row.primitive == "exp"]
    assert report.result.tolist() == [1024.0, 1024.0]


def test_shard_map():
    fun = over_devices(lambda x: lax.psum(jnp.exp(x), "data"), 4, P("data"), P())
    # Devices call the host at the same time. One in eight reports used to lose some calls.
    for _ in range(10):
        row = row_of(mpx.range_report(fun)(jnp.arange(8.0)), "exp")
        assert row.size == 8
    assert row.exponents == pytest.approx((0.0, 7 / np.log(2)))


def test_the_run_is_float32_whatever_the_function_casts_to():
    def fun(w, x):
        y = w.astype(jnp.float16) @ x.astype(jnp.float16)
        return jnp.cumsum(y * 1000), mpx.mixed_matmul(w, x, dtype="float16")

    w, x = jnp.full((2, 2), 100.0), jnp.full(2, 100.0, jnp.float16)
    report = mpx.range_report(fun)(w, x)
    assert not report.first_nonfinite
    assert row_of(report, "mul").exponents[1] == pytest.approx(np.log2(2e7))
    assert jax.tree.leaves(report.result)[0].dtype == jnp.float32
    assert report.result[0][1] == 4e7


# --- Lines ----------------------------------------------------------------------------------------


def test_a_planted_overflow_is_reported_at_its_own_line():
    """The sub-function is scanned, vmapped, jitted, checkpointed and differentiated."""

    @jax.jit
    def harmless(x):
        return jnp.tanh(x)

    @jax.jit
    def culprit(x):
        with jax.named_scope("culprit"):
            y = harmless(x)
            return jnp.sum(jnp.exp(12 * y + 1))  # the line

    line = line_here(-2)

    def loss(xs):
        of = lambda x: jax.vmap(jax.checkpoint(culprit))(x).mean() * 1e-6
        return lax.scan(lambda total, x: (total + of(x), None), jnp.float32(0), xs)[0]

    report = mpx.range_report(jax.grad(loss))(jnp.linspace(-2, 2, 60).reshape(3, 4, 5))
    first = report.first_overflow()
    assert (first.primitive, first.line) == ("exp", f"{__file__}:{line}")
    assert "culprit" in first.scope.split("/")
    assert report.first_nonfinite is None
    assert report.worst(1)[0].primitive in ("exp", "mul", "reduce_sum")


def test_the_first_that_is_not_finite():
    def fun(x):
        y = jnp.maximum(x, -jnp.inf)  # an infinity as an operand is not reported
        z = jnp.log(y)
        return jnp.exp(z) + z

    line = line_here(-3)
    report = mpx.range_report(fun)(jnp.array([1.0, 0.0]))
    [created] = [row for row in report.rows if row.creates_nonfinite]
    assert (created.primitive, created.line) == ("log", f"{__file__}:{line}")
    assert report.first_nonfinite == created


# --- Output ---------------------------------------------------------------------------------------


def odd_sizes(x, w, image, kernel):
    y = x @ w
    z = lax.conv(image, kernel, (1, 1), "SAME")
    return y @ jnp.ones((16, 8)), z


def test_sizes_that_leave_tensor_cores_idle():
    args = jnp.ones((8, 30)), jnp.ones((30, 16)), jnp.ones((1, 3, 8, 8)), jnp.ones((8, 3, 3, 3))
    idle = mpx.range_report(odd_sizes)(*args).idle
    found = [(x.primitive, x.rows, x.columns, x.contracted) for x in idle]
    assert found == [("dot_general", 8, 16, 30), ("conv_general_dilated", 64, 8, 27)]
    assert str(idle[0]).endswith("`dot_general`: contracted 30 → 32")


def test_tables_pictures_and_dicts(tmp_path):
    rich = pytest.importorskip("rich.console")

    report = mpx.range_report(lambda x: jnp.exp(x) @ jnp.exp(-x))(jnp.linspace(0.0, 20.0, 12))
    assert_tells(str(report), "exp", "test_ranges.py", "tensor cores idle")
    console = rich.Console(width=200, record=True, file=open(tmp_path / "out", "w"))  # noqa: SIM115
    console.print(report)
    console.file.close()
    assert "worst first" in console.export_text()
    data = json.loads(json.dumps(report.to_dict()))
    assert len(data["rows"]) == len(report.rows)
    assert data.keys() == {f.name for f in dataclasses.fields(report)} - {"result"}
    assert data["rows"][0]["float16"]["overflow"] == 0
    assert len(report.worst(2)) == 2
    assert report.worst()[0].float16.overflow == max(r.float16.overflow for r in report.rows)
    pytest.importorskip("matplotlib")
    report.plot(tmp_path / "ranges.png")
    assert (tmp_path / "ranges.png").stat().st_size > 10_000


def by_integers(x):
    return (x.astype(jnp.int32) * 100_000).astype(jnp.float32)


@pytest.mark.parametrize(
    ("fun", "x", "words"),
    [
        (lambda x: jnp.sum(jnp.exp(x)), 13.0, ["float16 overflows first at", "`exp`", "2^18.8"]),
        (lambda x: x * 1e6, 1.0, ["`mul`", "mpx.autocast(..., full='mul')", "bfloat16"]),
        (lambda x: x / 1e6, 1e5, ["the input at argument [0]", "keep_full"]),
        (by_integers, 1.0, ["a cast to float32. If the code names that dtype, it stays so"]),
        (lambda x: jnp.log(x - 1), 1.0, ["float32 itself", "`log`"]),
        (lambda x: x * 1e-9, 1.0, ["Nothing overflows", "lost to zero", "100 %"]),
        (lambda x: x + 1, 1.0, ["Everything is finite"]),
    ],
)
def test_explanations(fun, x, words):
    assert_tells(mpx.explain_nonfinite(fun, "float16")(jnp.full(4, x)), *words)


def test_explanation_follows_the_setting():
    with mpx.half_precision("bfloat16"):
        text = mpx.explain_nonfinite(lambda x: x * 1e6)(jnp.ones(3))
    assert "nothing overflows bfloat16" in text


def test_methods_names_and_other_leaves():
    class Net(eqx.Module):
        w: jax.Array
        name: str

        def __call__(self, x, *, times):
            return {"y": x * self.w, "name": self.name, "n": times * 2}

    report = mpx.range_report(Net(jnp.ones(3), "net"))(jnp.ones(3), times=jnp.arange(2))
    assert report.result["name"] == "net"
    assert report.result["n"].tolist() == [0, 2]
    places = [row.line for row in report.rows if row.primitive == "input"]
    assert places == ["function.w", "argument [0]"]


def test_an_operation_that_the_table_leaves_out_is_evaluated_in_float32():
    slope = jax.grad(lambda a, x: lax.igamma(a, x))
    a, x = jnp.float16(1.5), jnp.float16(3.0)
    report = mpx.range_report(slope)(a, x)
    assert "igamma_grad_a" in [row.primitive for row in report.rows]
    want = slope(jnp.float32(a), jnp.float32(x))
    # In half the error would be about 2^-12.
    np.testing.assert_allclose(report.result, want, rtol=2.0**-20)

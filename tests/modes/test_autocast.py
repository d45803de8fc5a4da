"""Compares autocast with the same functions in float32."""

import functools as ft
import math
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import HALVES, assert_half, equations, normal, scalar, tree_allclose, tree_equal_bits
from jax import lax
from program_functions import own

import mpx_pde as mpx


KEY = jax.random.key(0)


def inner_primitives(jaxpr):
    return [e.primitive.name for e in equations(jaxpr)]


@pytest.mark.slow
def test_derivatives_nest():
    w, x = normal(0, (6, 6), 0.4), normal(1, (6,))
    fun = lambda w, x: jnp.sum(jnp.tanh(w @ jax.nn.silu(w @ x)))
    cast = mpx.autocast(fun, "float16")
    for transform in (
        lambda f: jax.jvp(lambda x: f(w, x), (x,), (x,)),
        lambda f: jax.value_and_grad(f)(w, x),
        lambda f: jax.hessian(f, argnums=1)(w, x),
        lambda f: jax.jvp(jax.grad(f), (w, x), (w, x))[1],
        lambda f: jax.vmap(f, (None, 0))(w, jnp.stack([x, -x])),
        lambda f: jax.linearize(f, w, x)[1](w, x),
    ):
        got, want = (jax.jit(ft.partial(transform, f))() for f in (cast, fun))
        assert tree_allclose(got, want, computed_in="float16")
    assert_half(jax.hessian(cast, argnums=1), w, x)


# --- Masters --------------------------------------------------------------------------------------


MANY = 4096
"""The number of ones to sum. A sum in float16 would stop at 2048, and one in bfloat16 at 256."""


def added_up(fun, v):
    return lax.scan(lambda total, _: (total + fun(v), None), jnp.float32(0), None, length=MANY)[0]


first = lambda v: (v @ jnp.ones(4, v.dtype))[0].astype(jnp.float32)
PICKS = jnp.zeros(MANY, int)
USES = {
    "a master in a loop": lambda w: added_up(first, w),
    # The program's own cast is also postponed until the product.
    "what the program casts": lambda w: added_up(first, w.astype(jnp.float16)),
    "what was computed in half": lambda w: added_up(lambda v: jnp.sum(v[0] * 1.0), w @ jnp.eye(4)),
    # Embeddings and graphs do this.
    "what is picked": lambda w: jnp.sum(w[PICKS] @ jnp.ones(4)),
    "what is computed and picked": lambda w: jnp.sum((w @ jnp.eye(4))[PICKS] @ jnp.ones(4)),
}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("use", USES)
def test_cotangents_of_many_uses_add_up_in_float32(use, half):
    grad = jax.jit(jax.grad(mpx.autocast(USES[use], half)))(jnp.ones((2, 4)))
    assert tree_equal_bits(grad, jnp.zeros((2, 4)).at[0].set(MANY))


def test_a_parameter_is_cast_once_and_keeps_its_gradient_in_float32():
    w, x = normal(0, (8, 8), 0.3), normal(1, (8,))

    def fun(w, x):
        for _ in range(5):
            x = jnp.tanh(w @ x)
        return x

    cast = mpx.autocast(fun, "float16")
    jaxpr = jax.make_jaxpr(jax.grad(scalar(cast)))(w, x)
    casts = [e for e in equations(jaxpr) if e.primitive.name == "convert_element_type"]
    assert not [e for e in casts if e.invars[0].aval.shape == (8, 8)]
    # Each product rounds for itself. The compiler merges the five roundings into one.
    text = jax.jit(cast).lower(w, x).as_text("hlo")
    rounded = re.findall(r"f16\[8,8\]\S* convert\(", text)
    compiled = jax.jit(cast).lower(w, x).compile().as_text()
    assert len(rounded) == 5
    if jax.__version_info__ >= (0, 10, 2):  # older ones do not at the tests' optimization level
        assert len(re.findall(r"f16\[8,8\]\S* convert\(", compiled)) == 1


# --- Arrays that are kept for the backward pass ---------------------------------------------------


def kept(fun, *args):
    """Returns the dtypes and shapes of the arrays that reverse mode keeps."""
    shapes = jax.eval_shape(lambda *args: jax.vjp(fun, *args)[1], *args)
    return [(x.dtype.name, x.shape) for x in jax.tree.leaves(shapes)]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    "between", [jax.nn.gelu, jax.nn.softmax, jax.nn.softplus, jax.nn.standardize]
)
def test_between_products_nothing_is_kept_in_float32(between, half):
    w, x = normal(0, (8, 8), 0.5), normal(1, (16, 8))
    fun = lambda w, x: jnp.sum(between(x @ w) @ w)
    cast = mpx.autocast(fun, half)
    assert ("float32", (16, 8)) in kept(lambda w: fun(w, x), w)
    large = [k for k in kept(lambda w: cast(w, x), w) if len(k[1]) > 1 and k[1][0] == 16]
    # Only the input, a master, may be float32.
    assert [dtype for dtype, _ in large if dtype != half] in ([], ["float32"])
    got, want = (jax.jit(jax.grad(f, (0, 1)))(w, x) for f in (cast, fun))
    assert tree_allclose(got, want, computed_in=half)


def test_loops_and_effects_are_not_run_twice(capfd):
    def fun(w, x):
        y = jnp.exp(w @ x)
        jax.debug.print("once")
        y, _ = lax.scan(lambda y, _: (jnp.exp(-y), None), y, length=3)
        return jnp.sum(y**2)

    w, x = normal(0, (4, 4), 0.5), normal(1, (4,))
    inside = [name for e in evaluated_again(fun, w, x) for name in inner_primitives(e)]
    assert "exp" in inside
    assert not {"scan", "debug_callback", "debug_print", "mixed_dot_general"} & {*inside}
    jax.jit(jax.grad(mpx.autocast(fun, "float16")))(w, x)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("once") == 1


def evaluated_again(fun, *args):
    jaxpr = jax.make_jaxpr(mpx.autocast(fun, "float16"))(*args)
    return [e.params["jaxpr"] for e in equations(jaxpr) if e.primitive.name == "remat2"]


def test_whole_numbers_of_a_loop_go_into_a_branch():
    def fun(w, x):
        step = lambda c: (c[0] + 1, jnp.tanh(c[1] @ w))
        n, h = lax.while_loop(lambda c: c[0] < 3, step, (0, x))
        return jnp.sum(lax.cond(n > 2, lambda h, n: n * h, lambda h, n: h @ w, h, n))

    w, x = normal(0, (6, 6), 0.4), normal(1, (6,))
    got, want = (jax.jit(f)(w, x) for f in (mpx.autocast(fun, "float16"), fun))
    assert tree_allclose(got, want, computed_in="float16")


def test_layers_that_differ_in_a_sign_of_zero_are_not_alike():
    w, x = normal(0, (4, 4)), normal(1, (4,))

    def fun(w, x):
        return jnp.exp(w @ x) / 0.0, jnp.exp(w @ (w @ x)) / -0.0, w @ x

    assert len(evaluated_again(fun, w, x)) == 2
    above, below, _ = mpx.autocast(fun, "float16")(w, x)
    assert jnp.all(above == jnp.inf)
    assert jnp.all(below == -jnp.inf)


# --- Operands that decide -------------------------------------------------------------------------


def dtypes_of(fun, name, *args, dtype="float16", **overrides):
    jaxpr = jax.make_jaxpr(mpx.autocast(fun, dtype, **overrides))(*args)
    found = [e for e in equations(jaxpr) if e.primitive.name == name]
    return [v.aval.dtype.name for e in found for v in e.outvars]


def stored_as(fun, *args, dtype="float16"):
    """Returns the dtype in which the result of a checkpoint is stored before a product."""

    def multiplied(*args):
        out = jax.checkpoint(fun)(*args)
        return jnp.ones((1, out.shape[0])) @ out

    jaxpr = jax.make_jaxpr(mpx.autocast(multiplied, dtype))(*args)
    (out,) = next(e for e in jaxpr.eqns if e.primitive.name == "remat2").outvars
    return out.aval.dtype.name


def test_biases_give_way_and_targets_do_not():
    w, x, b = normal(0, (3, 4)), normal(1, (4,)), normal(2, (3,))
    layer = lambda w, x, b: jnp.tanh(w @ x + b)
    assert stored_as(lambda w, x, b: w @ x + b, w, x, b) == "float16"
    assert stored_as(layer, w, x, b) == "float16"
    assert stored_as(lambda w, x, b: jnp.abs(w @ x - b), w, x, b) == "float32"
    # Both operations are computed in float32.
    assert dtypes_of(layer, "add", w, x, b) == dtypes_of(layer, "tanh", w, x, b) == ["float32"]


@pytest.mark.parametrize(
    ("constant", "half", "dtype"),
    [
        (0.0, "float16", "float16"),
        (3.0, "float16", "float16"),
        (1e-12, "float16", "float32"),
        (-1e9, "float16", "float32"),
        (-1e9, "bfloat16", "bfloat16"),
        (math.inf, "float16", "float16"),
    ],
)
def test_what_constants_that_half_cannot_hold_make_is_stored_in_float32(constant, half, dtype):
    w, x = normal(0, (3, 4)), normal(1, (4,))
    fun = lambda w, x: jnp.maximum(w @ x, jnp.float32(constant))
    assert stored_as(fun, w, x, dtype=half) == stored_as(jax.jit(fun), w, x, dtype=half) == dtype


def test_numbers_that_a_program_holds_as_such_are_constants_too():
    """`jnp.where` and operations of `jax.lax` hold Python numbers as literals with a dtype."""
    y = normal(0, (4, 4))
    mask = jnp.tri(4) > 0
    for fun in (
        lambda x: jnp.where(mask, x @ y, -1e9),
        lambda x: jax.lax.pad(x @ y, -1e9, ((1, 1, 0), (0, 0, 0))),
        lambda x: jax.lax.max(jnp.abs(x @ y) - 1e3, 1e-12),
    ):
        got, want = mpx.autocast(fun, "float16")(y), fun(y)
        np.testing.assert_allclose(got, want, rtol=2.0**-8, atol=2.0**-8 * float(want.max()))


# --- Overrides ------------------------------------------------------------------------------------


def scoped(w, x):
    with jax.named_scope("encoder"), jax.named_scope("norm1"):
        x = w @ x
    with jax.named_scope("decoder"), jax.named_scope("norm1"):
        return w @ jnp.exp(x)


@pytest.mark.parametrize(
    ("pattern", "halves"),
    [
        ("encoder", 1),
        ("norm*", 0),
        ("decoder/norm1", 1),
        ("decoder/*", 1),
        ("dot_general", 0),
        (["encoder", "decoder"], 0),
        (lax.exp_p, 2),
    ],
    ids=str,
)
def test_full_by_scope_and_by_primitive(pattern, halves):
    w, x = normal(0, (4, 4)), normal(1, (4,))
    jaxpr = jax.make_jaxpr(mpx.autocast(scoped, "float16", full=pattern))(w, x)
    assert inner_primitives(jaxpr).count("mixed_dot_general") == halves


@pytest.mark.parametrize("option", ["half", "full"])
def test_an_override_that_matches_nothing_is_told(option):
    w, x = normal(0, (4, 4)), normal(1, (4,))
    run = mpx.autocast(scoped, "float16", **{option: ["encoder/norm2", "dot_general"]})
    with pytest.warns(mpx.PrecisionWarning, match="nothing to change for 'encoder/norm2' in"):
        jax.make_jaxpr(run)(w, x)


def test_half_by_primitive():
    w, x = normal(0, (4, 4)), normal(1, (4,))
    assert dtypes_of(scoped, "exp", w, x) == ["float32"]
    assert dtypes_of(scoped, "exp", w, x, half="exp") == ["float16"]
    assert dtypes_of(scoped, "exp", w, x, half="exp", full="decoder") == ["float32"]


# --- Values that pass through ---------------------------------------------------------------------


OTHERS = {
    "int": (jnp.arange(4), lambda x: x @ x),
    "bool": (jnp.array([True, False]), lambda x: ~x),
    "key": (jax.random.key(0), jax.random.split),
    "random": (jax.random.key(0), lambda key: jax.random.uniform(key, (3,), "float32")),
    "double": (np.linspace(0.0, 1.0, 4), lambda x: jnp.exp(x @ x)),
    "complex": (jnp.ones(3, "complex64"), lambda x: x @ x),
    "string": ("as it is", lambda x: x),
    "float": (0.1, lambda x: x * 3),
}


def test_other_dtypes_are_untouched():
    args = {name: x for name, (x, _) in OTHERS.items()}
    fun = lambda args: {name: f(args[name]) for name, (_, f) in OTHERS.items()}
    with jax.enable_x64(True):
        args["double"] = jnp.asarray(args["double"])
        assert tree_equal_bits(mpx.autocast(fun, "float16")(args), fun(args))


def test_effects_survive(capfd):
    w, x = normal(0, (4, 4)), jnp.ones(4)
    seen = []

    def fun(w, x):
        y = w @ x
        jax.debug.print("the largest is {}", jnp.max(y))
        jax.debug.callback(lambda y: seen.append(y.dtype), y)
        y = y + jax.pure_callback(lambda y: np.asarray(y) * 2, jax.typeof(y), y)
        return eqx.error_if(y, jnp.any(y > 1e3), "y is large")

    cast = eqx.filter_jit(mpx.autocast(fun, "float16"))
    assert tree_allclose(cast(w, x), fun(w, x), computed_in="float16")
    jax.effects_barrier()
    assert seen == 2 * [np.dtype("float32")]  # callbacks receive the dtypes of the program
    assert capfd.readouterr().out.count("the largest is") == 2
    with pytest.raises(eqx.EquinoxRuntimeError, match="y is large"):
        cast(w, 1e4 * x)
    capfd.readouterr()


@pytest.mark.slow
def test_an_unknown_operation_keeps_its_dtype_and_is_reported():
    x, w, sizes = normal(0, (4, 3)), normal(1, (2, 3, 5)), jnp.array([1, 3])
    fun = lambda x, w: lax.ragged_dot(jnp.tanh(x @ jnp.eye(3)), w, sizes)
    cast = mpx.autocast(fun, "float16")
    assert tree_allclose(cast(x, w), fun(x, w), computed_in="float16")
    report = cast.report(x, w)
    [unknown] = report.unknown
    assert (unknown.primitive, unknown.results) == ("ragged_dot_general", ("float32",))
    # The end of a program is float32.
    assert unknown.operands[:2] == ("float32", "float32")
    assert "ragged_dot_general" in str(report)


def test_report():
    cell = eqx.nn.GRUCell(3, 8, key=KEY)
    fun = lambda cell, xs: lax.scan(lambda h, x: (cell(x, h),) * 2, jnp.zeros(8), xs)
    cast = mpx.autocast(fun, "bfloat16", full="nowhere")
    report = cast.report(cell, jax.ShapeDtypeStruct((10, 3), jnp.float32))
    assert report.count("product") > 0
    assert (report.unused, report.unknown) == (("nowhere",), ())
    lines = {x.line for x in report.operations if x.rule == "product"}
    # Equinox is another library, so the line is the one in this file that called it.
    assert all("test_autocast.py" in line or "equinox" in line for line in lines)
    text = str(report)
    assert "dot_general" in text
    assert "unused override: 'nowhere'" in text


# --- Functions with derivatives of their own ------------------------------------------------------


def test_custom_rules_are_kept():
    """Tests a rule that also takes an integer. The random programs draw other rules."""
    reverse = jax.custom_vjp(lambda w, x, n: jnp.tanh(w @ x))
    reverse.defvjp(
        lambda w, x, n: (reverse(w, x, n), (w, x)),
        lambda r, g: (7 * jnp.outer(g, r[1]), r[0].T @ g, None),
    )

    w, x = normal(0, (4, 4), 0.5), normal(1, (4,))
    fun = lambda w, x: reverse(w, jnp.tanh(w @ x), jnp.int32(3))
    cast = mpx.autocast(fun, "float16")
    got, want = (jax.jit(jax.grad(scalar(f), (0, 1)))(w, x) for f in (cast, fun))
    assert tree_allclose(got, want, computed_in="float16")
    assert_half(jax.grad(scalar(cast), (0, 1)), w, x)


# --- The transformation itself --------------------------------------------------------------------


@pytest.mark.parametrize(
    "loop", [lambda v: lax.fori_loop(0, 2, lambda i, v: v + i, v), lambda v: lax.map(jnp.sin, v)]
)
def test_a_rule_around_a_loop_of_data_that_products_take(loop):
    """The loop stays in float32, and its result is stored in half."""
    w, x = normal(0, (4, 4), 0.5), normal(1, (4,))
    fun = lambda w, x: own(loop)(x) @ w
    cast = mpx.autocast(fun, "float16")
    got, want = (jax.jit(jax.grad(scalar(f)))(w, x) for f in (cast, fun))
    assert tree_allclose(got, want, computed_in="float16")
    assert_half(cast, w, x)


def test_methods_and_decorators():
    class Net(eqx.Module):
        weight: jax.Array

        @mpx.autocast
        def __call__(self, x, *, scale=1.0):
            return scale * (self.weight @ x)

    net = Net(normal(0, (4, 4)))
    x = normal(1, (4,))
    jaxpr = eqx.filter_make_jaxpr(net)(x, scale=2.0)[0]
    assert "mixed_dot_general" in inner_primitives(jaxpr)
    grads = eqx.filter_grad(lambda net: jnp.sum(net(x)))(net)
    assert grads.weight.dtype == jnp.float32


def test_the_dtype_is_that_of_the_moment():
    w, x = normal(0, (4, 4)), normal(1, (4,))
    inside = []

    def fun(w, x):
        inside.append(mpx.half_precision_datatype())
        return w @ x

    cast = mpx.autocast(fun)
    for half in HALVES:
        with mpx.half_precision(half):
            assert_half(cast, w, x, half=half)
    mpx.autocast(dtype="bfloat16")(fun)(w, x)
    assert inside == [*HALVES, "bfloat16"]


# --- In a training step ---------------------------------------------------------------------------


@pytest.mark.slow
def test_filter_grad_takes_overrides_and_a_full_policy():
    model = eqx.nn.Linear(2, 1, key=KEY)
    regression = lambda model, x, y: jnp.mean((jax.vmap(model)(x) - y) ** 2)
    x, y = normal(1, (16, 2)), normal(2, (16, 1))
    scaling = mpx.DynamicLossScaling(2.0**10)
    _, _, want = eqx.filter_jit(mpx.filter_grad(regression, scaling, False, False))(model, x, y)
    full = "params=float32,compute=float32,output=float32"
    for options in ({"autocast": {"full": "*"}}, {"autocast": True, "policy": full}):
        grads = eqx.filter_jit(mpx.filter_grad(regression, scaling, **options))(model, x, y)[2]
        assert tree_allclose(grads, want)

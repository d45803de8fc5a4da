"""Tests autocast of programs that use a function more than once: facts about one use must not be
applied to another. Also tests decisions that depend on a value's origin and uses."""

import re
import sys
from functools import partial

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.extend as jex
import jax.numpy as jnp
import pytest
from helpers import HALVES, assert_half, equations, normal, over_devices, relative, tree_allclose
from jax import lax
from jax.interpreters import ad
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import mpx_pde as mpx
from mpx_pde.engine.taylor import _known
from mpx_pde.engine.taylor._univariate import CLOSED
from mpx_pde.program import _tables as tables


# --- Functions with derivatives of their own, used more than once ---------------------------------

# Each is `plain` with a derivative that differs from its true derivative.


def plain(w, x):
    return jnp.tanh(x @ w)


reverse, asking, forward = jax.custom_vjp(plain), jax.custom_vjp(plain), jax.custom_jvp(plain)


def _reverse_forward(w, x):
    y = plain(w, x)
    return y, (w, x, y)


def _reverse_backward(residuals, g):
    w, x, y = residuals
    d = 1.5 * g * (1 - y * y)
    return x.T @ d, d @ w.T


reverse.defvjp(_reverse_forward, _reverse_backward)


asked = []


def _asking_forward(w, x):
    asked.append((w.perturbed, x.perturbed))
    return _reverse_forward(w.value, x.value)


asking.defvjp(_asking_forward, _reverse_backward, symbolic_zeros=True)


@forward.defjvp
def _(primals, tangents):
    (w, x), (dw, dx) = primals, tangents
    y = plain(w, x)
    return y, 1.5 * (1 - y * y) * (x @ dw + dx @ w)


LAYERS = {"custom_vjp": reverse, "asking": asking, "custom_jvp": forward, "plain": plain}


def twice(layer):
    return lambda w, x: lax.scan(lambda x, _: (layer(w, x), None), x, length=2)[0]


WRAPS = {
    "as it is": lambda layer: layer,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": twice,
    "jit of scan": lambda layer: jax.jit(twice(layer)),
    "vmap": lambda layer: lambda w, x: jax.vmap(lambda x: layer(w, x[None])[0])(x),
}

# All uses share one object, as in a program.
WRAPPED = {(name, wrap): WRAPS[wrap](f) for name, f in LAYERS.items() for wrap in WRAPS}


DEEP = 2
"""Bits by which the tolerance for two or three layers grows if there are more."""


def weights(n):
    return [normal(seed, (4, 4), 0.7) for seed in range(n)], normal(10, (3, 4))


def test_autocast_of_what_is_autocast_already():
    (w,), x = weights(1)
    inner = jax.jit(mpx.autocast(reverse, "float16"))
    fun = lambda h: lambda w, x: jnp.sum(h(w, h(w, x)))
    outer = mpx.autocast(fun(inner), "float16")
    got, want = (jax.jit(jax.grad(f, (0, 1)))(w, x) for f in (outer, fun(reverse)))
    assert tree_allclose(got, want, "float16", DEEP)
    # Autocasts its derivative as well.
    again = mpx.autocast(jax.grad(fun(inner), (0, 1)), "float16")
    assert tree_allclose(jax.jit(again)(w, x), want, "float16", DEEP)


def test_a_rule_that_asks_learns_which_operands_move():
    cast = jax.jit(mpx.autocast(asking, "float16"))
    (w,), x = weights(1)
    asked.clear()
    jax.grad(lambda w: jnp.sum(cast(w, x)))(w)
    jax.grad(lambda x: jnp.sum(cast(w, x)))(x)
    assert set(asked) - {(False, False)} == {(True, False), (False, True)}


@pytest.mark.slow
def test_rules_for_reverse_mode_in_batches_and_twice():
    cast = mpx.autocast(reverse, "float16")
    (w,), x = weights(1)
    xs = jnp.stack([x, -2 * x])

    # The whole batch shares w, which receives the sum of the cotangents.
    shared = lambda h: jax.grad(lambda w: jnp.sum(jax.vmap(h, (None, 0))(w, xs)))(w)
    each = lambda h: jax.vmap(jax.grad(lambda x: jnp.sum(h(w, x))))(xs)
    slope = lambda h: jax.grad(lambda w: jnp.sum(h(w, x)))
    twice = lambda h: jax.grad(lambda w: jnp.sum(jnp.sin(slope(h)(w))))(w)
    over = lambda h: jax.jvp(slope(h), (w,), (w,))[1]
    for transform in (shared, each, twice, over):
        got, want = (jax.jit(partial(transform, f))() for f in (cast, reverse))
        assert tree_allclose(got, want, "float16", bits=1)
    assert_half(lambda x: each(cast), xs)
    along = lambda w: jax.jvp(lambda w: cast(w, x), (w,), (w,))
    for run in (along, jax.jit(along)):
        with pytest.raises(TypeError, match="custom_vjp"):
            run(w)


@st.composite
def programs(draw):
    """Draws layers, each with its wrapper and whether its weight is frozen. Also draws the place of
    autocast (around the loss or around each layer) and the half dtype."""
    names, wraps = st.sampled_from([*LAYERS, "custom_vjp"]), st.sampled_from([*WRAPS, "jit"])
    layers = draw(st.lists(st.tuples(names, wraps, st.booleans()), min_size=2, max_size=4))
    return layers, draw(st.sampled_from(["loss", "layer"])), draw(st.sampled_from(HALVES))


@pytest.mark.slow
@hypothesis.given(programs())
@hypothesis.settings(max_examples=10)
def test_gradients_of_random_programs(program):
    layers, place, half = program
    ws, x = weights(len(layers))
    frozen = [f for _, _, f in layers]

    def gradient(around_loss, around_layer):
        functions = {key: around_layer(WRAPPED[key]) for key in {(n, w) for n, w, _ in layers}}

        def loss(moving, still, x):
            for (name, wrap, _), w, s in zip(layers, moving, still, strict=True):
                x = functions[name, wrap](s if w is None else w, x)
            return jnp.sum(x)

        moving = [None if f else w for f, w in zip(frozen, ws, strict=True)]
        still = [w if f else None for f, w in zip(frozen, ws, strict=True)]
        return jax.jit(jax.grad(around_loss(loss), (0, 2)))(moving, still, x)

    cast, same = (lambda f: mpx.autocast(f, half)), (lambda f: f)
    want = gradient(same, same)
    got = gradient(cast, same) if place == "loss" else gradient(same, lambda f: jax.jit(cast(f)))
    # Up to eight roundings follow one another.
    assert tree_allclose(got, want, half, DEEP)


# --- Shared masters -------------------------------------------------------------------------------


def test_cotangents_of_a_bias_in_a_batch_add_up_in_float32():
    """In bfloat16, 4097 is rounded to 4096."""
    w, b, x = jnp.eye(2), jnp.zeros(2), jnp.zeros((4097, 2))
    point = mpx.autocast(lambda w, b, x: x @ w + b, "bfloat16")
    grad = jax.grad(lambda b: jnp.sum(jax.vmap(point, (None, None, 0))(w, b, x)))
    assert jax.jit(grad)(b).tolist() == [4097.0, 4097.0]


POINTWISE = {
    "add": lambda y, b: y + b,
    "max": jnp.maximum,
    "concatenate": lambda y, b: jnp.concatenate([y, b]),
    "update": lambda y, b: lax.dynamic_update_slice(y, b[:1], (1,)),
    "cast by the program": lambda y, b: y.astype(jnp.bfloat16) + b.astype(jnp.bfloat16),
}


@pytest.mark.parametrize("name", POINTWISE)
def test_whatever_meets_a_master_gives_it_a_cotangent_in_float32(name):
    (w,), x = weights(1)
    x, b = jnp.tile(x, (40, 1)), normal(2, (4,))

    point = lambda w, b, x: jnp.sin(POINTWISE[name](x @ w, b).astype(jnp.float32))
    loss = lambda point: lambda w, b: jnp.sum(jax.vmap(point, (None, None, 0))(w, b, x))
    gradient = jax.grad(loss(mpx.autocast(point, "bfloat16")), (0, 1))
    for e in equations(jax.make_jaxpr(gradient)(w, b)):
        if e.primitive.name in ("reduce_sum", "psum") and e.invars[0].aval.size > 1:
            assert e.invars[0].aval.dtype != jnp.bfloat16
    # A maximum picks one operand. If two are nearly equal, rounding may change the choice.
    bits = 3 if name == "max" else 1
    got, want = (jax.jit(f)(w, b) for f in (gradient, jax.grad(loss(point), (0, 1))))
    assert tree_allclose(got, want, "bfloat16", bits)


@pytest.mark.slow
def test_biases_of_sharded_parameters_are_reduced_in_float32():
    """Checks the compiled program that each of eight devices runs."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    model = eqx.nn.MLP(8, 8, 16, 2, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    x = normal(0, (64, 8))

    def loss(params, x):
        point = mpx.autocast(eqx.combine(params, static), "float16")
        return jnp.mean(jax.vmap(point)(x) ** 2)

    shard = NamedSharding(mesh, P("data"))
    step = jax.jit(jax.grad(loss), in_shardings=shard, out_shardings=shard)
    text = str(step.lower(params, x).compile().as_text())
    operations = r" (all-reduce|all-reduce-start|reduce-scatter|reduce)\("
    reduced = [line for line in text.splitlines() if re.search(operations, line)]
    assert any("all-reduce" in line or "reduce-scatter" in line for line in reduced)
    assert not [line for line in reduced if "f16[" in line]


def test_a_function_that_says_how_its_arrays_are_sharded_says_so_still():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    shard = NamedSharding(mesh, P("data"))
    (w,), _ = weights(1)
    inner = jax.jit(plain, in_shardings=(None, shard), out_shardings=shard)
    cast = mpx.autocast(lambda w, x: jnp.sum(inner(w, x)), "float16")
    x = normal(0, (8, 4))
    found = [e.params.get("out_shardings") or () for e in equations(jax.make_jaxpr(cast)(w, x))]
    assert shard in [sharding for shardings in found for sharding in shardings]
    assert_half(cast, w, x)


# --- Operands of sums -----------------------------------------------------------------------------


def far(w, x):
    return 300 * (x @ w)


SUMMED = {
    "norm": lambda y: jnp.linalg.norm(y),
    "largest": lambda y: jnp.max(y * y),
    "where a mask is set": lambda y: jnp.sum(y * y, where=y > 0),
    "in a function": lambda y: jnp.sum(jax.jit(lambda y: y * y)(y)),
    "in a branch": lambda y: jnp.sum(lax.cond(y[0, 0] > 0, lambda y: y * y, lambda y: y * y, y)),
    "in a loop": lambda y: jnp.sum(lax.map(lambda row: row * row, y)),
    "in a checkpoint": lambda y: jnp.sum(jax.checkpoint(lambda y: y * y)(y)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SUMMED)
def test_squares_of_halves_do_not_overflow_before_a_sum(name):
    (w,), x = weights(1)

    fun = lambda w, x: SUMMED[name](far(w, x))
    assert jnp.max(jnp.abs(far(w, x))) > 256  # the square overflows float16
    # The loss is a logarithm, because the gradient of a square may overflow as well.
    loss = lambda fun: lambda w, x: jnp.log(jnp.abs(fun(w, x)))
    cast = mpx.autocast(fun, "float16")
    got, want = (jax.jit(jax.value_and_grad(loss(f)))(w, x) for f in (cast, fun))
    assert tree_allclose(got, want, "float16")


# --- The tables and JAX ---------------------------------------------------------------------------

# These do not exist in every version, or not always.
SOME_VERSIONS = {
    "pallas_call": "where Pallas is imported",
    "stack": "from 0.10.1 on",
    "unstack": "from 0.10.1 on",
    **dict.fromkeys(("polynomial", "pbroadcast_dynamic", "relayout"), "from 0.12 on"),
    "eval_jaxpr": "from 0.11 on",
    "log2": "from 0.11 on",
    "one_minus_square": "from 0.11 on",
    "call": "before 0.11",
    "closed_call": "before 0.11, and `eval_jaxpr` since",
}

# These are differentiable, but have no row in the table.
EXCEPTIONS = {
    **dict.fromkeys(("shift_left", "shift_right_arithmetic"), "integers"),
    **dict.fromkeys(("shift_right_logical", "mulhi"), "integers"),
    "ragged_dot_general": "there is no mixed product of ragged groups: float32, and reported",
    "composite": "stands for what a compiler knows by name, in the dtypes of the program",
    **dict.fromkeys(("from_edtype", "to_edtype"), "one side is an extended dtype"),
    **dict.fromkeys(
        ("all_gather_reduced", "preduced", "vary_unreduced_cast", "vary_unreduced_cast_p"),
        "shardings of sums that are not added up yet, in the dtypes of the program",
    ),
    **dict.fromkeys(("unreduced_psum", "unreduced_reduce_scatter"), "as the last"),
    "program_order": "what is in it is meant to stay as it stands",
    "ragged_all_to_all": "writes into an operand in the dtype of the program",
    **dict.fromkeys(("dce_sink", "tie", "stage"), "no values come out, or those that came in"),
}


def primitives(*modules):
    """Returns a dictionary of the primitives in all modules whose names start with `modules`."""
    return {
        x.name: x
        for name, module in list(sys.modules.items())
        if name.startswith(modules) and module is not None
        for x in vars(module).values()
        if isinstance(x, jex.core.Primitive)
    }


def test_every_row_is_of_a_primitive():
    known = {*primitives("jax.", "mpx_pde."), *SOME_VERSIONS}
    assert sorted({*tables.TABLE} - known) == []


def test_the_table_agrees_with_the_code_of_each_rule():
    of = lambda engine: {name for name, row in tables.TABLE.items() if row.engine == engine}
    assert of("elementwise") >= {*CLOSED} - {"logaddexp"}  # a function, not a primitive
    # An operation that moves known derivatives maps coordinates to coordinates.
    assert {*_known._MOVES} <= tables.COORDINATES


def test_every_primitive_of_the_library_has_a_row():
    own = {*primitives("mpx_pde.")}
    assert {"batch_behind", "mixed_dot_general"} <= own
    assert sorted(own - {*tables.TABLE}) == []


def test_every_differentiable_operation_of_lax_has_a_row():
    found = primitives("jax._src.lax", "jax._src.pjit")
    rules = {*ad.primitive_jvps, *ad.primitive_transposes}
    lax_own = {name for name, x in found.items() if x in rules}
    assert len(lax_own) > 100
    assert sorted(lax_own - {*tables.TABLE} - {*EXCEPTIONS}) == []


# --- Branches by platform -------------------------------------------------------------------------


# Stands for a kernel for other hardware, so it has no lowering.
elsewhere_p = jex.core.Primitive("elsewhere")
elsewhere_p.def_abstract_eval(lambda w, x: x)
ad.defbilinear(elsewhere_p, lambda g, w, x: x.T @ g, lambda g, w, x: g @ w.T)


def by_platform(w, x):
    return lax.platform_dependent(
        w, x, tpu=elsewhere_p.bind, cpu=plain, cuda=plain, rocm=plain
    ) + lax.platform_dependent(w, x, tpu=elsewhere_p.bind, default=plain)


def test_other_platforms_are_not_lowered():
    (w,), x = weights(1)
    cast = mpx.autocast(by_platform, "float16")
    gradient = lambda f: jax.jit(jax.grad(lambda w, x: jnp.sum(f(w, x)), (0, 1)))
    for f in (lambda f: f, jax.jit, gradient):
        got, want = (f(g)(w, x) for g in (cast, by_platform))
        assert tree_allclose(got, want, "float16")
    assert_half(cast, w, x)


def test_what_only_products_use_leaves_its_segment_in_half():
    """Neither the value nor its cotangent is ever float32 in memory."""

    def network(ws, x):
        h = jax.nn.gelu(x @ ws[0]) @ ws[1]
        return jnp.sum(jax.nn.softmax(h) @ ws[2])

    ws = [normal(i, (8, 8)) for i in range(3)]
    jaxpr = jax.make_jaxpr(mpx.autocast(network))(ws, normal(3, (4, 8)))
    segments = [e for e in equations(jaxpr) if e.primitive.name == "remat2"]
    out = [v.aval.dtype for e in segments[:2] for v in e.outvars]
    assert out == [jnp.dtype("float16")] * 2


@pytest.mark.parametrize("name", ["custom_vjp", "custom_jvp"])
def test_rules_on_several_devices(name):
    (w,), _ = weights(1)
    x, h = normal(3, (8, 4)), LAYERS[name]
    local = lambda w, x: lax.psum(jnp.sum(h(lax.pcast(w, "data", to="varying"), x)), "data")
    fun = over_devices(local, 4, (P(), P("data")), P())
    got, want = (jax.jit(jax.grad(f, (0, 1)))(w, x) for f in (mpx.autocast(fun, "float16"), fun))
    assert tree_allclose(got, want, "float16", DEEP)


# --- Writes of a backward pass --------------------------------------------------------------------


def _block(params, x):
    """A norm and attention, followed by linear layers around an activation, one with a bias."""
    first, second, bias = params
    x = jax.vmap(lambda t: (t - jnp.mean(t)) / jnp.sqrt(jnp.var(t) + 1e-5))(x)
    heads = jax.vmap(lambda t: first @ t)(x).reshape(len(x), 2, -1)
    scores = jax.nn.softmax(jnp.einsum("shd,thd->hst", heads, heads))
    mixed = jnp.einsum("hst,thd->shd", scores, heads).reshape(len(x), -1)
    hidden = jax.nn.gelu(jax.vmap(lambda t: second @ t + bias)(mixed))
    return jnp.mean(jax.vmap(lambda t: second @ t)(hidden) ** 2)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_backward_pass_of_autocast_writes_halves_and_copies_no_scores(dtype):
    params, x = [normal(0, (8, 8)), normal(1, (8, 8)), normal(2, (8,))], normal(3, (4, 5, 8))
    loss = lambda p, x: jnp.mean(jax.vmap(partial(_block, p))(x))
    gradient = jax.grad(mpx.autocast(loss, dtype))
    found = list(equations(jax.make_jaxpr(gradient)(params, x)))
    # The bias and the product before it share a cotangent, which is written once for both.
    shapes = [e.outvars[0].aval.shape for e in found if e.primitive.name == "written"]
    assert any(sorted(shape) == sorted(x.shape) for shape in shapes)
    # The layer after the scores is the only one without a barrier before it.
    again = [e.params["prevent_cse"] for e in found if e.primitive.name == "remat2"]
    assert {True, False} <= set(again)
    # The mean and the variance take one pass: a sum of two arrays.
    assert any(e.primitive.name == "sum_together" and len(e.invars) == 2 for e in found)
    # The recomputed values are right: some ten roundings follow one another.
    got, want = (jax.jit(f)(params, x) for f in (gradient, jax.grad(loss)))
    assert max(map(relative, got, want)) < {"float16": 5e-3, "bfloat16": 4e-2}[dtype]

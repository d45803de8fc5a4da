"""Tests gradients in mixed precision: exact unscaling, dtypes, prefixes, and transformations.

For equality to the last bit, numbers are small integers or powers of two, which all formats hold,
or the computation is in float32.
"""

import contextlib
import functools as ft
import inspect
import math

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import jmp
import numpy as np
import optax
import pytest
from helpers import (
    assert_tells,
    avals,
    over_devices,
    policy,
    relative,
    scaler,
    training_step,
    tree_equal_bits,
)
from jax import export, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import mpx_pde as mpx


def linear_loss(w, x):
    """Returns a loss whose gradient in `w` is `x`."""
    return jnp.sum(w * x)


def mse(model, batch):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def mlp(seed=0):
    return eqx.nn.MLP(2, 1, 8, 1, activation=jnp.tanh, key=jax.random.key(seed))


def batch(n=16):
    x = jnp.linspace(-1, 1, 2 * n).reshape(n, 2)
    # Targets are far from the network's values, so that no mean of residuals cancels.
    return x, jnp.sin(3 * x[:, :1]) + 2


# --- The scale is applied and removed exactly ----------------------------------------------------


# By compute dtype: exponents of a scale and of an entry of `x` whose product overflows.
OVERFLOWING = {"float16": (15, 6), "bfloat16": (100, 100)}


@pytest.mark.parametrize("compute", OVERFLOWING)
def test_growth_overflow_and_plain_steps(compute):
    exponent, big = OVERFLOWING[compute]
    w = jnp.array([1.0, 0.0, -2.0])
    good, bad = jnp.array([0.5, 0.25, 1.0]), jnp.array([0.5, 2.0**big, 1.0])

    @eqx.filter_jit
    def step(scaling, w, x):
        return mpx.filter_value_and_grad(linear_loss, scaling, policy=policy(compute))(w, x)

    scaling = scaler(exponent - 5, period=2, max_loss_scaling=2.0**exponent)
    exponents = []
    for x in [good] * 10 + [bad, good, bad, bad, good, good]:
        value, scaling, finite, grads = step(scaling, w, x)
        assert tree_equal_bits(value, jnp.float32(-1.5))
        assert finite == (x is good)
        want = x if x is good else jnp.array([0.5, jnp.inf, 1.0])
        assert tree_equal_bits(grads, want)
        exponents.append(math.frexp(scaling.loss_scaling)[1] - 1 - exponent)
    assert exponents == [-5, -4, -4, -3, -3, -2, -2, -1, -1, 0, -1, -1, -2, -3, -3, -2]
    assert scaling.skipped_steps == 3


@pytest.mark.slow
@pytest.mark.parametrize(("half", "exponent"), [("float16", 15), ("bfloat16", 126)])
def test_the_value_is_finite_whenever_the_loss_is(half, exponent):
    """The scaled loss, 6 · 2^15 or 6 · 2^126, is beyond the format."""
    with mpx.half_precision(half):
        for dtype in (half, "float32"):
            loss = lambda w, dtype=dtype: jnp.sum(w).astype(dtype)
            step = eqx.filter_jit(mpx.filter_value_and_grad(loss, scaler(exponent)))
            value, _, finite, grads = step(jnp.array([4.0, 2.0]))
            assert finite
            assert tree_equal_bits((value, grads), (jnp.float32(6.0), jnp.ones(2)))


# --- Arguments that the function receives --------------------------------------------------------


def seen_by(func=None):
    """Returns a loss that records the dtypes of its arguments, and the record."""
    seen = {}

    def loss(*args, **kwargs):
        for path, leaf in jtu.tree_leaves_with_path((args, kwargs)):
            seen[jtu.keystr(path)] = str(leaf.dtype) if eqx.is_array(leaf) else leaf
        floats = [x for x in jtu.tree_leaves((args, kwargs)) if eqx.is_inexact_array(x)]
        return sum(jnp.sum(x.astype(jnp.float32)) for x in floats)

    return loss, seen


def test_all_arguments_are_cast_but_full_precision_layers_and_states():
    loss, seen = seen_by()
    state, key = eqx.nn.State(eqx.nn.StateIndex(jnp.ones(2))), jax.random.key(0)
    layer = mpx.FullPrecision(eqx.nn.Linear(2, 2, key=key))
    model = {"w": jnp.ones(2), "n": jnp.arange(2), "l": layer, "state": state}
    given = {"c": jnp.ones(2, jnp.bfloat16), "extra": state}
    _, _, grads = mpx.filter_grad(loss, scaler(4))(model, [np.ones(2), 3, 1.5], key, **given)
    want = {"[0][0]['n']": "int32", "[0][1][1]": 3, "[0][1][2]": 1.5, "[0][2]": str(key.dtype)}
    want |= dict.fromkeys(("[0][0]['w']", "[0][1][0]", "[1]['c']"), "float16")
    assert seen == dict.fromkeys(seen, "float32") | want
    assert len(seen) == len(want) + 4  # two of the layer, and two states
    assert grads["l"].module.weight.dtype == jnp.float32


KEEP_FULL = {
    "everything": (True, ["w", "b", "x", "t", "points", "c"]),
    "an argument": ((False, False, True), ["points"]),
    "leaves": (({"w": True, "b": False}, {"x": False, "t": True}, False), ["w", "t"]),
    "a leaf": (({"w": False, "b": True}, False, False), ["b"]),
}


@pytest.mark.parametrize("case", list(KEEP_FULL))
def test_keep_full_is_a_prefix_of_the_arguments(case):
    keep_full, kept = KEEP_FULL[case]
    loss, seen = seen_by()
    model, batch = {"w": jnp.ones(2), "b": jnp.ones(2)}, {"x": jnp.ones(2), "t": jnp.ones(2)}
    gradient = mpx.filter_grad(loss, scaler(4), keep_full=keep_full)
    _, finite, grads = gradient(model, batch, jnp.array([1.0, 70000.0]), c=jnp.ones(2))
    names = {x: f"[0][{i}]['{x}']" for i, x in ((0, "w"), (0, "b"), (1, "x"), (1, "t"))}
    names |= {"points": "[0][2]", "c": "[1]['c']"}
    want = {path: "float32" if name in kept else "float16" for name, path in names.items()}
    assert seen == want
    assert finite == ("points" in kept)  # 70000 makes the loss infinite in half
    assert tree_equal_bits(grads, {"w": jnp.ones(2), "b": jnp.ones(2)})


@pytest.mark.parametrize(
    ("string", "top"), [("p=f32,c=bf16,o=f32", 16), ("params=full,compute=half,output=full", 15)]
)
def test_a_policy_and_its_string_are_the_same(string, top):
    x, loss = jnp.array([1.0 + 2.0**-9, 3.0]), lambda w: jnp.sum(w * w)

    @jax.jit
    def step(x):
        run = lambda p: mpx.filter_value_and_grad(loss, scaler(15, period=1), policy=p)(x)
        return run(string), run(jmp.get_policy(string)), run(policy("float32"))

    by_string, by_policy, full = step(x * 2.0**-10)
    assert tree_equal_bits(by_string, by_policy)
    assert not tree_equal_bits(by_string, full)
    # The cap of the scale is that of the policy.
    assert by_string[1].loss_scaling == 2.0**top


@pytest.mark.parametrize("dtype", OVERFLOWING)
def test_gradients_have_the_dtypes_of_the_masters(dtype):
    x = jnp.array([0.5, 2.0])
    model = {"w": jnp.ones(2, dtype), "np": np.ones(2, np.float32)}
    model |= {"n": jnp.arange(2), "f": jnp.tanh}

    loss = lambda model, x: jnp.sum((model["w"] + model["np"]) * x)
    _, finite, grads = mpx.filter_grad(loss, scaler(4))(model, x)
    assert finite
    want = {"w": x.astype(dtype), "np": x, "n": None, "f": None}
    assert tree_equal_bits(grads, want)


# --- Auxiliary output, methods, names ------------------------------------------------------------


@pytest.mark.parametrize("output", [None, "bfloat16"])
def test_aux_comes_back_in_the_output_dtype(output):
    state = eqx.nn.State(eqx.nn.StateIndex(jnp.ones(2)))
    layer = mpx.FullPrecision(eqx.nn.Linear(2, 2, key=jax.random.key(0)))
    others = {"n": jnp.arange(2), "z": jnp.array([1j]), "key": jax.random.key(0), "none": None}
    others |= {"state": state, "layer": layer, "static": (3, 1.5, "text", jnp.tanh)}

    def loss(w, x):
        aux = {"half": [w * x], "full": x.astype(jnp.float32), "flag": x[0] > 0, **others}
        return jnp.sum(w * x), aux

    given = output and policy("float16", output)
    run = mpx.filter_value_and_grad(loss, scaler(4), has_aux=True, policy=given)
    x = jnp.array([0.5, 2.0])
    (value, aux), _, _, grads = run(jnp.ones(2), x)
    assert tree_equal_bits((value, grads), (jnp.float32(2.5), x))
    dtype = jnp.dtype(output or "float32")
    assert tree_equal_bits(aux["half"], [x.astype(dtype)])
    assert tree_equal_bits(aux["full"], x.astype(dtype))
    dtypes = {"n": jnp.int32, "z": jnp.complex64, "flag": jnp.bool_, "key": jax.random.key(0).dtype}
    assert {name: aux[name].dtype for name in dtypes} == dtypes
    assert avals((aux["state"], aux["layer"])) == avals((state, layer))
    assert (aux["none"], aux["static"]) == (None, (3, 1.5, "text", jnp.tanh))


# New states computed from the old one and a batch, and results that only look like states.
STATES = {
    "average": (lambda s, x: {"mean": 0.999 * s["mean"] + 0.001 * jnp.mean(x, 0)}, True),
    "inside": (lambda s, x: [{"mean": s["mean"] + jnp.mean(x, 0)}, x], True),
    "as it came": (lambda s, x: s, False),
    "of the batch alone": (lambda s, x: {"mean": jnp.mean(x, 0)}, False),
    "of another shape": (lambda s, x: {"mean": s["mean"][None] * x}, False),
    "a number": (lambda s, x: {"mean": 1}, False),
    "of another name": (lambda s, x: {"sum": s["mean"] + 1}, False),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_is_rounded_at_each_step_is_told(name):
    new, told = STATES[name]
    given = jnp.ones(()), {"mean": jnp.full(3, 1.2)}, jnp.ones((4, 3))

    def loss(w, state, x):
        return jnp.sum(w * x.astype(w.dtype)), new(state, x.astype(state["mean"].dtype))

    def run(**options):
        return eqx.filter_jit(mpx.filter_grad(loss, scaler(4), has_aux=True, **options))(*given)

    message = r"argument 1 \(dict\).*`keep_full=\(False, True, True\)`"
    expected = pytest.warns(mpx.PrecisionWarning, match=message)
    with expected if told else contextlib.nullcontext():
        run(keep_full=(False, False, True))
    for options in ({"keep_full": (False, True, False)}, {"autocast": True}):
        run(**options)


def documented(model, /, x, *args, gain: float = 1.0, **kwargs):
    """A loss."""


TRANSFORMATIONS = [mpx.filter_grad, mpx.filter_value_and_grad, mpx.calculate_scaled_grad]
TRANSFORMATIONS += [ft.partial(mpx.filter_accumulated_value_and_grad, micro_batches=1)]


CASTS = [lambda fun, _: mpx.cast_function(fun, "float16")]
CASTS += [lambda fun, _: mpx.force_full_precision(fun), lambda fun, _: mpx.autocast(fun)]


@pytest.mark.parametrize("wrap", TRANSFORMATIONS + CASTS)
def test_name_docstring_and_signature(wrap):
    out = wrap(documented, scaler(4))
    assert out.__name__ == out.__qualname__ == "documented"
    assert (out.__doc__, out.__module__) == ("A loss.", __name__)
    assert out.__wrapped__ is documented
    assert inspect.signature(out) == inspect.signature(documented)


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("transform", TRANSFORMATIONS[1:])
def test_keywords_of_any_name_reach_the_function(transform, mixed):
    names = ("self", "model", "func", "args", "rest", "gradient", "tree", "x")

    def loss(w, /, **kwargs):
        assert set(kwargs) == set(names)
        return jnp.sum(w)

    call, other = (transform(loss, scaler(4), use_mixed_precision=mixed) for _ in range(2))
    assert call != other  # by identity, as functions: scalings hold arrays
    grads = call(jnp.ones(2), **{name: jnp.ones(2) for name in names})[-1]
    factor = 16 if transform is mpx.calculate_scaled_grad and mixed else 1
    assert tree_equal_bits(grads.astype(jnp.float32), jnp.full(2, 1.0 * factor))


# --- Without mixed precision, and the raw ingredients --------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("has_aux", [False, True])
def test_without_mixed_precision_it_is_equinox(has_aux):
    """There is no cast and no scale, and aux is unchanged."""

    def loss(model, batch):
        assert model.layers[0].weight.dtype == jnp.float32
        value = mse(model, batch)
        return (value, {"half": value.astype(jnp.float16), "n": 3}) if has_aux else value

    # This scale would show: 2^100 times the gradients is finite, times the cap's 2^15 it is not.
    scaling = scaler(100, max_loss_scaling=2.0**120, period=1)
    options = {"has_aux": has_aux, "use_mixed_precision": False, "policy": "compute=bfloat16"}
    plain = eqx.filter_value_and_grad(loss, has_aux=has_aux)
    want_value, want_grads = eqx.filter_jit(plain)(mlp(), batch())
    transformed = mpx.filter_value_and_grad(loss, scaling, **options)
    value, same, finite, grads = eqx.filter_jit(transformed)(mlp(), batch())
    assert tree_equal_bits((value, same, grads), (want_value, scaling, want_grads))
    assert tree_equal_bits(finite, jnp.array(True))


@pytest.mark.parametrize("transform", TRANSFORMATIONS[::3])
def test_without_mixed_precision_infinite_gradients_are_not_flagged(transform):
    """The same holds in MPX, and in the float32 loop that this replaces."""
    before = scaler(4)
    gradient = transform(linear_loss, before, use_mixed_precision=False)
    *_, same, finite, grads = gradient(jnp.ones(1), jnp.array([jnp.inf]))
    assert tree_equal_bits((same, grads), (before, jnp.array([jnp.inf])))
    assert finite


# --- Transformations -----------------------------------------------------------------------------


@pytest.mark.slow
def test_one_compilation_over_many_steps():
    optimizer = optax.adam(1e-3)

    step = training_step(lambda model, x: mse(model, (x, x[:, :1])), optimizer)
    step = eqx.filter_jit(chex.assert_max_traces(step, n=1), donate="all")
    chex.clear_trace_counter()
    model = eqx.nn.Linear(2, 1, key=jax.random.key(0))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    scaling = scaler(10, period=10, max_loss_scaling=2.0**12)
    types = avals((model, opt_state, scaling))
    scales, rng = set(), np.random.default_rng(0)
    for i in range(200):
        x = rng.standard_normal((4, 2)).astype(np.float32) * (1e4 if i % 35 == 34 else 1)
        model, opt_state, scaling, value, *_ = step(model, opt_state, scaling, x)
        scales.add(float(scaling.loss_scaling))
    assert (scaling.skipped_steps, opt_state[0].count) == (5, 195)
    assert scales == {2.0**10, 2.0**11, 2.0**12}
    assert jnp.isfinite(value)
    assert avals((model, opt_state, scaling)) == types


@pytest.mark.parametrize(
    ("transform", "optimizer"),
    [(TRANSFORMATIONS[1], optax.sgd(0.5)), (TRANSFORMATIONS[3], optax.adam(0.5))],
)
def test_a_weakly_typed_parameter_stays_so_and_is_compiled_once(transform, optimizer):
    """`jnp.array(1.0)` is weakly typed. Users write coefficients to be learnt like this."""

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(model, opt_state, scaling):
        loss = lambda model: jnp.sum(model["w"] * model["nu"])
        _, scaling, finite, grads = transform(loss, scaling)(model)
        model, opt_state = mpx.optimizer_update(model, optimizer, opt_state, grads, finite)
        return model, opt_state, scaling

    chex.clear_trace_counter()
    model = {"nu": jnp.array(1.0), "w": jnp.ones(2)}
    assert model["nu"].weak_type
    carry = (model, optimizer.init(model), scaler(4))
    types = avals(carry)
    for _ in range(3):
        carry = step(*carry)
    assert avals(carry) == types


def test_an_ensemble_with_a_scaling_each():
    """`vmap` over models, data and scalers: one member overflows, alone."""
    optimizer, w, x = optax.sgd(1.0), jnp.ones((3, 2)), jnp.ones((3, 2)).at[1, 0].set(3e4)
    make = lambda s: eqx.tree_at(lambda x: x.loss_scaling, scaler(1, period=1), s)
    scaling = eqx.filter_vmap(make)(jnp.array([2.0, 4.0, 8.0]))

    @eqx.filter_jit
    @eqx.filter_vmap
    def step(w, scaling, x):
        value, scaling, finite, grads = mpx.filter_value_and_grad(linear_loss, scaling)(w, x)
        w, _ = mpx.optimizer_update(w, optimizer, optimizer.init(w), grads, finite)
        return w, value, scaling, finite, grads

    w, _, scaling, finite, grads = step(w, scaling, x)
    np.testing.assert_array_equal(finite, [True, False, True])
    np.testing.assert_array_equal(scaling.loss_scaling, [4.0, 2.0, 16.0])
    np.testing.assert_array_equal(scaling.skipped_steps, [0, 1, 0])
    np.testing.assert_array_equal(grads, [[1, 1], [np.inf, 1], [1, 1]])
    np.testing.assert_array_equal(w, [[0, 0], [1, 1], [0, 0]])


def test_an_overflowing_step_makes_no_nan():
    w, x = jnp.ones(2), jnp.array([6e4, 1.0])
    with jax.debug_nans(True):
        for transform in (lambda f: f, eqx.filter_jit):
            step = transform(mpx.filter_value_and_grad(linear_loss, scaler(15)))
            value, _, finite, grads = step(w, x)
            assert not finite
            # 60000 is a float16, but 60001 is not.
            assert value == 6e4
            np.testing.assert_array_equal(grads, [np.inf, 1.0])


# --- Several devices -----------------------------------------------------------------------------


def normed(key):
    first, last = (eqx.nn.Linear(n, m, key=key) for n, m in ((2, 16), (16, 1)))
    return eqx.nn.Sequential([first, eqx.nn.LayerNorm(16), eqx.nn.Lambda(jnp.tanh), last])


def of_derivatives(model, x):
    terms = mpx.partials(model, ["u_x", "u_y"], coords="xy", outputs="u")
    return jnp.mean(jax.vmap(terms)(x)["u_y"] ** 2)


of_tokens = lambda model, x: jnp.mean(jax.vmap(lambda x: model(x, x, x))(x) ** 2)
of_fields = lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2)
MODELS = {
    "norms": (normed, (8, 2), of_derivatives),
    "attention": (lambda key: eqx.nn.MultiheadAttention(2, 8, key=key), (8, 6, 8), of_tokens),
    "FNO": (lambda key: mpx.nn.FNO(1, 1, 8, 1, (4, 4), key=key), (8, 1, 8, 8), of_fields),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"forward": "float32"}, pytest.param({"autocast": True}, marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.parametrize("name", MODELS)
def test_a_mesh_with_explicit_axes(name, options):
    """Gradients are laid out like their parameters."""
    make, shape, loss = MODELS[name]
    model, x = make(jax.random.key(0)), jax.random.normal(jax.random.key(1), shape)
    step = eqx.filter_jit(mpx.filter_grad(loss, scaler(8), **options))
    *_, want = step(model, x)
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        _, finite, grads = step(model, jax.device_put(x, NamedSharding(mesh, P("d"))))
    assert finite
    for got, true in zip(*map(jax.tree.leaves, (grads, want)), strict=True):
        assert not any(jax.typeof(got).sharding.spec)
        # Sums over devices are in another order, which changes some roundings to float16.
        np.testing.assert_allclose(got, true, rtol=1e-2, atol=2e-3 * np.max(np.abs(true)))


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_agree_after_an_overflow_on_one(check_vma):
    optimizer = optax.adam(1.0)

    def on_device(w, opt_state, scaling, x):
        # Each device has a gradient of its own. The mean is taken after the flag.
        own = lax.pcast(w, "data", to="varying") if check_vma else w
        gradient = mpx.filter_grad(linear_loss, scaling, axis_name="data")
        scaling, finite, grads = gradient(own, x[0])
        grads = lax.pmean(grads, "data")
        out = *mpx.optimizer_update(w, optimizer, opt_state, grads, finite), scaling, finite
        # The values on every device, one row each. For check_vma, also proves that they are equal.
        return out, jtu.tree_map(lambda x: x[None], out)

    specs = (P(), P(), P(), P("data")), (P(), P("data"))
    step = jax.jit(over_devices(on_device, 8, *specs, check_vma=check_vma))
    w = jnp.array([1.0, 2.0])
    state = (w, optimizer.init(w), scaler(4, period=2))
    good = jnp.ones((8, 2))
    for x, exponent in [(good, 4), (good, 5), (good.at[3, 1].set(6e4), 4), (good, 4), (good, 5)]:
        before = state
        (*state, finite), rows = step(*state, x)
        assert finite == (x is good)
        assert state[2].loss_scaling == 2.0**exponent
        for leaf, row in zip(jtu.tree_leaves((state, finite)), jtu.tree_leaves(rows), strict=True):
            assert tree_equal_bits(row, jnp.broadcast_to(leaf, (8, *leaf.shape)))
        kept = tree_equal_bits(state[:2], list(before[:2]))
        assert jnp.all(state[0] < before[0]) if finite else kept


@pytest.mark.parametrize("check_vma", [True, False])
def test_sums_over_devices_are_float32_whatever_the_loss_is_made_of(check_vma):
    # The sum of two shards of 40000 leaves float16's range, and the loss is plain JAX.
    def shard(w, scaling, x):
        _, finite, grad = mpx.filter_grad(linear_loss, scaling, axis_name="data")(w, x)
        # With `check_vma`, JAX sums by itself at the place where the weight is marked as varying.
        return finite, grad if check_vma else lax.psum(grad, "data")

    specs = (P(), P(), P("data")), P()
    step = jax.jit(over_devices(shard, 2, *specs, check_vma=check_vma))
    finite, grad = step(jnp.ones(1), mpx.StaticLossScaling(1), jnp.full(2, 40000.0))
    assert finite
    assert tree_equal_bits(grad, jnp.array([80000.0]))


def pinn_loss(model, points):
    d = jax.vmap(mpx.partials(model, ["u", "u_xx"], coords="xy", outputs="u"))(points)
    return jnp.mean((d["u"] - d["u_xx"]) ** 2)


@pytest.mark.slow
def test_a_step_is_exported_for_batches_of_every_size():
    model = eqx.nn.MLP(2, 1, 16, 2, activation=jax.nn.softplus, key=jax.random.key(0))
    arrays, static = eqx.partition(model, eqx.is_array)
    leaves, treedef = jtu.tree_flatten(arrays)

    @jax.jit
    def step(leaves, x):
        model = eqx.combine(treedef.unflatten(leaves), static)
        run = mpx.filter_value_and_grad(pinn_loss, scaler(4), forward="float32")
        value, _, _, grads = run(model, x)
        return value, jtu.tree_leaves(grads)

    (n,) = export.symbolic_shape("n")
    trace = export.export(step, platforms=["cpu", "cuda"])
    exported = trace(leaves, jax.ShapeDtypeStruct((n, 2), jnp.float32))
    for size in (3, 16):
        x, _ = batch(size)
        # The same program, except for the fusions that a known size allows.
        differences = jtu.tree_map(relative, exported.call(leaves, x), step(leaves, x))
        assert max(jtu.tree_leaves(differences)) < 2e-3


@pytest.mark.parametrize("transform", [TRANSFORMATIONS[1], TRANSFORMATIONS[3]])
def test_a_transformation_made_anew_at_each_step_is_not_compiled_anew(transform):
    traced = []

    def loss(w, x):
        traced.append(x)
        return w @ x

    for exponent in (1, 2, 3):
        eqx.filter_jit(transform(loss, scaler(exponent)))(jnp.ones(2), jnp.ones(2))
    assert len(traced) == 1


def test_a_model_that_is_passed_second_is_told():
    model, (x, y) = mlp(), batch()
    fit = lambda model, x, y: mse(model, (x, y))
    gradient = mpx.filter_value_and_grad(fit, mpx.DynamicLossScaling())
    with pytest.raises(TypeError) as caught:
        gradient(x, model, y)
    assert any("If the model is another one, pass it first" in n for n in caught.value.__notes__)
    # The gradient with respect to an input, of a function that fails on its own.
    with pytest.raises(TypeError) as caught:
        gradient(x, jnp.ones(3), y)
    assert not any("pass it first" in note for note in getattr(caught.value, "__notes__", ()))


# --- What is differentiated -----------------------------------------------------------------------

ON_THIRD = """moved = lambda given, a, b, *rest: loss(a, b, given, *rest)
    mpx_pde.{}(moved, scaling, ...)(c, a, b, *rest)"""
ON_TWO = """moved = lambda given, b, *rest: loss(given[0], b, given[1], *rest)
    mpx_pde.{}(moved, scaling, ...)((a, c), b, *rest)"""


@pytest.mark.parametrize("name", ["filter_grad", "filter_value_and_grad", "calculate_scaled_grad"])
@pytest.mark.parametrize(("argnums", "code"), [(2, ON_THIRD), ((0, 2), ON_TWO)])
def test_argnums_are_refused_with_the_code_to_write(name, argnums, code):
    def loss(a, b, c, d):
        return jnp.sum(a * b) + jnp.sum(c**2 * d)

    args = [jnp.array([1.0, 2.0]) * (i + 1) for i in range(4)]
    with pytest.raises(TypeError, match="takes no `argnums`") as caught:
        getattr(mpx, name)(loss, scaler(2), argnums=argnums)
    lines = str(caught.value).splitlines()[1:3]
    assert "\n".join(lines).strip() == code.format(name)
    # The code works.
    assigned, call = (line.strip() for line in lines)
    names = {"loss": loss, "mpx_pde": mpx, "scaling": scaler(2)}
    names |= dict(zip(("a", "b", "c"), args, strict=False)) | {"rest": args[3:]}
    exec(assigned, names)
    grads = eval(call.replace(", ...", ""), names)[-1]
    scale = 4 if name == "calculate_scaled_grad" else 1
    want = jax.grad(loss, argnums)(*args)
    assert tree_equal_bits(jtu.tree_map(lambda g: g.astype(jnp.float32) / scale, grads), want)
    # The first argument is what it differentiates anyway.
    assert relative(mpx.filter_grad(loss, scaler(2), argnums=0)(*args)[2], args[1]) == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*takes no derivative:mpx_pde.PrecisionWarning")
@pytest.mark.parametrize("kind", ["loss", "both"])
def test_the_scaling_of_an_ensemble_is_told(kind):
    scaling = scaler(4)
    if kind == "both":
        scaling = mpx.Scaling(scaling, mpx.DerivativeScaling.per_direction("x"))
    loss = lambda w, x, derivatives=None: jnp.sum(w * x)
    step = lambda w, scaling: mpx.filter_grad(loss, scaling)(w, jnp.ones(2))[0]
    scalings = jax.vmap(step, (0, None))(jnp.ones((3, 2)), scaling)
    with pytest.raises(ValueError, match=r"`(loss\.)?loss_scaling` has shape \(3,\).*vmap"):
        step(jnp.ones(2), scalings)
    # The suggestions work.
    jax.vmap(step)(jnp.ones((3, 2)), scalings)
    step(jnp.ones(2), jax.tree.map(lambda x: x[0], scalings))


def _gradient_step(residual, model, points):
    loss = lambda model, points: jnp.mean(jax.vmap(residual, (None, 0))(model, points) ** 2)
    mpx.filter_value_and_grad(loss, mpx.DynamicLossScaling())(model, points)


def _second_order_step(residual, model, points):
    optimizer = mpx.LevenbergMarquardt(residual)
    optimizer.update(model, optimizer.init(model), points)


@pytest.mark.parametrize("step", [_gradient_step, _second_order_step])
def test_a_term_that_was_not_asked_for_is_told(step):
    def residual(model, point):
        d = mpx.partials(model, "u_xx", coords="xy", outputs="u")(point)
        return d["u_xx"] + d["u"]

    def notes(residual, key):
        with pytest.raises(KeyError, match=key) as caught:
            step(residual, model, jnp.ones((4, 2)))
        return [n for n in getattr(caught.value, "__notes__", ()) if "`mpx_pde.partials`" in n]

    model = eqx.nn.MLP(2, "scalar", 8, 1, jnp.tanh, key=jax.random.key(0))
    [note] = notes(residual, "u")
    assert_tells(note, "If 'u' is a term, name it", '`partials(model, [..., "u"], ...)`')
    assert notes(lambda model, point: {"a b": model(point)}["no term"], "no term") == []

"""Tests casts of trees and functions: the leaves that change, and everything that survives."""

import functools as ft
import pickle
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from helpers import HALVES, Pair, is_key, policy, products, tree_allclose, tree_equal_bits
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import mpx_pde as mpx


FLOATS = ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"]

# Every format has these powers of two, so each cast is exact.
VALUES = [0.5, 1.0, 2.0]


class Holder(eqx.Module):
    """A module that is callable, so that `FullPrecision` takes it."""

    content: Any
    name: str = eqx.field(static=True, default="holder")

    def __call__(self, x):
        return x


# --- cast_tree -----------------------------------------------------------------------------------


@ft.cache
def leaves() -> tuple[list, list, list]:
    """Returns floating-point leaves, other leaves, and complex ones."""
    with jax.enable_x64(True):
        floats = [
            *(jnp.array(VALUES, dtype) for dtype in FLOATS),
            *(np.array(VALUES, jnp.dtype(dtype)) for dtype in FLOATS),
            *(jnp.dtype(dtype).type(2.0) for dtype in FLOATS),
            *(jax.ShapeDtypeStruct((3, 0), dtype) for dtype in ("bfloat16", "float32", "float64")),
            jax.ShapeDtypeStruct((), jnp.float32, weak_type=True),
            *(jnp.asarray(0.5), lax.full((2,), 0.5), jnp.zeros((0, 3), jnp.float32)),
        ]
        others = [
            *(jnp.arange(3, dtype=dtype) for dtype in ("int8", "int32", "uint32", "int64")),
            *(np.arange(3), np.int32(3), np.bool_(True), np.array(["a", "b"])),
            *(jnp.array([True, False]), jnp.asarray(3), np.array("2026-01-01", "datetime64[D]")),
            *(jax.random.key(0), jax.random.split(jax.random.key(1), 2), jax.random.PRNGKey(0)),
            *(1, 1.5, 2j, float("nan"), True, "text", b"bytes", jnp.tanh, jnp.float32, object()),
            jax.ShapeDtypeStruct((2,), jnp.int32),
            jax.ShapeDtypeStruct((), jax.random.key(0).dtype),
            mpx.FullPrecision(Holder(jnp.ones(2))),
            mpx.FullPrecision(Holder([np.float64(1.0), {"a": jnp.ones(2, jnp.bfloat16)}])),
            mpx.FullPrecision(jnp.tanh),
        ]
        numbers = [
            *(jnp.array([1 + 2j], dtype) for dtype in (jnp.complex64, jnp.complex128)),
            *(np.array([1 + 2j], np.complex64), np.complex128(1 + 2j), jnp.asarray(2j)),
            jax.ShapeDtypeStruct((2,), jnp.complex64),
        ]
    return floats, others, numbers


def leaves_and_structure(tree):
    return jtu.tree_flatten(tree, is_leaf=lambda x: isinstance(x, mpx.FullPrecision))


def kind(x):
    kinds = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
    return next((k for k in kinds if isinstance(x, k)), None)


def check_leaf(before, after, dtype):
    if kind(before) is None or isinstance(before, mpx.FullPrecision) or is_key(before):
        assert after is before
        return
    if jnp.issubdtype(before.dtype, jnp.floating):
        want = jnp.dtype(dtype)
    elif jnp.issubdtype(before.dtype, jnp.complexfloating):
        want = {"float32": jnp.complex64, "float64": jnp.complex128}.get(dtype, before.dtype)
    else:
        want = before.dtype
    assert after.dtype == want
    assert kind(after) is kind(before)
    assert after.shape == before.shape
    assert getattr(after, "weak_type", False) == getattr(before, "weak_type", False)
    if after.dtype == before.dtype:
        assert after is before
    elif not isinstance(before, jax.ShapeDtypeStruct):
        want = np.asarray(before).astype(np.complex128)
        np.testing.assert_array_equal(np.asarray(after).astype(np.complex128), want)


@pytest.mark.parametrize("dtype", FLOATS)
def test_cast_tree_changes_floating_arrays_and_nothing_else(dtype):
    floats, others, numbers = leaves()
    with jax.enable_x64(True):
        tree = {"list": [*floats, None], "module": Holder(numbers)}
        tree["tuple"] = Pair(others, {"a": jnp.ones(2)}), jnp.ones(2)
        before, structure = leaves_and_structure(tree)
        after, same_structure = leaves_and_structure(mpx.cast_tree(tree, dtype))
        assert structure == same_structure
        for x, y in zip(before, after, strict=True):
            check_leaf(x, y, dtype)


def test_the_casts_by_name():
    layer = mpx.FullPrecision(jnp.tanh)
    tree = {"a": jnp.ones(2, jnp.bfloat16), "b": np.ones(2), "n": jnp.arange(2), "layer": layer}
    for cast, dtype in [
        (mpx.cast_to_float16, jnp.float16),
        (mpx.cast_to_bfloat16, jnp.bfloat16),
        (mpx.cast_to_float32, jnp.float32),
        (mpx.cast_to_full_precision, jnp.float32),
        (mpx.cast_to_half_precision, jnp.float16),
    ]:
        out = cast(tree)
        assert out["a"].dtype == out["b"].dtype == dtype
        assert out["n"] is tree["n"]
        assert out["layer"] is layer


def test_an_overflowing_cast_of_numpy_data_is_infinite_without_a_warning():
    """NumPy would warn of the overflow, and the suite turns warnings into errors."""
    out = mpx.cast_tree((np.array([1.0, 7e4, -1e30]), np.float64(7e4)), jnp.float16)
    np.testing.assert_array_equal(out[0], np.array([1.0, np.inf, -np.inf]))
    assert out[1] == np.inf


def test_shardings_survive():
    mesh = jax.make_mesh((8,), ("x",), devices=jax.devices()[:8])
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    x = jax.device_put(jnp.ones((8, 2)), sharding)
    weak = jax.device_put(lax.full((8,), 0.5), sharding)
    assert weak.weak_type
    struct = jax.ShapeDtypeStruct((8, 2), jnp.float32, sharding=sharding)
    one = jax.device_put(jnp.ones(2), jax.devices()[3])
    for cast in (mpx.cast_to_float16, jax.jit(mpx.cast_to_float16)):
        for before, after in zip((x, weak), cast((x, weak)), strict=True):
            assert after.dtype == jnp.float16
            assert after.sharding.is_equivalent_to(sharding, before.ndim)
            assert after.weak_type == before.weak_type
        assert cast(one).sharding == one.sharding
    out = mpx.cast_to_float16(struct)
    assert out == jax.ShapeDtypeStruct((8, 2), jnp.float16, sharding=sharding)


def test_cast_tree_is_differentiated_back_to_the_masters_dtype():
    def loss(tree):
        half = mpx.cast_tree(tree, jnp.float16)
        assert half["w"].dtype == jnp.float16
        return jnp.sum(half["w"] * half["w"]).astype(jnp.float32)

    for dtype in ("float16", "bfloat16", "float32"):
        w = jnp.array([1.0, -2.0], dtype)
        assert tree_equal_bits(jax.jit(jax.grad(loss))({"w": w}), {"w": 2 * w})
        _, tangent = jax.jvp(loss, ({"w": w},), ({"w": w},))
        assert tangent == 10.0


# --- cast_function -------------------------------------------------------------------------------


def test_arguments_at_any_depth_and_by_keyword_are_cast():
    seen, key = {}, jax.random.key(0)
    func = lambda x, tree, **named: seen.update(x=x, tree=tree, **named)
    state = eqx.nn.State(eqx.nn.StateIndex(jnp.ones(2)))
    layer = mpx.FullPrecision(Holder(jnp.ones(2)))
    tree = {"a": [np.ones(2), Pair(jnp.ones(2), 1.5)], "n": jnp.arange(2), "layer": layer}
    mpx.cast_function(func, jnp.float16)(jnp.ones(2), tree, key=key, state=state, option="text")
    a, (first, number) = seen["tree"]["a"]
    assert {x.dtype for x in (seen["x"], a, first)} == {np.dtype("float16")}
    assert (number, seen["option"]) == (1.5, "text")
    kept = (seen["tree"]["n"], tree["n"]), (seen["tree"]["layer"], layer), (seen["key"], key)
    assert all(got is given for got, given in kept)
    assert [x.dtype for x in jtu.tree_leaves(seen["state"])] == [jnp.float32]


OUTPUTS = {
    "array": lambda x: x,
    "list": lambda x: [x, x],
    "tuple": lambda x: (x, [x]),
    "dict": lambda x: {"a": x, "b": {"c": x}},
    "NamedTuple": lambda x: Pair(x, (x,)),
    "Module": lambda x: Holder([x]),
}


def test_every_array_of_the_output_is_cast():
    def func(x):
        assert x.dtype == jnp.float16
        outputs = {name: make(x) for name, make in OUTPUTS.items()}
        return outputs, jnp.arange(2), None, jax.random.key(0)

    x = jnp.array([1.0, 0.5])
    out, n, none, key = mpx.cast_function(func, "float16", return_dtype="bfloat16")(x)
    assert tree_equal_bits(out, {name: f(x.astype(jnp.bfloat16)) for name, f in OUTPUTS.items()})
    assert (n.dtype, none, is_key(key)) == (jnp.int32, None, True)


class Network(eqx.Module):
    layer: eqx.nn.Linear
    gain: jax.Array

    def __init__(self):
        self.layer = eqx.nn.Linear(2, 2, key=jax.random.key(0))
        self.gain = jnp.array([2.0, 2.0])

    def half(self, x):
        return self.layer(x) * self.gain

    @ft.partial(mpx.cast_function, dtype=jnp.float16)
    def decorated(self, x):
        """A method in half precision."""
        assert self.gain.dtype == x.dtype == jnp.float16
        return self.layer(x) * self.gain

    @mpx.force_full_precision
    def full(self, x, *, shift=0.0):
        """A method in full precision."""
        assert self.gain.dtype == x.dtype == jnp.float32
        return self.layer(x) * self.gain + shift


def test_a_module_and_its_bound_methods_have_their_parameters_cast():
    network, x = Network(), jnp.ones(2, jnp.bfloat16)
    want = (mpx.cast_to_float16(network)).half(x.astype(jnp.float16))
    # Strict promotion makes these raise if the parameters stay float32.
    assert tree_equal_bits(mpx.cast_function(network.half, jnp.float16)(x), want)
    layer = mpx.cast_function(network.layer, jnp.float16)(x)
    assert tree_equal_bits(layer, mpx.cast_to_float16(network.layer)(x.astype(jnp.float16)))


def test_methods_of_modules_bind():
    network, x = Network(), jnp.ones(2)
    half = network.decorated(x)
    assert half.dtype == jnp.float16
    assert tree_equal_bits(half, Network.decorated(network, x))
    assert network.full(x).dtype == jnp.float32
    assert network.full(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    assert tree_equal_bits(network.full(x, shift=1.0), Network.full(network, x) + 1.0)


def test_a_cast_function_under_transformations():
    func = mpx.cast_function(lambda w, x: {"y": w * x}, jnp.float16, jnp.float32)
    w, x = jnp.array([1.0, 2.0]), jnp.array([[0.5, 4.0], [1.0, 1.0]])
    want = {"y": w * x[0]}
    for run in (func, jax.jit(func), eqx.filter_jit(func)):
        assert tree_equal_bits(run(w, x[0]), want)
    assert tree_equal_bits(jax.vmap(func, in_axes=(None, 0))(w, x), {"y": w[None] * x})
    assert tree_equal_bits(jax.grad(lambda w: jnp.sum(func(w, x[0])["y"]))(w), x[0])
    assert tree_equal_bits(jax.jvp(lambda w: func(w, x[0])["y"], (w,), (w,))[1], want["y"])
    out, _ = lax.scan(lambda w, x: (func(w, x)["y"], None), w, x)
    assert tree_equal_bits(out, w * x[0] * x[1])


# --- force_full_precision ------------------------------------------------------------------------


def dtypes_inside(*args, **kwargs):
    """Returns the dtypes that the function sees and the dtype of the result."""
    seen = []

    def func(*args, **kwargs):
        seen.extend(str(x.dtype) for x in jtu.tree_leaves((args, kwargs)) if eqx.is_array(x))
        floats = [x for x in jtu.tree_leaves((args, kwargs)) if eqx.is_inexact_array(x)]
        return sum(map(jnp.sum, floats))

    out = mpx.force_full_precision(func)(*args, **kwargs)
    return seen, getattr(out, "dtype", None)


@pytest.mark.parametrize("dtype", ["float8_e5m2", "float16", "float32"])
def test_runs_in_float32_and_returns_the_dtype_that_came_in(dtype):
    assert dtypes_inside(jnp.ones(2, dtype)) == (["float32"], dtype)
    assert dtypes_inside(x={"a": np.ones(2, jnp.dtype(dtype))}) == (["float32"], dtype)
    assert dtypes_inside([jnp.arange(2), jnp.ones(2, dtype)]) == (["int32", "float32"], dtype)


def test_mixed_inputs_come_back_in_the_widest_dtype():
    half, brain, full = (jnp.ones(2, d) for d in ("float16", "bfloat16", "float32"))
    assert dtypes_inside(half, full)[1] == jnp.float32
    assert dtypes_inside(half, x=brain) == (["float32"] * 2, jnp.float32)
    # NumPy's float64 is float32 in JAX.
    assert dtypes_inside(np.ones(2)) == (["float32"], jnp.float32)
    # With a given dtype the result is not rounded: 1 + 2^-7 squared has more digits than bfloat16.
    square = mpx.force_full_precision(lambda y: y * y, jnp.float32)
    assert square(jnp.bfloat16(1 + 2.0**-7)) == (1 + 2.0**-7) ** 2


def test_float64_stays_float64():
    with jax.enable_x64(True):
        assert dtypes_inside(jnp.ones(2, jnp.float64)) == (["float64"], jnp.float64)
        assert dtypes_inside(jnp.ones(2, "float16"), np.ones(2)) == (["float64"] * 2, jnp.float64)
        assert dtypes_inside(jnp.ones(2, "float16")) == (["float32"], jnp.float16)
        out = mpx.force_full_precision(lambda x: x, "float32")(jnp.ones(2, jnp.float64))
        assert out.dtype == jnp.float32


def test_without_floating_inputs_the_dtype_is_the_functions_own():
    embedding = eqx.nn.Embedding(4, 2, key=jax.random.key(0))
    for dtype in (*HALVES, "float32"):
        layer = mpx.cast_tree(embedding, dtype)
        assert mpx.force_full_precision(layer)(1).dtype == jnp.dtype(dtype)
    assert mpx.force_full_precision(lambda: jnp.ones(2, jnp.float16))().dtype == jnp.float16


def test_products_take_the_highest_precision_in_both_passes():
    weight = jnp.ones((3, 3))
    conv = eqx.nn.Conv1d(1, 1, 3, key=jax.random.key(1))

    @jax.jit
    def linear(x):
        return weight @ x

    def func(x):
        y, _ = lax.scan(lambda x, _: (linear(x), None), x, length=2)
        return jnp.sum(conv(y[None]))

    x = jnp.ones(3, jnp.float16)
    for full in (mpx.force_full_precision(func), mpx.FullPrecision(func)):
        for transformed in (full, jax.grad(full), jax.jit(full)):
            found = products(transformed, x)
            assert {e.primitive.name for e in found} == {"dot_general", "conv_general_dilated"}
            for e in found:
                assert {v.aval.dtype.name for v in e.invars} == {"float32"}, e
                assert e.params["precision"] == (lax.Precision.HIGHEST,) * 2, e
    # The setting ends with the call.
    assert {e.params["precision"] for e in products(func, jnp.ones(3))} == {None}


# --- FullPrecision -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
def test_full_precision_layers_stay_float32_and_hand_back_half(dtype):
    first, last = (eqx.nn.Linear(*sizes, key=jax.random.key(0)) for sizes in ((2, 4), (4, 1)))
    model = {"first": mpx.FullPrecision(first), "last": last}
    half = mpx.cast_tree(model, dtype)
    assert half["first"] is model["first"]
    assert half["last"].weight.dtype == jnp.dtype(dtype)
    x = jnp.array([0.5, -1.0], dtype)
    assert tree_allclose(half["first"](x), first(x.astype(jnp.float32)).astype(dtype))
    assert half["last"](half["first"](x)).dtype == jnp.dtype(dtype)
    # Coordinates in float32 reach the layer unchanged.
    y = jnp.array([1.0, 1.0 + 2.0**-12])
    assert tree_equal_bits(half["first"](y), first(y))


def test_full_precision_passes_keywords_and_keys():
    dropout, key = mpx.FullPrecision(eqx.nn.Dropout(0.5)), jax.random.key(0)
    x = jnp.ones(8, jnp.bfloat16)
    assert tree_equal_bits(dropout(x, key=key), eqx.nn.Dropout(0.5)(x, key=key))
    assert tree_equal_bits(dropout(x, inference=True), x)


# --- Half after a layer in full precision ---------------------------------------------------------


def _behind(x, out_dtype="half"):
    layer = eqx.nn.Linear(3, 4, key=jax.random.key(0))
    return mpx.FullPrecision(layer, out_dtype=out_dtype)(x)


@pytest.mark.slow
def test_half_behind_a_layer_is_what_was_asked_for():
    x = jnp.ones(3)
    assert _behind(x).dtype == jnp.float32  # nobody asked for half
    with mpx.half_precision("bfloat16"):
        assert _behind(x).dtype == jnp.float32
    assert _behind(x.astype("bfloat16")).dtype == jnp.bfloat16
    for half in ("float16", "bfloat16"):
        seen = []

        def loss(w, x, seen=seen):
            seen.append(_behind(x).dtype.name)
            return jnp.sum(w)

        options = {"keep_full": (False, True), "policy": policy(half)}
        scaling = mpx.DynamicLossScaling()
        for mixed in (True, False):
            mpx.filter_grad(loss, scaling, use_mixed_precision=mixed, **options)(x, x)
        mpx.autocast(loss, half)(x, x)
        mpx.cast_function(loss, half)(x, x)
        assert seen == [half, "float32", half, half]
    assert _behind(x, "bfloat16").dtype == jnp.bfloat16


@pytest.mark.filterwarnings("ignore::mpx_pde.PrecisionWarning")  # it multiplies nothing else
def test_a_compiled_function_notices_who_asks():
    behind = jax.jit(_behind)
    x = jnp.ones(3)
    assert behind(x).dtype == jnp.float32
    loss = lambda w, x: jnp.sum(w) + jnp.sum(behind(x).astype(w.dtype))
    run = mpx.filter_value_and_grad(loss, mpx.DynamicLossScaling(), keep_full=(False, True))
    assert "f16[4]" in str(jax.make_jaxpr(lambda x: run(x, x)[0])(x))


def test_attributes_of_what_is_wrapped():
    norm = mpx.FullPrecision(eqx.nn.LayerNorm(4))
    assert (norm.eps, norm.shape) == (norm.module.eps, norm.module.shape)
    assert norm.weight is norm.module.weight
    for name in ("nosuch", "_private", "__array__"):
        with pytest.raises(AttributeError, match=name):
            getattr(norm, name)
    replaced = eqx.tree_at(lambda m: m.weight, norm, jnp.zeros(4))
    assert not replaced.module.weight.any()
    copied = pickle.loads(pickle.dumps(mpx.FullPrecision(eqx.nn.Identity(), out_dtype="half")))
    assert copied.out_dtype == "half"

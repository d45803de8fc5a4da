"""Tests finiteness, norms and selection over whole PyTrees."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Pair, tree_equal_bits
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import mpx_pde as mpx


# --- all_finite ----------------------------------------------------------------------------------

BAD = [np.inf, -np.inf, np.nan]


@pytest.mark.parametrize("dtype", ["float8_e5m2", "float16", "bfloat16", "float32", "float64"])
def test_a_single_bad_entry_is_found(dtype):
    with jax.enable_x64(True):
        largest = jnp.full((3, 4), jnp.finfo(dtype).max)
        good = {"a": [largest, -largest], "n": jnp.arange(3)}
        assert mpx.all_finite(good)
        for bad in BAD:
            assert not mpx.all_finite({**good, "b": largest.at[2, 1].set(bad)})


def test_a_bad_entry_is_found_in_any_pass():
    layers = [{"w": jnp.ones((256, 256)), "b": jnp.ones(256)} for _ in range(3)]
    tree = [*layers, {"v": jnp.ones((128, 512)), "c": jnp.ones(7, jnp.float16)}]
    finite = jax.jit(mpx.all_finite)
    assert finite(tree)
    for i, name in ((0, "w"), (2, "w"), (1, "b"), (3, "v"), (3, "c")):
        bad = [dict(x) for x in tree]
        bad[i][name] = bad[i][name].at[-1].set(jnp.nan)
        assert not finite(bad)


def test_arrays_of_one_shape_in_different_layouts_are_looked_at_apart():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,))
    place = lambda spec: jax.device_put(jnp.ones((256, 256)), NamedSharding(mesh, P(*spec)))
    tree = [place(("x", None)), place((None, "x")), place(("x", None))]
    with jax.set_mesh(mesh):
        assert jax.jit(mpx.all_finite)(tree)
        assert not jax.jit(mpx.all_finite)([*tree, tree[1] * jnp.inf])


def test_complex_and_scalar_leaves_count():
    assert mpx.all_finite([1.0 + 2j, jnp.array([1j]), np.float16(2)])
    arrays = jnp.array([complex(0, np.nan)]), np.array([complex(np.inf, 0)])
    for bad in (*arrays, np.float16(np.inf), float("nan"), complex("inf")):
        assert not mpx.all_finite([1.0, bad])


def test_everything_else_is_finite():
    model = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    others = [None, 1, True, "text", jnp.tanh, jax.random.key(0), jnp.arange(2), np.array(["a"])]
    for tree in (others, {}, None, model, jnp.zeros((0, 2))):
        assert tree_equal_bits(mpx.all_finite(tree), jnp.array(True))


def test_all_finite_under_jit_and_vmap():
    x = jnp.zeros((3, 2)).at[1, 1].set(jnp.inf)
    tree = {"x": x, "f": x.astype(jnp.float16)}
    assert not jax.jit(mpx.all_finite)(tree)
    np.testing.assert_array_equal(jax.vmap(mpx.all_finite)(tree), [True, False, True])


# --- global_norm ---------------------------------------------------------------------------------


def test_the_norm_is_that_of_all_leaves_together():
    tree = {"a": jnp.array([3.0]), "b": [jnp.array([[0.0, 4.0]]), None, jnp.arange(9), "text"]}
    assert mpx.global_norm(tree) == 5.0
    assert mpx.global_norm(tree).dtype == jnp.float32
    assert mpx.global_norm([3 + 4j, jnp.array([12.0])]) == 13.0
    for empty in ({}, [jnp.arange(2)]):
        assert tree_equal_bits(mpx.global_norm(empty), jnp.zeros(()))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_squares_are_taken_in_float32(dtype):
    """The square of 300 is infinite in float16."""
    x = jnp.full(10000, 300.0, dtype)
    norm = jax.jit(mpx.global_norm)({"x": x})
    assert norm.dtype == jnp.float32
    # 1e4 terms are summed in float32, in blocks.
    np.testing.assert_allclose(norm, 100 * float(x[0]), rtol=1e-6)


def test_mixed_dtypes_and_float64():
    leaves = [jnp.array([2.0], d) for d in ("float16", "bfloat16", "float32")]
    assert tree_equal_bits(mpx.global_norm(leaves), jnp.sqrt(jnp.float32(12.0)))
    with jax.enable_x64(True):
        assert mpx.global_norm(leaves).dtype == jnp.float32
        norm = mpx.global_norm([*leaves, jnp.array([2.0], jnp.float64), np.float64(3.0)])
        assert tree_equal_bits(norm, jnp.float64(5.0))


# --- select_tree ---------------------------------------------------------------------------------


SPECIAL = np.array([0.0, -0.0, np.nan, -np.nan, np.inf, 1e-40, -np.inf, 1.5], np.float32)


def filled(sign):
    """Builds a tree with all kinds of leaves. Arrays and keys depend on `sign`."""
    values = np.copysign(SPECIAL, sign)
    return {
        "f32": jnp.array(values),
        "f16": [jnp.array(values, jnp.float16), jnp.array(values).astype(jnp.bfloat16)],
        "np": Pair(values, np.float16(sign)),
        "ints": (jnp.arange(2) + int(sign), jnp.array([sign > 0])),
        "key": jax.random.key(int(sign) + 1),
        "complex": jnp.array([complex(sign, -0.0)]),
        "layer": eqx.nn.Linear(2, 2, key=jax.random.key(int(sign) + 1)),
        "same": (None, jnp.tanh, "text", 3, 1.5, True),
        "empty": jnp.zeros((0, 2)),
    }


@pytest.mark.parametrize(("jit", "pred"), [(False, True), (False, np.False_), (True, False)])
def test_the_selected_tree_comes_back_bit_for_bit(jit, pred):
    a, b = filled(1.0), filled(-1.0)
    select = eqx.filter_jit(mpx.select_tree) if jit else mpx.select_tree
    want = a if pred else b
    # NumPy leaves become JAX arrays.
    out = select(jnp.asarray(pred) if jit else pred, a, b)
    assert tree_equal_bits(out, want)


def test_selecting_under_vmap():
    pred = jnp.array([True, False, True])
    a, b = jnp.arange(6.0).reshape(3, 2), -jnp.arange(6.0).reshape(3, 2)
    out = jax.vmap(mpx.select_tree)(pred, {"x": a}, {"x": b})
    assert tree_equal_bits(out, {"x": jnp.where(pred[:, None], a, b)})


def test_the_other_tree_may_be_nan_under_debug_nans():
    with jax.debug_nans(False):
        bad = {"x": jnp.array([jnp.nan, jnp.inf])}
    with jax.debug_nans(True):
        out = mpx.select_tree(jnp.array(False), bad, {"x": jnp.ones(2)})
    assert tree_equal_bits(out, {"x": jnp.ones(2)})

"""Tests the scalers: exact scaling, and the rule that changes a dynamic scale."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from helpers import HALVES, OwnScaling, avals, tree_equal_bits

import mpx_pde as mpx


SCALERS = {
    "dynamic": lambda scale: mpx.DynamicLossScaling(scale, min_loss_scaling=2.0**-100),
    "static": mpx.StaticLossScaling,
}


# --- scale and unscale ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(SCALERS))
@pytest.mark.parametrize("exponent", [-26, 8, 17])
def test_scaling_is_exact_and_unscaling_undoes_it(kind, exponent):
    """2^17 is infinite in float16 and 2^-26 is zero, but the products are neither."""
    with jax.enable_x64(True):
        scaling = SCALERS[kind](2.0**exponent)
        x = jnp.array([1.5, -3.0, 0.0]) * 2.0 ** -(exponent // 2)
        tree = {dtype: x.astype(dtype) for dtype in (*HALVES, "float32", "float64")}
        scaled = scaling.scale(tree)
        wide = {name: np.asarray(x, np.float64) * 2.0**exponent for name, x in tree.items()}
        assert tree_equal_bits(scaled, {name: jnp.asarray(x, name) for name, x in wide.items()})
        want = {d: x.astype("float64" if d == "float64" else "float32") for d, x in tree.items()}
        assert tree_equal_bits(scaling.unscale(scaled), want)


@pytest.mark.parametrize("kind", list(SCALERS))
def test_leaves_that_are_not_floating_pass_untouched(kind):
    scaling = SCALERS[kind](2.0**10)
    leaves = [None, 1, True, "text", jnp.tanh, jax.random.key(0), jnp.arange(2), np.arange(2)]
    for out in (scaling.scale(leaves), scaling.unscale(leaves)):
        assert all(x is y for x, y in zip(out, leaves, strict=True))


@pytest.mark.parametrize("kind", list(SCALERS))
def test_numpy_python_and_complex_numbers_are_scaled(kind):
    scaling = SCALERS[kind](2.0**100)
    tree = {"np": np.array([0.5]), "py": 1.5, "z": jnp.array([3 + 4j])}
    scaled = scaling.scale(tree)
    for name, x in tree.items():
        np.testing.assert_array_equal(scaled[name], x * 2.0**100)
    assert scaled["z"].dtype == jnp.complex64
    unscaled = scaling.unscale({**scaled, "half": np.float16(2)})
    assert tree_equal_bits(unscaled.pop("half"), jnp.float32(2.0**-99))
    jtu.tree_map(np.testing.assert_array_equal, unscaled, tree)


@pytest.mark.parametrize("kind", list(SCALERS))
def test_overflow_shows_and_stays(kind):
    scaling = SCALERS[kind](2.0**15)
    scaled = scaling.scale(jnp.array([1.0, 2.0, -4.0, jnp.nan], jnp.float16))
    np.testing.assert_array_equal(scaled, [2.0**15, np.inf, -np.inf, np.nan])
    np.testing.assert_array_equal(scaling.unscale(scaled), [1.0, np.inf, -np.inf, np.nan])
    bad = scaling.unscale(jnp.array([complex(np.inf, 1), complex(1, np.nan), 2.0**15]))
    np.testing.assert_array_equal(np.isfinite(bad), [False, False, True])


# --- The rule ------------------------------------------------------------------------------------


def reference(flags, scale, minimum, factor, period, counter, maximum):
    """Yields scale, counter, and skipped steps (in all and in a row), by the rule in Python."""
    skipped = in_a_row = 0
    for finite in flags:
        counter, in_a_row = (counter + 1, 0) if finite else (0, in_a_row + 1)
        skipped += not finite
        if not finite:
            scale = max(scale / factor, minimum)
        elif counter >= period:
            counter = 0
            if scale < maximum:
                scale = min(scale * factor, maximum)
        yield scale, counter, skipped, in_a_row


@pytest.mark.parametrize(
    ("minimum", "maximum", "factor", "period"), [(-2, 9, 4, 7), (0, 0, 2, 1), (-30, 3, 16, 2)]
)
def test_any_run_is_that_of_the_reference(minimum, maximum, factor, period):
    flags = np.random.default_rng(0).random(200) < 0.95
    given = (2.0**minimum, 2.0**minimum, factor, period)
    scaling = mpx.DynamicLossScaling(*given, counter=1, max_loss_scaling=2.0**maximum)

    adjust = lambda scaling, flag: (scaling.adjust(flag),) * 2
    history = jax.lax.scan(adjust, scaling, flags)[1]
    for i, want in enumerate(reference(flags, *given, 1, 2.0**maximum)):
        at = jtu.tree_map(lambda x, i=i: x[i], history)
        assert (at.loss_scaling, at.counter, at.skipped_steps, at.consecutive_skips) == want
        assert bool(at.at_minimum) == (want[3] > 0 and want[0] <= 2.0**minimum)
    assert history.loss_scaling.max() == 2.0**maximum
    assert history.skipped_steps[-1] == np.sum(~flags)


def test_the_defaults():
    scaling = mpx.DynamicLossScaling()
    assert (scaling.loss_scaling, scaling.factor, scaling.period) == (2.0**15, 2, 2000)
    assert (scaling.min_loss_scaling, scaling.max_loss_scaling) == (2.0**-24, None)
    assert scaling.counter == scaling.skipped_steps == scaling.consecutive_skips == 0


@pytest.mark.parametrize(("name", "top"), [("float16", 2.0**15), ("bfloat16", 2.0**126)])
def test_the_cap_is_that_of_half_precision(name, top):
    with mpx.half_precision(name):
        scaling = mpx.DynamicLossScaling(top / 2, period=1).adjust(True)
        assert scaling.loss_scaling == top
        assert scaling.adjust(True).loss_scaling == top
        # A factor that would pass the cap stops at it.
        assert mpx.DynamicLossScaling(top / 2, factor=16, period=1).adjust(True).loss_scaling == top


@pytest.mark.parametrize("half", HALVES)
def test_the_scale_can_be_divided_by_at_both_ends(half):
    """XLA divides an array by multiplying with the reciprocal. It flushes that of 2^127 to 0."""
    unscale = eqx.filter_jit(lambda scaling, x: scaling.unscale(x))
    with mpx.half_precision(half):
        largest = mpx.DynamicLossScaling(2.0**10, factor=2**8, period=1)
        for _ in range(20):
            largest = largest.adjust(True)
    smallest = mpx.DynamicLossScaling(1.0, min_loss_scaling=2.0**-126, factor=2**64)
    for _ in range(3):
        smallest = smallest.adjust(False)
    assert smallest.loss_scaling == 2.0**-126
    for scaling in (largest, smallest):
        size = float(scaling.loss_scaling) if scaling is largest else 2.0**-63
        x = jnp.array([size, -size / 2], jnp.bfloat16)
        want = np.asarray(x, np.float64) / float(scaling.loss_scaling)
        assert tree_equal_bits(unscale(scaling, x), jnp.asarray(want, jnp.float32))


# --- As a PyTree ---------------------------------------------------------------------------------


ARGUMENTS = {
    "python": (2.0**8, 2.0**-4, 4, 10),
    "numpy": (np.float64(256), np.float32(0.5), np.int64(2), np.int32(10)),
    "jax": (jnp.float16(256), jnp.bfloat16(0.5), jnp.array(2.0), jnp.array(10)),
}


@pytest.mark.parametrize("arguments", list(ARGUMENTS))
def test_fields_have_their_types_whatever_was_given(arguments):
    with jax.enable_x64(arguments != "jax"):
        scaling = mpx.DynamicLossScaling(*ARGUMENTS[arguments])
        types = [("float32[]", False), *[("int32[]", False)] * 5]
        assert avals(scaling) == types
        static = scaling.min_loss_scaling, scaling.factor, scaling.period
        assert [type(x) for x in static] == [float, float, int]
        for finite in (True, False, np.True_, jnp.array(False)):
            adjusted = scaling.adjust(finite)
            assert avals(adjusted) == types
            assert jtu.tree_structure(adjusted) == jtu.tree_structure(scaling)
        assert avals(mpx.StaticLossScaling(ARGUMENTS[arguments][0])) == types[:1]


def test_what_is_no_power_of_two_is_rounded_down_to_one():
    scaling = mpx.DynamicLossScaling(65504.0, 0.3, max_loss_scaling=100000.0)
    limits = scaling.min_loss_scaling, scaling.max_loss_scaling
    assert (scaling.loss_scaling, *limits) == (2.0**15, 2.0**-2, 2.0**16)
    traced = jax.jit(lambda x: mpx.DynamicLossScaling(x).loss_scaling)
    for value, want in [(jnp.asarray(65504.0), 2.0**15), (2.0**15, 2.0**15), (0.75, 0.5), (3, 2)]:
        assert traced(value) == want


def test_every_buffer_is_its_own():
    """Donating a buffer twice is an error."""
    one = jnp.float32(1.0)

    @eqx.filter_jit(donate="all")
    def adjust(scaling, finite):
        return scaling.adjust(finite)

    for scaling in (mpx.DynamicLossScaling(one, one), mpx.StaticLossScaling(one)):
        for finite in (True, False, True):
            scaling = adjust(scaling, jnp.array(finite))
    assert one == 1.0


# --- The others ----------------------------------------------------------------------------------


@pytest.mark.parametrize("finite", [True, False])
def test_static_and_noop_scalers_never_change(finite):
    for scaling, scale in ((mpx.StaticLossScaling(3.0), 3.0), (mpx.NoOpLossScaling(), 1.0)):
        assert scaling.adjust(finite) is scaling
        assert tree_equal_bits(scaling.loss_scaling, jnp.float32(scale))


def test_the_noop_scaler_widens_and_does_nothing_else():
    noop = mpx.NoOpLossScaling()
    tree = {"h": jnp.ones(2, jnp.bfloat16), "n": jnp.arange(2), "f": jnp.tanh, "x": jnp.ones(2)}
    assert noop.scale(tree) is tree
    assert tree_equal_bits(noop.unscale(tree), {**tree, "h": jnp.ones(2)})
    with jax.enable_x64(True):
        assert noop.unscale(jnp.ones(2, jnp.float64)).dtype == jnp.float64


def test_a_rule_of_ones_own():
    @jax.jit
    def step(w, scaling):
        return mpx.filter_value_and_grad(lambda w: jnp.sum(w * w), scaling)(w)

    own = OwnScaling(mpx.DynamicLossScaling(8.0, period=1), "grows at each step")
    value, scaling, finite, grads = step(jnp.array([1.0, 2.0]), own)
    assert (value, scaling.inner.loss_scaling, scaling.rule, finite) == (5.0, 16.0, own.rule, True)
    np.testing.assert_array_equal(grads, [2.0, 4.0])
    with pytest.raises(TypeError, match="abstract"):
        mpx.AbstractLossScaling()  # pyright: ignore[reportAbstractUsage]


# --- scaled --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
def test_scaled_multiplies_the_value_alone(dtype):
    scaling = mpx.DynamicLossScaling(2.0**4)
    x = jnp.array([1.0, 0.5], dtype)
    value = mpx.scaled(jnp.sum, scaling)(x)
    assert tree_equal_bits(value, jnp.array(24.0, dtype))
    value, aux = mpx.scaled(lambda x, *, n: (jnp.sum(x), (x, n)), scaling, has_aux=True)(x, n=3)
    assert tree_equal_bits((value, aux), (jnp.array(24.0, dtype), (x, 3)))
    grads = jax.grad(lambda x: mpx.scaled(jnp.sum, scaling)(x).astype(jnp.float32))(x)
    assert tree_equal_bits(grads, jnp.full(2, 16.0, dtype))


def test_it_is_shown_in_a_few_lines():
    scaling = mpx.DynamicLossScaling(2**14, period=20, max_loss_scaling=2**20)
    scaling = scaling.adjust(jnp.array(True))
    assert repr(scaling) == (
        "DynamicLossScaling(\n"
        "  loss_scaling=2^14 (2^-24 to 2^20, factor 2),\n"
        "  counter=1 of 20,\n"
        "  skipped_steps=0, consecutive_skips=0, vanished_steps=0\n"
        ")"
    )
    assert repr(mpx.StaticLossScaling(3)) == "StaticLossScaling(loss_scaling=3.0)"
    assert repr(mpx.NoOpLossScaling()) == "NoOpLossScaling()"

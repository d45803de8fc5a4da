"""Tests that parameters stored only in half precision learn like float32 masters."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from helpers import HALVES, over_devices, tree_equal_bits
from jax.sharding import PartitionSpec as P

import mpx_pde as mpx
from mpx_pde.precision._cast import rounded_to
from mpx_pde.training._masters import round_stochastically


@pytest.mark.parametrize("dtype", HALVES)
def test_stochastic_rounding_is_right_on_average(dtype):
    # 2^-20 is a subnormal number of float16.
    for value in (1.0 + 2.0**-12, -3.7, 1e-3, 2.0**-20 * 1.3):
        n = 20_000
        x = jnp.full(n, value, jnp.float32)
        rounded = round_stochastically(x, dtype, jax.random.key(1)).astype(jnp.float32)
        values = np.unique(np.asarray(rounded))
        assert len(values) == 2
        # The two neighbors are a step apart, which is 2^-24 for subnormal numbers of float16.
        assert values[0] < value < values[1]
        assert values[1] - values[0] <= max(float(jnp.finfo(dtype).eps) * abs(value), 2.0**-24)
        # Four standard deviations of the mean of n choices between the two.
        deviation = (values[1] - values[0]) / 2 / np.sqrt(n)
        assert abs(float(jnp.mean(rounded)) - value) < 4 * deviation


@pytest.mark.parametrize("dtype", HALVES)
def test_stochastic_rounding_leaves_what_is_representable_and_what_is_not_finite(dtype):
    largest = float(jnp.finfo(dtype).max)
    x = jnp.array([0.0, -0.0, 1.0, -largest, largest, jnp.inf, -jnp.inf, jnp.nan], jnp.float32)
    out = round_stochastically(x, dtype, jax.random.key(0)).astype(jnp.float32)
    np.testing.assert_array_equal(out, x)


@pytest.mark.slow
@pytest.mark.parametrize("master", ["stochastic", "kahan"])
def test_a_step_that_is_not_finite_changes_nothing(master):
    model = {"w": jnp.ones((4, 4), jnp.bfloat16), "full": jnp.ones(3), "n": jnp.arange(2)}
    optimizer = optax.contrib.muon(1e-3)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    if master == "kahan":
        state = mpx.compensated(state, model)
    grads = jtu.tree_map(lambda p: p * jnp.nan, eqx.filter(model, eqx.is_inexact_array))
    update = jax.jit(lambda m, s, g, f: mpx.optimizer_update(m, optimizer, s, g, f, master=master))
    assert tree_equal_bits(update(model, state, grads, jnp.array(False)), (model, state))


def test_kahan_keeps_what_rounding_takes():
    model = {"w": jnp.ones(3, jnp.bfloat16), "full": jnp.ones(3)}
    optimizer = optax.sgd(1.0)
    state = optimizer.init(model)
    grads = jtu.tree_map(lambda p: jnp.full_like(p, -(2.0**-12)), model)
    update = lambda m, s: mpx.optimizer_update(m, optimizer, s, grads, True, master="kahan")
    update = jax.jit(update)
    # A state without residues is taken as well.
    for i in range(1, 65):
        model, state = update(model, state)
        total = model["w"].astype(jnp.float32) + state.residue["w"].astype(jnp.float32)
        np.testing.assert_allclose(total, 1 + i * 2.0**-12, rtol=2**-15)
    assert model["w"].dtype == jnp.bfloat16
    np.testing.assert_allclose(model["full"], 1 + 64 * 2.0**-12)
    assert state.residue["full"] is None


@pytest.mark.slow
def test_stochastic_updates_repeat_and_take_a_key():
    model = jnp.ones(1000, jnp.bfloat16)
    optimizer = optax.sgd(1.0)
    state = optimizer.init(model)
    grads = jnp.full(1000, -(2.0**-9), jnp.bfloat16)

    def update(key=None, grads=grads):
        options = {"master": "stochastic", "key": key}
        return mpx.optimizer_update(model, optimizer, state, grads, True, **options)[0]

    assert (update() == update()).all()
    assert (update() != update(grads=grads * 1.0078125)).any()
    assert (update(jax.random.key(1)) != update(jax.random.key(2))).any()
    # A quarter of bfloat16's step above 1, 2^-7.
    mean = float(jnp.mean(update().astype(jnp.float32)))
    np.testing.assert_allclose(mean, 1 + 2.0**-9, atol=4 * 2.0**-7 * 0.5 / 1000**0.5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*holds squares of gradients")
@pytest.mark.parametrize(
    ("master", "dtype"),
    [("nearest", "float16"), *((m, "bfloat16") for m in ("nearest", "stochastic", "kahan"))],
)
def test_the_averages_of_an_optimizer_move_in_half_too(master, dtype):
    """Adam's second moment in bfloat16, rounded to the nearest, never falls. 0.1 % is less than
    half a step."""
    model = jnp.ones(500, dtype)
    optimizer = optax.adam(2.0**-10, b2=0.999)
    state = jtu.tree_map(jnp.ones_like, optimizer.init(model))
    state = mpx.compensated(state, model) if master == "kahan" else state

    @jax.jit
    def update(model, state, i):
        grads = jnp.full_like(model, 2.0**-8) * (1 + i / 64).astype(dtype)
        return mpx.optimizer_update(model, optimizer, state, grads, jnp.array(True), master=master)

    for i in range(20):
        model, state = update(model, state, jnp.float32(i))
    inner = state.state if master == "kahan" else state
    assert inner[0].nu.dtype == dtype
    nu = float(jnp.mean(inner[0].nu.astype(jnp.float32)))
    if master == "nearest":
        # A step of float16 below 1 is 2^-11, and 0.001 takes two of them.
        np.testing.assert_allclose(nu, 1.0 if dtype == "bfloat16" else 1 - 20 * 2.0**-10, rtol=1e-6)
    else:
        np.testing.assert_allclose(nu, 0.999**20, atol=4e-3)


def test_equal_gradients_are_rounded_anew_at_each_step():
    """After a step that changes nothing, the next one has the same gradients."""
    model, grads = jnp.ones(500, jnp.bfloat16), jnp.full(500, 2.0**-11)
    optimizer = optax.sgd(optax.constant_schedule(-1.0))  # it has a step counter
    state = optimizer.init(model)
    update = lambda m, s: mpx.optimizer_update(m, optimizer, s, grads, True, master="stochastic")
    update = jax.jit(update)
    for _ in range(64):
        model, state = update(model, state)
    # Four of 64 steps of 2^-7. With equal random numbers it would be all of them or none.
    moved = np.asarray(model.astype(jnp.float32)) - 1
    np.testing.assert_allclose(moved.mean(), 2.0**-5, rtol=0.1)
    assert moved.max() < 16 * 2.0**-7


@pytest.mark.slow
@pytest.mark.parametrize("key", [None, jax.random.key(7)], ids=["own key", "key"])
@pytest.mark.parametrize("master", ["stochastic", "kahan"])
@pytest.mark.parametrize("tracked", [True, False])
def test_copies_are_rounded_alike_and_parts_independently(tracked, master, key):
    """Runs in a `shard_map` with one array split over devices, and one copied to each."""
    model = {"copied": jnp.ones(64, jnp.bfloat16), "split": jnp.ones((4, 512), jnp.bfloat16)}
    # 1 + 2^-9 is a quarter of a step above 1.
    slope = 2.0**-9 * (1 + jnp.arange(4.0) / 16)
    grads = {"copied": jnp.full(64, 2.0**-9), "split": jnp.tile(slope[:, None], 512)}
    optimizer = optax.sgd(-1.0, momentum=0.9)
    state = optimizer.init(model)
    state = mpx.compensated(state, model) if master == "kahan" else state
    layout = lambda tree: jtu.tree_map(lambda x: P("data") if x.ndim == 2 else P(), tree)

    def update(model, state, grads):
        return mpx.optimizer_update(model, optimizer, state, grads, True, master=master, key=key)

    # Kahan's sums leave the momentum, which is also in half, to random rounding.
    specs = layout(model), layout(state), layout(grads)
    sharded = over_devices(update, 4, specs, specs[:2], check_vma=tracked)
    for _ in range(2):
        model, state = jax.jit(sharded)(model, state, grads)
    for x in jtu.tree_leaves((model, state)):
        copies = {np.asarray(shard.data).tobytes() for shard in x.addressable_shards}
        assert x.ndim > 1 or len(copies) == 1
    # Of a key that is the same on all devices nothing tells parts from copies without JAX's marks.
    if master == "stochastic" and (tracked or key is None):
        up = np.asarray(model["split"] > 1, np.float32)
        assert np.all(np.abs(np.corrcoef(up)[np.triu_indices(4, 1)]) < 4 / 512**0.5)


def test_residues_of_another_model_are_told_of():
    """Without residues, parameters would be rounded to the nearest."""
    model, optimizer = {"full": jnp.ones(3), "w": jnp.ones(2, jnp.bfloat16)}, optax.sgd(1.0)
    for other in (model | {"w": jnp.ones(2)}, model | {"w": model["w"][:1]}, {"w": model["w"]}):
        state = mpx.compensated(optimizer.init(model), other)
        match = r"`optimizer_update` .* residues .* at \['.*'\] it has"
        with pytest.raises(ValueError, match=match):
            mpx.optimizer_update(model, optimizer, state, model, True, master="kahan")


def test_rounding_in_float32_is_that_of_a_cast():
    """Of all numbers of float16, those between them, and those beyond its range."""
    every = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    finite = np.sort(every[np.isfinite(every)])
    x = np.concatenate([finite, (finite[:-1] + finite[1:]) / 2, [1e6, -1e6, np.inf, np.nan]])
    x = np.concatenate([x, np.nextafter(x, np.float32(np.inf)), x * np.float32(1.0001)])
    x = x.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        want = x.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(rounded_to, static_argnums=1)(x, jnp.float16), want)


@pytest.mark.parametrize("dtype", HALVES)
def test_kahan_keeps_small_parameters(dtype):
    """Parameters below float16's normal numbers, with gradients of zero and of their size."""
    model = jax.random.normal(jax.random.key(0), (1000,)).astype(jnp.float32) * 2e-5
    model = model.astype(dtype)
    optimizer = optax.sgd(1.0)
    state = mpx.compensated(optimizer.init(model), model)
    update = lambda m, s, g: mpx.optimizer_update(m, optimizer, s, g, True, master="kahan")
    update = jax.jit(update)
    same, after = update(model, state, jnp.zeros_like(model))
    assert same.dtype == model.dtype
    np.testing.assert_array_equal(same.astype(jnp.float32), model.astype(jnp.float32))
    assert not np.any(after.residue)
    grads = model / 4
    moved, after = update(model, state, grads)
    want = model.astype(jnp.float32) - grads.astype(jnp.float32)
    total = moved.astype(jnp.float32) + after.residue.astype(jnp.float32)
    # Half of float16's smallest number, 2^-24, in which the residue is rounded; a relative 2^-16 in
    # bfloat16.
    bound = {"float16": 2.0**-25, "bfloat16": 2.0**-16 * 1e-4}[dtype]
    assert np.max(np.abs(total - want)) <= bound


@pytest.mark.parametrize("master", ["nearest", "stochastic", "kahan"])
@pytest.mark.parametrize("dtype", HALVES)
def test_an_entry_that_would_become_infinite_stays(master, dtype):
    largest = float(jnp.finfo(dtype).max)
    optimizer = optax.sgd(1.0)
    update = lambda *args: mpx.optimizer_update(args[0], optimizer, *args[1:], True, master=master)
    update = jax.jit(update)
    model = {"w": jnp.array([largest, -largest, 1.0, jnp.inf], dtype), "full": jnp.ones(2)}
    state = optimizer.init(model)
    state = mpx.compensated(state, model) if master == "kahan" else state
    # Half a step above the largest number, from where on it is rounded to infinity.
    half = 2.0 ** int(jnp.finfo(dtype).maxexp - jnp.finfo(dtype).nmant - 2)
    grads = {"w": jnp.array([-half, half, -1.0, 0.0]), "full": -jnp.ones(2)}
    new, after = update(model, state, grads)
    assert tree_equal_bits(new["w"], jnp.array([largest, -largest, 2.0, jnp.inf], dtype))
    assert tree_equal_bits(new["full"], jnp.full(2, 2.0))
    if master == "kahan":
        assert not np.any(after.residue["w"])
    # What is not a matter of range is not hidden.
    new, _ = update(model, state, {"w": jnp.full(4, jnp.nan), "full": jnp.ones(2)})
    assert np.all(np.isnan(new["w"].astype(jnp.float32)))

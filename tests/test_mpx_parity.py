"""Code written for MPX runs after a change of import, and MPX 0.1.8's faults are gone.

The first half holds one group of tests for each fault, in the order `test_1_…` to `test_15_…`:
every one of them fails on MPX 0.1.8 for the reason that its docstring gives. The second half is
code as MPX's users write it, with nothing but the import changed.

Numbers are small powers of two wherever equality is meant to the last bit: float16 and float32
hold them, and their products with a power-of-two scale, exactly.
"""

import inspect
import itertools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import TOLERANCES, tree_allclose, tree_equal_bits
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mpx_pde as mpx


@pytest.fixture
def standard_promotion():
    """Code written for MPX, and Equinox's BatchNorm, rely on JAX's standard promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def scaler(scale: float, minimum: float = 1.0, **kwargs):
    """A scaler built as MPX wants it: from float32 arrays."""
    return mpx.DynamicLossScaling(jnp.float32(scale), jnp.float32(minimum), **kwargs)


def mesh_of(devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]), ("batch",))


def all_gradients(func, scaling, *args):
    """(scaling, finite, grads, value or None) by each of the four ways to ask for gradients."""

    def with_aux(*args):
        return func(*args), {"n": jnp.int32(3)}

    out = {}
    out["grad"] = (*mpx.filter_grad(func, scaling, search=False)(*args), None)
    *rest, _ = mpx.filter_grad(with_aux, scaling, has_aux=True, search=False)(*args)
    out["grad, aux"] = (*rest, None)
    value, *rest = mpx.filter_value_and_grad(func, scaling, search=False)(*args)
    out["value"] = (*rest, value)
    (value, _), *rest = mpx.filter_value_and_grad(with_aux, scaling, has_aux=True, search=False)(
        *args
    )
    out["value, aux"] = (*rest, value)
    return out


def dot_loss(params, x):
    """Its gradient in `w` is `x`."""
    return jnp.dot(params["w"], x)


# --- The faults of MPX 0.1.8 ---------------------------------------------------------------------


def test_1_a_growth_step_unscales_with_the_scale_that_scaled():
    """MPX adjusts first and unscales with the new scale: gradients and loss come back halved."""
    params = {"w": jnp.array([1.0, 2.0, -3.0])}
    x = jnp.array([0.5, 0.25, 2.0])
    for how, (new, finite, grads, value) in all_gradients(
        dot_loss, scaler(2**8, period=1), params, x
    ).items():
        assert finite, how
        assert new.loss_scaling == 2**9, how
        np.testing.assert_array_equal(grads["w"], x, err_msg=how)
        assert value is None or value == -5.0, how


def test_1_an_overflow_step_unscales_with_the_scale_that_scaled():
    """MPX's value and finite gradients come back doubled when another gradient overflows."""
    params = {"w": jnp.array([1.0, 0.0])}
    # 64 · 2^15 is beyond float16, 2^-1 · 2^15 is not.
    x = jnp.array([0.5, 64.0])
    for how, (new, finite, grads, value) in all_gradients(
        lambda params, x: jnp.sum(params["w"] * x), scaler(2**15), params, x
    ).items():
        assert not finite, how
        assert new.loss_scaling == 2**14, how
        assert grads["w"][0] == 0.5, how
        assert not jnp.isfinite(grads["w"][1]), how
        assert value is None or value == 0.5, how


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_2_half_precision_is_set_by_name(name):
    """MPX's setter takes a name and drops it."""
    other = {"float16": jnp.bfloat16, "bfloat16": jnp.float16}[name]
    mpx.set_half_precision_datatype(other)
    mpx.set_half_precision_datatype(name)
    assert mpx.half_precision_datatype() == jnp.dtype(name)
    assert mpx.HALF_PRECISION_DATATYPE == jnp.dtype(name)
    assert mpx.cast_to_half_precision(jnp.ones(2)).dtype == jnp.dtype(name)


def test_2_a_compiled_step_sees_the_new_setting():
    """MPX's setting is a global that jit's cache key does not know."""

    def loss(w, x):
        seen.append(w.dtype)
        return jnp.sum(w * x)

    seen = []
    step = jax.jit(lambda w, x, scaling: mpx.filter_grad(loss, scaling)(w, x))
    args = (jnp.ones(2), jnp.ones(2), scaler(2**4))
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float16):
        mpx.set_half_precision_datatype(dtype)
        jax.block_until_ready(step(*args))
    # The third call finds the first program in the cache: nothing is traced.
    assert seen == [jnp.float16, jnp.bfloat16]


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_3_force_full_precision_returns_the_dtype_it_was_given(dtype):
    """MPX returns float16 whatever came in."""
    seen = []

    def mean(x):
        seen.append(x.dtype)
        return jnp.mean(x)

    out = mpx.force_full_precision(mean)(jnp.ones(4, dtype))
    assert out.dtype == dtype
    assert seen == [jnp.float32]


class Pair(NamedTuple):
    first: Any
    second: Any


class Holder(eqx.Module):
    array: Any
    name: str = eqx.field(static=True)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: x,
        lambda x: (x, x),
        lambda x: [x, x],
        lambda x: {"a": x, "b": (x, None)},
        lambda x: Pair(x, 3),
        lambda x: Holder(x, "kept"),
    ],
    ids=["array", "tuple", "list", "dict", "NamedTuple", "Module"],
)
def test_4_cast_function_casts_every_kind_of_output(wrap):
    """MPX casts an array or a tuple and lets all else pass in the dtype it was computed in."""
    out = mpx.cast_function(wrap, jnp.float16, jnp.float32)(jnp.ones(3))
    expected = jax.tree_util.tree_structure(wrap(jnp.ones(3)))
    assert jax.tree_util.tree_structure(out) == expected
    arrays = [leaf for leaf in jax.tree_util.tree_leaves(out) if eqx.is_array(leaf)]
    assert arrays
    assert all(a.dtype == jnp.float32 for a in arrays)


def test_4_cast_function_keeps_the_name():
    """MPX's wrapper is called `wrapper`."""

    def energy(u, *, weight=1.0):
        """Half the squared norm."""
        return 0.5 * weight * jnp.sum(u * u)

    for wrapped in (mpx.cast_function(energy, jnp.float16), mpx.force_full_precision(energy)):
        assert wrapped.__name__ == "energy"
        assert wrapped.__doc__ == "Half the squared norm."
        assert list(inspect.signature(wrapped).parameters) == ["u", "weight"]


@pytest.mark.parametrize("exponent", [17, -26])
def test_5_scale_does_not_round_the_scale_to_half(exponent):
    """MPX rounds the scale to float16: 2^17 becomes infinity and 2^-26 becomes zero."""
    scaling = scaler(2.0**exponent, minimum=2.0**-30)
    scaled = scaling.scale(jnp.float32(3.0))
    assert scaled.dtype == jnp.float32
    assert scaled == 3.0 * 2.0**exponent
    assert scaling.unscale(scaled) == 3.0


def test_5_a_scale_below_halfs_range_keeps_the_gradient():
    """MPX's gradient is zero at a scale of 2^-26, and passes for finite."""

    def loss(w):
        # A PDE residual of 2^20: float32, like the equations of a problem with stiff units.
        return jnp.sum(w.astype(jnp.float32) * 2.0**20)

    scaling = scaler(2.0**-26, minimum=2.0**-30)
    _, finite, grads = mpx.filter_grad(loss, scaling)(jnp.ones(3))
    assert finite
    np.testing.assert_array_equal(grads, np.full(3, 2.0**20, np.float32))


def test_5_integers_pass_through_scale_and_unscale():
    """MPX multiplies integer leaves, which makes floats of them."""
    tree = {"x": jnp.ones(2), "i": jnp.arange(3), "mask": jnp.array([True, False])}
    scaling = scaler(2.0**3)
    for out in (scaling.scale(tree), scaling.unscale(tree)):
        assert tree_equal_bits((out["i"], out["mask"]), (tree["i"], tree["mask"]))
    np.testing.assert_array_equal(scaling.scale(tree)["x"], [8.0, 8.0])


def test_6_a_finite_loss_is_reported_finite_at_the_largest_scale():
    """MPX scales the loss in float16: 2 · 65504 is reported as infinity on a finite step."""
    scaling = mpx.DynamicLossScaling(mpx.FLOAT16_MAX, jnp.ones((), jnp.float32))
    value, _, finite, grads = mpx.filter_value_and_grad(lambda w: w * w / 2, scaling)(
        jnp.float32(1.5)
    )
    assert finite
    assert value == 1.125
    assert grads == 1.5
    value, _, finite, grads = mpx.filter_value_and_grad(lambda w: w, scaling)(jnp.float32(2.0))
    assert finite
    assert value == 2.0
    assert grads == 1.0


def test_6_scaling_is_exact_from_the_largest_starting_scale():
    """MPX starts at 65504, no power of two: every scaled gradient is rounded."""
    scaling = mpx.DynamicLossScaling(mpx.FLOAT16_MAX, jnp.ones((), jnp.float32))
    mantissa, _ = np.frexp(np.float32(scaling.loss_scaling))
    assert mantissa == 0.5
    # Every float16 of a binade, as gradients.
    x = jnp.asarray(np.arange(1024, 2048) / 4096, jnp.float32)
    _, finite, grads = mpx.filter_grad(dot_loss, scaling)({"w": jnp.ones_like(x)}, x)
    assert finite
    np.testing.assert_array_equal(grads["w"], x)


def test_7_the_cap_follows_the_half_precision_type():
    """MPX caps the scale at float16's 65504 in bfloat16 too."""
    mpx.set_half_precision_datatype(jnp.bfloat16)
    scaling = scaler(2.0**14, period=1)
    for _ in range(10):
        scaling = scaling.adjust(jnp.array(True))
    assert scaling.loss_scaling == 2.0**24

    mpx.set_half_precision_datatype(jnp.float16)
    scaling = scaler(2.0**14, period=1)
    for _ in range(10):
        scaling = scaling.adjust(jnp.array(True))
    assert scaling.loss_scaling == 2.0**15


@pytest.mark.parametrize("with_value", [False, True])
def test_8_aux_comes_back_in_full_precision(with_value):
    """MPX's aux stays in half precision."""

    def loss(w, x):
        residual = w * x
        return jnp.sum(residual), {"residual": residual, "count": jnp.int32(x.size), "none": None}

    transform = mpx.filter_value_and_grad if with_value else mpx.filter_grad
    out = transform(loss, scaler(2.0**4), has_aux=True)(jnp.ones(3), jnp.arange(3.0))
    aux = out[0][1] if with_value else out[3]
    assert aux["residual"].dtype == jnp.float32
    np.testing.assert_array_equal(aux["residual"], [0.0, 1.0, 2.0])
    assert aux["count"].dtype == jnp.int32
    assert aux["none"] is None


class NormNet(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, *, key):
        self.linear = eqx.nn.Linear(2, 3, key=key)
        self.norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="batch", momentum=0.5)

    def __call__(self, x, state):
        x, state = self.norm(self.linear(x), state)
        return jnp.sum(x * x), state


def test_8_batch_norm_state_stays_full_and_rolls_back(standard_promotion):
    """MPX casts the running statistics to half precision with all other arguments, so that they
    no longer fit the ones to roll back to."""
    model, state = eqx.nn.make_with_state(NormNet)(key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (8, 2))
    dtypes = [leaf.dtype for leaf in jax.tree_util.tree_leaves(state)]

    def loss(model, state, x):
        assert [leaf.dtype for leaf in jax.tree_util.tree_leaves(state)] == dtypes
        out, state = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")(
            x, state
        )
        return jnp.mean(out), state

    @eqx.filter_jit
    def step(model, state, x, scaling):
        scaling, finite, _, new_state = mpx.filter_grad(loss, scaling, has_aux=True)(
            model, state, x
        )
        return scaling, finite, mpx.select_tree(finite, new_state, state), new_state

    _, finite, kept, new_state = step(model, state, x, scaler(1.0))
    assert finite
    assert [leaf.dtype for leaf in jax.tree_util.tree_leaves(new_state)] == dtypes
    assert tree_equal_bits(kept, new_state)
    assert not tree_equal_bits(kept, state)

    _, finite, kept, new_state = step(model, state, x.at[0, 0].set(jnp.inf), scaler(1.0))
    assert not finite
    assert not tree_equal_bits(new_state, state)
    assert tree_equal_bits(kept, state)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_9_gradients_have_the_dtype_of_the_masters(dtype):
    """MPX casts outside of the differentiated function, so that gradients belong to the copies
    in half precision: a bfloat16 master gets a float32 gradient."""
    params = {"w": jnp.ones(3, dtype)}
    x = jnp.array([0.5, 0.25, 2.0])
    for how, (_, finite, grads, _) in all_gradients(dot_loss, scaler(2.0**4), params, x).items():
        assert finite, how
        assert grads["w"].dtype == dtype, how
        np.testing.assert_array_equal(grads["w"].astype(jnp.float32), x, err_msg=how)


def test_9_a_weight_shared_by_5000_scan_steps():
    """MPX's cotangent is summed in float16, which stops at 2048 ones."""
    steps = 5000

    def loss(w, x):
        def body(total, _):
            product = mpx.mixed_matmul(x, w, dtype=jnp.float16)
            return total + product[0, 0].astype(jnp.float32), None

        total, _ = jax.lax.scan(body, jnp.float32(0.0), length=steps)
        return total

    w, x = jnp.ones((1, 1)), jnp.ones((1, 1))
    # `keep_full`: the product rounds its operands itself, the float32 master goes into the scan.
    _, finite, grads = mpx.filter_grad(loss, scaler(2.0**3), keep_full=(True, False))(w, x)
    assert finite
    assert grads.dtype == jnp.float32
    # 5000 · 2^3 is an integer below 2^24: the float32 sum is exact.
    np.testing.assert_array_equal(grads, [[5000.0]])


def test_9_a_gradient_summed_over_devices():
    """MPX's gradients are reduced over the devices in float16: two shards of 40000 make inf."""
    mesh = mesh_of(2)
    split = NamedSharding(mesh, PartitionSpec("batch"))
    whole = NamedSharding(mesh, PartitionSpec())
    w = jax.device_put(jnp.ones((1, 1)), whole)
    x = jax.device_put(jnp.full((2, 1), 40000.0), split)

    def loss(w, x):
        # Summed after the weight: its gradient is the sum of x over the devices.
        product = mpx.mixed_matmul(x, w, dtype=jnp.float16, out_dtype=jnp.float32)
        return jnp.sum(product)

    step = jax.jit(
        lambda w, x, scaling: mpx.filter_grad(loss, scaling, keep_full=(True, False))(w, x)
    )
    compiled = step.lower(w, x, scaler(1.0)).compile()
    _, finite, grads = compiled(w, x, scaler(1.0))
    assert finite
    np.testing.assert_array_equal(grads, [[80000.0]])
    reductions = [line for line in compiled.as_text().splitlines() if " all-reduce" in line]
    assert any("f32" in line for line in reductions)
    assert not any("f16" in line for line in reductions)


def test_10_coordinates_can_stay_in_full_precision():
    """MPX rounds coordinates with all else, to [1, 1000.5, inf], and nothing opts out."""
    points = jnp.array([0.9999, 1000.3, 70000.0])
    seen = {}

    def loss(w, points):
        seen["w"], seen["points"] = w.dtype, points.dtype
        inside = jnp.sin(points) * 0.125
        return jnp.sum(w * inside.astype(w.dtype)), points

    scaling = scaler(2.0**4)
    _, finite, grads, aux = mpx.filter_grad(loss, scaling, has_aux=True, keep_full=(False, True))(
        jnp.ones(3), points
    )
    assert seen == {"w": jnp.float16, "points": jnp.float32}
    assert finite
    assert tree_equal_bits(aux, points)
    # Half the spacing of float16 below 1/8; a rounded coordinate is off by far more.
    np.testing.assert_allclose(grads, np.sin(np.asarray(points)) * 0.125, atol=2.0**-15)


@pytest.mark.parametrize("check_vma", [False, True])
def test_11_devices_agree_under_shard_map(check_vma):
    """On MPX the one device that overflowed halves its scale and skips, alone."""
    mesh = mesh_of(8)
    spec = PartitionSpec("batch")
    x = jnp.ones((8, 2)).at[3, 0].set(60000.0)

    def device_step(w, x, scaling):
        loss = lambda w, x: jnp.sum(w * x)
        scaling, finite, grads = mpx.filter_grad(loss, scaling, axis_name="batch", search=False)(
            w, x
        )
        # One row for each device.
        return scaling.loss_scaling.reshape(1), jnp.reshape(finite, (1,)), grads

    # A weight of each device's own, as in an ensemble or a fully sharded model: no reduction of
    # the gradients tells the devices of the overflow.
    step = jax.jit(
        jax.shard_map(
            device_step,
            mesh=mesh,
            in_specs=(spec, spec, PartitionSpec()),
            out_specs=(spec, spec, spec),
            check_vma=check_vma,
        )
    )
    w = jnp.ones((8, 2))
    scales, finite, grads = step(w, x, scaler(2.0**4, period=1))
    assert not jnp.any(finite)
    np.testing.assert_array_equal(scales, np.full(8, 2.0**3))

    scales, finite, grads = step(w, jnp.ones((8, 2)), scaler(2.0**4, period=1))
    assert jnp.all(finite)
    np.testing.assert_array_equal(scales, np.full(8, 2.0**5))
    np.testing.assert_array_equal(grads, np.ones((8, 2)))


@pytest.mark.parametrize("check_vma", [False, True])
def test_11_data_parallel_devices_agree(check_vma):
    """On MPX the devices that did not overflow keep their scale, though the sum is infinite."""
    mesh = mesh_of(4)
    replicated, split = PartitionSpec(), PartitionSpec("batch")

    def device_step(w, x, scaling):
        scaling, finite, grads = mpx.filter_grad(
            lambda w, x: jnp.sum(w * x), scaling, axis_name="batch", search=False
        )(w, x)
        if not check_vma:
            # With the check, JAX sums the gradients of what is the same on all devices itself.
            grads = jax.lax.psum(grads, "batch")
        # Every device's own view of the scale, without a claim that they agree.
        return jax.lax.all_gather(scaling.loss_scaling, "batch").reshape(1, 4), finite, grads

    step = jax.jit(
        jax.shard_map(
            device_step,
            mesh=mesh,
            in_specs=(replicated, split, replicated),
            # With the check, "replicated" is verified when the step is traced.
            out_specs=(split, replicated, replicated),
            check_vma=check_vma,
        )
    )
    w = jnp.ones((1, 2))
    scales, finite, grads = step(w, jnp.ones((4, 2)), scaler(2.0**4))
    assert bool(finite)
    np.testing.assert_array_equal(scales, np.full((4, 4), 2.0**4))
    np.testing.assert_array_equal(grads, np.full((1, 2), 4.0))
    bad = jnp.ones((4, 2)).at[2, 1].set(60000.0)
    scales, finite, _ = step(w, bad, scaler(2.0**4))
    np.testing.assert_array_equal(scales, np.full((4, 4), 2.0**3))
    assert not bool(finite)


def test_11_lanes_agree_under_vmap():
    """`axis_name` is any named axis: MPX's lanes diverge under vmap as its devices do."""
    x = jnp.ones((4, 2)).at[1].set(60000.0)

    def lane(x):
        scaling, finite, _ = mpx.filter_value_and_grad(
            lambda w, x: jnp.sum(w * x), scaler(2.0**4), axis_name="lanes", search=False
        )(jnp.ones(2), x)[1:]
        return scaling.loss_scaling, finite

    scales, finite = jax.vmap(lane, axis_name="lanes")(x)
    assert not jnp.any(finite)
    np.testing.assert_array_equal(scales, np.full(4, 2.0**3))


def test_12_bfloat16_parameters():
    """MPX's update of a bfloat16 parameter is float32, and selecting between the two raises."""
    model = {"w": jnp.array([1.0, 2.0], jnp.bfloat16)}
    optimizer = optax.sgd(0.5)
    state = optimizer.init(model)

    def loss(model):
        return jnp.sum(model["w"] * model["w"])

    _, finite, grads = mpx.filter_grad(loss, scaler(2.0**2))(model)
    new_model, new_state = mpx.optimizer_update(model, optimizer, state, grads, finite)
    assert new_model["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(new_model["w"].astype(jnp.float32), [0.0, 0.0])

    bad = {"w": jnp.array([jnp.nan, 1.0], jnp.bfloat16)}
    kept = mpx.optimizer_update(model, optimizer, state, bad, jnp.array(False))
    assert tree_equal_bits(kept, (model, state))
    assert jax.tree_util.tree_structure(new_state) == jax.tree_util.tree_structure(state)


def test_12_reduce_on_plateau_takes_the_loss():
    """MPX's `optimizer_update` takes no extra arguments."""
    model = {"w": jnp.array([1.0, 2.0])}
    optimizer = optax.chain(
        optax.sgd(0.5), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, cooldown=0)
    )
    state = optimizer.init(model)
    grads = {"w": jnp.ones(2)}
    scales = []
    for _ in range(4):
        model, state = mpx.optimizer_update(
            model, optimizer, state, grads, jnp.array(True), value=jnp.float32(1.0)
        )
        scales.append(float(state[-1].scale))
    # The loss does not fall, so that the rate does.
    assert scales[0] == 1.0
    assert scales[-1] < 1.0
    kept = mpx.optimizer_update(
        model, optimizer, state, {"w": jnp.array([jnp.inf, 0.0])}, jnp.array(False), value=jnp.inf
    )
    assert tree_equal_bits(kept, (model, state))


def test_12_lbfgs_takes_its_line_search():
    """MPX's `optimizer_update` takes no extra arguments."""
    target = jnp.array([1.0, -2.0])

    def loss(model):
        return jnp.sum((model["w"] - target) ** 2)

    model = {"w": jnp.zeros(2)}
    optimizer = optax.lbfgs()
    state = optimizer.init(model)
    scaling = scaler(1.0)

    @jax.jit
    def step(model, state):
        value, _, finite, grads = mpx.filter_value_and_grad(
            loss, scaling, use_mixed_precision=False
        )(model)
        model, state = mpx.optimizer_update(
            model, optimizer, state, grads, finite, value=value, grad=grads, value_fn=loss
        )
        return model, state, value

    for _ in range(3):
        model, state, _ = step(model, state)
    # A quadratic: a line search along the gradient ends in its minimum, to float32 rounding.
    np.testing.assert_allclose(model["w"], target, atol=1e-5)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_12_a_skipped_step_makes_no_nan(jit, bad):
    """MPX runs the optimizer on the infinite gradients and drops the result: the infinity over
    infinity on the way stops an eager run under `jax_debug_nans`."""
    model = {"w": jnp.array([1.0, 2.0])}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    state = optimizer.init(model)
    grads = {"w": jnp.array([bad, 1.0], jnp.float32)}

    def update(model, state, grads):
        return mpx.optimizer_update(model, optimizer, state, grads, jnp.array(False))

    with jax.debug_nans(True):
        kept = (jax.jit(update) if jit else update)(model, state, grads)
    assert tree_equal_bits(kept, (model, state))


@pytest.mark.parametrize("is_param", [eqx.is_array, eqx.is_inexact_array])
def test_12_integer_arrays_in_the_model(is_param):
    """With the optimizer state made as in MPX's README, from all arrays, MPX's update has other
    leaves than the state, and selecting between the two raises."""
    model = {"w": jnp.array([1.0, 2.0]), "grid": jnp.arange(3)}
    optimizer = optax.adamw(1e-2)
    state = optimizer.init(eqx.filter(model, is_param))

    def loss(model):
        return jnp.sum(model["w"] * model["grid"][1:].astype(model["w"].dtype))

    _, finite, grads = mpx.filter_grad(loss, scaler(2.0**2))(model)
    new_model, new_state = mpx.optimizer_update(model, optimizer, state, grads, finite)
    assert tree_equal_bits(new_model["grid"], model["grid"])
    assert jnp.all(new_model["w"] < model["w"])
    assert jax.tree_util.tree_structure(new_state) == jax.tree_util.tree_structure(state)


def test_13_a_step_under_strict_promotion():
    """MPX mixes float16, float32, integers and bools freely, which strict promotion forbids."""
    model = {"w": jnp.array([1.0, 2.0])}
    optimizer = optax.adam(1e-2)
    state = optimizer.init(model)

    @jax.jit
    def step(model, state, scaling):
        value, scaling, finite, grads = mpx.filter_value_and_grad(
            lambda model: jnp.sum(model["w"] * model["w"]), scaling
        )(model)
        model, state = mpx.optimizer_update(model, optimizer, state, grads, finite)
        return model, state, scaling, value

    with jax.numpy_dtype_promotion("strict"):
        new_model, state, scaling, value = step(model, state, scaler(2.0**4, period=1))
    assert value == 5.0
    assert scaling.loss_scaling == 2.0**5
    assert jnp.all(new_model["w"] < model["w"])


def test_13_one_array_as_scale_and_minimum_under_donation():
    """MPX keeps both arrays, and the buffer that they share is donated twice."""
    one = jnp.ones((), jnp.float32)
    scaling = mpx.DynamicLossScaling(one, one, period=1)

    @eqx.filter_jit(donate="all")
    def step(w, scaling):
        scaling, _, grads = mpx.filter_grad(lambda w: jnp.sum(w * w), scaling)(w)
        return w - grads, scaling

    w, scaling = step(jnp.ones(3), scaling)
    assert scaling.loss_scaling == 2.0
    w, scaling = step(w, scaling)
    assert scaling.loss_scaling == 4.0
    np.testing.assert_array_equal(w, np.ones(3))


def test_14_accumulation_keeps_every_micro_batch():
    """MPX's recipe sums the gradients of the micro-batches and updates with the last ones."""
    params = {"w": jnp.array([1.0, 2.0])}
    x = jnp.array([[1.0, 2.0], [4.0, 8.0], [16.0, 32.0], [64.0, 128.0]])

    def loss(params, x):
        return jnp.mean(jnp.sum(params["w"] * x, axis=1, dtype=jnp.float32))

    accumulate = mpx.filter_accumulated_value_and_grad(loss, scaler(2.0**4), 4)
    value, scaling, finite, grads = accumulate({"w": params["w"][None]}, x)
    assert finite
    np.testing.assert_array_equal(grads["w"], [[85.0 / 4, 170.0 / 4]])
    assert value == 425.0 / 4
    # One adjustment for the window, not one for each micro-batch.
    assert scaling.counter == 1


def test_14_an_overflow_in_any_micro_batch_skips_the_step():
    """MPX's recipe keeps the last micro-batch's flag, and adjusts the scale between them."""
    x = jnp.array([[1.0], [60000.0], [1.0], [1.0]])
    accumulate = mpx.filter_accumulated_value_and_grad(
        lambda w, x: jnp.mean(w * x), scaler(2.0**4), 4, search=False
    )
    _, scaling, finite, _ = accumulate(jnp.ones((1, 1)), x)
    assert not finite
    assert scaling.loss_scaling == 2.0**3


class SpectralLayer(eqx.Module):
    """A one-dimensional Fourier layer as most libraries have it: complex weights, `rfft`."""

    weight: jax.Array

    def __call__(self, x):
        modes = self.weight.shape[-1]
        spectrum = jnp.fft.rfft(x)[:, :modes]
        spectrum = jnp.einsum("im,iom->om", spectrum, self.weight)
        return jnp.fft.irfft(spectrum, n=x.shape[-1])


class SmallFNO(eqx.Module):
    lift: eqx.nn.Linear
    spectral: eqx.Module
    project: eqx.nn.Linear

    def __call__(self, u):
        hidden = jax.vmap(self.lift, in_axes=1, out_axes=1)(u)
        hidden = jnp.tanh(self.spectral(hidden))
        return jax.vmap(self.project, in_axes=1, out_axes=1)(hidden)


def test_15_a_fourier_operator_trains_in_half_precision():
    """An FNO crashes under MPX: `rfft` takes no float16, and no part of a model can be exempt."""
    keys = jax.random.split(jax.random.key(0), 5)
    real, imag = jax.random.normal(keys[0], (2, 4, 4, 3)) / 4
    model = SmallFNO(
        eqx.nn.Linear(1, 4, key=keys[1]),
        mpx.FullPrecision(SpectralLayer(jax.lax.complex(real, imag))),
        eqx.nn.Linear(4, 1, key=keys[2]),
    )
    u, target = jax.random.normal(keys[3], (2, 5, 1, 16))

    def loss(model, u, target):
        error = (jax.vmap(model)(u) - target).astype(jnp.float32)
        return jnp.mean(error**2)

    def run(mixed):
        transformed = mpx.filter_value_and_grad(loss, scaler(2.0**8), use_mixed_precision=mixed)
        return eqx.filter_jit(transformed)(model, u, target)

    value, _, finite, grads = run(True)
    expected, _, _, expected_grads = run(False)
    assert finite
    np.testing.assert_allclose(value, expected, rtol=TOLERANCES["float16"])
    assert tree_allclose(grads, expected_grads, "float16")
    assert grads.spectral.module.weight.dtype == jnp.complex64


# --- Code written for MPX ------------------------------------------------------------------------

# Name → positional parameters of MPX 0.1.8, in order.
MPX_FUNCTIONS = {
    "all_finite": ("tree",),
    "calculate_scaled_grad": ("func", "scaling", "has_aux", "use_mixed_precision"),
    "cast_function": ("func", "dtype", "return_dtype"),
    "cast_to_bfloat16": ("x",),
    "cast_to_float16": ("x",),
    "cast_to_float32": ("x",),
    "cast_to_full_precision": ("x",),
    "cast_to_half_precision": ("x",),
    "cast_tree": ("tree", "dtype"),
    "DynamicLossScaling": ("loss_scaling", "min_loss_scaling", "factor", "period", "counter"),
    "filter_grad": ("func", "scaling", "has_aux", "use_mixed_precision"),
    "filter_value_and_grad": ("func", "scaling", "has_aux", "use_mixed_precision"),
    "force_full_precision": ("func", "return_dtype"),
    "half_precision_datatype": (),
    "optimizer_update": ("model", "optimizer", "optimizer_state", "grads", "grads_finite"),
    "scaled": ("func", "scaling", "has_aux"),
    "select_tree": ("pred", "a", "b"),
    "set_half_precision_datatype": ("datatype",),
}


@pytest.mark.parametrize("name", sorted(MPX_FUNCTIONS))
def test_functions_take_the_arguments_of_mpx(name):
    wanted = MPX_FUNCTIONS[name]
    parameters = inspect.signature(getattr(mpx, name)).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert tuple(p.name for p in positional[: len(wanted)]) == wanted
    # Whatever else there is has a default.
    others = [p for p in parameters if p.name not in wanted]
    assert all(p.default is not p.empty or p.kind is p.VAR_KEYWORD for p in others)


def test_constants_of_mpx():
    assert mpx.FLOAT16_MAX == 65504.0
    assert mpx.BFLOAT16_MAX == float(jnp.finfo(jnp.bfloat16).max)
    assert mpx.HALF_PRECISION_DATATYPE == jnp.float16
    assert mpx.half_precision_datatype() == jnp.float16


def test_a_scaler_has_the_fields_of_mpx():
    scaling = mpx.DynamicLossScaling(
        jnp.float32(2.0**7), jnp.float32(2.0), 4, 30, jnp.array(5, jnp.int32)
    )
    assert scaling.loss_scaling == 2.0**7
    assert scaling.loss_scaling.shape == ()
    assert scaling.min_loss_scaling == 2.0
    assert scaling.factor == 4
    assert scaling.period == 30
    assert scaling.counter == 5
    assert scaling.counter.dtype == jnp.int32


def test_a_scaler_adjusts_as_mpx_does():
    """Growth after `period` finite steps in a row, division on overflow, both within bounds."""
    scaling = scaler(2.0**13, minimum=2.0**11, period=3)
    finite = [True] * 2 + [False] + [True] * 9 + [False] * 6
    scale, counter, expected, got = 2.0**13, 0, [], []
    adjust = jax.jit(lambda scaling, finite: scaling.adjust(finite))
    for ok in finite:
        if not ok:
            scale = max(2.0**11, scale / 2)
        elif counter == 2:
            scale = scale * 2
        counter = (counter + 1) % 3 if ok else 0
        expected.append((scale, counter))
        scaling = adjust(scaling, jnp.array(ok))
        got.append((float(scaling.loss_scaling), int(scaling.counter)))
    assert got == expected
    assert {s for s, _ in got} == {2.0**k for k in range(11, 16)}


@pytest.mark.parametrize("mixed", [True, False])
def test_return_orders(mixed):
    scaling = scaler(2.0**2)

    def with_aux(w):
        return jnp.sum(w), {"double": 2 * w}

    w = jnp.ones(2)
    out = mpx.filter_grad(jnp.sum, scaling, False, mixed)(w)
    assert len(out) == 3
    new, finite, grads = out
    assert isinstance(new, mpx.DynamicLossScaling)
    assert finite.dtype == bool
    assert finite.shape == ()
    np.testing.assert_array_equal(grads, [1.0, 1.0])

    new, finite, grads, aux = mpx.filter_grad(with_aux, scaling, True, mixed)(w)
    assert isinstance(new, mpx.DynamicLossScaling)
    assert bool(finite)
    np.testing.assert_array_equal(grads, [1.0, 1.0])
    np.testing.assert_array_equal(aux["double"], [2.0, 2.0])

    value, new, finite, grads = mpx.filter_value_and_grad(jnp.sum, scaling, False, mixed)(w)
    assert value == 2.0
    assert isinstance(new, mpx.DynamicLossScaling)
    assert bool(finite)
    np.testing.assert_array_equal(grads, [1.0, 1.0])

    (value, aux), new, finite, grads = mpx.filter_value_and_grad(with_aux, scaling, True, mixed)(w)
    assert value == 2.0
    np.testing.assert_array_equal(aux["double"], [2.0, 2.0])
    assert isinstance(new, mpx.DynamicLossScaling)
    assert bool(finite)
    np.testing.assert_array_equal(grads, [1.0, 1.0])

    value, grads = mpx.calculate_scaled_grad(jnp.sum, scaling, False, mixed)(w)
    (aux_value, aux), aux_grads = mpx.calculate_scaled_grad(with_aux, scaling, True, mixed)(w)
    factor = 4.0 if mixed else 1.0
    assert float(value) == float(aux_value) == 2.0 * factor
    for g in (grads, aux_grads):
        assert g.dtype == (jnp.float16 if mixed else jnp.float32)
        np.testing.assert_array_equal(g.astype(jnp.float32), np.full(2, factor))
    assert set(aux) == {"double"}


def test_the_float32_run_of_an_mpx_script_has_no_scaler():
    """Scripts with a precision flag pass `scaling=None` with `use_mixed_precision=False`."""

    def loss(w):
        return jnp.sum(w * w)

    w = jnp.array([1.0, 3.0])
    value, scaling, finite, grads = mpx.filter_value_and_grad(
        loss, scaling=None, use_mixed_precision=False
    )(w)
    assert scaling is None
    assert bool(finite)
    assert tree_equal_bits((value, grads), eqx.filter_value_and_grad(loss)(w))


def test_the_parts_of_a_step_by_hand():
    """The helpers in the order that MPX's own `filter_grad` calls them."""
    model = {"w": jnp.array([1.0, 2.0]), "activation": jnp.tanh, "none": None}
    x = jnp.array([0.5, 0.25])
    scaling = scaler(2.0**6)

    def loss(model, x):
        return jnp.dot(model["w"], x)

    value, grads = mpx.calculate_scaled_grad(loss, scaling)(model, x)
    assert grads["w"].dtype == jnp.float16
    assert float(value) == 2.0**6
    finite = mpx.all_finite(grads)
    assert finite.shape == ()
    assert bool(finite)
    grads = scaling.unscale(mpx.cast_to_full_precision(grads))
    np.testing.assert_array_equal(grads["w"], x)
    assert not mpx.all_finite({"w": jnp.array([1.0, jnp.inf])})
    assert bool(mpx.all_finite({}))

    scaled = mpx.scaled(loss, scaling)
    assert scaled(model, x) == 2.0**6
    value, aux = mpx.scaled(lambda x: (jnp.sum(x), x), scaling, has_aux=True)(x)
    assert value == 0.75 * 2.0**6
    np.testing.assert_array_equal(aux, x)

    other = {"w": jnp.zeros(2), "activation": jnp.tanh, "none": None}
    assert tree_equal_bits(mpx.select_tree(finite, model, other), model)
    chosen = mpx.select_tree(jnp.array(False), model, other)
    assert tree_equal_bits(chosen, other)
    assert chosen["activation"] is jnp.tanh


class AttentionBlock(eqx.Module):
    """Multi-head attention as in MPX's README, line by line but for `einshape`."""

    dense_qs: eqx.nn.Linear
    dense_ks: eqx.nn.Linear
    dense_vs: eqx.nn.Linear
    dense_o: eqx.nn.Linear
    num_heads: int = eqx.field(static=True)
    layer_norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout

    def __init__(self, features, num_heads, key):
        keys = jax.random.split(key, 4)
        self.dense_qs, self.dense_ks, self.dense_vs, self.dense_o = (
            eqx.nn.Linear(features, features, key=k) for k in keys
        )
        self.num_heads = num_heads
        self.layer_norm = eqx.nn.LayerNorm(features)
        self.dropout = eqx.nn.Dropout(0.0)

    @staticmethod
    def attention(q, k, v, dropout, key, inference):
        attention_scores = q @ k.T
        attention_scores /= jnp.sqrt(q.shape[-1])
        attention_scores = mpx.force_full_precision(jax.nn.softmax, attention_scores.dtype)(
            attention_scores, axis=-1
        )
        attention_scores = dropout(attention_scores, inference=inference, key=key)
        return attention_scores @ v

    def __call__(self, inputs, inference, key):
        inputs_after_layernorm = jax.vmap(mpx.force_full_precision(self.layer_norm, inputs.dtype))(
            inputs
        )
        heads = [
            jax.vmap(dense)(inputs_after_layernorm)
            .reshape(len(inputs), self.num_heads, -1)
            .transpose(1, 0, 2)
            for dense in (self.dense_qs, self.dense_ks, self.dense_vs)
        ]
        keys = jax.random.split(key, self.num_heads)
        outputs = jax.vmap(self.attention, in_axes=(0, 0, 0, None, 0, None))(
            *heads, self.dropout, keys, inference
        )
        outputs = outputs.transpose(1, 0, 2).reshape(inputs.shape)
        outputs = jax.vmap(self.dense_o)(outputs)
        return outputs + inputs


@eqx.filter_jit
def batched_loss_acc_wrapper(
    model, batch, batch_sharding, replicated_sharding, key, weight_regularization=0.0
):
    """The loss of MPX's README."""
    batch = eqx.filter_shard(batch, batch_sharding)
    model = eqx.filter_shard(model, replicated_sharding)
    pred = jax.vmap(model, in_axes=(0, None, None))(batch["input"], False, key)
    losses = jnp.mean((pred - batch["target"]) ** 2, axis=(1, 2))
    acc = (losses < 1).astype(losses.dtype)
    loss = mpx.force_full_precision(jnp.mean, losses.dtype)(losses)
    acc = mpx.force_full_precision(jnp.mean, losses.dtype)(acc)

    params, _ = eqx.partition(model, eqx.is_array)
    params = jax.tree_util.tree_leaves(params)
    params = jax.tree_util.tree_map(lambda x: x.flatten(), params)
    params = jnp.concatenate(params).flatten()
    loss = loss + weight_regularization * mpx.force_full_precision(jnp.mean, jnp.float32)(
        jnp.abs(params)
    )
    return loss, acc


@eqx.filter_jit
def make_step(
    model,
    optimizer,
    optimizer_state,
    batch,
    batch_sharding,
    replicated_sharding,
    loss_scaling: mpx.DynamicLossScaling,
    train_mixed_precision,
    weight_regularization,
    key,
):
    """The training step of MPX's README."""
    batch = eqx.filter_shard(batch, batch_sharding)
    model = eqx.filter_shard(model, replicated_sharding)
    optimizer_state = eqx.filter_shard(optimizer_state, replicated_sharding)

    if train_mixed_precision:
        (loss_value, _), loss_scaling, grads_finite, grads = mpx.filter_value_and_grad(
            batched_loss_acc_wrapper, scaling=loss_scaling, has_aux=True
        )(model, batch, batch_sharding, replicated_sharding, key, weight_regularization)
        model, optimizer_state = mpx.optimizer_update(
            model, optimizer, optimizer_state, grads, grads_finite
        )
    else:
        (loss_value, _), grads = eqx.filter_value_and_grad(batched_loss_acc_wrapper, has_aux=True)(
            model, batch, batch_sharding, replicated_sharding, key, weight_regularization
        )
        updates, optimizer_state = optimizer.update(
            grads, optimizer_state, eqx.filter(model, eqx.is_array)
        )
        model = eqx.apply_updates(model, updates)

    model = eqx.filter_shard(model, replicated_sharding)
    optimizer_state = eqx.filter_shard(optimizer_state, replicated_sharding)
    loss_scaling = eqx.filter_shard(loss_scaling, replicated_sharding)
    return model, optimizer_state, loss_scaling, loss_value


def test_the_training_of_mpxs_readme(standard_promotion):
    mesh = mesh_of(4)
    batch_sharding = NamedSharding(mesh, PartitionSpec("batch"))
    replicated_sharding = NamedSharding(mesh, PartitionSpec())
    keys = jax.random.split(jax.random.PRNGKey(0), 4)
    batch = {
        "input": jax.random.normal(keys[0], (8, 5, 8)),
        "target": jax.random.normal(keys[1], (8, 5, 8)),
    }
    batch = jax.device_put(batch, batch_sharding)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.scale_by_adam(), optax.scale_by_learning_rate(1e-2)
    )

    def train(mixed):
        model = AttentionBlock(8, 2, keys[2])
        model = eqx.filter_shard(model, replicated_sharding)
        optimizer_state = optimizer.init(eqx.filter(model, eqx.is_array))
        loss_scaling = mpx.DynamicLossScaling(
            loss_scaling=mpx.FLOAT16_MAX,
            min_loss_scaling=jnp.ones((), dtype=jnp.float32),
            period=2000,
        )
        optimizer_state, loss_scaling = eqx.filter_shard(
            (optimizer_state, loss_scaling), replicated_sharding
        )
        losses = []
        for _ in range(8):
            model, optimizer_state, loss_scaling, loss_value = make_step(
                model=model,
                optimizer=optimizer,
                optimizer_state=optimizer_state,
                batch=batch,
                batch_sharding=batch_sharding,
                replicated_sharding=replicated_sharding,
                loss_scaling=loss_scaling,
                train_mixed_precision=mixed,
                weight_regularization=0.001,
                key=keys[3],
            )
            losses.append(float(loss_value))
        return losses, model

    mixed, model = train(True)
    full, _ = train(False)
    assert all(
        a.dtype == jnp.float32 for a in jax.tree_util.tree_leaves(eqx.filter(model, eqx.is_array))
    )
    assert np.all(np.diff(full) < 0)
    assert mixed[-1] < 0.9 * mixed[0]
    # Steps that are skipped while the scale comes down leave the loss where it was.
    moves = [a for a, b in itertools.pairwise(mixed) if a != b] + mixed[-1:]
    np.testing.assert_allclose(moves, full[: len(moves)], rtol=TOLERANCES["float16"])


def test_the_step_of_mpxs_paper(standard_promotion):
    """Example 2 of the paper, with a classification loss forced to full precision."""
    model = eqx.nn.MLP(2, 3, 8, 1, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (12, 2))
    labels = jnp.arange(12) % 3
    optimizer = optax.adamw(1e-2)
    optimizer_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    loss_scaling = mpx.DynamicLossScaling(
        loss_scaling=jnp.float32(2.0**10), min_loss_scaling=jnp.float32(1.0), period=2
    )

    @eqx.filter_jit
    def loss(model, x, labels):
        logits = jax.vmap(model)(x)
        return mpx.force_full_precision(jnp.mean)(
            mpx.force_full_precision(optax.softmax_cross_entropy_with_integer_labels)(
                logits=logits, labels=labels
            )
        )

    @eqx.filter_jit
    def step(model, optimizer_state, loss_scaling):
        loss_scaling, grads_finite, grads = mpx.filter_grad(loss, loss_scaling)(model, x, labels)
        model, optimizer_state = mpx.optimizer_update(
            model, optimizer, optimizer_state, grads, grads_finite
        )
        return model, optimizer_state, loss_scaling, grads_finite

    before = loss(model, x, labels)
    for _ in range(4):
        model, optimizer_state, loss_scaling, grads_finite = step(
            model, optimizer_state, loss_scaling
        )
        assert bool(grads_finite)
    assert loss(model, x, labels) < before
    # Two growths in four steps, each after two clean ones.
    assert loss_scaling.loss_scaling == 2.0**12


def test_casting_functions_of_mpx():
    tree = {"x": jnp.ones(2), "i": jnp.arange(2), "f": jnp.tanh, "s": "name", "p": 1.5, "n": None}
    for cast, dtype in [
        (mpx.cast_to_float16, jnp.float16),
        (mpx.cast_to_bfloat16, jnp.bfloat16),
        (mpx.cast_to_half_precision, jnp.float16),
        (lambda t: mpx.cast_tree(t, jnp.bfloat16), jnp.bfloat16),
        (lambda t: mpx.cast_tree(t, "float16"), jnp.float16),
    ]:
        out = cast(tree)
        assert out["x"].dtype == dtype
        assert out["i"].dtype == jnp.int32
        assert (out["f"], out["s"], out["p"], out["n"]) == (jnp.tanh, "name", 1.5, None)
        for back in (mpx.cast_to_float32, mpx.cast_to_full_precision):
            assert back(out)["x"].dtype == jnp.float32

    @mpx.force_full_precision
    def mean_square(x, *, shift):
        assert x.dtype == shift.dtype == jnp.float32
        return jnp.mean((x - shift) ** 2)

    # 300² is beyond float16, the mean of the square roots is not: float32 is what ran inside.
    x = jnp.full(4, 300.0, jnp.float16)
    out = mpx.force_full_precision(lambda x: jnp.sqrt(jnp.mean(x * x)))(x)
    assert out.dtype == jnp.float16
    assert out == 300.0
    out = mean_square(x, shift=jnp.full(4, 299.0, jnp.float16))
    assert out.dtype == jnp.float16
    assert out == 1.0


# --- What MPX's own tests ask for and is refused here: the table in docs/coming_from.md ----------


def test_an_infinite_scale_is_refused_and_none_takes_its_place():
    with pytest.raises(ValueError, match="`DynamicLossScaling` needs a positive, finite scalar"):
        mpx.DynamicLossScaling(jnp.array(jnp.inf))
    loss = lambda w: jnp.sum(w**2)
    for scaling in (None, mpx.DynamicLossScaling()):
        grad_fn = mpx.filter_grad(loss, scaling, use_mixed_precision=False)
        after, finite, grads = grad_fn(jnp.array([1.0, 2.0]))
        assert tree_equal_bits(after, scaling)
        assert finite
        assert tree_equal_bits(grads, jnp.array([2.0, 4.0]))


def test_a_scale_above_the_range_of_float16_is_kept():
    scaling = scaler(2.0**16, period=1).adjust(jnp.array(True))
    assert scaling.loss_scaling == 2.0**16
    assert scaling.adjust(jnp.array(False)).loss_scaling == 2.0**15
    with pytest.raises(ValueError, match="between `min_loss_scaling`"):
        scaler(2.0**16, max_loss_scaling=2.0**15)

"""Tests gradients in mixed precision under transformations: `jit`, `vmap`, meshes and export."""

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from gradients import TRANSFORMATIONS, batch, linear_loss, mse
from helpers import avals, over_devices, relative, scaler, training_step, tree_equal_bits
from jax import export, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import mpx_pde as mpx


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

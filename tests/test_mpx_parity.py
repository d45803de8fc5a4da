"""Tests that code for MPX runs after a change of import: its signatures, the order of its results,
and a training as in its README. Fixes of MPX 0.1.8's faults are tested with each behavior:
`test_grad*.py`, `test_optimizer.py`, `test_loss_scaling.py`, `test_cast.py`.
"""

import inspect
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import TOLERANCES, running
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import mpx_pde as mpx


def scaler(scale: float, minimum: float = 1.0, **kwargs):
    """Builds a scaler from float32 arrays, as MPX requires."""
    return running(mpx.DynamicLossScaling(jnp.float32(scale), jnp.float32(minimum), **kwargs))


# Name → positional parameters of MPX 0.1.8, in order.
MPX_FUNCTIONS = {
    "all_finite": ("tree",),
    "cast_function": ("func", "dtype", "return_dtype"),
    "cast_tree": ("tree", "dtype"),
    "DynamicLossScaling": ("loss_scaling", "min_loss_scaling", "factor", "period", "counter"),
    "force_full_precision": ("func", "return_dtype"),
    "half_precision_datatype": (),
    "optimizer_update": ("model", "optimizer", "optimizer_state", "grads", "grads_finite"),
    "scaled": ("func", "scaling", "has_aux"),
    "select_tree": ("pred", "a", "b"),
    "set_half_precision_datatype": ("datatype",),
}
for name in ("bfloat16", "float16", "float32", "full_precision", "half_precision"):
    MPX_FUNCTIONS[f"cast_to_{name}"] = ("x",)
for name in ("calculate_scaled_grad", "filter_grad", "filter_value_and_grad"):
    MPX_FUNCTIONS[name] = ("func", "scaling", "has_aux", "use_mixed_precision")


def test_functions_take_the_arguments_of_mpx():
    for name, wanted in MPX_FUNCTIONS.items():
        parameters = inspect.signature(getattr(mpx, name)).parameters.values()
        positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert tuple(p.name for p in positional[: len(wanted)]) == wanted
        # All other parameters have defaults.
        others = [p for p in parameters if p.name not in wanted]
        assert all(p.default is not p.empty or p.kind is p.VAR_KEYWORD for p in others)


@pytest.mark.parametrize("mixed", [True, False])
def test_return_orders(mixed):
    """The scale grows in these steps. MPX unscales their gradients with the grown scale."""
    scaling, factor = scaler(2.0**2, period=1), 4.0 if mixed else 1.0
    w, with_aux = jnp.ones(2), lambda w: (jnp.sum(w), {"double": 2 * w})
    for func, has_aux in ((jnp.sum, False), (with_aux, True)):
        options = func, scaling, has_aux, mixed
        *three, aux = [*mpx.filter_grad(*options)(w), *[{}] * (not has_aux)]
        value, *rest = mpx.filter_value_and_grad(*options)(w)
        raw, grads = mpx.calculate_scaled_grad(*options)(w)
        if has_aux:
            (value, same), (raw, raw_aux) = value, raw
            for out in (aux, same, raw_aux):
                np.testing.assert_array_equal(out["double"].astype(jnp.float32), [2.0, 2.0])
        for new, finite, of_full in (three, rest):
            assert new.loss_scaling == (8.0 if mixed else 4.0)
            assert (finite.dtype, finite.shape, bool(finite)) == (bool, (), True)
            np.testing.assert_array_equal(of_full, [1.0, 1.0])
        assert (value, float(raw)) == (2.0, 2.0 * factor)
        assert grads.dtype == (jnp.float16 if mixed else jnp.float32)
        np.testing.assert_array_equal(grads.astype(jnp.float32), np.full(2, factor))


class Block(eqx.Module):
    """A layer whose norm and softmax are forced to full precision, called as in MPX's README."""

    dense: eqx.nn.Linear
    layer_norm: eqx.nn.LayerNorm

    def __call__(self, inputs, inference, key):
        del inference, key
        normed = jax.vmap(mpx.force_full_precision(self.layer_norm, inputs.dtype))(inputs)
        scores = jax.vmap(self.dense)(normed)
        return inputs + mpx.force_full_precision(jax.nn.softmax, scores.dtype)(scores, axis=-1)


@eqx.filter_jit
def batched_loss_acc_wrapper(model, batch, batch_sharding, replicated_sharding, key, weight):
    """Evaluates the loss of MPX's README."""
    batch = eqx.filter_shard(batch, batch_sharding)
    model = eqx.filter_shard(model, replicated_sharding)
    pred = jax.vmap(model, in_axes=(0, None, None))(batch["input"], False, key)
    losses = jnp.mean((pred - batch["target"]) ** 2, axis=(1, 2))
    loss = mpx.force_full_precision(jnp.mean, losses.dtype)(losses)
    acc = mpx.force_full_precision(jnp.mean, losses.dtype)((losses < 1).astype(losses.dtype))
    params = jax.tree_util.tree_leaves(eqx.partition(model, eqx.is_array)[0])
    params = jnp.concatenate([x.flatten() for x in params])
    return loss + weight * mpx.force_full_precision(jnp.mean, jnp.float32)(jnp.abs(params)), acc


@eqx.filter_jit
def make_step(mixed, model, optimizer, optimizer_state, loss_scaling, *args):
    """Takes the training step of MPX's README."""
    options = {"scaling": loss_scaling, "has_aux": True, "use_mixed_precision": mixed}
    value_and_grad = mpx.filter_value_and_grad(batched_loss_acc_wrapper, **options)
    (loss_value, _), loss_scaling, finite, grads = value_and_grad(model, *args)
    model, optimizer_state = mpx.optimizer_update(model, optimizer, optimizer_state, grads, finite)
    return model, optimizer_state, loss_scaling, loss_value


@pytest.mark.slow
def test_the_training_of_mpxs_readme(standard_promotion):
    mesh = Mesh(np.array(jax.devices()[:4]), ("batch",))
    batch_sharding, replicated = (NamedSharding(mesh, P(*x)) for x in (["batch"], []))
    keys = jax.random.split(jax.random.PRNGKey(0), 4)
    draw = lambda key: jax.random.normal(key, (8, 5, 8))
    batch = jax.device_put({"input": draw(keys[0]), "target": draw(keys[1])}, batch_sharding)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))

    def train(mixed):
        model = Block(eqx.nn.Linear(8, 8, key=keys[2]), eqx.nn.LayerNorm(8))
        limits = {"loss_scaling": mpx.FLOAT16_MAX, "min_loss_scaling": jnp.ones((), jnp.float32)}
        scaling = mpx.DynamicLossScaling(**limits, period=2000)
        state = optimizer.init(eqx.filter(model, eqx.is_array))
        model, state, scaling = eqx.filter_shard((model, state, scaling), replicated)
        losses = []
        for _ in range(8):
            given = batch, batch_sharding, replicated, keys[3], 0.001
            carry = model, optimizer, state, scaling
            model, state, scaling, loss_value = make_step(mixed, *carry, *given)
            losses.append(float(loss_value))
        return losses, model

    mixed, model = train(True)
    full, _ = train(False)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
    assert np.all(np.diff(full) < 0)
    assert mixed[-1] < mixed[0]
    # Steps that are skipped while the scale falls leave the loss unchanged.
    moves = [a for a, b in itertools.pairwise(mixed) if a != b] + mixed[-1:]
    np.testing.assert_allclose(moves, full[: len(moves)], rtol=TOLERANCES["float16"])


# --- Deliberate differences from MPX's own tests: the table in docs/other_libraries.md ------------


def test_a_scale_above_the_range_of_float16_is_kept():
    scaling = scaler(2.0**16, period=1).adjust(jnp.array(True))
    assert scaling.loss_scaling == 2.0**16
    assert scaling.adjust(jnp.array(False)).loss_scaling == 2.0**15

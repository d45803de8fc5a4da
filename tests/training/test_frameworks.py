"""Tests models, optimizers and JAX settings that people use.

Every model goes through the same test, and every Optax optimizer through another. A finite step
equals plain Optax in float32. A skipped step changes no bit of model or state.
"""

import inspect
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from helpers import TOLERANCES, avals, plain_update, training_step, tree_allclose, tree_equal_bits

import mpx_pde as mpx


FACTOR = 2.0**10


def spoiled(grads: Any) -> Any:
    """Puts an infinity and a NaN into the first leaf of gradients, as after an overflow."""
    leaves, structure = jtu.tree_flatten(grads)
    flat = leaves[0].reshape(-1).at[0].set(jnp.inf).at[-1].set(jnp.nan)
    return jtu.tree_unflatten(structure, [flat.reshape(leaves[0].shape), *leaves[1:]])


def init(optimizer, model):
    return optimizer.init(eqx.filter(model, eqx.is_inexact_array))


# --- Models --------------------------------------------------------------------------------------


class Params(NamedTuple):
    weights: list
    bias: jax.Array


def tuple_model(key):
    params = Params([jax.random.normal(key, (2, 8)), jnp.full((8, 2), 0.25)], jnp.ones(2))
    return params, lambda p, x: jnp.tanh(x @ p.weights[0]) @ p.weights[1] + p.bias[None]


def linen_model(key):
    first, last = map(flax.linen.Dense, (8, 2))
    net = flax.linen.Sequential([first, jnp.tanh, flax.linen.LayerNorm(), last])
    return net.init(key, jnp.ones((1, 2))), lambda variables, x: net.apply(variables, x)


def nnx_module_model(key):
    first, last = (nnx.Linear(*sizes, rngs=nnx.Rngs(key)) for sizes in ((2, 8), (8, 2)))
    return nnx.Sequential(first, jnp.tanh, last), lambda model, x: model(x)


def shared_model(key):
    """An autoencoder whose decoder has the weights of its encoder."""
    into, out = eqx.nn.Linear(2, 8, key=key), eqx.nn.Linear(8, 2, key=key)
    model = eqx.nn.Shared((into, out), lambda m: m[1].weight, lambda m: m[0].weight.T)

    def apply(model, x):
        into, out = model()
        return jax.vmap(lambda x: out(jnp.tanh(into(x))))(x)

    return model, apply


MODELS = {
    "NamedTuple": tuple_model,
    "flax.linen": linen_model,
    "flax.nnx": nnx_module_model,
    "eqx.nn.Shared": shared_model,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(MODELS))
def test_models(kind, standard_promotion):
    model, apply = MODELS[kind](jax.random.key(0))
    x, target = jax.random.normal(jax.random.key(1), (2, 16, 2))

    def loss(model, x, target):
        out = apply(model, x)
        seen.append(out.dtype)
        return jnp.mean((out - target).astype(jnp.float32) ** 2)

    seen, optimizer = [], optax.adam(1e-2)
    state, step = init(optimizer, model), training_step(loss, optimizer)
    scaling = mpx.DynamicLossScaling(FACTOR)
    *new, scaling, value, finite, grads = step(model, state, scaling, x, target)
    assert set(seen) == {jnp.dtype("float16")}
    assert finite

    expected, expected_grads = eqx.filter_jit(eqx.filter_value_and_grad(loss))(model, x, target)
    np.testing.assert_allclose(value, expected, rtol=TOLERANCES["float16"])
    assert tree_allclose(grads, expected_grads, "float16")

    # Given the gradients, the update is that of plain Optax.
    plain = eqx.filter_jit(plain_update)(model, optimizer, state, grads)
    assert tree_allclose(new, list(plain))
    assert jtu.tree_structure(new[0]) == jtu.tree_structure(model)
    assert not tree_equal_bits(new[0], model)

    *skipped, scaling, _, finite, _ = step(*new, scaling, x.at[0, 0].set(jnp.inf), target)
    assert not finite
    assert tree_equal_bits(skipped, new)
    assert scaling.loss_scaling == FACTOR / 2


def normed(mode, wrap, *, key):
    norm = wrap(eqx.nn.BatchNorm(3, axis_name="batch", mode=mode, momentum=0.5))
    return eqx.nn.Sequential([eqx.nn.Linear(2, 3, key=key), norm, eqx.nn.Lambda(jnp.tanh)])


def norm_loss(model, state, x):
    # Statistics that pass through half precision would be returned as float32, too.
    assert all(s.dtype in (jnp.float32, jnp.int32, jnp.bool_) for s in jtu.tree_leaves(state))
    out, state = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")(x, state)
    return jnp.mean(out.astype(jnp.float32) ** 2), state


# Mode "ema" selects between the dtypes of its inputs and its state, which Equinox wants equal. The
# variance of mode "batch" is told, because larger inputs would overflow in it.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*divides by the root of:mpx_pde.PrecisionWarning")
@pytest.mark.parametrize(("mode", "wrap"), [("batch", lambda x: x), ("ema", mpx.FullPrecision)])
def test_batch_norm(mode, wrap, standard_promotion):
    """Running statistics stay float32 and roll back, although the layer runs in half precision.
    `FullPrecision` works around a layer with state."""
    model, state = eqx.nn.make_with_state(normed)(mode, wrap, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (16, 2))
    optimizer = optax.adam(1e-2)
    step, scaling = (
        training_step(norm_loss, optimizer, has_aux=True),
        mpx.DynamicLossScaling(FACTOR),
    )
    *trained, scaling, (_, new), finite, _ = step(model, init(optimizer, model), scaling, state, x)
    assert finite
    after = mpx.select_tree(finite, new, state)
    assert not tree_equal_bits(after, state)
    assert avals(after) == avals(state)

    assert tree_allclose(after, norm_loss(model, state, x)[1], "float16")

    *kept, _, (_, new), finite, _ = step(*trained, scaling, after, x.at[0, 0].set(jnp.inf))
    assert not finite
    assert tree_equal_bits((mpx.select_tree(finite, new, after), kept), (after, trained))


# --- Optimizers ----------------------------------------------------------------------------------


def drawn(seed, dtype=jnp.float32):
    """Returns random parameters, which also serve as gradients."""
    w, b = jax.random.split(jax.random.key(seed))
    tree = {"w": jax.random.normal(w, (4, 3)), "b": jax.random.normal(b, (3,))}
    return mpx.cast_tree(tree, dtype)


def quadratic(params):
    return sum(jnp.sum(p.astype(jnp.float32) ** 2) for p in jtu.tree_leaves(params))


# Arguments beside a learning rate that an optimizer needs to be made and to be called.
MADE_WITH = {"noisy_sgd": {"key": 0}, "schedule_free": {"base_optimizer": optax.sgd(0.01)}}
of_value = lambda params: {"value": quadratic(params)}
of_search = lambda params: {"grad": jax.grad(quadratic)(params), "value_fn": quadratic}
CALLED_WITH = {
    **dict.fromkeys(("momo", "momo_adam", "polyak_sgd", "plateau"), of_value),
    "sophia": lambda params: {"obj_fn": quadratic},
    "lbfgs": lambda params: of_value(params) | of_search(params),
}


# The first warns of its removal. The second takes one gradient for each example, which
# `filter_grad` does not return.
LEFT_OUT = {"optimistic_adam", "dpsgd"}


def optimizers_of_optax():
    """Lists Optax's public functions that make an optimizer from a learning rate."""
    for module, prefix in ((optax, ""), (optax.contrib, "contrib.")):
        for name, make in sorted(vars(module).items()):
            if name.startswith(("_", "scale_by_")) or not inspect.isfunction(make):
                continue
            arguments = inspect.signature(make).parameters
            takes_rate = "learning_rate" in arguments or "max_learning_rate" in arguments
            if takes_rate and name not in LEFT_OUT:
                yield prefix + name


OPTIMIZERS = list(optimizers_of_optax())
WRAPPED = {
    "clipped adamw with a schedule": optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.adamw(optax.cosine_decay_schedule(0.1, 10), weight_decay=0.1),
    ),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1)),
    "multi": optax.MultiSteps(optax.adam(0.1), 2),
    "hyperparameters": optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.1, 1e-3, 10)),
    "flattened": optax.flatten(optax.adam(0.1)),
    "plateau": optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau(patience=1)),
}


def make_optimizer(name):
    if name in WRAPPED:
        return WRAPPED[name], CALLED_WITH.get(name, lambda params: {})
    module, name = (optax.contrib, name[8:]) if name.startswith("contrib.") else (optax, name)
    make = getattr(module, name)
    rate = "max_learning_rate" if name == "polyak_sgd" else "learning_rate"
    options = {rate: 0.01}
    accepted = inspect.signature(make).parameters
    options |= {k: v for k, v in MADE_WITH.get(name, {}).items() if k in accepted}
    return make(**options), CALLED_WITH.get(name, lambda params: {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, "float32") for name in (*OPTIMIZERS, *WRAPPED)]
    + [(name, "bfloat16") for name in ("adafactor", "contrib.muon", "contrib.prodigy", "sm3")],
)
def test_optimizers(name, dtype, standard_promotion):
    optimizer, extra_args = make_optimizer(name)
    params, grads = drawn(0, dtype), drawn(1, dtype)
    state = init(optimizer, params)
    wide_params, wide_grads = mpx.cast_to_float32((params, grads))
    wide_state = init(optimizer, wide_params)

    @jax.jit
    def step(params, state, grads, finite):
        extra = extra_args(params)
        return mpx.optimizer_update(params, optimizer, state, grads, finite, **extra)

    @jax.jit
    def plain(params, state, grads):
        return plain_update(params, optimizer, state, grads, **extra_args(params))

    new = step(params, state, grads, jnp.array(True))
    assert avals(new) == avals((params, state))
    assert not tree_equal_bits(new, (params, state))
    expected = plain(wide_params, wide_state, wide_grads)
    if dtype == "float32":
        assert tree_allclose(new, expected)
    else:
        # The reference is Optax in float32, not in bfloat16 throughout.
        assert tree_allclose(mpx.cast_to_float32(new[0]), expected[0], dtype)

    for grads in (spoiled(drawn(2, dtype)), drawn(2, dtype)):
        # The flag decides, not the gradients: finite ones are skipped as well.
        with jax.debug_nans(True):  # no intermediate value is NaN
            kept = step(*new, grads, jnp.array(False))
        assert tree_equal_bits(kept, new)


def test_an_optimizer_without_extra_arguments_ignores_them():
    params, grads = drawn(0), drawn(1)
    optimizer = optax.GradientTransformation(*optax.sgd(0.1))
    state = init(optimizer, params)
    new, _ = mpx.optimizer_update(params, optimizer, state, grads, True, value=jnp.float32(1.0))
    assert tree_allclose(new, plain_update(params, optimizer, state, grads)[0])


# --- Precision settings --------------------------------------------------------------------------


def test_float64_losses_and_full_precision_parts():
    """Values kept full stay float64, and so does the loss computed from them."""
    with jax.enable_x64(True):
        w, x = jnp.array([1.0, 2.0]), jnp.array([1.0 + 2.0**-40, 1.0])
        loss, scaling = lambda w, x: jnp.sum(w * x), mpx.DynamicLossScaling(FACTOR)
        run = mpx.filter_value_and_grad(loss, scaling, keep_full=True)
        value, _, finite, grads = run(w, x)
        assert finite
        assert tree_equal_bits((value, grads), (jnp.float64(3.0 + 2.0**-40), x))

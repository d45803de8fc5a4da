"""Models, optimizers and JAX settings that people have.

Every model goes through the same test, and every Optax optimizer through another: a finite step
equals plain Optax in float32, a step that is skipped changes no bit of model or state.
"""

import functools
import inspect
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import jmp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from helpers import HALVES, TOLERANCES, tree_allclose, tree_equal_bits

import mpx_pde as mpx


FACTOR = 2.0**10


@pytest.fixture
def standard_promotion():
    """For foreign code that mixes dtypes itself."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def dtypes(tree: Any) -> list[tuple[str, str]]:
    """Path and type of every array leaf: what a skipped or finished step must keep."""
    leaves = jtu.tree_leaves_with_path(eqx.filter(tree, eqx.is_array))
    return [(jtu.keystr(path), f"{x.dtype}{list(x.shape)}") for path, x in leaves]


def spoiled(grads: Any) -> Any:
    """Gradients with an infinity and a NaN in the first inexact leaf, as after an overflow."""
    leaves, structure = jtu.tree_flatten(grads)
    first = next(i for i, g in enumerate(leaves) if eqx.is_inexact_array(g))
    flat = leaves[first].reshape(-1)
    flat = flat.at[0].set(jnp.inf).at[-1].set(jnp.nan)
    leaves[first] = flat.reshape(leaves[first].shape)
    return jtu.tree_unflatten(structure, leaves)


def plain_update(model, optimizer, state, grads, **extra_args):
    """The step without this library."""
    params = eqx.filter(model, eqx.is_inexact_array)
    # Optax mixes int32 counters with floats.
    with jax.numpy_dtype_promotion("standard"):
        updates, state = optimizer.update(grads, state, params, **extra_args)
        return eqx.apply_updates(model, updates), state


def init(optimizer, model, is_param=eqx.is_inexact_array):
    with jax.numpy_dtype_promotion("standard"):
        return optimizer.init(eqx.filter(model, is_param))


# --- Models --------------------------------------------------------------------------------------


class Everything(eqx.Module):
    """Leaves and fields of every kind that Equinox modules have."""

    mlp: eqx.nn.MLP
    nothing: None
    function: Any
    number: float
    count: int
    mask: jax.Array
    table: np.ndarray
    key: jax.Array
    name: str = eqx.field(static=True)
    nested: dict

    def __init__(self, *, key):
        self.mlp = eqx.nn.MLP(2, 2, 8, 1, activation=jax.nn.silu, key=key)
        self.nothing = None
        self.function = jnp.tanh
        self.number = 0.5
        self.count = 3
        self.mask = jnp.array([True, False])
        self.table = np.array([1.0, 2.0], np.float32)
        self.key = jax.random.key(3)
        self.name = "kept"
        self.nested = {"gain": jnp.array([1.5, 0.5]), "index": jnp.array([1, 0])}

    def __call__(self, x):
        assert self.name == "kept"
        assert self.nothing is None
        x = self.function(self.mlp(x)) * self.number + x * self.table
        x = jnp.where(self.mask, x, -x) * self.nested["gain"][self.nested["index"]]
        noise = jax.random.normal(self.key, x.shape, jnp.float32)
        return x * self.count + noise.astype(x.dtype)


class Tied(eqx.Module):
    """One weight in two places."""

    shared: eqx.nn.Shared

    def __init__(self, *, key):
        keys = jax.random.split(key)
        layers = (eqx.nn.Linear(2, 4, key=keys[0]), eqx.nn.Linear(4, 2, key=keys[1]))
        self.shared = eqx.nn.Shared(
            layers, where=lambda ls: ls[1].weight, get=lambda ls: jnp.transpose(ls[0].weight)
        )

    def __call__(self, x):
        encode, decode = self.shared()
        return decode(jnp.tanh(encode(x)))


class Params(NamedTuple):
    weights: list
    bias: jax.Array


def equinox_model(make):
    def build(key):
        model = make(key=key)
        return model, lambda model, x: jax.vmap(model)(x)

    return build


def dict_model(key):
    params = {"in": jax.random.normal(key, (2, 8)), "out": jnp.full((8, 2), 0.25), "none": None}
    return params, lambda p, x: jnp.tanh(x @ p["in"]) @ p["out"]


def tuple_model(key):
    params = Params([jax.random.normal(key, (2, 8)), jnp.full((8, 2), 0.25)], jnp.ones(2))
    return params, lambda p, x: jnp.tanh(x @ p.weights[0]) @ p.weights[1] + p.bias[None]


class LinenNet(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x):
        x = jnp.tanh(flax.linen.Dense(8)(x))
        return flax.linen.Dense(2)(flax.linen.LayerNorm()(x))


def linen_model(key):
    net = LinenNet()
    return net.init(key, jnp.ones((1, 2))), lambda variables, x: net.apply(variables, x)


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(2, 8, rngs=rngs)
        self.second = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


def nnx_state_model(key):
    del key
    graphdef, state = nnx.split(NnxNet(nnx.Rngs(0)))
    return state, lambda state, x: nnx.merge(graphdef, state)(x)


def nnx_module_model(key):
    del key
    return NnxNet(nnx.Rngs(0)), lambda model, x: model(x)


MODELS = {
    "eqx.nn.MLP": equinox_model(lambda key: eqx.nn.MLP(2, 2, 8, 2, key=key)),
    "eqx, every kind of leaf": equinox_model(lambda key: Everything(key=key)),
    "eqx.nn.Shared": equinox_model(lambda key: Tied(key=key)),
    "eqx, a float32 first layer": equinox_model(
        lambda key: eqx.nn.Sequential(
            [
                mpx.FullPrecision(eqx.nn.Linear(2, 8, key=key)),
                eqx.nn.Lambda(jnp.tanh),
                eqx.nn.Linear(8, 2, key=key),
            ]
        )
    ),
    "dict": dict_model,
    "NamedTuple, list": tuple_model,
    "flax.linen variables": linen_model,
    "flax.nnx state": nnx_state_model,
    "flax.nnx module": nnx_module_model,
}


# Flax's normalisation layers promote float16 with float32 by themselves.
PROMOTION = {"flax.linen variables": "standard"}


@pytest.fixture
def promotion(kind):
    with jax.numpy_dtype_promotion(PROMOTION.get(kind, "strict")):
        yield


@pytest.mark.parametrize(
    ("kind", "half"),
    [(kind, "float16") for kind in MODELS]
    + [(kind, "bfloat16") for kind in ("eqx, every kind of leaf", "dict", "flax.nnx state")],
)
def test_models(kind, half, promotion):
    model, apply = MODELS[kind](jax.random.key(0))
    x, target = jax.random.normal(jax.random.key(1), (2, 16, 2))

    def loss(model, x, target):
        out = apply(model, x)
        seen.append(out.dtype)
        return jnp.mean((out - target).astype(jnp.float32) ** 2)

    seen = []
    optimizer = optax.adam(1e-2)
    state = init(optimizer, model)

    @eqx.filter_jit
    def step(model, state, scaling, x):
        value, scaling, finite, grads = mpx.filter_value_and_grad(
            loss, scaling, policy=f"params=float32,compute={half},output=float32"
        )(model, x, target)
        model, state = mpx.optimizer_update(model, optimizer, state, grads, finite)
        return model, state, scaling, finite, value, grads

    scaling = mpx.DynamicLossScaling(FACTOR)
    new_model, new_state, new_scaling, finite, value, grads = step(model, state, scaling, x)
    assert set(seen) == {jnp.dtype(half)}
    assert bool(finite)

    expected, expected_grads = eqx.filter_jit(eqx.filter_value_and_grad(loss))(model, x, target)
    np.testing.assert_allclose(value, expected, rtol=TOLERANCES[half])
    assert jtu.tree_structure(grads) == jtu.tree_structure(expected_grads)
    assert tree_allclose(grads, expected_grads, half)

    # Given the gradients, the update is that of plain Optax.
    plain_model, plain_state = eqx.filter_jit(plain_update)(model, optimizer, state, grads)
    assert tree_allclose(new_model, plain_model)
    assert tree_allclose(new_state, plain_state)
    assert jtu.tree_structure(new_model) == jtu.tree_structure(model)
    assert not tree_equal_bits(new_model, model)

    *skipped, scaling, finite, _, _ = step(
        new_model, new_state, new_scaling, x.at[0, 0].set(jnp.inf)
    )
    assert not bool(finite)
    assert tree_equal_bits(skipped, [new_model, new_state])
    assert scaling.loss_scaling == FACTOR / 2


@pytest.mark.parametrize("kind", list(MODELS))
def test_models_in_full_precision(kind, promotion):
    """The float32 baseline is one flag away, and equals Equinox to the bit."""
    model, apply = MODELS[kind](jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (16, 2))

    def loss(model, x):
        return jnp.mean(apply(model, x) ** 2)

    scaling = mpx.DynamicLossScaling(FACTOR)
    value, same, finite, grads = eqx.filter_jit(
        mpx.filter_value_and_grad(loss, scaling, use_mixed_precision=False)
    )(model, x)
    assert bool(finite)
    assert tree_equal_bits(same, scaling)
    expected = eqx.filter_jit(eqx.filter_value_and_grad(loss))(model, x)
    assert tree_equal_bits((value, grads), expected)


class NormNet(eqx.Module):
    linear: eqx.nn.Linear
    norm: Any

    def __init__(self, mode, wrap, *, key):
        self.linear = eqx.nn.Linear(2, 3, key=key)
        self.norm = wrap(eqx.nn.BatchNorm(3, axis_name="batch", mode=mode, momentum=0.5))

    def __call__(self, x, state):
        x, state = self.norm(self.linear(x), state)
        return jnp.tanh(x), state


class Counter(eqx.Module):
    index: eqx.nn.StateIndex

    def __init__(self):
        self.index = eqx.nn.StateIndex(jnp.zeros(()))


def norm_loss(model, state, x):
    # Statistics that pass through half precision on the way would come back as float32 too.
    assert all(s.dtype in (jnp.float32, jnp.int32, jnp.bool_) for s in jtu.tree_leaves(state))
    out, state = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")(x, state)
    return jnp.mean(out.astype(jnp.float32) ** 2), state


def unwrapped(layer):
    return layer


def check_batch_norm(mode, wrap, jit):
    model, state = eqx.nn.make_with_state(NormNet)(mode, wrap, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (16, 2))
    optimizer = optax.adam(1e-2)
    opt_state = init(optimizer, model)

    def step(model, state, opt_state, scaling, x):
        scaling, finite, grads, new_state = mpx.filter_grad(norm_loss, scaling, has_aux=True)(
            model, state, x
        )
        model, opt_state = mpx.optimizer_update(model, optimizer, opt_state, grads, finite)
        return model, mpx.select_tree(finite, new_state, state), opt_state, scaling, finite

    step = eqx.filter_jit(step) if jit else step
    before = state
    scaling = mpx.DynamicLossScaling(FACTOR)
    model, state, opt_state, scaling, finite = step(model, state, opt_state, scaling, x)
    assert bool(finite)
    after = state
    assert not tree_equal_bits(after, before)
    assert dtypes(after) == dtypes(before)

    with jax.numpy_dtype_promotion("standard"):
        model32, state32 = eqx.nn.make_with_state(NormNet)(mode, wrap, key=jax.random.key(0))
        _, state32 = norm_loss(model32, state32, x)
    assert tree_allclose(state, state32, "float16")

    kept = (model, opt_state)
    model, state, opt_state, scaling, finite = step(
        model, state, opt_state, scaling, x.at[0, 0].set(jnp.inf)
    )
    assert not bool(finite)
    assert tree_equal_bits(state, after)
    assert tree_equal_bits((model, opt_state), kept)


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_batch_norm_state(jit, standard_promotion):
    """Running statistics stay float32 and roll back, though the layer runs in half precision."""
    # Mode "ema" selects between its inputs' dtype and its state's, which Equinox wants equal.
    check_batch_norm("batch", unwrapped, jit)


@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_batch_norm_in_full_precision(mode):
    """`FullPrecision` works around a layer with state, and under strict promotion."""
    check_batch_norm(mode, mpx.FullPrecision, jit=True)


def test_state_is_not_cast_in_any_position():
    """`eqx.nn.State` stays float32 as a positional argument, by keyword and nested in others."""
    _, state = eqx.nn.make_with_state(NormNet)("batch", unwrapped, key=jax.random.key(0))
    expected = dtypes(state)

    def loss(w, state, bundle, *, extra):
        for s in (state, bundle["state"], extra):
            assert dtypes(s) == expected
        assert bundle["x"].dtype == w.dtype == jnp.float16
        return jnp.sum(w), (state, {"again": extra, "w": w})

    _, _, _, (first, second) = mpx.filter_grad(loss, mpx.DynamicLossScaling(FACTOR), has_aux=True)(
        jnp.ones(2), state, {"state": state, "x": jnp.ones(2)}, extra=state
    )
    assert dtypes(first) == dtypes(second["again"]) == expected
    assert second["w"].dtype == jnp.float32


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_state_that_is_set_outside_of_vmap_rolls_back(jit):
    """Setting a state invalidates the one it came from; the caller's own must survive that."""
    index_holder, state = eqx.nn.make_with_state(Counter)()

    def loss(w, state, x):
        state = state.set(index_holder.index, state.get(index_holder.index) + 1)
        return jnp.sum(w * x), state

    def step(w, state, x):
        _, finite, _, new_state = mpx.filter_grad(
            loss, mpx.DynamicLossScaling(FACTOR), has_aux=True
        )(w, state, x)
        return finite, mpx.select_tree(finite, new_state, state)

    step = eqx.filter_jit(step) if jit else step
    finite, state = step(jnp.ones(1), state, jnp.ones(1))
    assert bool(finite)
    assert state.get(index_holder.index) == 1.0
    finite, state = step(jnp.ones(1), state, jnp.full(1, jnp.inf))
    assert not bool(finite)
    assert state.get(index_holder.index) == 1.0


def test_a_linen_model_with_running_statistics():
    """Mutable collections are plain dicts: `keep_full` keeps them in float32; roll back as any."""
    net = flax.linen.BatchNorm(use_running_average=False, momentum=0.5)
    x = jax.random.normal(jax.random.key(1), (16, 2))
    variables = net.init(jax.random.key(0), x)
    params, stats = variables["params"], variables["batch_stats"]

    def loss(params, stats, x):
        out, updated = net.apply(
            {"params": params, "batch_stats": stats}, x, mutable=["batch_stats"]
        )
        return jnp.mean(out.astype(jnp.float32) ** 4), updated["batch_stats"]

    @jax.jit
    def step(params, stats, x):
        with jax.numpy_dtype_promotion("standard"):
            _, finite, grads, new_stats = mpx.filter_grad(
                loss, mpx.DynamicLossScaling(FACTOR), has_aux=True, keep_full=(False, True, False)
            )(params, stats, x)
        return finite, grads, mpx.select_tree(finite, new_stats, stats)

    finite, grads, new_stats = step(params, stats, x)
    assert bool(finite)
    assert dtypes(grads) == dtypes(params)
    assert dtypes(new_stats) == dtypes(stats)
    assert not tree_equal_bits(new_stats, stats)
    finite, _, kept = step(params, new_stats, x.at[0, 0].set(jnp.inf))
    assert not bool(finite)
    assert tree_equal_bits(kept, new_stats)


def test_an_nnx_model_with_other_variables():
    """`nnx.split(model, nnx.Param, ...)`: parameters first, statistics and PRNG state beside."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(2, 4, rngs=rngs)
            self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.norm(self.linear(x)))

    graphdef, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)
    x = jax.random.normal(jax.random.key(1), (16, 2))
    optimizer = optax.adam(1e-2)
    state = init(optimizer, params)

    def loss(params, rest, x):
        # A copy, since variables may only change at the trace level that made them.
        model = nnx.merge(graphdef, params, rest, copy=True)
        assert {p.dtype for p in jtu.tree_leaves(params)} == {jnp.dtype("float16")}
        assert {v.dtype for v in jtu.tree_leaves(rest)} >= {jnp.dtype("float32")}
        out = model(x)
        return jnp.mean(out.astype(jnp.float32) ** 2), nnx.state(model, nnx.Not(nnx.Param))

    @jax.jit
    def step(params, rest, state, x):
        with jax.numpy_dtype_promotion("standard"):
            _, finite, grads, new_rest = mpx.filter_grad(
                loss, mpx.DynamicLossScaling(FACTOR), has_aux=True, keep_full=(False, True, False)
            )(params, rest, x)
        params, state = mpx.optimizer_update(params, optimizer, state, grads, finite)
        return params, mpx.select_tree(finite, new_rest, rest), state, finite

    new_params, new_rest, new_state, finite = step(params, rest, state, x)
    assert bool(finite)
    assert dtypes((new_params, new_rest, new_state)) == dtypes((params, rest, state))
    assert not tree_equal_bits(new_rest, rest)
    *kept, finite = step(new_params, new_rest, new_state, x.at[0, 0].set(jnp.inf))
    assert not bool(finite)
    assert tree_equal_bits(kept, [new_params, new_rest, new_state])


# --- Optimizers ----------------------------------------------------------------------------------


def parameters(dtype=jnp.float32):
    w, b = jax.random.normal(jax.random.key(0), (4, 3)), jnp.array([1.0, -0.5, 0.25])
    return {"w": w.astype(dtype), "b": b.astype(dtype)}


def gradients(seed, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(seed))
    return {
        "w": jax.random.normal(keys[0], (4, 3)).astype(dtype),
        "b": jax.random.normal(keys[1], (3,)).astype(dtype),
    }


def quadratic(params):
    return sum(jnp.sum(p.astype(jnp.float32) ** 2) for p in jtu.tree_leaves(params))


# What an optimizer needs beside a learning rate, to be made and to be called.
MADE_WITH = {
    "noisy_sgd": {"key": 0},
    "schedule_free": {"base_optimizer": optax.sgd(0.01)},
}
CALLED_WITH = {
    "momo": lambda params: {"value": quadratic(params)},
    "momo_adam": lambda params: {"value": quadratic(params)},
    "polyak_sgd": lambda params: {"value": quadratic(params)},
    "sophia": lambda params: {"obj_fn": quadratic},
    "lbfgs": lambda params: {
        "value": quadratic(params),
        "grad": jax.grad(quadratic)(params),
        "value_fn": quadratic,
    },
}


# The first warns that it is going; the second takes one gradient for each example, which is not
# what `filter_grad` returns.
LEFT_OUT = {"optimistic_adam", "dpsgd"}


def optimizers_of_optax():
    """Every function in Optax's public namespaces that makes an optimizer from a learning rate."""
    for module, prefix in ((optax, ""), (optax.contrib, "contrib.")):
        for name, make in sorted(vars(module).items()):
            if name.startswith(("_", "scale_by_")) or not inspect.isfunction(make):
                continue
            arguments = inspect.signature(make).parameters
            takes_rate = "learning_rate" in arguments or "max_learning_rate" in arguments
            if takes_rate and name not in LEFT_OUT:
                yield prefix + name


OPTIMIZERS = list(optimizers_of_optax())


def make_optimizer(name):
    module, name = (optax.contrib, name[8:]) if name.startswith("contrib.") else (optax, name)
    make = getattr(module, name)
    rate = "max_learning_rate" if name == "polyak_sgd" else "learning_rate"
    options = {rate: 0.01}
    accepted = inspect.signature(make).parameters
    options |= {k: v for k, v in MADE_WITH.get(name, {}).items() if k in accepted}
    return make(**options), CALLED_WITH.get(name, lambda params: {})


def test_the_list_of_optimizers_is_found():
    assert {"adam", "adamw", "sgd", "lion", "lamb", "lars", "adafactor", "rmsprop"} < {*OPTIMIZERS}
    assert {"novograd", "yogi", "radam", "sm3", "adabelief", "lbfgs"} < {*OPTIMIZERS}
    assert len(OPTIMIZERS) > 30


@functools.cache
def optimizer_and_plain_step(name):
    """Cached, since both dtypes compare with the same compiled float32 step."""
    optimizer, extra_args = make_optimizer(name)

    @jax.jit
    def plain(params, state, grads):
        return plain_update(params, optimizer, state, grads, **extra_args(params))

    return optimizer, extra_args, plain


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name, dtype, standard_promotion):
    if name == "lbfgs" and dtype == "bfloat16":
        pytest.skip("second-order optimizers run in float32")
    optimizer, extra_args, plain = optimizer_and_plain_step(name)
    params, grads = parameters(dtype), gradients(1, dtype)
    state = init(optimizer, params)

    @jax.jit
    def step(params, state, grads, finite):
        return mpx.optimizer_update(params, optimizer, state, grads, finite, **extra_args(params))

    new = step(params, state, grads, jnp.array(True))
    assert dtypes(new) == dtypes((params, state))
    assert not tree_equal_bits(new, (params, state))
    wide = mpx.cast_to_float32((params, grads))
    expected = plain(wide[0], init(optimizer, wide[0]), wide[1])
    if dtype == "float32":
        assert tree_allclose(new, expected)
    else:
        # Not what Optax makes of bfloat16 throughout: what it makes of the same in float32.
        assert tree_allclose(mpx.cast_to_float32(new[0]), expected[0], dtype)

    for grads in (spoiled(gradients(2, dtype)), gradients(2, dtype)):
        # The flag decides, not the gradients: finite ones are skipped as well.
        kept = step(*new, grads, jnp.array(False))
        assert tree_equal_bits(kept, new)


WRAPPED = {
    "chain, clip_by_global_norm": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-2)
    ),
    "adaptive_grad_clip": lambda: optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
    "add_noise": lambda: optax.chain(optax.add_noise(0.1, 0.55, 0), optax.sgd(0.1)),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-2), max_consecutive_errors=3),
    "schedule": lambda: optax.adam(optax.cosine_decay_schedule(1e-2, 10)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(
        learning_rate=optax.linear_schedule(1e-1, 1e-3, 10)
    ),
    "masked": lambda: optax.masked(optax.adam(1e-2), {"w": True, "b": False}),
    "multi_transform": lambda: optax.multi_transform(
        {"a": optax.adam(1e-2), "b": optax.sgd(1e-1)}, {"w": "a", "b": "b"}
    ),
    "ema and trace": lambda: optax.chain(optax.trace(0.9), optax.ema(0.99), optax.scale(-0.1)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2),
    "MultiSteps as a transformation": lambda: optax.MultiSteps(
        optax.adam(1e-2), every_k_schedule=2
    ).gradient_transformation(),
    "flatten": lambda: optax.flatten(optax.adam(1e-2)),
    "reduce_on_plateau": lambda: optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, accumulation_size=1)
    ),
}


@pytest.mark.parametrize("kind", list(WRAPPED))
def test_wrappers_skip_as_if_the_step_had_not_been(kind):
    """Finite, skipped, finite, finite: in the end as without the skipped one, to the bit."""
    optimizer = WRAPPED[kind]()
    params = parameters()
    state = init(optimizer, params)
    plateau = kind == "reduce_on_plateau"

    @jax.jit
    def step(params, state, grads, finite, value):
        extra_args = {"value": value} if plateau else {}
        return mpx.optimizer_update(params, optimizer, state, grads, finite, **extra_args)

    @jax.jit
    def plain(params, state, grads, value):
        extra_args = {"value": value} if plateau else {}
        return plain_update(params, optimizer, state, grads, **extra_args)

    def run(flags):
        out, seed = (params, state), 0
        for finite in flags:
            seed += finite
            grads = gradients(seed) if finite else spoiled(gradients(99))
            value = jnp.float32(1.0 if finite else np.nan)
            out = step(*out, grads, jnp.array(finite), value)
            assert dtypes(out) == dtypes((params, state))
        return out

    skipping = run([True, False, True, False, False, True])
    straight = run([True, True, True])
    assert tree_equal_bits(skipping, straight)

    expected = (params, state)
    for seed in (1, 2, 3):
        expected = plain(*expected, gradients(seed), jnp.float32(1.0))
    assert tree_allclose(straight, expected)
    assert not tree_equal_bits(straight, (params, state))


@pytest.mark.parametrize(
    "kind", ["chain, clip_by_global_norm", "apply_if_finite", "MultiSteps as a transformation"]
)
def test_wrappers_with_bfloat16_parameters(kind):
    """These branch on the device, where both branches must agree in dtype."""
    optimizer = WRAPPED[kind]()
    params = parameters(jnp.bfloat16)
    state = init(optimizer, params)
    step = jax.jit(lambda p, s, g, finite: mpx.optimizer_update(p, optimizer, s, g, finite))
    new = step(params, state, gradients(1, jnp.bfloat16), jnp.array(True))
    assert dtypes(new) == dtypes((params, state))
    assert not tree_equal_bits(new, (params, state))
    kept = step(*new, spoiled(gradients(2, jnp.bfloat16)), jnp.array(False))
    assert tree_equal_bits(kept, new)


def test_a_schedule_does_not_advance_on_skipped_steps():
    schedule = optax.linear_schedule(1.0, 0.0, 4)
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=schedule)
    params = {"w": jnp.zeros(1)}
    state = init(optimizer, params)
    moves = []
    for finite in (True, False, False, True, False, True):
        grads = {"w": jnp.array([1.0 if finite else jnp.nan])}
        new, state = mpx.optimizer_update(params, optimizer, state, grads, jnp.array(finite))
        moves.append(float((params["w"] - new["w"])[0]))
        params = new
    # Quarters, and their sums, are exact.
    assert moves == [1.0, 0.0, 0.0, 0.75, 0.0, 0.5]


def test_clipping_sees_unscaled_float32_gradients():
    """A norm of 500 would be infinite in float16, and one of 0.5 would be clipped if scaled."""
    seen = []

    def update(updates, state, params=None):
        seen.append([(g.dtype, float(jnp.max(jnp.abs(g)))) for g in jtu.tree_leaves(updates)])
        return updates, state

    spy = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    optimizer = optax.chain(spy, optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    params = {"w": jnp.zeros(2)}
    state = init(optimizer, params)
    scaling = mpx.DynamicLossScaling(2.0**6)

    def move(direction):
        _, finite, grads = mpx.filter_grad(lambda p, x: jnp.sum(p["w"] * x), scaling)(
            params, direction
        )
        assert bool(finite)
        new, _ = mpx.optimizer_update(params, optimizer, state, grads, finite)
        return new["w"]

    # 300² + 400² is beyond float16.
    np.testing.assert_allclose(move(jnp.array([300.0, 400.0])), [-0.6, -0.8], rtol=1e-6)
    # Below the threshold nothing is clipped: powers of two pass exactly.
    np.testing.assert_array_equal(move(jnp.array([0.25, -0.5])), [-0.25, 0.5])
    assert all(dtype == jnp.float32 for call in seen for dtype, _ in call)
    assert (jnp.float32, 400.0) in [leaf for call in seen for leaf in call]
    assert (jnp.float32, 0.5) in [leaf for call in seen for leaf in call]


def test_reduce_on_plateau_in_a_training_loop():
    """The loss goes in as `value`; a skipped step's infinite loss is not counted."""
    optimizer = optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=2))
    params = {"w": jnp.ones(3)}
    state = init(optimizer, params)
    scaling = mpx.DynamicLossScaling(FACTOR)

    @eqx.filter_jit
    def step(params, state, scaling, x):
        value, scaling, finite, grads = mpx.filter_value_and_grad(
            lambda p, x: jnp.mean((p["w"] * x) ** 2), scaling
        )(params, x)
        params, state = mpx.optimizer_update(params, optimizer, state, grads, finite, value=value)
        return params, state, scaling, value, finite

    x = jnp.array([1.0, 2.0, 3.0])
    params, state, scaling, first, finite = step(params, state, scaling, x)
    assert bool(finite)
    assert state[-1].best_value == first
    kept = (params, state)
    params, state, scaling, value, finite = step(params, state, scaling, x.at[0].set(1e6))
    assert not bool(finite)
    assert not jnp.isfinite(value)
    assert tree_equal_bits((params, state), kept)


def test_an_optimizer_without_extra_arguments_ignores_them():
    params, optimizer = parameters(), optax.GradientTransformation(*optax.sgd(0.1))
    state = init(optimizer, params)
    new, _ = mpx.optimizer_update(
        params, optimizer, state, gradients(1), jnp.array(True), value=jnp.float32(1.0)
    )
    assert tree_allclose(new, plain_update(params, optimizer, state, gradients(1))[0])


def test_lbfgs_in_a_training_loop():
    """`value`, `grad` and `value_fn` reach the line search; a skipped step keeps its memory."""
    target = {"w": jnp.array([1.0, -2.0, 3.0])}

    def loss(params):
        # Rosenbrock-like: a line search has work to do.
        d = params["w"] - target["w"]
        return jnp.sum(d * d) + jnp.sum((d[1:] - d[:-1] ** 2) ** 2)

    optimizer = optax.lbfgs()
    params = {"w": jnp.zeros(3)}
    state = init(optimizer, params)
    start = float(loss(params))

    @jax.jit
    def step(params, state, spoil):
        value, _, finite, grads = mpx.filter_value_and_grad(
            loss, mpx.NoOpLossScaling(), use_mixed_precision=False
        )(params)
        grads = jtu.tree_map(lambda g: jnp.where(spoil, jnp.nan, g), grads)
        return mpx.optimizer_update(
            params,
            optimizer,
            state,
            grads,
            finite & ~spoil,
            value=value,
            grad=grads,
            value_fn=loss,
        )

    for i in range(12):
        if i == 5:
            kept = step(params, state, jnp.array(True))
            assert tree_equal_bits(kept, (params, state))
        params, state = step(params, state, jnp.array(False))
    assert float(loss(params)) < 1e-6 * start


# --- Policies ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [
        "params=float32,compute=bfloat16,output=float32",
        "p=f32,c=bf16,o=f32",
        jmp.get_policy("params=float32,compute=bfloat16,output=float32"),
        jmp.Policy(jnp.float32, jnp.bfloat16, jnp.float32),
    ],
    ids=["string", "short string", "parsed", "Policy"],
)
@pytest.mark.parametrize("transform", [mpx.filter_grad, mpx.filter_value_and_grad])
def test_policies(policy, transform):
    def loss(w, x):
        seen.append((w.dtype, x.dtype, mpx.half_precision_datatype()))
        return jnp.sum(w * x), {"x": x, "n": jnp.int32(1)}

    seen = []
    out = transform(loss, mpx.DynamicLossScaling(FACTOR), has_aux=True, policy=policy)(
        jnp.ones(2), jnp.array([0.5, 2.0])
    )
    bf16 = jnp.dtype("bfloat16")
    assert set(seen) == {(bf16, bf16, bf16)}
    # Outside, the setting is as before.
    assert mpx.half_precision_datatype() == jnp.float16
    grads, aux = (out[2], out[3]) if transform is mpx.filter_grad else (out[3], out[0][1])
    assert grads.dtype == jnp.float32
    np.testing.assert_array_equal(grads, [0.5, 2.0])
    assert aux["x"].dtype == jnp.float32
    assert aux["n"].dtype == jnp.int32


def test_policy_output_is_the_dtype_of_aux():
    policy = "params=float32,compute=float16,output=bfloat16"
    _, _, grads, aux = mpx.filter_grad(
        lambda w: (jnp.sum(w), {"w": w, "i": jnp.arange(2)}),
        mpx.DynamicLossScaling(FACTOR),
        has_aux=True,
        policy=policy,
    )(jnp.ones(2))
    assert grads.dtype == jnp.float32
    assert aux["w"].dtype == jnp.bfloat16
    assert aux["i"].dtype == jnp.int32


def test_a_policy_of_full_precision_computes_in_it():
    seen = []

    def loss(w):
        seen.append(w.dtype)
        return jnp.sum(w * w)

    w = jnp.array([1.0001, 2.0])
    value, _, finite, grads = mpx.filter_value_and_grad(
        loss, mpx.DynamicLossScaling(FACTOR), policy=jmp.get_policy("float32")
    )(w)
    assert set(seen) == {jnp.dtype("float32")}
    assert bool(finite)
    # Scaling by a power of two changes no bit.
    assert tree_equal_bits((value, grads), eqx.filter_value_and_grad(loss)(w))


# --- PRNG keys, donation, debugging, precision settings ------------------------------------------


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey], ids=["key", "PRNGKey"])
def test_prng_keys(make_key):
    """In the model, as arguments and in aux; drawing from them gives what it gives outside."""
    model = {"w": jnp.ones(4), "key": make_key(1)}

    def loss(model, key, x, *, more):
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        new_key, _ = jax.random.split(more)
        noise = jax.random.normal(model["key"], x.shape, x.dtype)
        return jnp.sum(model["w"] * jnp.where(keep, x, 0) + noise), {"key": new_key, "keep": keep}

    def run(transform):
        args = (model, make_key(2), jnp.arange(4.0))
        return eqx.filter_jit(transform)(*args, more=make_key(3))

    scaling = mpx.DynamicLossScaling(FACTOR)
    _, finite, grads, aux = run(mpx.filter_grad(loss, scaling, has_aux=True))
    assert bool(finite)
    assert tree_equal_bits((grads, aux), run(eqx.filter_grad(loss, has_aux=True)))
    assert grads["key"] is None

    optimizer = optax.adam(1e-2)
    state = init(optimizer, model)
    new_model, new_state = mpx.optimizer_update(model, optimizer, state, grads, jnp.array(True))
    assert tree_equal_bits(new_model["key"], model["key"])
    kept = mpx.optimizer_update(new_model, optimizer, new_state, spoiled(grads), jnp.array(False))
    assert tree_equal_bits(kept, (new_model, new_state))
    chosen = mpx.select_tree(jnp.array(False), model, {"w": jnp.zeros(4), "key": make_key(9)})
    assert tree_equal_bits(chosen["key"], make_key(9))


def training_step(optimizer):
    def step(model, state, scaling, x):
        value, scaling, finite, grads = mpx.filter_value_and_grad(
            lambda model, x: jnp.mean(jax.vmap(model)(x).astype(jnp.float32) ** 2), scaling
        )(model, x)
        model, state = mpx.optimizer_update(model, optimizer, state, grads, finite)
        return model, state, scaling, x, finite, value

    return step


def test_donation():
    """`donate="all"`, through finite and skipped steps: the bits are those without donation."""
    optimizer = optax.adam(1e-2)
    x = jax.random.normal(jax.random.key(1), (4, 2))
    xs = [x, x.at[0, 0].set(jnp.inf), x, x.at[1, 1].set(1e9), x, x]

    def run(**options):
        model = eqx.nn.MLP(2, 1, 8, 1, key=jax.random.key(0))
        state = init(optimizer, model)
        scaling = mpx.DynamicLossScaling(FACTOR, period=2)
        step = eqx.filter_jit(training_step(optimizer), **options)
        finites, first = [], eqx.filter(model, eqx.is_array)
        for x in xs:
            x = jnp.array(x, copy=True)
            model, state, scaling, _, finite, _ = step(model, state, scaling, x)
            finites.append(bool(finite))
        return (model, state, scaling), finites, first

    plain, finites, _ = run()
    donated, also_finites, first = run(donate="all")
    assert finites == also_finites == [True, False, True, False, True, True]
    assert tree_equal_bits(donated, plain)
    # The buffers did go.
    assert all(leaf.is_deleted() for leaf in jtu.tree_leaves(first))


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_debug_nans(jit):
    """The step that overflows is skipped without a NaN on the way, to the end of the update."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    model = {"w": jnp.array([1.0, 2.0]), "b": jnp.ones(1)}
    state = init(optimizer, model)
    scaling = mpx.DynamicLossScaling(2.0**15)

    def step(model, state, scaling, x):
        value, scaling, finite, grads = mpx.filter_value_and_grad(
            lambda model, x: jnp.sum(model["w"] * x) + jnp.sum(model["b"]), scaling
        )(model, x)
        model, state = mpx.optimizer_update(model, optimizer, state, grads, finite)
        return model, state, scaling, finite, value

    step = jax.jit(step) if jit else step
    with jax.debug_nans(True):
        *new, finite, value = step(model, state, scaling, jnp.array([0.25, 0.5]))
        assert bool(finite)
        assert not tree_equal_bits(new[0], model)
        # 64 · 2^15 is beyond float16, the loss is not.
        model, state, scaling, finite, value = step(*new, jnp.array([64.0, 0.5]))
    assert not bool(finite)
    assert jnp.isfinite(value)
    assert tree_equal_bits([model, state], new[:2])
    assert scaling.loss_scaling == 2.0**14


@pytest.mark.parametrize("name", ["lamb", "adafactor", "contrib.prodigy"])
def test_debug_nans_eagerly_for_other_optimizers(name):
    optimizer, _ = make_optimizer(name)
    params = parameters()
    state = init(optimizer, params)
    bad = spoiled(gradients(1))
    with jax.debug_nans(True):
        kept = mpx.optimizer_update(params, optimizer, state, bad, jnp.array(False))
    assert tree_equal_bits(kept, (params, state))


def test_float64_masters():
    """Masters, gradients and optimizer state are float64; the computation is half."""
    with jax.enable_x64(True):
        model = eqx.nn.MLP(2, 1, 8, 1, key=jax.random.key(0), dtype=jnp.float64)
        x = jax.random.normal(jax.random.key(1), (16, 2), jnp.float64)
        optimizer = optax.adam(1e-2)
        state = init(optimizer, model)
        scaling = mpx.DynamicLossScaling(FACTOR, period=1)
        seen = []

        def loss(model, x):
            seen.append((model.layers[0].weight.dtype, x.dtype))
            return jnp.mean(jax.vmap(model)(x).astype(jnp.float32) ** 2)

        @eqx.filter_jit
        def step(model, state, scaling, x):
            value, scaling, finite, grads = mpx.filter_value_and_grad(loss, scaling)(model, x)
            model, state = mpx.optimizer_update(model, optimizer, state, grads, finite)
            return model, state, scaling, finite, value, grads

        new_model, new_state, new_scaling, finite, value, grads = step(model, state, scaling, x)
        assert set(seen) == {(jnp.dtype("float16"), jnp.dtype("float16"))}
        assert bool(finite)
        assert value.dtype == jnp.float32
        assert dtypes((new_model, new_state, new_scaling)) == dtypes((model, state, scaling))
        expected = eqx.filter_jit(eqx.filter_grad(loss))(model, x)
        assert tree_allclose(grads, expected, "float16")
        assert {g.dtype for g in jtu.tree_leaves(grads)} == {jnp.dtype("float64")}

        plain_model, _ = eqx.filter_jit(plain_update)(model, optimizer, state, grads)
        # float64 from the gradients on: far closer than float32 could be.
        assert tree_allclose(new_model, plain_model)

        *kept, _, finite, _, _ = step(new_model, new_state, new_scaling, x.at[0, 0].set(jnp.inf))
        assert not bool(finite)
        assert tree_equal_bits(kept, [new_model, new_state])


def test_float64_losses_and_full_precision_parts():
    """What is kept full stays float64, and so does the loss that it makes."""
    with jax.enable_x64(True):
        w, x = jnp.array([1.0, 2.0]), jnp.array([1.0 + 2.0**-40, 1.0])
        value, _, finite, grads = mpx.filter_value_and_grad(
            lambda w, x: jnp.sum(w * x), mpx.DynamicLossScaling(FACTOR), keep_full=True
        )(w, x)
        assert bool(finite)
        assert value.dtype == grads.dtype == jnp.float64
        np.testing.assert_array_equal(grads, x)
        assert value == 3.0 + 2.0**-40


def test_one_step_traces_once_under_x64():
    """Counters stay int32 and the scale float32, so nothing is traced a second time."""
    with jax.enable_x64(True):
        traces = []

        @eqx.filter_jit
        def step(w, scaling, x):
            traces.append(None)
            scaling, finite, grads = mpx.filter_grad(lambda w, x: jnp.sum(w * x), scaling)(w, x)
            return w - jnp.where(finite, grads, 0), scaling

        w, scaling = jnp.ones(2), mpx.DynamicLossScaling(FACTOR, period=2)
        for i in range(7):
            w, scaling = step(w, scaling, jnp.full(2, np.inf if i == 3 else 0.5))
        assert len(traces) == 1
        assert scaling.skipped_steps == 1


def test_strict_promotion_is_on():
    """Silent upcasts would pass this file if it were not."""
    with pytest.raises(Exception, match="no available implicit dtype promotion path"):
        _ = jnp.ones(2, jnp.float16) + jnp.ones(2, jnp.float32)


def test_a_step_is_the_same_under_either_promotion():
    """Nothing is left to promotion: strict and standard give the same dtypes and the same bits."""
    model = eqx.nn.MLP(2, 1, 8, 1, key=jax.random.key(0))
    optimizer = optax.adamw(optax.cosine_decay_schedule(1e-2, 10))
    state = init(optimizer, model)
    scaling = mpx.DynamicLossScaling(FACTOR, period=1)
    x = jax.random.normal(jax.random.key(1), (4, 2))

    def run(promotion):
        with jax.numpy_dtype_promotion(promotion):
            return eqx.filter_jit(training_step(optimizer))(model, state, scaling, x)

    strict, standard = run("strict"), run("standard")
    assert tree_equal_bits(strict, standard)
    expected = (model, state, scaling, x, jnp.array(True), jnp.float32(0))
    assert dtypes(strict) == dtypes(expected)


def test_bfloat16_parameters():
    """Parameters stored in bfloat16 train in float16 or bfloat16, and stay bfloat16."""
    model = mpx.cast_to_bfloat16(eqx.nn.MLP(2, 1, 8, 1, key=jax.random.key(0)))
    x = jax.random.normal(jax.random.key(1), (16, 2))
    optimizer = optax.adam(1e-2)
    state = init(optimizer, model)
    step = eqx.filter_jit(training_step(optimizer))
    for half in HALVES:
        with mpx.half_precision(half):
            scaling = mpx.DynamicLossScaling(FACTOR)
            *new, scaling, _, finite, _ = step(model, state, scaling, x)
            assert bool(finite)
            assert dtypes(new) == dtypes([model, state])
            assert not tree_equal_bits(new[0], model)
            *kept, _, _, finite, _ = step(*new, scaling, x.at[0, 0].set(jnp.inf))
            assert not bool(finite)
            assert tree_equal_bits(kept, new)


INTEGERS = {
    "is_inexact_array": eqx.is_inexact_array,
    "is_array": eqx.is_array,
}


@pytest.mark.parametrize("is_param", list(INTEGERS))
@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb", "adafactor", "sm3"])
def test_integer_arrays(name, is_param):
    """Integer, bool and key leaves stay as they are, however the optimizer state was made."""
    model = parameters() | {
        "grid": jnp.arange(5),
        "mask": jnp.array([True, False]),
        "step": jnp.array([3], jnp.uint8),
    }
    grads = gradients(1) | {"grid": None, "mask": None, "step": None}
    optimizer, _ = make_optimizer(name)
    state = init(optimizer, model, INTEGERS[is_param])
    step = jax.jit(lambda m, s, g, f: mpx.optimizer_update(m, optimizer, s, g, f))

    new_model, new_state = step(model, state, grads, jnp.array(True))
    assert dtypes((new_model, new_state)) == dtypes((model, state))
    assert jtu.tree_structure(new_state) == jtu.tree_structure(state)
    for key in ("grid", "mask", "step"):
        assert tree_equal_bits(new_model[key], model[key])
    floats = parameters()
    plain_model, _ = plain_update(floats, optimizer, init(optimizer, floats), gradients(1))
    assert tree_allclose({k: new_model[k] for k in floats}, plain_model)

    kept = step(new_model, new_state, spoiled(grads), jnp.array(False))
    assert tree_equal_bits(kept, (new_model, new_state))


def test_integer_arrays_through_a_whole_step():
    """From `filter_grad`, whose gradients have `None` for them."""

    class Grid(eqx.Module):
        linear: eqx.nn.Linear
        index: jax.Array

        def __call__(self, x):
            return self.linear(x[self.index])

    model = Grid(eqx.nn.Linear(2, 1, key=jax.random.key(0)), jnp.array([1, 0]))
    optimizer = optax.adam(1e-2)
    x = jax.random.normal(jax.random.key(1), (4, 2))
    for is_param in INTEGERS.values():
        state = init(optimizer, model, is_param)
        out = eqx.filter_jit(training_step(optimizer))(
            model, state, mpx.DynamicLossScaling(FACTOR), x
        )
        assert bool(out[4])
        assert dtypes(out[:2]) == dtypes((model, state))
        assert tree_equal_bits(out[0].index, model.index)
        assert not tree_equal_bits(out[0].linear, model.linear)

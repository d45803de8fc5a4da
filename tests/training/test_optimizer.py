"""Tests that an optimizer step is the same as Optax's, or does not happen at all."""

import contextlib
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import optax.contrib
import pytest
from helpers import HALVES, avals, plain_update, tree_allclose, tree_equal_bits

import mpx_pde as mpx


def make_grads(model, value=0.25):
    params = eqx.filter(model, eqx.is_inexact_array)
    return jtu.tree_map(lambda x: jnp.full_like(x, value), params)


def test_it_is_the_flag_that_decides():
    model, optimizer = {"w": jnp.ones(2), "key": jax.random.key(0)}, optax.sgd(1.0)
    grads = {"w": jnp.ones(2), "key": None}
    state = optimizer.init(grads)
    for flag in (False, np.False_, jnp.array(False), True, np.True_, jnp.array(True)):
        after = mpx.optimizer_update(model, optimizer, state, grads, flag)
        assert tree_equal_bits(after, ({**model, "w": 0 * model["w"]} if flag else model, state))


@pytest.mark.parametrize("dtype", HALVES)
def test_half_parameters_are_updated_in_float32_and_stay_half(dtype):
    """The square of 300 is infinite in float16, but its root is not."""
    model = {"w": jnp.zeros(4, dtype)}
    grads = {"w": jnp.full(4, 300.0, dtype)}
    clipped = optax.chain(optax.clip_by_global_norm(2.0), optax.sgd(1.0))
    for optimizer, want in ((clipped, -1.0), (optax.adam(1e-2), -1e-2)):
        state = optimizer.init(model)
        after, new_state = mpx.optimizer_update(model, optimizer, state, grads, jnp.array(True))
        assert tree_allclose(after, {"w": jnp.full(4, want, dtype)})
        assert avals(new_state) == avals(state)


quadratic = lambda params: jnp.sum((params["w"] - 1.0) ** 2) + 1.0


@pytest.mark.slow
@pytest.mark.parametrize("function", [lambda f: f, jtu.Partial])
def test_a_line_search_does_not_run_on_a_skipped_step(function):
    """A line search evaluates the loss, which may be the value that overflows."""
    evaluated = []

    def value_fn(params):
        jax.debug.callback(lambda: evaluated.append(1))
        return quadratic(params)

    optimizer = optax.lbfgs()
    params = {"w": jnp.array([3.0, -2.0])}
    state = optimizer.init(params)

    @jax.jit
    def update(params, state, grads, finite):
        given = {"value": jnp.float32(14.0), "grad": grads, "value_fn": function(value_fn)}
        return mpx.optimizer_update(params, optimizer, state, grads, finite, **given)

    bad = {"w": jnp.array([jnp.nan, jnp.inf])}
    with jax.debug_nans(True):
        after = update(params, state, bad, jnp.array(False))
    jax.effects_barrier()
    assert tree_equal_bits(after, (params, state))
    assert not evaluated

    new, new_state = update(params, state, jax.grad(quadratic)(params), jnp.array(True))
    jax.effects_barrier()
    assert evaluated
    assert quadratic(new) < quadratic(params)
    assert avals((new, new_state)) == avals((params, state))


def test_float64():
    with jax.enable_x64(True):
        model = {"w": jnp.ones(2, jnp.float64)}
        optimizer = optax.adam(0.1)
        state = optimizer.init(model)
        grads = {"w": jnp.full(2, 1e-30, jnp.float64)}
        after, new_state = mpx.optimizer_update(model, optimizer, state, grads, jnp.array(True))
        assert avals((after, new_state)) == avals((model, state))
        # 1e-60 is zero in float32.
        assert new_state[0].nu["w"][0] > 0
        skipped = mpx.optimizer_update(model, optimizer, state, grads, jnp.array(False))
        assert tree_equal_bits(skipped, (model, state))
    # NumPy parameters get the dtype that JAX gives them.
    model, grads = {"w": np.ones(2)}, {"w": jnp.ones(2)}
    after, _ = mpx.optimizer_update(model, optimizer, optimizer.init(model), grads, True)
    assert after["w"].dtype == jnp.float32


def floats(tree):
    """Returns the part of a model that Optax can handle."""
    return eqx.filter(tree, eqx.is_inexact_array)


def by_dtype(params):
    kind = lambda x: "float" if jnp.issubdtype(x.dtype, jnp.inexact) else "other"
    return jtu.tree_map(kind, params)


ADAM = optax.adam(0.1)
# Each with what it is on parameters alone, where that is another thing.
WITH_OTHERS = {
    "decayed, then clipped": [
        optax.chain(optax.adamw(0.1, weight_decay=0.5), optax.clip_by_global_norm(0.1))
    ],
    "masked by a tree": [
        optax.masked(ADAM, {"w": True, "b": False, "n": other, "flag": other})
        for other in (False, None)
    ],
    "by dtype": [optax.multi_transform({"float": ADAM, "other": optax.set_to_zero()}, by_dtype)],
    "if finite": [optax.apply_if_finite(ADAM, 3)],
    "l-bfgs": [optax.lbfgs(0.1, linesearch=None)],
    "beside keys": [ADAM],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(WITH_OTHERS))
def test_integers_and_keys_in_the_model_change_nothing(name):
    """The state is made from all arrays; what the parameters do is what they do alone."""
    optimizer, alone = (2 * WITH_OTHERS[name])[:2]
    model = {"w": jnp.array([[1.0, 2.0], [0.5, -1.0]]), "b": jnp.array([1.0, -2.0])}
    others = {"n": jnp.arange(3), "flag": jnp.array([True, False])}
    if name == "beside keys":
        others = {"key": jax.random.key(3), "old": jax.random.PRNGKey(3)}
    model |= others
    params, grads = floats(model), make_grads(model)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        state = optimizer.init(model)
        reference = (params, alone.init(params))
    before = avals((model, state))
    update = jax.jit(lambda m, s, finite: mpx.optimizer_update(m, optimizer, s, grads, finite))
    by_hand = jax.jit(lambda p, s: plain_update(p, alone, s, grads))
    ours = (model, state)
    with jax.numpy_rank_promotion("allow"):
        for _ in range(2):
            reference = by_hand(*reference)
            ours = update(*ours, jnp.array(True))
    assert tree_allclose(floats(ours[0]), reference[0])
    assert not tree_allclose(floats(ours[0]), params)
    assert tree_equal_bits({k: ours[0][k] for k in others}, others)
    assert avals(ours) == before
    assert tree_equal_bits(update(*ours, jnp.array(False)), ours)


def test_a_state_for_another_static_field_is_told_by_its_place():
    network = functools.partial(mpx.nn.CoordinateMLP, 2, 1, 4, 1, key=jax.random.key(0))
    model, optimizer = network(activation=jnp.sin), optax.adam(0.1)
    state = optimizer.init(floats(network(activation=jnp.tanh)))
    with pytest.raises(ValueError, match=r"`optimizer_update` got.*metadata.*activation"):
        mpx.optimizer_update(model, optimizer, state, make_grads(model), True)


def test_what_an_optimizer_lacks_is_told():
    """The error is Optax's, and the note is ours."""
    optimizer, w = optax.lbfgs(), jnp.ones(3)
    with pytest.raises(TypeError, match="'value_fn'") as caught:
        mpx.optimizer_update(w, optimizer, optimizer.init(w), w, True)
    assert any("mpx_pde.line_search_value" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("dtype", HALVES)
def test_hyperparameters_in_half_are_told_of(dtype):
    """0.999 in bfloat16 and 1e-8 in float16 turn a finite gradient into NaN."""
    model = {"w": jnp.ones(3, dtype)}
    grads = {"w": jnp.array([0.5, 0.0, -0.25])}
    step = lambda opt: mpx.optimizer_update(model, opt, opt.init(model), grads, jnp.array(True))
    inject = functools.partial(optax.inject_hyperparams, optax.adamw)
    for wrap in (lambda x: x, lambda x: optax.chain(optax.clip(1.0), x)):
        with pytest.raises(ValueError, match=r"`optimizer_update`.*b2.*hyperparam_dtype"):
            step(wrap(inject()(learning_rate=0.1)))
        optimizer = wrap(inject(hyperparam_dtype=jnp.float32)(learning_rate=0.1))
        assert tree_equal_bits(step(optimizer)[0], step(optax.adamw(0.1))[0])


@pytest.mark.slow
def test_lookahead_takes_the_gradients_of_its_fast_parameters():
    """It also takes gradients of both copies, and ignores those of the slow copy."""
    optimizer = optax.lookahead(optax.adam(0.1), 2, 0.5)
    model = {"w": jnp.array([1.0, -2.0]), "f": jnp.tanh}
    start = optax.LookaheadParams.init_synced(model)
    grads = {"w": jnp.array([0.5, 0.25]), "f": None}
    given = want = (start, optimizer.init(floats(start)))
    for i in range(3):
        want = plain_update(want[0], optimizer, want[1], grads)
        mine = optax.LookaheadParams(grads, grads) if i == 2 else grads
        given = mpx.optimizer_update(given[0], optimizer, given[1], mine, True)
    assert tree_allclose(given, want)
    assert not np.array_equal(given[0].slow["w"], start.slow["w"])
    bad = {"w": jnp.full(2, jnp.nan), "f": None}
    skipped = mpx.optimizer_update(given[0], optimizer, given[1], bad, jnp.array(False))
    assert tree_equal_bits(skipped, given)


IS_HALF = lambda params: jtu.tree_map(lambda x: x.dtype == jnp.bfloat16, params)
NAMED = lambda params: jtu.tree_map(lambda half: "half" if half else "full", IS_HALF(params))
BY_DTYPE = {
    "decayed": lambda of: optax.adamw(0.1, weight_decay=0.5, mask=of(IS_HALF)),
    "frozen": lambda of: optax.partition(
        {"half": optax.sgd(0.5), "full": optax.set_to_zero()}, of(NAMED)
    ),
    "masked": lambda of: optax.masked(optax.adam(0.5), of(IS_HALF)),
    "two norms": lambda of: optax.partition(
        dict.fromkeys(("half", "full"), optax.clip_by_global_norm(0.1)), of(NAMED)
    ),
}


@pytest.mark.parametrize("name", list(BY_DTYPE))
def test_masks_by_dtype_are_told_of_and_taken_as_trees(name):
    """The optimizer sees half parameters in float32, so such a function cannot tell them apart."""
    model = {"w": jnp.full(4, 2.0, jnp.bfloat16), "norm": jnp.full(4, 2.0)}
    grads = make_grads(model)

    def updated(optimizer):
        state = optimizer.init(model)
        return jax.jit(lambda g: mpx.optimizer_update(model, optimizer, state, g, True)[0])(grads)

    with jax.numpy_dtype_promotion("standard"):
        by_function = BY_DTYPE[name](lambda function: function)
        given = by_function.update(grads, by_function.init(model), model)
        want = optax.apply_updates(model, given[0])
        # Optax raises of a state that has another mask.
        match = r"`optimizer_update` widens .* masks or lab"
        with pytest.warns(mpx.PrecisionWarning, match=match), contextlib.suppress(ValueError):
            updated(by_function)
        got = updated(BY_DTYPE[name](lambda function: function(model)))
    assert tree_allclose(got, want)
    assert not np.array_equal(got["w"], model["w"])


def test_an_optimizer_that_takes_no_half_arrays_takes_half_parameters():
    def update(grads, state, params=None):
        if grads["w"].dtype != jnp.float32:
            raise NotImplementedError("such as an eigenvalue decomposition")
        return grads, state

    optimizer = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    model = {"w": jnp.ones(3, jnp.bfloat16)}
    step = lambda grads: mpx.optimizer_update(model, optimizer, optax.EmptyState(), grads, True)
    assert jax.jit(step)(make_grads(model))[0]["w"].tolist() == [1.25] * 3


def _optimizers():
    labels = lambda p: jtu.tree_map(lambda x: "matrix" if x.ndim > 1 else "vector", p)
    adam, momentum = optax.adam(1e-2), optax.sgd(1e-1, momentum=0.9)
    clip = optax.clip_by_global_norm(1.0)
    return {
        "adam": (adam, "nu"),
        "adagrad": (optax.adagrad(1e-1), "sum_of_squares"),
        "clipped adam": (optax.chain(clip, adam), "nu"),
        "adam of sums": (optax.MultiSteps(adam, 2), "nu"),
        "some adam": (optax.multi_transform({"matrix": momentum, "vector": adam}, labels), "nu"),
        "momentum": (momentum, None),
        "clipped momentum": (optax.chain(clip, momentum), None),
        "momentum of sums": (optax.MultiSteps(momentum, 2), None),
        "adamax": (optax.adamax(1e-2), None),
        "lion": (optax.lion(1e-3), None),
    }


@pytest.mark.parametrize("name", _optimizers())
def test_squares_of_gradients_in_float16_are_told_of(name):
    """Those of gradients of 1e-3 are 0 there, and Adam's first update is 1e5 times its rate."""
    optimizer, place = _optimizers()[name]
    params = {"w": jnp.ones((4, 4), "float16"), "b": jnp.zeros(4, "float16")}
    grads = jtu.tree_map(lambda x: jnp.full_like(x, 1e-3), params)
    update = functools.partial(mpx.optimizer_update, params, optimizer)
    step = jax.jit(lambda state, grads: update(state, grads, True))
    told = contextlib.nullcontext()
    if place is not None:
        told = pytest.warns(mpx.PrecisionWarning, match=f"squares of gradients .*{place}")
    with told:
        step(optimizer.init(params), grads)
    wide = mpx.cast_to_float32(params)
    state = optimizer.init(wide)
    for _ in range(2):  # `MultiSteps` updates at the second
        after, state = step(state, grads)
    assert avals(state) == avals(optimizer.init(wide))
    assert avals(after) == avals(params)


def test_a_wider_state_is_not_that_of_another_model():
    def update(grads, state, params=None, *, value_fn):
        raise RuntimeError("its own")

    params = {"w": jnp.ones(2, "float16")}
    adam = optax.adam(1e-2)
    optimizer = optax.GradientTransformationExtraArgs(adam.init, update)
    state = optimizer.init(mpx.cast_to_float32(params))
    with pytest.raises(RuntimeError, match="its own"):
        mpx.optimizer_update(params, optimizer, state, params, True, value_fn=1.0)

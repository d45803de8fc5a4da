"""Tests climbing from one precision to the next."""

import io

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx_pde as mpx


X = jax.random.normal(jax.random.key(0), (64, 4))
TRUTH = jnp.array([1.0, -2.0, 0.5, 3.0])
OPTIMIZER = optax.adam(optax.exponential_decay(0.3, 20, 0.8))
BFLOAT16 = {"policy": "params=float32,compute=bfloat16,output=float32"}


def cancelling(model, x):
    """Returns a loss with two large terms whose difference vanishes in training."""
    return jnp.mean((x @ model["w"] - (x @ TRUTH.astype(x.dtype))) ** 2)


def train(ladder, steps, loss=cancelling):
    traces = []

    @eqx.filter_jit
    def step(ladder, model, state, scaling, x):
        traces.append(ladder.rung)
        gradient = mpx.filter_value_and_grad(loss, scaling, **BFLOAT16, **ladder.options)
        value, scaling, finite, grads = gradient(model, x)
        return *mpx.optimizer_update(model, OPTIMIZER, state, grads, finite), scaling, value

    model = {"w": jnp.zeros(4)}
    state, scaling = OPTIMIZER.init(model), mpx.StaticLossScaling(1.0)
    rungs = []
    for i in range(steps):
        model, state, scaling, value = step(ladder, model, state, scaling, X)
        ladder = ladder.update(i, loss, scaling, **BFLOAT16)(model, X)
        rungs.append(ladder.rung)
    return model, ladder, rungs, traces, value


@pytest.fixture(scope="module")
def climbed():
    said = []
    ladder = mpx.PrecisionLadder(("half", "float32", "full"), interval=20, say=said.append)
    return *train(ladder, 400), said, ladder


@pytest.mark.slow
def test_it_climbs_when_the_floor_is_reached_and_says_so(climbed):
    _, ladder, rungs, traces, value, said, first = climbed
    assert ladder.rung == "float32"  # its gradient has a relative error only
    assert first.rung == "half"  # an update does not change a ladder
    at = rungs.index("float32")
    assert 0 < at < 399
    assert at % 20 == 0
    assert said == [said[0]]
    assert said[0].startswith(f"Step {at}, bfloat16: rounding is ")
    assert said[0].endswith("go on with forward='float32'.")
    # One program for each rung.
    assert traces == ["half", "float32"]
    # Less than bfloat16 can resolve in a sum of four products of about 2.
    assert value < 1e-8


@pytest.mark.slow
def test_without_it_rounding_is_where_the_training_ends(climbed):
    ladder = mpx.PrecisionLadder(("half",), interval=20)
    stuck, *_, told = train(ladder, 400)
    assert cancelling(stuck, X) > 1e3 * cancelling(climbed[0], X)
    assert told == 0  # the value in bfloat16


def test_it_measures_between_its_intervals_alone():
    calls = []

    def counted(model, x):
        calls.append(None)
        return cancelling(model, x)

    ladder = mpx.PrecisionLadder(interval=10)
    model = {"w": jnp.ones(4)}
    for step in (0, 1, 9, 11):
        assert ladder.update(step, counted, mpx.NoOpLossScaling())(model, X) is ladder
    assert not calls
    ladder.update(10, counted, mpx.NoOpLossScaling())(model, X)
    assert calls


def test_checkpoints_keep_the_rung():
    ladder = mpx.PrecisionLadder(("half", "float32", "full"))
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, eqx.tree_at(lambda x: x.index, ladder, 1))
    file.seek(0)
    assert eqx.tree_deserialise_leaves(file, ladder).rung == "float32"
    with pytest.raises(ValueError, match="is on rung 2, but has only half, float32"):
        _ = eqx.tree_at(lambda x: x.index, mpx.PrecisionLadder(), 2).rung


@pytest.mark.parametrize("array", [jnp.asarray, np.asarray])
def test_a_rung_that_became_an_array_is_told_of(array):
    """As after a checkpoint of `jax.tree.leaves`. The text says how to go on."""
    ladder = eqx.tree_at(lambda x: x.index, mpx.PrecisionLadder(), array(1))
    rung = eqx.filter_jit(lambda ladder: ladder.rung)
    with pytest.raises(TypeError, match=r"an integer again: .*int\(ladder.index\)"):
        rung(ladder)
    assert rung(eqx.tree_at(lambda x: x.index, ladder, int(ladder.index))) == "float32"


@pytest.mark.parametrize("rungs", [("half", "full"), ("half", "bfloat16_x3", "float32")])
def test_a_checkpoint_is_of_the_same_rungs(rungs):
    """With its number alone, the rung would be another precision, which may be lower."""
    saved = mpx.scaling_options({"ladder": mpx.PrecisionLadder()})
    with pytest.raises(ValueError, match=r"rungs was \['half', 'float32'\] and is "):
        mpx.check_scaling_options(saved, {"ladder": mpx.PrecisionLadder(rungs)})
    # The messages and the interval of the ladder are not part of the state.
    like = mpx.PrecisionLadder(interval=7, tolerance=0.5, say=None)
    mpx.check_scaling_options(saved, {"ladder": like})


def test_it_takes_the_options_of_the_step():
    ladder = mpx.PrecisionLadder(interval=1, say=None)
    model = {"w": TRUTH + 1e-4}
    step = {"axis_name": "devices", "keep_full": False, "policy": "bfloat16"}
    update = ladder.update(1, cancelling, mpx.NoOpLossScaling(), **step)
    assert update(model, X).rung == "float32"


def test_float64_is_a_rung_where_there_is_one():
    with jax.enable_x64(True):
        assert mpx.PrecisionLadder(("half", "full", "float64")).rungs[-1] == "float64"

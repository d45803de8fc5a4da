"""Tests that runs with NaNs, infinities and other faults lose nothing and count their skips."""

import functools as ft

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import oscillation

import mpx_pde as mpx


KINDS = ("clean", "nan batch", "inf batch", "corrupted sample", "overflow", "zero gradients")
BAD = (1, 2, 3, 4)  # kinds that make a step non-finite, at scales from 1 up
LENGTH = 24
LOWEST, HIGHEST = 2.0**-2, 2.0**10


@ft.cache
def start():
    model = mpx.nn.CoordinateMLP(1, "scalar", 8, 2, key=jax.random.key(0))
    loss = mpx.DynamicLossScaling(2.0**6, LOWEST, period=3, max_loss_scaling=HIGHEST)
    intervals = {"growth_interval": 3, "recover_growth_interval": 2}
    directions = mpx.DerivativeScaling.per_direction("x", order=2, min_scale=2.0**-6, **intervals)
    scaling = mpx.Scaling(loss, directions)
    optimizer = optax.adamw(1e-2)
    return optimizer, (model, optimizer.init(eqx.filter(model, eqx.is_inexact_array)), scaling)


def faulty(kind, points):
    """Returns a batch with a fault, and the weight of each of its rows."""
    one = jnp.ones(points.shape[0])
    first = jnp.arange(points.shape[0]) == 0
    batches = [
        (points, one),
        (points * jnp.nan, one),
        (points * jnp.inf, one),
        (jnp.where(first[:, None], jnp.nan, points), one),
        (points, jnp.where(first, 1e36, one)),
        (points, 0 * one),
    ]
    return jax.lax.switch(kind, [ft.partial(lambda b: b, b) for b in batches])


def run(kinds):
    """Returns the states from the first on, and the flag of each step."""
    return _run(*start(), kinds)


# Inside of it, XLA might compute the first weights twice, rounded differently.
@eqx.filter_jit
def _run(optimizer, state, kinds):
    arrays, static = eqx.partition(state, eqx.is_array)

    def step(carry, x):
        kind, key = x
        model, opt_state, scaling = eqx.combine(carry, static)
        batch = faulty(kind, jax.random.uniform(key, (8, 1)))
        grad_fn = mpx.filter_grad(oscillation, scaling, keep_full=(False, True, True))
        scaling, finite, grads = grad_fn(model, *batch)
        model, opt_state = mpx.optimizer_update(model, optimizer, opt_state, grads, finite)
        carry = eqx.filter((model, opt_state, scaling), eqx.is_array)
        return carry, (carry, finite)

    keys = jax.random.split(jax.random.key(1), LENGTH)
    _, (states, finite) = jax.lax.scan(step, arrays, (kinds, keys))
    first = jax.tree.map(lambda x, xs: jnp.concatenate([x[None], xs]), arrays, states)
    return first, finite


@pytest.mark.slow
@hypothesis.settings(max_examples=200)
@hypothesis.given(st.lists(st.sampled_from(range(len(KINDS))), min_size=LENGTH, max_size=LENGTH))
def test_any_schedule_of_faults(kinds):
    states, finite = jax.tree.map(np.asarray, run(jnp.array(kinds, jnp.int32)))
    model, opt_state, scaling = states
    for x in jax.tree.leaves((model, opt_state)):
        if np.issubdtype(x.dtype, np.floating):
            assert np.all(np.isfinite(x))
        # A skipped step changes no bit. Step i leads from state i to state i + 1.
        before, after = x[:-1][~finite], x[1:][~finite]
        assert before.tobytes() == after.tobytes()
    assert not np.any(finite[np.isin(kinds, BAD)])
    scale = scaling.loss.loss_scaling
    assert np.all((scale >= LOWEST) & (scale <= HIGHEST) & (np.frexp(scale)[0] == 0.5))
    exponents = scaling.derivatives.exponents
    assert np.all((exponents >= -6) & (exponents <= 15))
    np.testing.assert_array_equal(scaling.skipped_steps[1:], np.cumsum(~finite))
    streak = 0
    for i, taken in enumerate(finite):
        streak = 0 if taken else streak + 1
        assert scaling.consecutive_skips[i + 1] == streak
    # The separate counts of both scalings add up.
    apart = scaling.loss.skipped_steps + scaling.derivatives.skipped_steps
    np.testing.assert_array_equal(apart, scaling.skipped_steps)


@pytest.mark.slow
def test_ten_overflows_in_a_row_and_a_scale_at_its_minimum():
    kinds = [0] * 3 + [4] * 10 + [0] * (LENGTH - 13)
    states, finite = run(jnp.array(kinds, jnp.int32))
    np.testing.assert_array_equal(finite, [k == 0 for k in kinds])
    scale = np.asarray(states[2].loss.loss_scaling)
    assert scale[13] == LOWEST  # ten halvings from 2^7 would be below it
    assert scale[-1] > LOWEST  # training continues
    weights = jax.tree.leaves(states[0])[0]
    assert not np.array_equal(weights[13], weights[-1])


class TestErrorIfStuck:
    def test_counts_what_it_is_asked_to(self):
        scaling = mpx.DynamicLossScaling()
        checked = lambda s: mpx.error_if_stuck(s, s, max_consecutive_skips=3)
        check = eqx.filter_jit(lambda s: checked(s).consecutive_skips)
        for skips in (1, 2):
            scaling = scaling.adjust(jnp.array(False))
            assert check(scaling) == skips
        assert check(scaling.adjust(jnp.array(True))) == 0
        # A `RuntimeError` of Equinox, or the error that an older JAX makes of it.
        with pytest.raises((RuntimeError, ValueError), match=r"3 steps in a row were skipped"):
            check(scaling.adjust(jnp.array(False)))

    @pytest.mark.parametrize(
        ("scaling", "counts", "reason"),
        [
            (mpx.DynamicLossScaling(4.0), None, "can still fall"),
            (mpx.DynamicLossScaling(1.0, 1.0), None, "smallest loss scale"),
            (start()[1][2], "overflow", "derivatives of the network"),
            (start()[1][2], "none", "can still fall"),
        ],
    )
    def test_names_what_is_to_blame(self, scaling, counts, reason):
        args = ()
        if counts is not None:
            seen = jnp.zeros_like(scaling.derivatives.counts)
            args = (seen.at[0, -1].set(1) if counts == "overflow" else seen,)
        scaling = scaling.adjust(jnp.array(False), *args)
        with pytest.raises(eqx.EquinoxRuntimeError, match=reason):
            mpx.error_if_stuck(scaling, scaling, max_consecutive_skips=1)

"""Tests initial scales, telemetry, and whole training runs."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import training_step

import mpx_pde as mpx
from mpx_pde import nn
from mpx_pde.derivatives import plot, telemetry


pytestmark = pytest.mark.slow

KEPT = {"keep_full": (False, True)}


def points(n=64):
    return jax.random.uniform(jax.random.key(1), (n, 2), minval=-1.0)


def sine_network(frequency, width=16):
    """Returns a network with large first weights, whose third derivatives overflow float16."""
    model = nn.CoordinateMLP(2, "scalar", width, 3, key=jax.random.key(0), activation=jnp.sin)
    return eqx.tree_at(lambda m: m.first.module.weight, model, replace_fn=lambda w: frequency * w)


def kdv(model, x, *, derivatives):
    terms = ["u", "u_t", "u_x", "u_xxx"]
    d = jax.vmap(mpx.partials(model, terms, coords="xt", outputs="u", scaling=derivatives))(x)
    residual = d["u_t"] + d["u"] * d["u_x"] + 0.0025 * d["u_xxx"]
    return jnp.mean(residual**2) + jnp.mean((d["u"] - jnp.cos(jnp.pi * x[:, 0])) ** 2)


def test_kdv_trains_only_with_derivative_scaling():
    model, optimizer = sine_network(60.0), optax.adam(1e-4)
    step = training_step(kdv, optimizer, **KEPT)
    in_full = training_step(kdv, optimizer, use_mixed_precision=False)

    def train(scaling, steps, step=step):
        state, trained = optimizer.init(eqx.filter(model, eqx.is_inexact_array)), model
        losses, finites = [], []
        for _ in range(steps):
            trained, state, scaling, value, finite, _ = step(trained, state, scaling, points())
            losses.append(float(value))
            finites.append(bool(finite))
        return losses, finites

    loss_scaling = mpx.DynamicLossScaling(2.0**-2)
    never = mpx.DerivativeScaling.per_direction("xt", order=3, min_scale=1.0)
    # Moments and parameters are not needed, because no step is taken.
    find = eqx.filter_jit(lambda scaling: mpx.filter_grad(kdv, scaling, **KEPT)(model, points()))
    scaling = mpx.Scaling(loss_scaling, never)
    for _ in range(12):
        scaling, finite, _ = find(scaling)
        assert not finite
    free = mpx.Scaling(loss_scaling, mpx.DerivativeScaling.per_direction("xt", order=3))
    losses, finite = train(free, 40)
    assert all(finite[20:])
    want, _ = train(free, 40, in_full)
    assert losses[-1] < 1.1 * want[len(want) - 1 - finite.count(False)]
    # With the right initial scales no step is lost.
    start = mpx.initial_scaling(kdv, free, **KEPT)(model, points())
    assert all(train(start, 8)[1])


def test_telemetry_and_its_picture(tmp_path):
    model = sine_network(20.0)
    options = {"order": 3, "init_scale": 2.0**-4, "terms": ["u_x"]}
    directions = mpx.DerivativeScaling.per_direction("xt", **options)
    scaling = mpx.Scaling(mpx.NoOpLossScaling(), directions)
    step = eqx.filter_jit(lambda s: mpx.filter_grad(kdv, s, **KEPT)(model, points())[0])
    new = step(scaling)
    log = eqx.filter_jit(telemetry)(new)
    assert all(eqx.is_array(x) for x in jax.tree.leaves(log))
    one = lambda n: int(log["counts"][n].sum() + log["zeros"][n] + log["nonfinite"][n])
    total = {n: one(n) for n in log["counts"]}
    assert {n: c for n, c in total.items() if c} == {"u_x": 64, "_t": 64, "_xxx": 64}
    assert int(log["shift"]["_xxx"]) == -12
    # The exponents are those of the unscaled derivative.
    u_x = jax.jit(jax.vmap(mpx.partials(model, ["u_x"], coords="xt", outputs="u")))(points())["u_x"]
    seen = np.asarray(log["exponents"]["u_x"])[np.asarray(log["counts"]["u_x"]) > 0]
    assert abs(seen.max() - np.floor(np.log2(np.abs(u_x).max()))) <= 1
    assert set(log["scale"]) == {"x", "t"}
    figure = plot([telemetry(new), telemetry(step(new))])
    figure.savefig(tmp_path / "ranges.png")

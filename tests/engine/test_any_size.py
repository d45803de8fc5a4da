"""Tests values that are not rounded to half anywhere: derivatives, which may be of any size, and
values near a number, of whose distance to it rounding leaves little."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import HALVES, in_float64, normal, policy, relative
from jax import lax

import mpx_pde as mpx


# A few roundings of a half in a row, most of which average out.
# Under `autocast` values are rounded too.
TOLERANCES = {
    "forward": {"float16": 2.0**-9, "bfloat16": 2.0**-6},
    "autocast": {"float16": 2.0**-7, "bfloat16": 2.0**-5},
}
KEY = jax.random.key(0)
POINTS = jnp.linspace(0, 1, 128)[:, None]
WAVES = jnp.sin(jnp.pi * jnp.outer(jnp.arange(1.0, 9.0), POINTS[:, 0])) / 64
OPTIONS = {"forward": {"forward": "float32"}, "autocast": {"autocast": True}}


closed_over = lambda y: lax.map(lambda wave: wave @ y, WAVES)
steps = lambda c, weights: lax.scan(lambda c, w: (c + w @ c, None), c, weights)[0]

# Functions of u_xx of chunks of points, and of parameters.
OF_DERIVATIVES = {
    "a sum by coefficients": lambda u, w, unit: (
        jnp.stack([u(POINTS)] * 8, -1) * w["few"][None] @ w["two"]
    ),
    "a weak form": lambda u, w, unit: WAVES @ u(POINTS),
    "a loop over a weak form": lambda u, w, unit: closed_over(u(POINTS)),
    "two products": lambda u, w, unit: w["two"] @ (w["one"] @ u(POINTS)),
    "a bounded function": lambda u, w, unit: (
        unit**2 * (w["two"] @ jnp.tanh(w["one"] @ u(POINTS) / unit**2))
    ),
    "what a loop carries": lambda u, w, unit: steps(u(POINTS[:8]), w["three"]),
    "chunks": lambda u, w, unit: w["one"] @ lax.map(u, POINTS.reshape(4, 32, 1)).reshape(-1),
    "an absolute value": lambda u, w, unit: w["one"] @ jnp.abs(u(POINTS)),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("unit", [3e3, 1e-4])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow] if i % 4 else [])
        for i, n in enumerate(OF_DERIVATIVES)
    ],
)
def test_derivatives_are_not_rounded_without_their_scales(name, unit, how):
    """Rounded to float16, derivatives overflow, so that every step is skipped, or vanish, or become
    an infinity that a bounded function makes finite, with a wrong gradient."""
    few, two, three = normal(2, (8,)), normal(3, (8, 8), 0.3), normal(4, (3, 8, 8), 0.2)
    weights = {"few": few, "one": normal(1, (8, 128), 0.1), "two": two, "three": three}
    model = eqx.nn.MLP(1, "scalar", 16, 2, jnp.tanh, key=KEY), weights

    def loss(model, *, derivatives=None):
        network = lambda p: model[0](p * unit)
        terms = mpx.partials(network, ["u_xx"], coords="x", outputs="u", scaling=derivatives)
        u_xx = lambda points: jax.vmap(terms)(points / unit)["u_xx"]
        return jnp.mean((OF_DERIVATIVES[name](u_xx, model[1], unit) / unit**2) ** 2)

    want = eqx.filter_jit(eqx.filter_grad(loss))(model)
    scaling = mpx.Scaling(derivatives=mpx.DerivativeScaling.per_direction("x"))
    step = eqx.filter_jit(lambda s, model: mpx.filter_grad(loss, s, **OPTIONS[how])(model))
    for _ in range(20):
        scaling, finite, grads = step(scaling, model)
    assert finite
    assert relative(grads, want) < TOLERANCES[how]["float16"]


def logits(h, weights):
    """Runs a recurrence whose state lies near 1."""
    step = lambda h, w: (jax.nn.sigmoid(5 + jnp.tanh(w @ jnp.log(h / (1 - h)))), h)
    return lax.scan(step, jax.nn.sigmoid(5 + h), weights)


def branch(h, w):
    y = lax.cond(h[0] > 0, lambda h: jax.nn.sigmoid(6 + w @ h), lambda h: jax.nn.sigmoid(5 + h), h)
    return 1 - y


# Functions of the result of a first layer, and of weights.
NEAR_ONE = {
    "into a loop": lambda h, w: 1 - lax.scan(
        lambda c, _: (jax.nn.sigmoid(jnp.log(c / (1 - c)) + 0.1), None),
        jax.nn.sigmoid(6 + w[0] @ h), None, length=3,
    )[0],
    "carried": lambda h, w: 1 - logits(h, w)[0],
    "out of a loop": lambda h, w: jnp.sum(1 - logits(h, w)[1], axis=0),
    "out of a branch": lambda h, w: branch(h, w[0]),
    "out of a checkpoint": lambda h, w: 1 - jax.checkpoint(jax.nn.sigmoid)(6 + w[0] @ h),
    "by roots": lambda h, w: jnp.sqrt(1 - jnp.tanh(3 + w[0] @ h) ** 2 + 1e-7),
    "the largest": lambda h, w: jnp.ones(8) * (1 - jnp.max(jax.nn.sigmoid(6 + w[0] @ h))),
    "in order": lambda h, w: 1 - jnp.sort(jax.nn.sigmoid(6 + w[0] @ h)),
    "written into": lambda h, w: 1 - jax.nn.sigmoid(6 + w[0] @ h).at[0].set(0.5),
    "scaled": lambda h, w: 0.4995 - logits(h, w)[0] / 2,
    "from a number that is computed": lambda h, w: jnp.cos(jnp.zeros(())) - logits(h, w)[0],
    "the largest of segments": lambda h, w: (
        1 - jax.ops.segment_max(logits(h, w)[0], jnp.arange(8) // 2, 4)[jnp.arange(8) // 2]
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize(
    ("name", "half"),
    [
        pytest.param(n, HALVES[i % 2], marks=[pytest.mark.slow] if i % 3 else [])
        for i, n in enumerate(NEAR_ONE)
    ],
)
def test_what_is_near_a_number_is_not_rounded_before_its_distance_is_taken(name, half, how):
    """Rounding made gradients wrong by a factor of 48 and losses by 84 %, all of them finite."""
    params = normal(9, (8, 2)), normal(5, (3, 8, 8), 0.2), normal(6, (8,), 0.3)
    points = normal(7, (32, 2))

    def loss(params, points):
        first, weights, last = params
        out = lambda p: last @ jnp.tanh(10 * NEAR_ONE[name](jnp.tanh(first @ p), weights))
        return jnp.mean((jax.vmap(out)(points) - points[:, 0]) ** 2)

    with jax.enable_x64(True):
        want = jax.grad(loss)(*in_float64((params, points)))
    scaling, options = mpx.StaticLossScaling(2.0**8), {"policy": policy(half), **OPTIONS[how]}
    _, finite, grads = eqx.filter_jit(mpx.filter_grad(loss, scaling, **options))(params, points)
    assert finite
    assert relative(grads, want) < TOLERANCES[how][half]

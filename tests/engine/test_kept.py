"""Tests what a loss with a full forward pass keeps, and the gradient that follows from it."""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix
import pytest
from helpers import HALVES, normal, policy, relative

import mpx_pde as mpx
from mpx_pde.engine._keeping import chosen, unrounded


pytestmark = pytest.mark.usefixtures("standard_promotion")

# A gradient takes a few roundings of 2^-11 or 2^-8 in a row, most of which average out, whatever
# the number of steps.
TOLERANCES = {"float16": 1e-3, "bfloat16": 8e-3}

WEIGHT, STATES = normal(0, (64, 64), 1 / 8), normal(1, (16, 64))
OTHER, POINTS = normal(2, (64, 64), 1 / 8), normal(3, (128, 16))
LAYERS = (
    normal(4, (16, 64), 1 / 4),
    normal(5, (64,), 0.1),
    normal(6, (64, 64), 1 / 8),
    normal(7, (64,), 0.1),
    normal(8, (64, 8), 1 / 8),
)


def network(p, x):
    h = jax.nn.gelu(x @ p[0] + p[1], approximate=False)
    return jax.nn.gelu(h @ p[2] + p[3]) @ p[4]


with jax.numpy_rank_promotion("allow"):
    TARGETS = network(LAYERS, POINTS)


def squared(x):
    return jnp.mean(x**2)


def evolved(step, state, length):
    return jax.lax.scan(lambda u, _: (step(u), None), state, length=length)[0]


def euler(steps):
    def loss(w, u, dt):
        return squared(evolved(lambda u: u + dt * jnp.tanh(u @ w.T), u, steps) - 2 * u)

    return loss, 0.3 * WEIGHT, STATES, jnp.float32(1 / steps)


def leaky(p, u):
    cell = lambda u, t: (u * (1 - p[1]) + p[1] * jnp.sin(u @ p[0] + t), None)
    return squared(jax.lax.scan(cell, u, jnp.arange(400.0) / 100)[0])


def lstm(p, x):
    def cell(carry, x):
        h, c = carry
        i, f, o, g = jnp.split(jnp.concatenate([x, h], -1) @ p, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros((16, 32))
    return squared(jax.lax.scan(cell, (zeros, zeros), x)[1] - 0.3)


def gru(p, x):
    def cell(h, x):
        z, r = (jax.nn.sigmoid(jnp.concatenate([x, h], -1) @ w) for w in p[:2])
        return (1 - z) * h + z * jnp.tanh(jnp.concatenate([x, r * h], -1) @ p[2]), None

    return squared(jax.lax.scan(cell, jnp.zeros((16, 32)), x)[0] - 0.3)


def runge_kutta(p, u):
    slope, dt = lambda u: jnp.tanh(u @ p[0]) @ p[1], 0.01

    def step(u):
        a = slope(u)
        b = slope(u + dt / 2 * a)
        c = slope(u + dt / 2 * b)
        return u + dt / 6 * (a + 2 * b + 2 * c + slope(u + dt * c))

    return squared(evolved(step, u, 300) - 2 * u)


def limited(w, u):
    def step(u):
        a, b = jnp.roll(u, -1, -1) - u, u - jnp.roll(u, 1, -1)
        slope = jnp.where(a * b > 0, jnp.sign(a) * jnp.minimum(jnp.abs(a), jnp.abs(b)), 0.0)
        return u - 0.05 * slope + 0.01 * jnp.tanh(u @ w)

    return squared(evolved(step, u, 200) - u)


def trained_inside(p, x):
    inner = lambda w: squared(jnp.tanh(x @ w) - x)
    w = p[0]
    for _ in range(5):
        w = w - p[1] * jax.grad(inner)(w)
    return inner(w)


def with_norm_of_gradient(p, x):
    inner = lambda p: squared(network(p, x))
    norm = sum(jnp.sum(g**2) for g in jax.grad(inner)(p))
    return inner(p) + 0.1 * jnp.sqrt(norm)


def message_passing(p, x, senders, receivers):
    for w in p[:-1]:
        messages = jnp.tanh(jnp.concatenate([x[senders], x[receivers]], -1) @ w)
        x = x + jnp.tanh(jax.ops.segment_sum(messages, receivers, 64) @ p[-1])
    return squared(x - 1)


def ridge(p, x):
    features = jnp.tanh(x @ p[0]) @ p[1]
    matrix = features.T @ features / len(x) + 1e-4 * jnp.eye(features.shape[1])
    solution = jnp.linalg.solve(matrix, features.T @ x[:, :1] / len(x))
    return squared(features @ solution - x[:, :1])


def twice_by_jvp(p, x):
    u = lambda q: network(p, q)[0]
    along = lambda f, v: lambda q: jax.jvp(f, (q,), (v,))[1]
    residual = lambda q: sum(along(along(u, v), v)(q) for v in jnp.eye(16)[:2]) + u(q)
    return squared(jax.vmap(residual)(x))


def by_partials(p, x):
    named = {"coords": list("abcdefghijklmnop"), "outputs": "u"}
    terms = mpx.partials(lambda q: network(p, q)[0], ["u", "u_aa", "u_bb"], **named)
    return squared(sum(jax.vmap(terms)(x).values()))


def integrated(adjoint):
    def loss(p, u):
        term = diffrax.ODETerm(lambda t, y, w: jnp.tanh(y @ w))
        options = {"adjoint": adjoint, "saveat": diffrax.SaveAt(t1=True)}
        out = diffrax.diffeqsolve(term, diffrax.Tsit5(), 0, 1, 0.05, u, p, **options)
        return squared(out.ys[0] - 2 * u)

    return loss


def fixed_point(w, x):
    step = lambda y, args: jnp.tanh(0.5 * y @ args[0] + args[1])
    solver = optimistix.FixedPointIteration(1e-6, 1e-6)
    return squared(optimistix.fixed_point(step, solver, x, (w, x)).value - 1)


def near(threshold, x, w):
    """Returns values that rounding to bfloat16 may move to the other side of a threshold."""
    return threshold - 1e-4 + 1e-5 * jnp.tanh(x @ w)


@jax.custom_vjp
def kinked(x):
    return jnp.where(x - 0.1 > 0, 30 * x, x)


kinked.defvjp(lambda x: (kinked(x), x), lambda x, g: (jnp.where(x - 0.1 > 0, 30 * g, g),))

DECISIONS = {
    "where": lambda h, w: jnp.where(h - 0.1 > 0, 30 * h, h) @ w,
    "sign": lambda h, w: (jnp.sign(h - 0.1) * h) @ w,
    "heaviside": lambda h, w: (jnp.heaviside(h - 0.1, 0.5) + h) @ w,
    "log": lambda h, w: jnp.where(jnp.log(10 * h) > 0, 30 * h, h) @ w,
    "maximum": lambda h, w: (jnp.maximum(h, 0.1) * h) @ w,
    "a rule": lambda h, w: kinked(h) @ w,
    "a checkpoint": jax.checkpoint(lambda h, w: jnp.where(h - 0.1 > 0, 30 * h, h) @ w),
    "a loop": lambda h, w: evolved(
        lambda h: jnp.where(h - 0.1 > 0, 1.2 * h, h) + 0.01 * jnp.tanh(h @ w), h, 5
    ),
    "a loop in a checkpoint": jax.checkpoint(
        lambda h, w: evolved(
            lambda h: jnp.where(h - 0.1 > 0, 1.2 * h, h) + 0.01 * jnp.tanh(h @ w), h, 5
        )
    ),
}


def _made(make):
    return lambda p, x: squared(network((*p[:2], make(p[2]), *p[3:]), x) - 1)


BASE = normal(9, (64, 64), 1 / 8)
MADE = {
    "tril": jnp.tril,
    "a base": lambda w: w + BASE,
    "a mask": lambda w: w * (BASE > 0),
    "identity": lambda w: w + jnp.eye(64),
    "a scale": lambda w: w * BASE[0][:, None],
    "padding": lambda w: jnp.pad(w[:-1], ((0, 1), (0, 0))),
    "a fixed row": lambda w: jnp.concatenate([w[:-1], BASE[:1]]),
    "its norm": lambda w: w / jnp.linalg.norm(w),
}

SENDERS, RECEIVERS = (jax.random.randint(jax.random.key(i), (300,), 0, 64) for i in (10, 11))
PROGRAMS = {
    "50 steps": euler(50),
    "2,000 steps": euler(2000),
    "leaky cell": (leaky, (WEIGHT, jnp.float32(0.1)), STATES),
    "LSTM": (lstm, normal(12, (64, 128), 1 / 8), normal(13, (500, 16, 32))),
    "GRU": (
        gru,
        tuple(normal(i, (64, 32), 1 / 8) for i in (14, 15, 16)),
        normal(17, (500, 16, 32)),
    ),
    "Runge-Kutta": (runge_kutta, (WEIGHT, OTHER), STATES),
    "limiters": (limited, WEIGHT, STATES),
    "training inside": (trained_inside, (WEIGHT, jnp.float32(0.5)), STATES),
    "norm of a gradient": (with_norm_of_gradient, LAYERS, POINTS),
    "message passing": (
        message_passing,
        (*(normal(i, (64, 32), 1 / 8) for i in (18, 19)), normal(20, (32, 32), 1 / 6)),
        normal(21, (64, 32)),
        SENDERS,
        RECEIVERS,
    ),
    "ridge regression": (ridge, (WEIGHT, normal(22, (64, 8), 1 / 8)), normal(23, (128, 64))),
    "nested jvp": (twice_by_jvp, LAYERS, POINTS),
    "partials": (by_partials, LAYERS, POINTS),
    "small residual": (
        lambda p, x, y: squared(network(p, x) - y),
        LAYERS,
        POINTS,
        TARGETS + 1e-3 * normal(24, (128, 8)),
    ),
    "two networks": (
        lambda p, x, z: squared(jnp.einsum("bp,np->bn", network(p[0], x), network(p[1], z)) - 1),
        (LAYERS, LAYERS),
        POINTS,
        POINTS[:48],
    ),
    "direct adjoint": (integrated(diffrax.DirectAdjoint()), WEIGHT, STATES),
    "checkpointed adjoint": (integrated(diffrax.RecursiveCheckpointAdjoint()), WEIGHT, STATES),
    "backsolve": (integrated(diffrax.BacksolveAdjoint()), WEIGHT, STATES),
    "fixed point": (fixed_point, WEIGHT, STATES),
    **{f"made weights: {k}": (_made(make), LAYERS, POINTS) for k, make in MADE.items()},
    **{
        f"decision: {k}": (
            lambda p, x, f=f: squared(f(near(0.1, x, p[0]), p[1])),
            (WEIGHT, OTHER),
            STATES,
        )
        for k, f in DECISIONS.items()
    },
}
FAST = "leaky cell", "small residual", "made weights: tril", "decision: where", "decision: a rule"


def gradient(loss, half, **options):
    options = {"forward": "float32", "policy": policy(half), **options}
    return mpx.filter_value_and_grad(loss, mpx.StaticLossScaling(2.0**8), **options)


@pytest.mark.filterwarnings("ignore:.*is done in half")  # loops of other libraries keep to float32
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in PROGRAMS]
)
def test_a_program_of_any_kind_has_its_gradient(name, half):
    loss, params, *data = PROGRAMS[name]
    want_value, want = eqx.filter_jit(jax.value_and_grad(loss))(params, *data)
    value, _, finite, got = eqx.filter_jit(gradient(loss, half))(params, *data)
    assert finite
    # Sums in another order, beside terms of a thousand times the size.
    np.testing.assert_allclose(value, want_value, rtol=1e-5)
    assert relative(got, want) < TOLERANCES[half]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two networks", *(f"made weights: {k}" for k in MADE)])
def test_their_backward_pass_is_half(name):
    loss, params, *data = PROGRAMS[name]
    report = mpx.precision_report(gradient(loss, "bfloat16"))(params, *data)
    assert report.backward_half_share >= 0.9
    # The results of two layers for each point, and more for two networks.
    assert report.kept_in_half >= 2 * 128 * 64 * 2
    assert f"{100 * report.backward_half_share:.0f}% of its work in half" in str(report)


def test_what_a_loop_keeps_is_counted_by_its_steps():
    loss, params, *data = PROGRAMS["leaky cell"]
    report = mpx.precision_report(gradient(loss, "bfloat16"))(params, *data)
    # The state and the cosine of each step, and the last state.
    assert report.kept_in_half == (2 * 400 + 1) * STATES.size * 2


def test_a_kept_value_beyond_the_range_of_float16_makes_the_step_not_finite():
    """The derivative of a saturated function would be zero, and the step silently wrong."""
    loss = lambda w, x: squared(jnp.tanh(1e-12 * (x @ w) ** 2) - 1)
    run = lambda half: eqx.filter_jit(gradient(loss, half))(WEIGHT, 1e6 * STATES)[2]
    assert not run("float16")
    assert run("bfloat16")


def test_a_mask_beyond_the_range_of_float16_is_no_overflow():
    mask = jnp.tril(jnp.ones((16, 16), bool))

    def loss(w, x):
        scores = jnp.where(mask, (x @ w) @ x.T, -1e9)
        return squared(jax.nn.softmax(scores) @ x - 1)

    _, _, finite, got = eqx.filter_jit(gradient(loss, "float16"))(WEIGHT, STATES)
    assert finite
    assert relative(got, jax.grad(loss)(WEIGHT, STATES)) < TOLERANCES["float16"]


def test_tangents_of_integers_in_a_loss():
    """The second argument of `ldexp` has a tangent of no numbers, which `partials` meets."""

    def loss(w, x):
        u = lambda q: jnp.sum(jnp.ldexp(jnp.tanh(q @ w), 2))
        return squared(jax.vmap(mpx.partials(u, ["u_x"], coords="xy", outputs="u"))(x)["u_x"])

    params, points = LAYERS[0][:2], POINTS[:, :2]
    _, _, finite, got = gradient(loss, "bfloat16")(params, points)
    want = jax.grad(lambda w, x: squared(4 * jnp.sum(w[0] / jnp.cosh(x @ w) ** 2, -1)))
    assert finite
    assert relative(got, want(params, points)) < TOLERANCES["bfloat16"]


def test_forward_mode_around_the_gradient():
    loss, params, *data = PROGRAMS["made weights: tril"]
    of = lambda p: gradient(loss, "float16", keep_full=(False, True))(p, *data)[3]
    product = jax.jit(lambda p, v: jax.jvp(of, (p,), (v,))[1])(params, params)
    want = jax.jvp(lambda p: jax.grad(loss)(p, *data), (params,), (params,))[1]
    # A second derivative is taken of rounded values, and has more terms that cancel.
    assert relative(product, want) < 2e-3


def test_the_smallest_set_that_all_can_be_computed_from_is_kept():
    """Variables 3 and 4 follow from 2, which follows from 0 (there anyway) and 1."""
    operands = {2: (0, 1), 3: (2,), 4: (2,), 5: (3, 4)}
    sizes = {1: 4, 2: 2, 3: 2, 4: 2, 5: 3}
    assert chosen({3, 4}, operands, {0}, sizes.__getitem__) == [2]
    assert chosen({5}, operands, {0}, sizes.__getitem__) == [2]
    assert chosen({5}, operands, {0}, {**sizes, 5: 1}.__getitem__) == [5]
    assert chosen({1, 3}, operands, {0}, sizes.__getitem__) == [1]
    assert set(chosen({1, 3}, {3: (2,)}, {0}, sizes.__getitem__)) == {1, 3}
    # Of two choices of one size, the one nearest to where it is read.
    assert chosen({3}, {2: (1,), 3: (2,)}, {0}, lambda x: 2) == [3]


def test_small_arrays_stay_as_they_are():
    assert unrounded({0: 320, 1: 5, 2: 5, 3: 5}) == {1, 2}
    assert unrounded({}) == set()

"""Tests that a gradient has the digits of what is kept, though most of it is computed again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forward_passes import CLOSE, step_of
from helpers import HALVES, normal, relative


pytestmark = pytest.mark.usefixtures("standard_promotion")

LINE = jnp.linspace(0, 1, 65)
CURVES = jnp.stack([LINE, LINE**2, 0 * LINE + 1], 1)
NEAR = jnp.concatenate([jnp.ones((64, 1)), 1e-3 * normal(1, (64, 2))], 1)
ROWS, FAR = normal(2, (32, 4)), 100 + jax.random.uniform(jax.random.key(3), (32, 4))
FIRST, LAST = normal(4, (4, 8)), normal(5, (8, 1))
OFFSETS = -100.5 * FIRST.sum(0)
TURN = jax.random.orthogonal(jax.random.key(6), 4)
STIFF = 50 * (2 * jnp.eye(65) - jnp.eye(65, k=1) - jnp.eye(65, k=-1))
STIFF = STIFF.at[0, 0].set(50).at[-1, -1].set(50)
GRID = np.linspace(1, 2, 65, dtype=np.float32)

squared = lambda x: jnp.mean(x**2)


@jax.custom_vjp
def energy(u, a):
    return u @ (a @ u) / 2


energy.defvjp(lambda u, a: (energy(u, a), (u, a)), lambda r, g: ((r[1] @ r[0]) * g, None))


@jax.custom_vjp
def potential(u):
    return jnp.sum((u * GRID - 1) ** 2) / 2


potential.defvjp(lambda u: (potential(u), u), lambda u, g: (g * GRID * (u * GRID - 1),))


def of_pairs(w, x):
    """Both signs occur among these, so their sums may be small."""
    u = jnp.tanh(x @ w)
    return jnp.mean(1 / ((u[:, None] + u[None, :]) ** 2 + 1e-3))


def of_neighbours(w, x):
    u = jnp.exp(-((x @ w) ** 2))
    return squared(u[1:] - u[:-1])


def shifted(p, x):
    return squared(jnp.tanh((x @ p[0])[:, None] + p[1]))


def first_layer(p, x):
    """A bias takes the offset of the data away."""
    return squared(jax.checkpoint(lambda x: jnp.tanh(x @ p[0] + p[1]) @ p[2])(x))


def turned(p, x):
    again = jax.checkpoint(lambda x: jnp.tanh((x @ TURN - 100 * TURN.sum(0)) @ p[0]) @ p[1])
    return squared(again(x))


PROGRAMS = {
    "sums of pairs": (of_pairs, normal(7, (4,)), ROWS),
    "differences of neighbours": (of_neighbours, jnp.array([0.1, 0.1, 1.0]), CURVES),
    "near a level": (
        lambda w, x: squared(jax.nn.sigmoid(x @ w) - 0.69),
        jnp.array([0.85, 1.0, 1.0]),
        NEAR,
    ),
    "near a root": (
        lambda w, x: squared(jnp.tanh(x @ w) - 2 * jnp.tanh(x @ w) ** 2),
        jnp.array([0.56, 1.0, 1.0]),
        NEAR,
    ),
    "a shift that is broadcast": (
        shifted,
        (jnp.array([100.2, 1.0, 1.0]), -100 + normal(8, (8,))),
        NEAR,
    ),
    "a product in a rule": (
        lambda w, x: energy(x @ w, STIFF),
        jnp.array([0.1, 0.01, 3.0]),
        CURVES,
    ),
    "an array in a rule": (
        lambda w, x: potential((1 + 0.01 * (x @ w)) / GRID),
        jnp.array([1.0, 0.5, 0.3]),
        CURVES,
    ),
    "a checkpoint of data": (turned, (FIRST, LAST), FAR),
}


def gradients(loss, half, p, x):
    step = step_of(loss, half)
    return jax.jit(jax.grad(loss))(p, x), jax.jit(lambda p, x: step(p, x)[3])(p, x)


@pytest.mark.filterwarnings("ignore:.*is done in half")  # the rule multiplies in float32
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_value_that_may_cancel_is_kept(name, half):
    want, got = gradients(PROGRAMS[name][0], half, *PROGRAMS[name][1:])
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative(a, b) < CLOSE[half]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("made", [False, True])
def test_data_with_an_offset_enter_a_checkpoint_in_full(made, half):
    """Rounding these products to half leaves nothing of them. Their gradients still meet the
    offset."""
    loss = first_layer
    if made:
        loss = lambda p, x: first_layer(p, 100 + jax.nn.sigmoid(x @ TURN))
    want, got = gradients(loss, half, (FIRST, OFFSETS, LAST), ROWS if made else FAR)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative(a, b) < 4 * CLOSE[half]

"""Tests that backward rules which compare a scaled cotangent are told, with the call's line."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import assert_tells, line_here, normal, relative
from jax import lax
from jax.experimental.ode import odeint

import mpx_pde as mpx
from mpx_pde.reports._cotangents import compared_cotangents
from mpx_pde.reports._survey import Survey


pytestmark = pytest.mark.usefixtures("standard_promotion")


def with_rule(rule):
    """The identity, with a backward rule of `(x, cotangent)`."""

    @jax.custom_vjp
    def same(x):
        return x

    same.defvjp(lambda x: (x, x), lambda x, g: (rule(x, g),))
    return same


def clipped(x, g):
    return jnp.clip(g, -1e-4, 1e-4)


def by_norm(x, g):
    size = jnp.sqrt(jnp.sum(g * g))
    return jnp.where(size > 1e-3, 1e-3 * g / size, g)


def loss_of(function, wrapped=lambda f: f):
    def loss(w, x):
        return jnp.mean(wrapped(lambda h: function(jnp.tanh(h @ w)))(x) ** 2)

    return loss


def looped(f):
    return lambda x: lax.scan(lambda h, _: (f(h), None), x, length=3)[0]


GIVEN = normal(0, (8, 8)) / 4, normal(1, (16, 8))


def told_of(loss):
    return compared_cotangents(Survey(jax.make_jaxpr(jax.grad(loss))(*GIVEN)))


def gradient(loss, scaling=None, **options):
    scaling = mpx.DynamicLossScaling() if scaling is None else scaling
    policy = "params=float32,compute=bfloat16,output=float32"
    _, _, grads = eqx.filter_jit(mpx.filter_grad(loss, scaling, policy=policy, **options))(*GIVEN)
    return grads


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (clipped, {"forward": "float32"}),
        pytest.param(clipped, {}, marks=pytest.mark.slow),
        pytest.param(clipped, {"autocast": True}, marks=pytest.mark.slow),
        pytest.param(by_norm, {}, marks=pytest.mark.slow),
        pytest.param(lambda x, g: 1e-4 * jnp.sign(g), {}, marks=pytest.mark.slow),
    ],
)
def test_rules_that_compare_are_told_and_are_wrong_under_a_scale(rule, options):
    function = with_rule(rule)
    loss = lambda w, x: jnp.mean(function(jnp.tanh(x @ w)) ** 2)
    with pytest.warns(mpx.PrecisionWarning, match=r"jax\.custom_vjp") as told:
        wrong = gradient(loss, **options)
    line = f"test_cotangents.py:{line_here(-3)}"
    assert_tells(str(told[0].message), line, "loss scale", "NoOpLossScaling()")
    want = jax.grad(loss)(*GIVEN)
    assert relative(wrong, want) > 0.9
    right = gradient(loss, mpx.NoOpLossScaling(), **options)  # warnings are errors
    # 1e-4 is clipped of cotangents of about 1e-3, so few depend on their size. A sign flips where
    # rounding does.
    assert relative(right, want) < 0.05


@pytest.mark.parametrize("wrapped", [looped, jax.checkpoint, jax.vmap, jax.jit])
def test_they_are_found_in_containers(wrapped):
    (line,) = told_of(loss_of(with_rule(clipped), wrapped))
    assert "test_cotangents.py:" in line


@pytest.mark.parametrize(
    "rule",
    [
        lambda x, g: g * (jnp.abs(x) < 1),  # a straight-through estimator
        lambda x, g: jnp.maximum(g, 0),  # guided backpropagation
        lambda x, g: jnp.nan_to_num(g, posinf=jnp.inf, neginf=-jnp.inf),
        lambda x, g: -0.1 * g * jnp.clip(x, -0.5, 0.5),
        lambda x, g: jnp.where(g > 0, g, 0.1 * g),
    ],
)
@pytest.mark.parametrize("wrapped", [looped, jax.checkpoint])
def test_rules_that_scale_with_their_cotangent_are_not_told(rule, wrapped):
    assert told_of(loss_of(with_rule(rule), wrapped)) == []


def test_the_rule_of_an_adaptive_solver_is_not_told():
    def loss(w, x):
        solved = odeint(lambda u, t: jnp.tanh(u @ w), x[0], jnp.linspace(0.0, 1.0, 3))
        return jnp.mean(solved**2)

    assert told_of(loss) == []

"""Tests that rounded phases of complex numbers are told."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import assert_tells, line_here, relative

import mpx_pde as mpx


pytestmark = pytest.mark.usefixtures("standard_promotion")


def state_space(model, u):
    """A diagonal state-space model with complex poles, as a convolution with its kernel."""
    poles = -jnp.exp(model["decay"]) + 1j * model["frequency"]
    kernel = jnp.exp(poles[:, None] * model["step"] * jnp.arange(u.shape[-1]))
    kernel = jnp.real(jnp.sum(model["out"][:, None] * kernel, axis=0))
    y = jnp.sum(u * kernel[::-1], axis=-1)
    return jnp.mean((y - 1) ** 2)


LINE = line_here(-6)


def start(modes=16, length=256):
    model = {
        "decay": jnp.full(modes, -1.0),
        "frequency": jnp.pi * jnp.arange(modes, dtype=jnp.float32),
        "step": jnp.float32(0.05),
        "out": jax.random.normal(jax.random.key(0), (modes,)),
    }
    return model, jax.random.normal(jax.random.key(1), (8, length))


def gradient(model, u, **options):
    return eqx.filter_jit(mpx.filter_grad(state_space, mpx.NoOpLossScaling(), **options))(model, u)


@pytest.mark.slow
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_the_poles_of_a_state_space_model_are_told_and_the_mends_work(half):
    given = {"policy": f"params=float32,compute={half},output=float32"}
    want = jax.grad(state_space)(*start())
    with pytest.warns(mpx.PrecisionWarning, match="exponential of complex numbers") as told:
        *_, lost = gradient(*start(), **given)
    assert_tells(str(told[0].message), f"test_phases.py:{LINE}", half, "keep_full", "autocast=True")
    assert max(jax.tree.leaves(jax.tree.map(relative, lost, want))) > 0.05
    for mend in ({"autocast": True}, {"forward": "float32"}, {"keep_full": (True, False)}):
        *_, right = gradient(*start(), **given, **mend)
        # Data are rounded, once, if they are cast: 2^-8 and 2^-11, and some terms cancel.
        assert relative(right, want) < 8 * float(jnp.finfo(half).eps)


def test_phases_of_a_network_are_no_alarm():
    def loss(model, x):
        phase = jax.vmap(model)(x)
        return jnp.mean(jnp.abs(jnp.exp(1j * phase.astype(jnp.float32)) - 1) ** 2)

    model = eqx.nn.MLP(2, 1, 8, 1, key=jax.random.key(0))
    eqx.filter_jit(mpx.filter_grad(loss, mpx.DynamicLossScaling()))(model, jnp.ones((4, 2)))

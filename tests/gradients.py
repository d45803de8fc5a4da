"""Losses, a model, data and transformations for the tests of gradients."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp

import mpx_pde as mpx


TRANSFORMATIONS = [mpx.filter_grad, mpx.filter_value_and_grad, mpx.calculate_scaled_grad]
TRANSFORMATIONS += [ft.partial(mpx.filter_accumulated_value_and_grad, micro_batches=1)]


def linear_loss(w, x):
    """Returns a loss whose gradient in `w` is `x`."""
    return jnp.sum(w * x)


def mse(model, batch):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def mlp(seed=0):
    return eqx.nn.MLP(2, 1, 8, 1, activation=jnp.tanh, key=jax.random.key(seed))


def batch(n=16):
    x = jnp.linspace(-1, 1, 2 * n).reshape(n, 2)
    # Targets are far from the network's values, so that no mean of residuals cancels.
    return x, jnp.sin(3 * x[:, :1]) + 2

"""Networks and solvers on grids: convolutions in Equinox and Linen, steps of solvers, elements."""

import equinox as eqx
import exponax
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse

from ._client import Client, dense, evolved, layers, normal, squared


def waves(count, size, channels=1):
    """Draws smooth periodic fields."""
    x = 2 * jnp.pi * jnp.arange(size) / size
    modes = normal(0, (2, count, channels, 4))
    k = jnp.arange(1, 5)[:, None] * x
    return (modes[0] @ jnp.sin(k) + modes[1] @ jnp.cos(k)) / 2


# --- Rollouts ------------------------------------------------------------------------------------


class ConvNet(eqx.Module):
    layers: tuple

    def __init__(self, *widths, key):
        keys = jax.random.split(key, len(widths) - 1)
        pairs = zip(widths[:-1], widths[1:], keys, strict=True)
        wrapped = {"padding": "SAME", "padding_mode": "CIRCULAR"}
        self.layers = tuple(eqx.nn.Conv1d(m, n, 3, **wrapped, key=k) for m, n, k in pairs)

    def __call__(self, u):
        h = u
        for layer in self.layers[:-1]:
            h = jax.nn.gelu(layer(h))
        return u + 0.1 * self.layers[-1](h)


def rolled_out(model, u, steps):
    """Returns the states of each step."""

    def step(u, _):
        u = jax.vmap(model)(u)
        return u, u

    return jax.lax.scan(step, u, length=steps)[1]


def convnet():
    """Unrolls a network of convolutions, against shifted fields."""

    def loss(model, u):
        steps = rolled_out(model, u, 8)
        return squared(steps - jnp.stack([jnp.roll(u, i + 1, -1) for i in range(8)]))

    model = ConvNet(1, 16, 16, 1, key=jax.random.key(0))
    return Client(loss, model, (waves(4, 64),))


class UNet(linen.Module):
    width: int = 12

    @linen.compact
    def __call__(self, u):
        conv = lambda n, **options: linen.Conv(n, (3, 3), padding="CIRCULAR", **options)
        norm = lambda x: linen.GroupNorm(num_groups=4)(x)
        top = jax.nn.silu(norm(conv(self.width)(u)))
        low = jax.nn.silu(norm(conv(2 * self.width, strides=2)(top)))
        low = jax.nn.silu(conv(2 * self.width)(low))
        up = linen.ConvTranspose(self.width, (2, 2), strides=(2, 2))(low)
        return u + conv(1)(jnp.concatenate([top, up], -1))


def unet():
    """Unrolls a U-Net of Linen for two steps."""
    model = UNet()
    u = jnp.einsum("ix,jy->ijxy", waves(2, 16)[:, 0], waves(1, 16)[:, 0])
    u = u.reshape(2, 16, 16, 1)

    def loss(params, u):
        twice = model.apply(params, model.apply(params, u))
        return squared(twice - jnp.roll(u, 2, 1))

    return Client(loss, model.init(jax.random.key(1), u), (u,))


# --- Differentiable physics ----------------------------------------------------------------------


def corrected_solver():
    """Adds a network's correction to each of 100 steps of a spectral solver."""
    solver = exponax.stepper.Burgers(1, 2 * jnp.pi, 64, 0.01, diffusivity=0.05)

    def loss(params, u):
        def step(u):
            around = jnp.stack([jnp.roll(u[0], s) for s in (-1, 0, 1)], -1)
            return solver(u) + 0.01 * dense(params, around, jax.nn.gelu).T

        end = jax.vmap(lambda u: evolved(step, u, 100))(u)
        return squared(end - 0.5 * u)

    return Client(loss, layers(10, 3, 32, 32, 1), (waves(4, 64),))


def finite_volumes():
    """Steps of Burgers' equation with a limiter, whose viscosity is a network."""

    def loss(params, u):
        def step(u):
            ahead, behind = jnp.roll(u, -1, -1) - u, u - jnp.roll(u, 1, -1)
            smaller = jnp.minimum(jnp.abs(ahead), jnp.abs(behind))
            slope = jnp.where(ahead * behind > 0, jnp.sign(ahead) * smaller, 0.0)
            left, right = u + slope / 2, jnp.roll(u - slope / 2, -1, -1)
            speed = jnp.maximum(jnp.abs(left), jnp.abs(right))
            viscosity = jax.nn.softplus(dense(params, jnp.stack([left, right], -1)))[..., 0]
            flux = (left**2 + right**2) / 4 - (speed + 0.1 * viscosity) / 2 * (right - left)
            return u - 0.05 * (flux - jnp.roll(flux, 1, -1))

        return squared(evolved(step, u, 200) - 0.3 * u)

    return Client(loss, layers(13, 2, 16, 1), (waves(4, 64)[:, 0],))


def limited():
    """Steps of a limiter beside a network."""

    def loss(weight, u):
        def step(u):
            a, b = jnp.roll(u, -1, -1) - u, u - jnp.roll(u, 1, -1)
            slope = jnp.where(a * b > 0, jnp.sign(a) * jnp.minimum(jnp.abs(a), jnp.abs(b)), 0.0)
            return u - 0.05 * slope + 0.01 * jnp.tanh(u @ weight)

        return squared(evolved(step, u, 200) - u)

    return Client(loss, normal(0, (64, 64), 1 / 8), (normal(1, (16, 64)),))


def elements():
    """The residual of finite elements by a sparse product, for a network's values at nodes."""
    n = 32
    h = 1 / n
    off, main = np.full(n, -1 / h), np.full(n + 1, 2 / h)
    rows = np.r_[np.arange(n + 1), np.arange(n), np.arange(1, n + 1)]
    columns = np.r_[np.arange(n + 1), np.arange(1, n + 1), np.arange(n)]
    entries = jnp.asarray(np.r_[main, off, off], "float32")
    indices = jnp.asarray(np.stack([rows, columns], 1))
    x = jnp.linspace(0, 1, n + 1)

    def loss(params, entries, x):
        stiffness = sparse.BCOO((entries, indices), shape=(n + 1, n + 1))
        u = x * (1 - x) * dense(params, x[:, None])[:, 0]
        residual = stiffness @ u - h * 10 * jnp.sin(jnp.pi * x)
        return jnp.sum(residual[1:-1] ** 2) / h

    return Client(loss, layers(15, 1, 32, 32, 1), (entries, x))


CLIENTS = {
    "ConvNet rollout, Equinox": convnet,
    "U-Net rollout, Linen": unet,
    "spectral solver and network": corrected_solver,
    "finite volumes and network": finite_volumes,
    "limiter and network": limited,
    "finite elements, BCOO": elements,
}

"""Programs of many steps: recurrent cells, state spaces and integrators."""

import jax
import jax.numpy as jnp

from ._client import Client, evolved, normal, squared


WEIGHT, OTHER = normal(0, (64, 64), 1 / 8), normal(2, (64, 64), 1 / 8)
STATES = normal(1, (16, 64))


def euler(steps):
    def loss(w, u, dt):
        return squared(evolved(lambda u: u + dt * jnp.tanh(u @ w.T), u, steps) - 2 * u)

    return lambda: Client(loss, 0.3 * WEIGHT, (STATES, jnp.float32(1 / steps)))


def runge_kutta():
    def loss(params, u):
        slope, dt = lambda u: jnp.tanh(u @ params[0]) @ params[1], 0.01

        def step(u):
            a = slope(u)
            b = slope(u + dt / 2 * a)
            c = slope(u + dt / 2 * b)
            return u + dt / 6 * (a + 2 * b + 2 * c + slope(u + dt * c))

        return squared(evolved(step, u, 300) - 2 * u)

    return Client(loss, (WEIGHT, OTHER), (STATES,))


def leaky():
    """A leaky cell whose rate is trained."""

    def loss(params, u):
        weight, rate = params
        cell = lambda u, t: (u * (1 - rate) + rate * jnp.sin(u @ weight + t), None)
        return squared(jax.lax.scan(cell, u, jnp.arange(400, dtype=u.dtype) / 100)[0])

    return Client(loss, (WEIGHT, jnp.float32(0.1)), (STATES,))


def lstm():
    def loss(weight, x):
        def cell(carry, x):
            h, c = carry
            i, f, o, g = jnp.split(jnp.concatenate([x, h], -1) @ weight, 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((16, 32), x.dtype)
        return squared(jax.lax.scan(cell, (zeros, zeros), x)[1] - 0.3)

    return Client(loss, normal(12, (64, 128), 1 / 8), (normal(13, (500, 16, 32)),))


def gru():
    def loss(params, x):
        def cell(h, x):
            z, r = (jax.nn.sigmoid(jnp.concatenate([x, h], -1) @ w) for w in params[:2])
            return (1 - z) * h + z * jnp.tanh(jnp.concatenate([x, r * h], -1) @ params[2]), None

        return squared(jax.lax.scan(cell, jnp.zeros((16, 32), x.dtype), x)[0] - 0.3)

    params = tuple(normal(i, (64, 32), 1 / 8) for i in (14, 15, 16))
    return Client(loss, params, (normal(17, (500, 16, 32)),))


def state_space():
    """A diagonal state space: real products into complex modes, and a parallel scan."""

    def loss(params, x):
        decay, frequency, step, into, out, mix = params
        rate = -jnp.exp(decay) + 1j * frequency
        factor = jnp.exp(rate * jnp.exp(step))
        forced = (x @ into) * jnp.exp(step)
        combine = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])
        factors = jnp.broadcast_to(factor, forced.shape)
        states = jax.lax.associative_scan(combine, (factors, forced + 0j))[1]
        y = jax.nn.gelu(states.real @ out[0] - states.imag @ out[1]) @ mix
        return squared(y[1:] - x[:-1])

    count, width = 32, 16
    params = (
        jnp.log(jnp.full(count, 0.5)),
        jnp.pi * jnp.arange(count, dtype="float32"),
        jnp.full(count, jnp.log(0.01)).astype("float32"),
        normal(40, (width, count), 1 / 4),
        normal(41, (2, count, width), 1 / 4),
        normal(42, (width, width), 1 / 4),
    )
    return Client(loss, params, (normal(43, (256, width)),))


CLIENTS = {
    "Euler, 50 steps": euler(50),
    "Euler, 2,000 steps": euler(2000),
    "Runge-Kutta, 300 steps": runge_kutta,
    "leaky cell, 400 steps": leaky,
    "LSTM, 500 steps": lstm,
    "GRU, 500 steps": gru,
    "state space, complex": state_space,
}

"""Programs of graphs, tables, transport, attention and forces."""

import jax
import jax.numpy as jnp
from flax import nnx

from ._client import Client, dense, layers, normal, squared, uniform


def hub():
    """Messages of a graph in which every node sends to the first one."""
    nodes = 3000

    def loss(params, x, senders, receivers):
        for w, out in params:
            messages = jnp.tanh(jnp.concatenate([x[senders], x[receivers]], -1) @ w)
            received = jax.ops.segment_sum(messages, receivers, nodes)
            degree = jax.ops.segment_sum(jnp.ones_like(messages[:, 0]), receivers, nodes)
            x = x + jnp.tanh(received / jnp.maximum(degree, 1)[:, None] @ out)
        return squared(x - 1) + squared(x[0] - 0.5)

    params = tuple((normal(i, (32, 16), 1 / 4), normal(i + 1, (16, 16), 1 / 4)) for i in (50, 52))
    senders = jnp.tile(jnp.arange(nodes), 2)
    receivers = jnp.concatenate([jnp.zeros(nodes, int), jnp.roll(jnp.arange(nodes), 1)])
    return Client(loss, params, (0.5 + normal(54, (nodes, 16)), senders, receivers))


def message_passing():
    def loss(params, x, senders, receivers):
        for w in params[:-1]:
            messages = jnp.tanh(jnp.concatenate([x[senders], x[receivers]], -1) @ w)
            x = x + jnp.tanh(jax.ops.segment_sum(messages, receivers, 64) @ params[-1])
        return squared(x - 1)

    params = (*(normal(i, (64, 32), 1 / 8) for i in (18, 19)), normal(20, (32, 32), 1 / 6))
    edges = tuple(jax.random.randint(jax.random.key(i), (300,), 0, 64) for i in (10, 11))
    return Client(loss, params, (normal(21, (64, 32)), *edges))


def sinkhorn():
    """The entropic transport cost between embedded points, by iterations of logarithms."""

    def loss(params, x, y):
        a, b = dense(params, x), dense(params, y)
        cost = jnp.mean((a[:, None] - b) ** 2, -1)
        f, g = jnp.zeros_like(a[:, 0]), jnp.zeros_like(b[:, 0])
        epsilon = 0.05
        for _ in range(20):
            f = -epsilon * jax.nn.logsumexp((g - cost) / epsilon, axis=1)
            g = -epsilon * jax.nn.logsumexp((f[:, None] - cost) / epsilon, axis=0)
        return jnp.mean(f) + jnp.mean(g)

    points = normal(55, (48, 8)), normal(56, (64, 8)) + 0.5
    return Client(loss, layers(57, 8, 32, 16), points)


def lookup():
    """Properties of a material from a table, at temperatures near 300."""
    temperatures = jnp.linspace(250.0, 350.0, 41)
    values = 1 + 0.3 * jnp.sin(temperatures / 8)

    def loss(params, x, temperatures, values):
        rise = 10 * dense(params, x)[:, 0]
        conductivity = jnp.interp(300 + rise, temperatures, values)
        flux = conductivity[1:] * (rise[1:] - rise[:-1]) * 64
        return squared(flux / 100 - 1)

    x = jnp.linspace(0, 1, 65)[:, None]
    return Client(loss, layers(60, 1, 32, 32, 1), (x, temperatures, values))


class Potential(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(16, 32, rngs=rngs)
        self.second = nnx.Linear(32, 32, rngs=rngs)
        self.last = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, positions):
        difference = positions[:, None] - positions
        distance = jnp.sqrt(jnp.sum(difference**2, -1) + 1e-2)[..., None]
        centers = jnp.linspace(0.5, 3.0, 16, dtype=positions.dtype)
        features = jnp.exp(-4 * (distance - centers) ** 2)
        h = jax.nn.silu(self.second(jax.nn.silu(self.first(features))))
        return jnp.sum(self.last(h)) / 2


def forces():
    """A potential of NNX whose gradient by positions is fitted to forces."""
    graph, state = nnx.split(Potential(nnx.Rngs(0)))

    def loss(state, positions, wanted):
        potential = nnx.merge(graph, state)
        energy, slope = jax.vmap(jax.value_and_grad(lambda r: potential(r)))(positions)
        return squared(slope + wanted) + 1e-3 * squared(energy)

    positions = uniform(63, (8, 6, 3), -1.5, 1.5)
    return Client(loss, state, (positions, 0.3 * normal(64, (8, 6, 3))))


def attention():
    """Tokens attend to a field's sensors, with positions as Fourier features."""

    def loss(params, x, field, target):
        def head(wq, wk, wv):
            q, k, v = x @ wq, field @ wk, field @ wv
            return jax.nn.softmax(q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5) @ v

        h = jnp.concatenate([head(*p) for p in params[0]], -1)
        h = (h - jnp.mean(h, -1, keepdims=True)) / jnp.sqrt(jnp.var(h, -1, keepdims=True) + 1e-5)
        return squared(dense(params[1], h, jax.nn.gelu)[..., 0] - target)

    heads = tuple(tuple(normal(70 + 3 * i + j, (16, 16), 1 / 4) for j in range(3)) for i in (0, 1))
    data = normal(77, (4, 32, 16)), normal(78, (4, 24, 16)), normal(79, (4, 32))
    return Client(loss, (heads, layers(80, 32, 64, 1)), data)


CLIENTS = {
    "graph with a hub": hub,
    "message passing": message_passing,
    "Sinkhorn": sinkhorn,
    "table at 300": lookup,
    "forces of a potential, NNX": forces,
    "attention": attention,
}

"""A steady reaction–diffusion equation, −Δu + u³ = f on the square −1 ≤ x, y ≤ 1, solved by a gated
network that does not use this library.

The network has gated residual blocks on random Fourier features, as in PirateNets (Wang et al.,
arXiv 2402.00326), in plain JAX and Equinox. With f = 5π² u + u³ the solution is u = sin πx sin 2πy,
which vanishes on the boundary.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

import mpx_pde as mpx

from ._problem import draws, grid, problem


LOW, HIGH = (-1.0, -1.0), (1.0, 1.0)
WIDTH, BLOCKS = 64, 2


def exact(point):
    x, y = point
    return jnp.sin(jnp.pi * x) * jnp.sin(2 * jnp.pi * y)


class Block(eqx.Module):
    """Three layers; the first two choose between two fixed features, entry by entry."""

    layers: tuple[eqx.nn.Linear, ...]
    mix: Array  # initially 0, which makes the block the identity

    def __init__(self, key: PRNGKeyArray):
        keys = jax.random.split(key, 3)
        self.layers = tuple(eqx.nn.Linear(WIDTH, WIDTH, key=k) for k in keys)
        self.mix = jnp.array(0.0)

    def __call__(self, x, u, v):
        h = x
        for layer in self.layers[:-1]:
            gate = jnp.tanh(layer(h))
            h = gate * u + (1 - gate) * v
        return self.mix * jnp.tanh(self.layers[-1](h)) + (1 - self.mix) * x


class Gated(eqx.Module):
    """A network from a point to a number."""

    frequencies: Float[Array, "features coords"]
    gates: tuple[eqx.nn.Linear, eqx.nn.Linear]
    blocks: tuple[Block, ...]
    last: eqx.nn.Linear

    def __init__(self, key: PRNGKeyArray):
        features, one, two, last, *blocks = jax.random.split(key, 4 + BLOCKS)
        self.frequencies = 2 * jax.random.normal(features, (WIDTH // 2, 2))
        self.gates = eqx.nn.Linear(WIDTH, WIDTH, key=one), eqx.nn.Linear(WIDTH, WIDTH, key=two)
        self.blocks = tuple(map(Block, blocks))
        self.last = eqx.nn.Linear(WIDTH, "scalar", key=last)

    def __call__(self, point):
        phase = jax.lax.stop_gradient(self.frequencies) @ point
        h = jnp.concatenate([jnp.cos(phase), jnp.sin(phase)])
        u, v = (jnp.tanh(gate(h)) for gate in self.gates)
        for block in self.blocks:
            h = block(h, u, v)
        return self.last(h)


def loss(model, points, *, derivatives=None):
    given = {"coords": "xy", "outputs": "u", "scaling": derivatives}
    d = jax.vmap(mpx.laplacian(model, ["u"], **given))(points["inside"])
    wanted = jax.vmap(exact)(points["inside"])
    residual = wanted**3 - d["u"] ** 3 + d["lap_u"] + 5 * jnp.pi**2 * wanted
    ends = jax.vmap(mpx.partials(model, ["u"], **given))(points["ends"])["u"]
    return jnp.mean(residual**2) + 1000 * jnp.mean(ends**2)


sample = draws(inside=(384, LOW, HIGH), ends=(128, LOW, HIGH, (0, 1)))
AT = grid(np.linspace(-1, 1, 61), np.linspace(-1, 1, 61))
PROBLEM = problem(
    __name__,
    "Reaction–diffusion by a gated network",
    coords="xy",
    order=2,
    network=Gated,
    optimizer="adam",
    learning_rate=2e-3,
)

"""Networks of any number of coordinates with one output, written as their authors would.

Only `CoordinateMLP` uses this library.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.tree_util import Partial

import mpx_pde as mpx


def layers(key: Any, *sizes: int) -> list[tuple[jax.Array, jax.Array]]:
    """Initializes the weights and biases of dense layers."""
    pairs = list(itertools.pairwise(sizes))
    keys = jax.random.split(key, len(pairs))
    return [
        (jax.random.normal(k, (n, m)) / math.sqrt(n), jnp.zeros(m))
        for k, (n, m) in zip(keys, pairs, strict=True)
    ]


def dense(params: list, h: Any, activation: Callable = jnp.tanh) -> Any:
    for weight, bias in params[:-1]:
        h = activation(h @ weight + bias)
    weight, bias = params[-1]
    return h @ weight + bias


def siren(size: int, width: int, key: Any) -> Any:
    """Builds a SIREN (Sitzmann et al., 2020), with frequency 5 instead of 30, for the unit cube."""

    def fun(params, p):
        (weight, bias), *rest = params
        return dense(rest, jnp.sin(5 * (p @ weight + bias)), jnp.sin)[0]

    return Partial(fun, layers(key, size, width, width, width, width, 1))


def pirate(size: int, width: int, key: Any) -> Any:
    """Builds gated residual blocks on Fourier features, as PirateNets do (Wang et al., 2024)."""
    a, b, c, d, e = jax.random.split(key, 5)
    params = {
        "frequencies": jax.random.normal(a, (size, width // 2)),
        "gates": [layers(b, width, width)[0], layers(c, width, width)[0]],
        "blocks": [layers(k, width, width, width, width) for k in jax.random.split(d, 2)],
        "mix": [jnp.array(0.5), jnp.array(0.5)],
        "last": layers(e, width, 1),
    }

    def fun(params, p):
        phase = p @ params["frequencies"]
        h = jnp.concatenate([jnp.cos(phase), jnp.sin(phase)])
        u, v = (jnp.tanh(h @ weight + bias) for weight, bias in params["gates"])
        for block, mix in zip(params["blocks"], params["mix"], strict=True):
            g = h
            for i, (weight, bias) in enumerate(block):
                g = jnp.tanh(g @ weight + bias)
                if i < 2:
                    g = g * u + (1 - g) * v
            h = mix * g + (1 - mix) * h
        return dense(params["last"], h)[0]

    return Partial(fun, params)


def kan(size: int, width: int, key: Any) -> Any:
    """Builds three layers with Chebyshev polynomials on their edges (Sidharth et al., 2024)."""
    degree, width = 4, width // 4
    sizes = [size, width, width, 1]
    params = [
        jax.random.normal(k, (n, degree + 1, m)) / math.sqrt(n * (degree + 1))
        for k, n, m in zip(jax.random.split(key, 3), sizes[:-1], sizes[1:], strict=True)
    ]

    def fun(params, h):
        for weight in params:
            x = jnp.tanh(h)
            basis = [jnp.ones_like(x), x]
            for _ in range(degree - 1):
                basis.append(2 * x * basis[-1] - basis[-2])
            h = jnp.einsum("ni,nio->o", jnp.stack(basis, -1), weight)
        return h[0]

    return Partial(fun, params)


def separable(size: int, width: int, key: Any) -> Any:
    """Builds one network per coordinate and sums their products (SPINN, Cho et al., 2023)."""
    width = width // 2 if size < 10 else width // 8
    params = [layers(k, 1, width, width, width) for k in jax.random.split(key, size)]

    def fun(params, p):
        out = 1.0
        for i, body in enumerate(params):
            out = out * dense(body, p[i : i + 1])
        return jnp.sum(out)

    return Partial(fun, params)


class Normed(eqx.Module):
    """Fourier features, then linear layers, each with a norm."""

    frequencies: jax.Array
    layers: list[eqx.nn.Linear]
    norms: list[eqx.nn.LayerNorm]
    last: eqx.nn.Linear

    def __init__(self, size: int, width: int, key: Any):
        a, b, *keys = jax.random.split(key, 7)
        self.frequencies = jax.random.normal(a, (size, width // 2))
        self.layers = [eqx.nn.Linear(width, width, key=k) for k in keys]
        self.norms = [eqx.nn.LayerNorm(width) for _ in keys]
        self.last = eqx.nn.Linear(width, "scalar", key=b)

    def __call__(self, p):
        phase = p @ self.frequencies
        h = jnp.concatenate([jnp.cos(phase), jnp.sin(phase)])
        for layer, norm in zip(self.layers, self.norms, strict=True):
            h = jnp.tanh(norm(layer(h)))
        return self.last(h)


class Attention(eqx.Module):
    """Tokens computed from the point, one transformer block, and the mean of its outputs."""

    embed: eqx.nn.Linear
    attention: eqx.nn.MultiheadAttention
    norms: list[eqx.nn.LayerNorm]
    mlp: eqx.nn.MLP
    last: eqx.nn.Linear

    def __init__(self, size: int, width: int, key: Any):
        a, b, c, d = jax.random.split(key, 4)
        dim = width // 4
        self.embed = eqx.nn.Linear(size, 8 * dim, key=a)
        self.attention = eqx.nn.MultiheadAttention(4, dim, key=b)
        self.norms = [eqx.nn.LayerNorm(dim), eqx.nn.LayerNorm(dim)]
        self.mlp = eqx.nn.MLP(dim, dim, 4 * dim, 1, activation=jax.nn.gelu, key=c)
        self.last = eqx.nn.Linear(dim, "scalar", key=d)

    def __call__(self, p):
        tokens = jnp.sin(self.embed(p)).reshape(8, -1)
        h = jax.vmap(self.norms[0])(tokens)
        tokens = tokens + self.attention(h, h, h)
        tokens = tokens + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(tokens))
        return jnp.mean(jax.vmap(self.last)(tokens))


def deeponet(size: int, width: int, key: Any) -> Any:
    """Builds a branch net for a function at 32 sensors and a trunk for the point (Lu et al.,
    2021)."""
    a, b, c = jax.random.split(key, 3)
    params = {
        "branch": layers(a, 32, width, width),
        "trunk": layers(b, size, width, width, width),
        "sensors": jax.random.normal(c, (32,)),
    }

    def fun(params, p):
        branch = dense(params["branch"], params["sensors"], jax.nn.gelu)
        return jnp.vdot(branch, dense(params["trunk"], p))

    return Partial(fun, params)


NETWORKS: dict[str, Callable[[int, int, Any], Any]] = {
    "eqx.nn.MLP": lambda n, m, key: eqx.nn.MLP(n, "scalar", m, 4, jnp.tanh, key=key),
    "CoordinateMLP": lambda n, m, key: mpx.nn.CoordinateMLP(n, "scalar", m, 4, key=key),
    "SIREN": siren,
    "PirateNet": pirate,
    "KAN": kan,
    "SPINN": separable,
    "LayerNorm": Normed,
    "attention": Attention,
    "DeepONet": deeponet,
}
"""Builders by name; each takes the number of coordinates, a width and a key."""

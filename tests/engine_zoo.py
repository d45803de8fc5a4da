"""Networks of two coordinates x and y, of many architectures, as PyTrees that can be cast."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen
import jax
import jax.numpy as jnp
from jax.tree_util import Partial


WIDTH = 12


def layers(key: Any, *sizes: int) -> list:
    """Weights and biases of a chain of dense layers, in the default dtype."""
    out = []
    for k, n, m in zip(jax.random.split(key, len(sizes) - 1), sizes[:-1], sizes[1:], strict=True):
        weight, bias = jax.random.split(k)
        weight = jax.random.normal(weight, (n, m)) / math.sqrt(n)
        out.append((weight, 0.3 * jax.random.normal(bias, (m,))))
    return out


def dense(params: list, h: Any, activation: Callable = jnp.tanh) -> Any:
    for weight, bias in params[:-1]:
        h = activation(h @ weight + bias)
    weight, bias = params[-1]
    return h @ weight + bias


def chain(activation: Callable, key: Any) -> Any:
    params = layers(key, 2, WIDTH, WIDTH, WIDTH, 1)
    return Partial(lambda params, p: dense(params, p, activation)[0], params)


def pirate(key):
    """Gated residual blocks on random Fourier features."""
    a, b, c, d = jax.random.split(key, 4)
    params = {
        "frequencies": jax.random.normal(a, (2, WIDTH // 2)),
        "gates": layers(b, WIDTH, WIDTH) + layers(jax.random.fold_in(b, 1), WIDTH, WIDTH),
        "blocks": [layers(k, WIDTH, WIDTH, WIDTH, WIDTH) for k in jax.random.split(c, 2)],
        "mix": [jnp.array(0.4), jnp.array(0.7)],
        "last": layers(d, WIDTH, 1),
    }

    def fun(params, p):
        phase = p @ params["frequencies"]
        h = jnp.concatenate([jnp.cos(phase), jnp.sin(phase)])
        (uw, ub), (vw, vb) = params["gates"]
        u, v = jnp.tanh(h @ uw + ub), jnp.tanh(h @ vw + vb)
        for block, mix in zip(params["blocks"], params["mix"], strict=True):
            g = h
            for i, (w, bias) in enumerate(block):
                g = jnp.tanh(g @ w + bias)
                if i < 2:
                    g = g * u + (1 - g) * v
            h = mix * g + (1 - mix) * h
        return dense(params["last"], h)[0]

    return Partial(fun, params)


class Attention(eqx.Module):
    embed: list
    attention: Any
    norm: Any
    mlp: Any

    def __init__(self, key):
        a, b, c = jax.random.split(key, 3)
        self.embed = layers(a, 2, 4 * 8)
        self.attention = eqx.nn.MultiheadAttention(2, 8, key=b)
        self.norm = eqx.nn.LayerNorm(8)
        self.mlp = eqx.nn.MLP(8, "scalar", 16, 1, activation=jax.nn.gelu, key=c)

    def __call__(self, p):
        tokens = jnp.tanh(dense(self.embed, p)).reshape(4, 8)
        h = jax.vmap(self.norm)(tokens)
        tokens = tokens + self.attention(h, h, h)
        return jnp.mean(jax.vmap(self.mlp)(jax.vmap(self.norm)(tokens)))


class _Foreign(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, p):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            h = flax.linen.Dense(WIDTH)(p)
            h = flax.linen.LayerNorm(epsilon=1e-2)(flax.linen.swish(h))
            return flax.linen.Dense(1)(jnp.tanh(flax.linen.Dense(WIDTH)(h)))[0]


def foreign(key):
    module = _Foreign()
    params = module.init(key, jnp.zeros(2))
    params = jax.tree.map(lambda w: w.astype(jnp.zeros(()).dtype), params)
    return Partial(module.apply, params)


EQUINOX = lambda key: eqx.nn.MLP(2, "scalar", WIDTH, 3, activation=jnp.tanh, key=key)

NETWORKS: dict[str, Callable[[Any], Any]] = {
    "tanh": EQUINOX,
    "gelu": lambda key: chain(lambda x: jax.nn.gelu(x, approximate=False), key),
    "siren": lambda key: chain(lambda x: jnp.sin(2 * x), key),
    "pirate": pirate,
    "attention": Attention,
    "flax": foreign,
}

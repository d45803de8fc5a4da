"""Networks of two coordinates x and y, of many architectures, as PyTrees that can be cast."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen
import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import Partial

import mpx_pde as mpx


WIDTH = 12


def layers(key: Any, *sizes: int, scale: float = 1.0) -> list:
    """Weights and biases of a chain of dense layers, in the default dtype."""
    out = []
    for k, n, m in zip(jax.random.split(key, len(sizes) - 1), sizes[:-1], sizes[1:], strict=True):
        weight, bias = jax.random.split(k)
        out.append(
            (
                scale * jax.random.normal(weight, (n, m)) / math.sqrt(n),
                0.3 * jax.random.normal(bias, (m,)),
            )
        )
    return out


def dense(params: list, h: Any, activation: Callable = jnp.tanh) -> Any:
    for weight, bias in params[:-1]:
        h = activation(h @ weight + bias)
    weight, bias = params[-1]
    return h @ weight + bias


def chain(activation: Callable, key: Any, scale: float = 1.0) -> Any:
    params = layers(key, 2, WIDTH, WIDTH, WIDTH, 1, scale=scale)
    return Partial(lambda params, p: dense(params, p, activation)[0], params)


def siren(key):
    params = layers(key, 2, WIDTH, WIDTH, 1)

    def fun(params, p):
        (first, bias), *rest = params
        return dense(rest, jnp.sin(3 * (p @ first + bias)), jnp.sin)[0]

    return Partial(fun, params)


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


def kan_chebyshev(key):
    a, b = jax.random.split(key)
    shapes = [(2, 5, WIDTH), (WIDTH, 5, 1)]
    params = [jax.random.normal(k, s) / 4 for k, s in zip((a, b), shapes, strict=True)]

    def fun(params, h):
        for weight in params:
            x = jnp.tanh(h)
            basis = [jnp.ones_like(x), x]
            for _ in range(3):
                basis.append(2 * x * basis[-1] - basis[-2])
            h = jnp.einsum("ni,nio->o", jnp.stack(basis, -1), weight)
        return h[0]

    return Partial(fun, params)


def b_splines(x, degree=5, cells=3):
    """The basis by the recursion of Cox and de Boor on [-1, 1]."""
    knots = jnp.linspace(-1 - 2 * degree / cells, 1 + 2 * degree / cells, cells + 2 * degree + 1)
    knots = knots.astype(x.dtype)
    x = x[:, None]
    basis = ((x >= knots[:-1][None]) & (x < knots[1:][None])).astype(x.dtype)
    for k in range(1, degree + 1):
        left = (x - knots[: -k - 1][None]) / (knots[k:-1] - knots[: -k - 1])[None]
        right = (knots[k + 1 :][None] - x) / (knots[k + 1 :] - knots[1:-k])[None]
        basis = left * basis[:, :-1] + right * basis[:, 1:]
    return basis


def kan_splines(key):
    a, b = jax.random.split(key)
    params = [jax.random.normal(a, (2, 8, WIDTH)), jax.random.normal(b, (WIDTH, 1))]

    def fun(params, h):
        splines, last = params
        h = jnp.einsum("ni,nio->o", b_splines(jnp.tanh(h)), splines) + jnp.sum(jax.nn.silu(h))
        return (jnp.tanh(h) @ last)[0]

    return Partial(fun, params)


def separable(key):
    """SPINN: a body for each coordinate."""
    params = [layers(k, 1, WIDTH, WIDTH, WIDTH) for k in jax.random.split(key, 2)]

    def fun(params, p):
        x, y = (dense(q, p[i : i + 1]) for i, q in enumerate(params))
        return jnp.sum(x * y)

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


def deeponet(key):
    a, b, c = jax.random.split(key, 3)
    params = {
        "branch": layers(a, 6, WIDTH, WIDTH),
        "trunk": layers(b, 2, WIDTH, WIDTH, WIDTH),
        "sensors": jax.random.normal(c, (6,)),
    }

    def fun(params, p):
        branch = dense(params["branch"], params["sensors"], jax.nn.gelu)
        return jnp.vdot(branch, dense(params["trunk"], p))

    return Partial(fun, params)


def resnet(key):
    a, b, c = jax.random.split(key, 3)
    params = {
        "first": layers(a, 2, WIDTH),
        "blocks": [layers(k, WIDTH, WIDTH, WIDTH) for k in jax.random.split(b, 2)],
        "last": layers(c, WIDTH, 1),
    }

    def fun(params, p):
        h = dense(params["first"], p)
        for block in params["blocks"]:
            norm = h * lax.rsqrt(jnp.mean(h * h) + 1e-2)
            h = h + dense(block, norm, jax.nn.softplus)
        return dense(params["last"], h)[0]

    return Partial(fun, params)


def scanned(key):
    """Layers in a `scan`, under a checkpoint, and a second output along it."""
    a, b, c = jax.random.split(key, 3)
    params = {
        "first": layers(a, 2, WIDTH),
        "stack": jax.random.normal(b, (3, WIDTH, WIDTH)) / 3,
        "last": layers(c, WIDTH, 1),
    }

    def fun(params, p):
        @jax.checkpoint
        def body(h, weight):
            h = jnp.tanh(h @ weight) + 0.5 * h
            return h, jnp.mean(h)

        h, means = lax.scan(body, dense(params["first"], p), params["stack"])
        return dense(params["last"], h)[0] * jnp.sum(means**2)

    return Partial(fun, params)


def branches(key):
    """`cond` both ways, a `while` loop, and vmap inside."""
    params = layers(key, 2, WIDTH, WIDTH, 1)

    def fun(params, p):
        (w0, b0), (w1, b1), last = params
        h = jnp.tanh(p @ w0 + b0)
        h = lax.cond(p[0] > 0.4, lambda h: jnp.sin(h @ w1 + b1), lambda h: h * p[1], h)
        h = lax.cond(p[1] > 5.0, lambda h: h, lambda h: jnp.exp(-h), h)

        def body(carry):
            i, h = carry
            return i + 1, jnp.tanh(h) + 0.1 * h

        _, h = lax.while_loop(lambda carry: carry[0] < 3, body, (0, h))
        each = jax.vmap(lambda w, x: jnp.cos(w * x), (0, None))(w1[:, 0], h[0])
        return dense([last], h)[0] + jnp.sum(each)

    return Partial(fun, params)


def selections(key):
    params = layers(key, 2, WIDTH, 1)

    def fun(params, p):
        (w, b), last = params
        h = jnp.sin(p @ w + b)
        s = jnp.sort(h)[::-1]
        top, _ = lax.top_k(h * h, 3)
        picked = h[jnp.argmax(h)] * jnp.max(h) * jnp.min(s[:3])
        h = jnp.clip(jnp.cumsum(s) / 3, -0.6, 0.6) + jnp.maximum(h, 0.2 * h) * jnp.abs(h)
        h = jnp.where(h > 0.1, h, h**3) + jnp.roll(h, 2).at[1].set(0.5).at[3].add(h[0] ** 2)
        return dense([last], h)[0] * picked + jnp.prod(top) + jnp.linalg.norm(h)

    return Partial(fun, params)


@jax.custom_jvp
def bent(x):
    return x * jax.nn.sigmoid(x)


@bent.defjvp
def _bent_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    s = jax.nn.sigmoid(x)
    return bent(x), (s + x * s * (1 - s)) * t


@jax.custom_jvp
def mixed_up(x, y):
    return jnp.sum(x * y) * jnp.cos(x)


@mixed_up.defjvp
def _mixed_up_jvp(primals, tangents):
    return jax.jvp(lambda x, y: jnp.sum(x * y) * jnp.cos(x), primals, tangents)


def custom(key):
    params = layers(key, 2, WIDTH, WIDTH, 1)

    def fun(params, p):
        h = bent(dense(params[:2], p))
        h = mixed_up(h, jnp.tanh(h[::-1]))
        return dense(params[2:], h)[0]

    return Partial(fun, params)


def transforms(key):
    """Fourier transforms, convolutions and a linear solve."""
    a, b = jax.random.split(key)
    params = {"dense": layers(a, 2, 16, 1), "kernel": jax.random.normal(b, (3, 1, 3))}

    def fun(params, p):
        (w, bias), last = params["dense"]
        h = jnp.tanh(p @ w + bias)
        spectrum = jnp.fft.rfft(h)
        h = jnp.fft.irfft(spectrum * lax.complex(jnp.cos(p[0]), p[1]) * (1 + spectrum), n=16) + h
        c = lax.conv_general_dilated(h[None, None], params["kernel"], (1,), "SAME")
        h = h + jnp.sum(jnp.tanh(c), axis=(0, 1))
        matrix = jnp.eye(3, dtype=h.dtype) * 4 + jnp.outer(h[:3], h[3:6])
        return dense([last], h)[0] + jnp.sum(jnp.linalg.solve(matrix, h[6:9]))

    return Partial(fun, params)


def functions(key):
    """Functions of one and two variables, with and without a closed form."""
    params = layers(key, 2, WIDTH, 1)

    def fun(params, p):
        (w, b), last = params
        h = jnp.tanh(p @ w + b) / 2
        q = 1.2 + h**2
        parts = [
            jnp.log(q) + jnp.log1p(q) + jnp.expm1(h) + jnp.exp2(h) + q**1.7,
            jnp.sqrt(q) * lax.rsqrt(q + 1) + jnp.cbrt(q) + jnp.sinh(h) + jnp.log2(q),
            jnp.tan(h) + jnp.arcsin(h) + jnp.cosh(h) + jax.jvp(jnp.tanh, (q,), (h,))[1],
            jnp.arctan2(h, q) + q**h + jnp.logaddexp(h, q) + lax.erfc(h),
            jax.nn.logsumexp(h) * jax.nn.softmax(h) + q ** (-2) / (1 + h * h),
            lax.reduce_precision(h, 11, 52) + jnp.cumprod(q) / (2 + jnp.sin(h)),
        ]
        return dense([last], sum(parts[1:], parts[0]))[0]

    return Partial(fun, params)


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
OWN = lambda key: mpx.nn.CoordinateMLP(2, "scalar", WIDTH, 3, key=key)

NETWORKS: dict[str, Callable[[Any], Any]] = {
    "tanh": EQUINOX,
    "gelu exact": lambda key: chain(lambda x: jax.nn.gelu(x, approximate=False), key),
    "gelu tanh": lambda key: chain(jax.nn.gelu, key),
    "silu softplus": lambda key: chain(lambda x: jax.nn.silu(x) + jax.nn.softplus(x), key),
    "relu power": lambda key: chain(lambda x: jax.nn.relu(x) ** 5, key, 0.8),
    "siren": siren,
    "pirate": pirate,
    "kan chebyshev": kan_chebyshev,
    "kan splines": kan_splines,
    "separable": separable,
    "attention": Attention,
    "deeponet": deeponet,
    "resnet": resnet,
    "scan": scanned,
    "branches": branches,
    "selections": selections,
    "custom": custom,
    "transforms": transforms,
    "functions": functions,
    "flax": foreign,
}

"""Statements of random programs, as people write them, and the functions that they call.

In a template `{x}` is any array, `{a}` one with axes, `{b}` one of the shape of the first operand,
`{s}` a scalar, `{v}` a vector, `{u}` a vector of the same length, `{m}` a matrix; `{n}` and `{l}`
are the first and the last size of the first operand, `{i}` is an index below `{n}`, `{c}` a number,
and `{W:n,4}` a new weight of that shape.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


TABLE = np.float64(np.float32(np.random.default_rng(0).normal(size=512)))
"""What data is looked up in."""


def rounded(x):
    """Returns `x`. The judge puts a function in its place that rounds."""
    return x


# --- Functions -----------------------------------------------------------------------------------


@jax.custom_jvp
def swish(x):
    return x * jax.nn.sigmoid(x)


@swish.defjvp
def _swish_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    s = jax.nn.sigmoid(x)
    return x * s, (s + x * s * (1 - s)) * t


@jax.custom_jvp
def recurrence(v):
    """A custom rule around a scan over entries."""
    step = lambda c, x: (rounded(jnp.tanh(c + x)),) * 2
    return lax.scan(step, jnp.zeros((), v.dtype), v)[1]


@recurrence.defjvp
def _recurrence_jvp(primals, tangents):
    (v,), (t,) = primals, tangents

    def step(c, x):
        y = rounded(jnp.tanh(c[0] + x[0]))
        return (y, (1 - y * y) * (c[1] + x[1])), (y, (1 - y * y) * (c[1] + x[1]))

    zero = jnp.zeros((), v.dtype)
    return lax.scan(step, (zero, zero), (v, t))[1]


@jax.custom_jvp
def mixing(v):
    """A custom rule of a function that is not elementwise."""
    return v * jnp.sum(jnp.sin(v))


@mixing.defjvp
def _mixing_jvp(primals, tangents):
    (v,), (t,) = primals, tangents
    return mixing(v), t * jnp.sum(jnp.sin(v)) + v * jnp.sum(jnp.cos(v) * t)


@jax.custom_vjp
def huber(v):
    # sqrt(1 + v²) - 1, written so that nothing cancels inside of one statement.
    return jnp.sum(v * v / (jnp.sqrt(1 + v * v) + 1))


huber.defvjp(
    lambda v: (huber(v), v),
    lambda v, g: (g * v / jnp.sqrt(1 + v * v),),
)


def running(v):
    """A scan over entries that carries a scalar."""
    step = lambda c, x: (rounded(0.5 * c + jnp.sin(x)), c * x)
    return lax.scan(step, jnp.zeros((), v.dtype), v)[1]


def layers(v, weights):
    """Layers of one shape, in a scan."""
    return lax.scan(lambda h, w: (rounded(jnp.tanh(h @ w)), None), v, weights)[0]


def residual(v, weights):
    def block(i, h):
        return rounded(h + 0.5 * jnp.tanh(weights[i] @ h))

    return lax.fori_loop(0, weights.shape[0], block, v)


def newton(x):
    """Square roots of `1 + x**2` by Newton's steps, in a while loop."""
    a = 1 + x * x
    step = lambda c: (c[0] + 1, rounded(0.5 * (c[1] + a / c[1])))
    return lax.while_loop(lambda c: c[0] < 6, step, (0, a))[1]


def layer_norm(v):
    return (v - jnp.mean(v)) / jnp.sqrt(jnp.var(v) + 1e-5)


def rms_norm(v):
    return v * lax.rsqrt(jnp.mean(v**2) + 1e-6)


def fourier(s):
    return jnp.concatenate([f(2.0 ** jnp.arange(3) * s) for f in (jnp.sin, jnp.cos)])


def hermite(x):
    basis = [jnp.ones_like(x), x]
    for k in range(1, 3):
        basis.append(x * basis[-1] - k * basis[-2])
    return jnp.stack(basis, -1)


def positive(m):
    """A well-conditioned symmetric matrix."""
    return jnp.eye(m.shape[-1]) * 2 + jnp.tanh(m).T @ jnp.tanh(m) / m.shape[0]


def linear(v, weight, bias):
    layer = eqx.nn.Linear(weight.shape[1], weight.shape[0], key=jax.random.key(0))
    return eqx.tree_at(lambda m: (m.weight, m.bias), layer, (weight, bias))(v)


def convolution(v, kernel):
    layer = eqx.nn.Conv1d(1, 2, 3, padding=1, use_bias=False, key=jax.random.key(0))
    return eqx.tree_at(lambda m: m.weight, layer, kernel)(v[None])


def attention(tokens, q, k, v, o):
    size = tokens.shape[-1]
    layer = eqx.nn.MultiheadAttention(1, size, key=jax.random.key(0))
    where = lambda m: [x.weight for x in (m.query_proj, m.key_proj, m.value_proj, m.output_proj)]
    return eqx.tree_at(where, layer, [q, k, v, o])(tokens, tokens, tokens)


def _lines(text):
    return [line for line in text.strip().splitlines() if line]


# --- Templates -----------------------------------------------------------------------------------

ELEMENTWISE = """
jnp.tanh({x})
jnp.sin({c} * {x})
jnp.cos({x} + {c})
jnp.exp(-({x} ** 2))
jnp.exp({x} / 4)
jnp.log(1.5 + {x} ** 2)
jnp.log1p({x} * {x})
jnp.sqrt(1 + {x} ** 2)
lax.rsqrt(1 + {x} * {x})
jnp.cbrt(2 + jnp.sin({x}))
jnp.abs({x})
{x} ** 2
{x} ** 3
{x} * {x} * {x}
lax.integer_pow({x}, 5)
jnp.power(2 + jnp.sin({x}), 1.5)
(1 + {x} ** 2) ** -0.5
2.0 ** {x}
1 / (1 + {x} ** 2)
jnp.where({x} > 0, {x}, jnp.expm1({x}))
jnp.where(jnp.abs({x}) < 1e-3, 1.0, jnp.sin({x}) / {x})
jnp.maximum({x}, 0.1 * {x})
jnp.minimum({x}, {c})
jnp.clip({x}, -1, 1)
jnp.sign({x}) * {x} ** 2
{x} - jnp.floor({x})
jnp.mod({x}, 1.0)
lax.erf({x})
lax.logistic({x})
jnp.arctan({x})
jnp.arcsinh({x})
jnp.hypot({x}, 1.0)
jnp.logaddexp({x}, 0.0)
jnp.sinc({x})
jnp.square(jnp.tan({x} / 4))
jnp.cosh({x} / 2)
jax.nn.gelu({x})
jax.nn.gelu({x}, approximate=False)
jax.nn.silu({x})
jax.nn.softplus({x})
jax.nn.relu({x}) ** 2
jax.nn.relu({x})
jax.nn.elu({x})
jax.nn.leaky_relu({x})
jax.nn.mish({x})
jax.nn.sigmoid({x})
jax.nn.selu({x})
jax.scipy.special.ndtr({x})
swish({x})
newton({x})
jax.jit(lambda x: jnp.sin(x) * x)({x})
jax.checkpoint(lambda x: jnp.tanh(x) * x)({x})
{x}.astype(jnp.float32)
jnp.nan_to_num({x})
jnp.asarray({x}) * np.float32(0.5)
lax.map(jnp.sin, {a})
-{x}
{x} - {c}
{x} * {c}
{c} / (2 + jnp.sin({x}))
{x} * lax.stop_gradient({x})
"""

PAIRS = """
{x} + {b}
{x} - {b}
{x} * {b}
{x} / (1 + {b} ** 2)
jnp.where({x} > {b}, {x}, {b} ** 2)
jnp.maximum({x}, {b})
jnp.arctan2({x}, 2 + {b} ** 2)
jnp.logaddexp({x}, {b})
jnp.power(1 + {x} ** 2, jnp.tanh({b}))
lax.select({x} > 0, {x}, {b})
jnp.hypot({x}, 1 + {b})
{x} + 0.1 * {b} ** 2
"""

SCALARS_AND_ARRAYS = """
{s} * jnp.tanh({a})
{s} * {a}
{a} - {s} ** 2
{a} + {s}
(1 - {s}) * {a}
{a} / (1 + {s} ** 2)
jnp.where({s} > 0, {a}, -{a})
jnp.exp(-(({a} - {s}) ** 2))
jnp.maximum({a}, {s})
{s} ** jnp.arange(4)
{s} * jnp.arange(4)
jnp.array([{s}, {s} ** 2, 1.0])
jnp.full(4, {s}) * jnp.linspace(0.0, 1.0, 4)
jnp.concatenate([{v}, {s}[None]])
{v}.at[{i}].set({s})
{v}.at[{i}].add({s})
{v}.at[{i}].multiply({s})
lax.cond({s} > 0, jnp.sin, jnp.tanh, {a})
lax.switch(jnp.clip(jnp.floor(4 * {s}).astype(int), 0, 2), [jnp.sin, jnp.cos, jnp.tanh], {a})
lax.fori_loop(0, 3, lambda i, h: jnp.sin(h + {s}), {a})
lax.dynamic_slice({v}, (jnp.floor(3 * {s}).astype(int),), (2,))
{v}[jnp.clip(jnp.floor(3 * {s}).astype(int), 0, 1)]
lax.dynamic_update_slice({v}, {s}[None], (1,))
jax.vmap(lambda x: jnp.sin({s} * x))({v})
jax.vmap(lambda x, s: s * jnp.tanh(x), (0, None))({v}, {s})
jnp.stack([{s}, {s} * {s}, jnp.sin({s})])
fourier({s})
jnp.where(jnp.arange({n}) < 2, {s}, {v})
jnp.polyval({v}, {s} / 2)
{a} * lax.rsqrt(1 + {s} ** 2)
jnp.heaviside({s}, 0.5) * {a}
"""

REDUCTIONS = """
jnp.sum({a})
jnp.mean({a})
jnp.var({a})
jnp.std({a})
jnp.max({a})
jnp.min({a})
jnp.prod(jnp.cos({v}))
jnp.linalg.norm({v})
jnp.sqrt(jnp.mean({a} ** 2) + 1e-6)
jax.nn.logsumexp({v})
jnp.vdot({v}, {u})
{v} @ {u}
{v}[{i}]
{v}[-1]
{v}[jnp.argmax(jnp.abs({v}))]
jnp.sum(jnp.where({v} > 0, {v}, 0.0))
jnp.median({v})
jnp.trace({m})
{m}[{i}, 0]
huber({v})
jnp.linalg.det(positive({m}))
"""

VECTORS = """
jax.nn.softmax({v})
jax.nn.log_softmax({v})
jnp.cumsum({v})
jnp.cumprod(jnp.cos({v}))
lax.cummax({v})
jnp.sort({v})
{v}[jnp.argsort({v})]
jnp.take_along_axis({v}, jnp.argsort({u}), 0)
lax.top_k({v}, 2)[0]
jnp.roll({v}, 1)
{v}[::-1]
{v}[1:] - {v}[:-1]
jnp.pad({v}, 1)
{v}[:2]
jnp.diff({v})
jnp.concatenate([jnp.sin({v}), {u}])
jnp.stack([{v}, {u}]).sum(0)
layer_norm({v})
rms_norm({v})
{v} / jnp.linalg.norm({v})
{v} / (1e-3 + jnp.max(jnp.abs({v})))
eqx.nn.LayerNorm({n})({v})
eqx.nn.RMSNorm({n})({v})
recurrence({v})
running({v})
mixing({v})
lax.associative_scan(jnp.add, {v})
jnp.convolve({v}, jnp.array([0.25, 0.5, 0.25]), mode="same")
jnp.fft.rfft({v}).real
jnp.fft.irfft(jnp.fft.rfft({v}) * 0.5, {n})
{v} - jnp.mean({v})
{v} - lax.stop_gradient(jnp.max({v}))
{v}.at[0].set(0.0)
{v}.at[jnp.array([0, 1])].add({u}[:2])
jnp.interp({v}, jnp.linspace(-2.0, 2.0, 5), jnp.array([0.0, 1.0, 0.5, -1.0, 2.0]))
"""

MATRICES = """
jnp.outer({v}, {u})
{v}[:, None] * jnp.sin({u})[None]
jnp.stack([{v}, {u}])
jnp.tile({v}, (2, 1))
hermite({v})
{m}.T
{m} @ {m}.T
jnp.sum({m}, 0)
jnp.mean({m}, 1)
jnp.max({m}, 0)
{m}[0]
{m}[:, 0]
{m}.reshape(-1)
jnp.einsum("ij->j", {m})
jnp.einsum("ij,ij->i", {m}, {m})
jnp.matmul({m}, jnp.transpose({m}))
jax.nn.softmax({m}, -1)
{m} / jnp.linalg.norm({m}, axis=-1, keepdims=True)
{m} - jnp.mean({m}, 1, keepdims=True)
jax.vmap(layer_norm)({m})
jnp.cumsum({m}, 1)
jnp.sort({m}, 1)
jnp.linalg.solve(positive({m}), {m}[0])
jnp.linalg.inv(positive({m}))
jnp.linalg.cholesky(positive({m}))
jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky(positive({m})), {m}[0], lower=True)
jnp.take_along_axis({m}, jnp.argmax({m}, 1)[:, None], 1)[:, 0]
jnp.concatenate([{m}, jnp.sin({m})], 1)
eqx.nn.GroupNorm(1, {n})({m})
lax.scan(lambda c, x: (jnp.tanh(c + x), jnp.sum(c * x)), {m}[0], {m})[1]
lax.dot_general({m}, {m}, (((1,), (1,)), ((), ())))
jax.vmap(jnp.vdot)({m}, {m})
"""

WEIGHTED = """
{v} @ {W:n,8}
{v} @ {W:n,4} + {W:4}
{W:8,n} @ {v}
jnp.tanh({v} @ {W:n,8} + {W:8})
jnp.sin({v} @ {W:n,8} + {W:8})
jax.nn.gelu({v} @ {W:n,8} + {W:8})
jax.nn.softplus({v} @ {W:n,4})
{v} + jnp.tanh({v} @ {W:n,n})
jax.nn.sigmoid({v} @ {W:n,n}) * {v}
jnp.einsum("i,ij->j", {v}, {W:n,4})
jnp.einsum("i,kij->kj", {v}, {W:2,n,4})
lax.dot_general({v}, {W:n,4}, (((0,), (0,)), ((), ())))
{v} @ {W:n}
{v} * {W:n}
{v} + {W:n}
{x} * {W:1}[0]
jnp.exp({W:n} * {v} / 4)
layers({v}, {W:3,n,n})
residual({v}, {W:2,n,n})
jax.vmap(lambda k: k @ {v})({W:4,n})
lax.map(lambda k: jnp.tanh(k @ {v}), {W:3,n})
linear({v}, {W:4,n}, {W:4})
convolution({v}, {W:2,1,3})
jnp.tanh({m} @ {W:l,4} + {W:4})
{m} @ {W:l,4}
jnp.einsum("ij,jk->ik", {m}, {W:l,4})
jax.vmap(lambda x: jnp.tanh({W:4,l} @ x))({m})
attention({m}, {W:l,l}, {W:l,l}, {W:l,l}, {W:l,l})
jnp.einsum("ij,ijk->k", {m}, {W:n,l,4})
jnp.einsum("nk,nk->n", hermite({v}), {W:n,4})
jax.checkpoint(lambda h, k: jnp.tanh(h @ k))({v}, {W:n,8})
"""

# What people do to a batch before a model sees it: `a` lies near 1e4, `z` near 1e-3, `t` in [0, 1],
# half of the time within 1e-2.
PREPARATIONS = _lines("""
a - 1e4
(a - 1e4) / 2
(a - jnp.mean(a, 0)) / jnp.std(a, 0)
a / 1e4
1e3 * z
jnp.log(z)
z / jnp.linalg.norm(z)
jnp.diff(t) * 1000
jnp.diff(t * 1000) / 2
jnp.sin(2 * jnp.pi * t)
jnp.stack([jnp.sin(k * jnp.pi * t) for k in (1, 4, 32)], 1)
jnp.sin(t[:, None] * 2.0 ** jnp.arange(4))
jnp.sin(2 * jnp.pi * t[:, None] * 2.0 ** jnp.arange(6))
table[jnp.floor(t * 512).astype(int)]
table[(t * 512).astype(int)][:, None] * x
jnp.where(x > 0, x, 0.0)
jnp.where(t > 0.5, 1.0, 0.0)
x[:, :2]
jnp.cumsum(t)
jnp.exp(-t)
t - jnp.mean(t)
jnp.roll(x, 1, 0) - x
(x - 0.5) * 2
jnp.concatenate([x, 1e3 * z], 1)
""")

# Only where 64-bit types are on.
WIDE = _lines("""
((1e8 + jnp.sin({x})) - 1e8).astype(jnp.float32)
jnp.tanh({x}).astype(jnp.float32)
({x} * 1e6 - jnp.floor({x} * 1e6)).astype(jnp.float32)
""")

# Layers of a batch, with what is done to the data written where it is used.
MODELS = _lines("""
jnp.tanh((a - 1e4) @ {W:4,8} + {W:8})
jnp.tanh(jnp.diff(a, axis=0) @ {W:4,8})
jnp.tanh((jnp.diff(t)[:, None] * 1000) @ {W:1,8} + {W:8})
jnp.sin(jnp.stack([jnp.sin(k * jnp.pi * t) for k in (1, 4, 32, 128)], 1) @ {W:4,8})
jnp.tanh(jnp.sin(2 * jnp.pi * t[:, None] * 2.0 ** jnp.arange(4)) @ {W:4,8} + {W:8})
table[jnp.floor(t * 512).astype(int)][:, None] * jnp.tanh(x @ {W:4,8})
{W:512}[jnp.floor(t * 512).astype(int)]
table[jnp.floor(t * 512).astype(int)][:, None] * {m}
table[jnp.floor(t * 512).astype(int)] * {v}
jnp.where(t[:, None] > 0.5, {m}, 0.0)
jax.vmap(lambda s: jnp.tanh({W:8,2} @ jnp.stack([s, table[jnp.floor(s * 512).astype(int)]])))(t)
jax.vmap(lambda s: jnp.tanh({W:8,4} @ jnp.sin(s * 2 * jnp.pi * 2.0 ** jnp.arange(4))))(t)
jax.vmap(lambda p: jnp.tanh({W:8,4} @ (p - 1e4)))(a)
lax.map(lambda p: jnp.tanh({W:8,4} @ (p - 1e4)), a)
jnp.tanh(x @ {W:4,8} + {W:8})
jax.nn.sigmoid(x @ {W:4,8})
""")

FAMILIES = {
    "elementwise": (5, _lines(ELEMENTWISE)),
    "pairs": (2, _lines(PAIRS)),
    "scalars": (4, _lines(SCALARS_AND_ARRAYS)),
    "reductions": (2, _lines(REDUCTIONS)),
    "vectors": (3, _lines(VECTORS)),
    "matrices": (2, _lines(MATRICES)),
    "weighted": (5, _lines(WEIGHTED)),
}
"""Templates and how often they are drawn."""

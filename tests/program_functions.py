"""Functions that the statements of random programs call."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


TABLE = np.float64(np.float32(np.random.default_rng(0).normal(size=512)))
"""The table in which programs look up data."""


def rounded(x):
    """Returns `x`. The judge replaces this by a function that marks stored values."""
    return x


def own(body):
    """Gives `body` a custom rule that computes its ordinary derivative."""
    fun = jax.custom_jvp(body)
    fun.defjvp(lambda primals, tangents: jax.jvp(body, primals, tangents))
    return fun


swish = own(lambda x: x * jax.nn.sigmoid(x))
mixing = own(lambda v: v * jnp.sum(jnp.sin(v)))


@own
def recurrence(v):
    """A custom rule around a scan over entries."""
    step = lambda c, x: (rounded(jnp.tanh(c + x)),) * 2
    return lax.scan(step, jnp.zeros((), v.dtype), v)[1]


# The identity, whose derivative subtracts the mean of all entries.
centred = jax.custom_jvp(lambda v: v * 1.0)
centred.defjvp(lambda p, t: (centred(*p), t[0] - jnp.mean(t[0])))


# The identity, whose second derivative mixes entries.
tilted = jax.custom_jvp(lambda v: v * 1.0)
tilted.defjvp(lambda p, t: (tilted(*p), centred(jnp.sin(p[0])) * t[0]))


# The squared magnitude of a complex number, which is not holomorphic.
magnitude = jax.custom_jvp(lambda z: jnp.abs(z) ** 2)
magnitude.defjvp(lambda p, t: (magnitude(*p), 2 * jnp.real(jnp.conj(p[0]) * t[0])))


@jax.custom_jvp
def logaddexp(x, y):
    """A function that has the name of JAX's `logaddexp` and other values."""
    return jnp.sin(x) * y


logaddexp.defjvp(lambda p, t: (logaddexp(*p), jnp.cos(p[0]) * p[1] * t[0] + jnp.sin(p[0]) * t[1]))


@jax.custom_vjp
def huber(v):
    # sqrt(1 + v²) - 1, in a form without cancellation inside of one statement.
    return jnp.sum(v * v / (jnp.sqrt(1 + v * v) + 1))


huber.defvjp(lambda v: (huber(v), v), lambda v, g: (g * v / jnp.sqrt(1 + v * v),))


def running(v):
    """A scan over entries that carries a scalar."""
    step = lambda c, x: (rounded(0.5 * c + jnp.sin(x)), c * x)
    return lax.scan(step, jnp.zeros((), v.dtype), v)[1]


def layers(v, weights):
    """Layers of one shape in a scan."""
    return lax.scan(lambda h, w: (rounded(jnp.tanh(h @ w)), None), v, weights)[0]


def residual(v, weights):
    def block(i, h):
        return rounded(h + 0.5 * jnp.tanh(weights[i] @ h))

    return lax.fori_loop(0, weights.shape[0], block, v)


def newton(x):
    """Computes square roots of `1 + x**2` by Newton's steps, in a while loop."""
    a = 1 + x * x
    step = lambda c: (c[0] + 1, rounded(0.5 * (c[1] + a / c[1])))
    return lax.while_loop(lambda c: c[0] < 6, step, (0, a))[1]


def halved(x):
    """Halves all entries in a while loop until the largest is at most one."""
    return lax.while_loop(lambda h: jnp.max(jnp.abs(h)) > 1, lambda h: h / 2, x)


def reversed_sums(v):
    """A loop that mixes entries."""
    step = lambda c: (c[0] + 1, c[1] + c[1][::-1])
    return lax.while_loop(lambda c: c[0] < 2, step, (0, v))[1]


def stopped_layers(v, weights):
    """Layers in a scan that contain while loops, whose derivatives are not needed."""
    step = lambda h, w: (rounded(jnp.tanh(w @ h) + lax.stop_gradient(newton(h)) * h), None)
    return lax.scan(step, v, weights)[0]


def shifted_layers(v, weight):
    """Layers in a loop that compute a value of weights alone, with float32 numbers."""
    step = lambda h, _: (rounded(jnp.tanh(h @ rounded(weight + np.float32(0.5)))), None)
    return lax.scan(step, v, None, length=3)[0]


def skipping(v, weight, share):
    """Twenty steps, each of which adds a little."""
    return lax.fori_loop(0, 20, lambda i, h: rounded(h + share * jnp.tanh(h @ weight)), v)


def leaking(v, weight, rate):
    """Steps of a leaky cell, with a rate that may be trained."""
    rate = jax.nn.sigmoid(rate)
    step = lambda h, t: (rounded((1 - rate) * h + rate * jnp.sin(h @ weight + t)), None)
    return lax.scan(step, v, jnp.linspace(0.0, 1.0, 12, dtype=v.dtype))[0]


def gated(v, gate, weight):
    """Steps of a cell that chooses between its state and a candidate."""

    def step(h, _):
        z = jax.nn.sigmoid(h @ gate)
        return rounded((1 - z) * h + z * jnp.tanh(h @ weight)), jnp.sum(h)

    return lax.scan(step, v, None, length=6)[0]


def unrolled(v, weights):
    """Layers with skips, in a Python loop."""
    for weight in weights:
        v = rounded(v + jnp.tanh(v @ weight))
    return v


def calling_twice(v, weight):
    """Steps that call a layer, and again for its derivative."""

    def step(h, _):
        layer = lambda h: jnp.tanh(h @ weight)
        slope = jax.jvp(layer, (h,), (jnp.ones_like(h),))[1]
        return rounded(h + 0.1 * layer(h) * slope), None

    return lax.scan(step, v, None, length=5)[0]


def energy(v):
    """The energy of a loaded membrane."""
    n = v.shape[-1]
    stiffness = 2 * jnp.eye(n) - jnp.eye(n, k=1) - jnp.eye(n, k=-1)
    return v @ (stiffness @ v) / 2 - jnp.vdot(jnp.ones(n), v)


def thresholded(v, weight, threshold):
    """Decides in each step of a loop on what it computed."""
    step = lambda i, h: rounded(
        jnp.where(h - threshold > 0, 1.2 * h, h) + 0.1 * jnp.tanh(h @ weight)
    )
    return lax.fori_loop(0, 3, step, v)


def one_of_two(v, weight):
    """A branch that depends on the weights and contains float32 numbers."""
    double = lambda v: v @ rounded(weight * np.float32(2))
    return lax.cond(jnp.sum(weight**2) > np.float32(0.1), double, lambda v: v @ weight, v)


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
    """Returns a well-conditioned symmetric matrix."""
    return jnp.eye(m.shape[-1]) * 2 + rounded(jnp.tanh(m).T @ jnp.tanh(m)) / m.shape[0]


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

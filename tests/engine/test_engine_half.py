"""The derivative engine in half precision: accuracy, programs and gradients."""

import math
import re
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_zoo import layers
from helpers import HALVES, program_for_gpu, relative

import mpx_pde as mpx


pytestmark = pytest.mark.slow


WIDTH = 24
TERMS = ["u", "u_x", "u_xx", "u_xxx", "u_xxxx"]


class Staged(eqx.Module):
    """A network as a chain of layers: functions of their parameters and of what came before."""

    params: list
    stages: tuple = eqx.field(static=True)

    def __call__(self, p):
        h = p
        for params, stage in zip(self.params, self.stages, strict=True):
            h = stage(params, h)
        return h


def activated(activation, factor=1.0):
    return lambda w, h: activation(factor * (h @ w[0] + w[1]))


def last(w, h):
    return (h @ w[0] + w[1])[0]


def gated(w, state):
    h, u, v = state
    g = jnp.tanh(h @ w[0] + w[1])
    return g * u + (1 - g) * v, u, v


def features(w, p):
    phase = p @ w
    return jnp.concatenate([jnp.cos(phase), jnp.sin(phase)])


def gates(w, h):
    return h, jnp.tanh(h @ w["u"][0] + w["u"][1]), jnp.tanh(h @ w["v"][0] + w["v"][1])


def normed(w, h):
    return h + jnp.tanh(h * jax.lax.rsqrt(jnp.mean(h * h) + 0.1) @ w[0] + w[1])


def chebyshev(w, h):
    x = jnp.tanh(h)
    basis = [x, 2 * x * x - 1, 4 * x**3 - 3 * x]
    return jnp.concatenate(basis) @ w[0] + w[1]


def make(name):
    key = jax.random.key(0)
    dense = layers(key, 2, WIDTH, WIDTH, WIDTH, 1)
    if name == "chebyshev":
        return Staged(
            layers(key, 6, WIDTH)[:1] + layers(key, 3 * WIDTH, 1), (chebyshev, chebyshev1)
        )
    if name == "gated":
        u, v = layers(jax.random.key(2), WIDTH, WIDTH, WIDTH)
        frequencies = jax.random.normal(key, (2, WIDTH // 2))
        final = lambda w, state: last(w, state[0])
        return Staged(
            [frequencies, {"u": u, "v": v}, *dense[1:]], (features, gates, gated, gated, final)
        )
    act = {"tanh": jnp.tanh, "gelu": jax.nn.gelu, "siren": jnp.sin, "resnet": jnp.tanh}[name]
    hidden = normed if name == "resnet" else activated(act)
    factor = 3.0 if name == "siren" else 1.0
    return Staged(dense, (activated(act, factor), hidden, hidden, last))


def chebyshev1(w, h):
    return chebyshev(w, h)[0]


NAMES = ("gated", "resnet", "chebyshev")


def points(n=256):
    return jax.random.uniform(jax.random.key(3), (n, 2))


def rounded_once_a_layer(model, p, kind, order=4):
    """The derivatives in x in float64, with what each layer hands on rounded to a half type (0, 1),
    or as it is (2).

    A layer maps curves: `f(h + h' t + h'' t²/2 + …)`, differentiated at zero.
    """
    streams = [p, jnp.eye(2, dtype=p.dtype)[0], *[jnp.zeros_like(p)] * (order - 1)]
    for i, (params, stage) in enumerate(zip(model.params, model.stages, strict=True)):

        def curve(t, streams=streams, params=params, stage=stage):
            polynomial = lambda *h: sum(x * t**k / math.factorial(k) for k, x in enumerate(h))
            return [stage(params, jax.tree.map(polynomial, *streams))]

        for _ in range(order):
            curve = lambda t, f=curve: (lambda v, d: [*v, d[-1]])(
                *jax.jvp(f, (t,), (jnp.ones(()),))
            )
        streams = curve(jnp.zeros(()))
        if i < len(model.stages) - 1:
            streams = jax.tree.map(
                lambda x: jnp.stack([*(x.astype(h).astype(x.dtype) for h in HALVES), x])[kind],
                streams,
            )
    return jnp.stack(streams)


@pytest.mark.parametrize("name", NAMES)
def test_the_error_is_that_of_storing_streams_in_half(name):
    model = make(name)
    fun = lambda m, x: jax.vmap(mpx.partials(m, TERMS, coords="xy", outputs="u"))(x)
    got = {h: eqx.filter_jit(fun)(mpx.cast_tree(model, h), points()) for h in HALVES}
    x = np.asarray(points(), np.float64)
    wide = lambda h: jax.tree.map(
        lambda w: np.asarray(w.astype(h).astype(jnp.float32), np.float64), model.params
    )
    with jax.enable_x64(True):

        @jax.jit
        @partial(jax.vmap, in_axes=(0, 0, None))
        def oracle(params, kind, x):
            staged = Staged(params, model.stages)
            return jax.vmap(lambda p: rounded_once_a_layer(staged, p, kind))(x)

        # Exact and rounded, for both types.
        both = [wide(h) for h in (*HALVES, *HALVES)]
        stacked = jax.tree.map(lambda *w: jnp.stack(w), *both)
        found = np.asarray(oracle(stacked, jnp.array([2, 2, 0, 1]), jnp.asarray(x)))
    for half, exact, rounded in zip(HALVES, found[:2], found[2:], strict=True):
        for k, term in enumerate(TERMS):
            error = relative(got[half][term], exact[:, k])
            # The engine rounds what a product takes and what it returns: the square root of two.
            assert error < 2 * relative(rounded[:, k], exact[:, k]), (half, term)


def loss(model, x, scaling=None):
    terms = mpx.partials(model, ["u", "u_x", "u_yyy"], coords="xy", outputs="u", scaling=scaling)
    lap = mpx.linear_operator(model, {"b": {"xx": 1.0, "xxxx": 0.1}}, coords="xy", outputs="u")
    d = {**jax.vmap(terms)(x), **jax.vmap(lap)(x)}
    return jnp.mean((d["u_yyy"] + d["u"] * d["u_x"] - d["b_u"]) ** 2)


def test_products_and_gradients_of_a_step():
    """Hidden products are half × half, forward and backward, of layers that know nothing of it."""
    model = make("gated")
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    step = jax.jit(jax.grad(lambda a, x: loss(eqx.combine(a, static), x)))
    half = mpx.cast_to_float16(arrays)
    text = program_for_gpu(step, half, points())
    hidden = 0
    for line in text.splitlines():
        if "stablehlo.dot_general" not in line:
            continue
        shapes = re.findall(r"tensor<([0-9x]*)x(f16|f32)>", line.rsplit(" : ", 1)[1])
        if all(dtype == "f16" for _, dtype in shapes[:2]):
            hidden += 1
        else:
            # The two coordinates meet the first layer in float32.
            assert any("2" in shape.split("x") for shape, _ in shapes), line
    assert hidden
    got, want = step(half, points()), step(arrays, points())
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if a.size > 1:
            # Roundings of 2^-11 in some ten layers and streams, of a sum that partly cancels.
            assert relative(a, b) < 0.03


def test_high_orders_keep_their_digits_at_small_scales():
    """u_xxyy carries the fourth power of a coordinate's scale, here 2^-16."""
    model = make("siren")
    terms = ["u_xx", "u_xxy", "u_xxyy"]

    @eqx.filter_jit
    def run(model, scaling):
        return jax.vmap(mpx.partials(model, terms, coords="xy", outputs="u", scaling=scaling))(
            points()
        )

    scaling = mpx.DerivativeScaling.per_direction("xy", init_scale=2.0**-4)
    half = mpx.cast_to_float16(model)
    got, unscaled, want = run(half, scaling), run(half, None), run(model, None)
    for term in terms:
        # Stored at 2^-10 (and at 2^-16 with ten times the error): few entries lose a digit.
        assert relative(got[term], want[term]) < 2 * relative(unscaled[term], want[term])


def test_raised_scales_stay_within_the_margin():
    """No stream is stored nearer to overflow than the update rule leaves room for."""
    scaling = mpx.DerivativeScaling.per_direction("xy", init_scale=2.0**-4, margin=2)
    terms = mpx.partials(make("tanh"), TERMS, coords="xy", outputs="u", scaling=scaling)
    # One coordinate's powers 1 to 4; the margin bounds what is raised.
    found = sorted(
        (len(k), int(np.log2(s))) for k, (s, _) in terms._scales(jnp.dtype("float16")).items()
    )
    assert found == [(1, -4), (2, -8), (3, -10), (4, -14)]

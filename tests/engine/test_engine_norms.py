"""Norms, softmax and what else sums all streams of a value: in one pass, and right."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import in_float64, program_for_gpu, relative
from jax.flatten_util import ravel_pytree

import mpx_pde as mpx
from mpx_pde.engine._together import beside, spread_together, sum_together


WIDTH = 8
NAMES = ("u", "u_x", "u_xx", "u_xy", "u_yy")


def written_out(x):
    mean = jnp.mean(x)
    return (x - mean) / jnp.sqrt(jnp.mean((x - mean) ** 2) + 1e-5)


def softmax(x):
    tokens = x.reshape(2, -1)
    return (jax.nn.softmax(tokens, -1) * tokens).reshape(-1)


def other_mean(x):
    """No variance: the mean is that of other axes, or divided by another number."""
    table = x.reshape(2, -1)
    across = jnp.sum((table - jnp.mean(table, 0, keepdims=True)) ** 2, 1, keepdims=True)
    return (table / (1 + across + jnp.sum((x - jnp.sum(x) / 3) ** 2))).reshape(-1)


def both_axes(x):
    table = x.reshape(2, 2, -1)
    return ((table - table.mean()) / (0.1 + table.var((0, 2), keepdims=True))).reshape(-1)


def large_mean(x):
    return written_out(1e3 + x)


NORMS = {
    "LayerNorm": eqx.nn.LayerNorm(WIDTH),
    "RMSNorm": eqx.nn.RMSNorm(WIDTH),
    "GroupNorm": eqx.nn.GroupNorm(2, WIDTH),
    "no weights": eqx.nn.LayerNorm(WIDTH, use_weight=False, use_bias=False),
    "written out": written_out,
    "softmax": softmax,
    "logsumexp": lambda x: x - jax.nn.logsumexp(x),
    "other mean": other_mean,
    "several axes": both_axes,
    "large mean": large_mean,
}


class Net(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.Module | None
    inner: eqx.nn.Linear
    last: eqx.nn.Linear
    fixed: object = eqx.field(static=True)

    def __init__(self, norm):
        a, b, c = jax.random.split(jax.random.key(0), 3)
        is_layer = isinstance(norm, eqx.Module)
        self.norm, self.fixed = (norm, None) if is_layer else (None, norm)
        self.first = eqx.nn.Linear(2, WIDTH, key=a)
        self.inner = eqx.nn.Linear(WIDTH, WIDTH, key=b)
        self.last = eqx.nn.Linear(WIDTH, "scalar", key=c)

    def __call__(self, p):
        norm: Any = self.fixed or self.norm
        h = norm(jnp.tanh(self.first(p)))
        return self.last(jnp.tanh(norm(self.inner(h))))


def points(dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(0).random((4, 2)), dtype)


def squares(d):
    return jnp.mean((d["u"] + d["u_x"] + d["u_xx"] - 2 * d["u_xy"] + d["u_yy"]) ** 2)


def by_engine(net, p, **options):
    terms = mpx.partials(net, NAMES, coords="xy", outputs="u", **options)
    return squares(jax.vmap(terms)(p))


def by_jax(net, p):
    def at(p):
        (x, _), h = jax.grad(net)(p), jax.hessian(net)(p)
        return {"u": net(p), "u_x": x, "u_xx": h[0, 0], "u_xy": h[0, 1], "u_yy": h[1, 1]}

    return squares(jax.vmap(at)(p))


def flat(loss, net, p):
    """The loss of all parameters as one vector."""
    params, static = eqx.partition(net, eqx.is_inexact_array)
    vector, unravel = ravel_pytree(params)
    return vector, lambda v: loss(eqx.combine(unravel(v), static), p)


QUICK = ("LayerNorm", "several axes", "large mean")
ALL = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NORMS]


@pytest.mark.parametrize("name", ALL)
def test_values_and_gradients_are_those_of_jax(name):
    with jax.enable_x64(True):
        net, p = in_float64(Net(NORMS[name])), points(jnp.float64)
        vector, ours = flat(by_engine, net, p)
        _, theirs = flat(by_jax, net, p)
        (value, gradient), (want, want_gradient) = (
            jax.jit(jax.value_and_grad(f))(vector) for f in (ours, theirs)
        )
        tolerance = 1e-6 if name == "large mean" else 1e-11
        np.testing.assert_allclose(value, want, rtol=tolerance)
        assert relative(gradient, want_gradient) < tolerance


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LayerNorm", "softmax"])
def test_derivatives_nest(name):
    with jax.enable_x64(True):
        net, p = in_float64(Net(NORMS[name])), points(jnp.float64)
        vector, ours = flat(by_engine, net, p)
        _, theirs = flat(by_jax, net, p)
        direction = jnp.cos(jnp.arange(vector.size))

        def twice(f):
            over = lambda v: jax.jvp(jax.grad(f), (v,), (direction,))[1]
            back = jax.grad(lambda v: jnp.vdot(jax.grad(f)(v), direction))
            return jax.jit(lambda v: (over(v), back(v), jax.jvp(f, (v,), (direction,))[1]))(vector)

        for got, want in zip(twice(ours), twice(theirs), strict=True):
            assert relative(got, want) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("forward", ["half", "bfloat16_x3"])
@pytest.mark.parametrize("name", ["LayerNorm", "softmax"])
def test_in_half_precision_it_is_near(name, forward):
    net, p = Net(NORMS[name]), points()
    with jax.enable_x64(True):
        want = eqx.filter_grad(by_jax)(in_float64(net), points(jnp.float64))
        want = [np.asarray(x) for x in jax.tree.leaves(want)]
    gradient = mpx.filter_grad(
        by_engine,
        mpx.NoOpLossScaling(),
        policy="params=float32,compute=bfloat16,output=float32",
        keep_full=(False, True),
        forward=forward,
    )
    _, _, grads = jax.jit(lambda p: gradient(net, p))(p)
    got = np.concatenate([np.ravel(x) for x in jax.tree.leaves(grads)])
    error = relative(got, np.concatenate([np.ravel(x) for x in want]))
    assert error < (0.2 if forward == "half" else 0.03)


def test_a_variance_beside_a_large_mean_keeps_its_digits():
    x = 1e3 + jnp.cos(jnp.arange(64.0))
    fun = lambda p: jnp.var(x + p[0] * jnp.sin(x))
    got = jax.jit(mpx.partials(fun, ["u", "u_x", "u_xx"], coords="x", outputs="u"))(jnp.zeros(1))
    centred = np.asarray(x, np.float64) - np.mean(np.asarray(x, np.float64))
    wave = np.sin(np.asarray(x, np.float64))
    want = [np.mean(centred**2), 2 * np.mean(centred * wave), 2 * np.var(wave)]
    np.testing.assert_allclose([got[k] for k in ("u", "u_x", "u_xx")], want, rtol=1e-4)


@pytest.mark.parametrize("number", [123.4, 1e4])
def test_equal_entries_have_no_variance(number):
    """A sum of squares less the square of the sum may come out below zero, and its root as NaN."""
    fun = lambda p: jnp.std(jnp.full(7, 1.1 * number) * (1 + p[0]))
    got = mpx.partials(fun, ["u", "u_x"], coords="x", outputs="u")(jnp.full(1, 0.3))
    assert 0 <= got["u"] <= 1e-6 * number


WEIGHT = jnp.arange(1.0, 6.0)


def by_hand(a, b):
    s, t = sum_together([a, b], (0,))
    s, t = spread_together([s, t * s], (4, 5), (1,))
    weight, row, two = beside([WEIGHT, a[0], jnp.float32(2)], s)
    return s * weight * row + t * two


def by_numpy(a, b):
    s, t = (jnp.broadcast_to(x, (4, 5)) for x in (a.sum(0), b.sum(0) * a.sum(0)))
    return s * WEIGHT[None] * a[0][None] + 2 * t


@pytest.mark.parametrize("dims", [(0, 0), (0, None), (None, 0), (2, 1)])
def test_sums_and_spreads_in_every_transformation(dims):
    arrays = [jnp.asarray(np.random.default_rng(i).random((3, 4, 5)), "float32") for i in (0, 1)]
    pairs = zip(arrays, dims, strict=True)
    args = [x[0] if d is None else jnp.moveaxis(x, 0, d) for x, d in pairs]

    def told(fun):
        total = lambda *z: jnp.sum(jnp.sin(jax.vmap(fun, in_axes=dims)(*z)))
        gradient = jax.grad(total, (0, 1))
        return total(*args), gradient(*args), jax.jvp(gradient, args, args)

    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3)
    jax.tree.map(close, told(by_hand), told(by_numpy))


def test_on_a_gpu_the_sums_of_all_streams_are_one_reduction():
    net = Net(NORMS["LayerNorm"])
    text = program_for_gpu(jax.jit(lambda p: by_engine(net, p)), points())
    reductions = [line for line in text.splitlines() if "stablehlo.reduce(" in line]
    # Value and five derivatives, of the entries and of their squares.
    assert max(line.count(" init:") for line in reductions) == 12

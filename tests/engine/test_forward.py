"""Tests losses with full-precision values whose derivatives are taken in half."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forward_passes import SCALING, TOLERANCES, assert_nearly, evaluated
from helpers import HALVES, in_float64, normal, policy, relative, tree_equal_bits

import mpx_pde as mpx
from mpx_pde import nn


# Foreign networks are written for JAX's default promotion.
pytestmark = pytest.mark.usefixtures("standard_promotion")

KEY = jax.random.key(0)


class Gated(eqx.Module):
    """A network that does not use this library: gates, a residual, and layers that share an operand
    of products."""

    gates: list
    layers: list
    last: eqx.nn.Linear

    def __init__(self, width, key):
        keys = jax.random.split(key, 6)
        self.gates = [eqx.nn.Linear(2, width, key=k) for k in keys[:2]]
        self.layers = [eqx.nn.Linear(n, width, key=k) for n, k in ((2, keys[2]), (width, keys[3]))]
        self.last = eqx.nn.Linear(width, "scalar", key=keys[4])

    def __call__(self, x):
        u, v = (jnp.tanh(gate(x)) for gate in self.gates)
        h = x
        for layer in self.layers:
            z = jnp.tanh(layer(h))
            h = (1 - z) * u + z * v
        return self.last(h)


def pde(model, points):
    terms = mpx.partials(model, ["u", "u_x", "u_xx", "u_yy"], coords="xy", outputs="u")
    d = jax.vmap(terms)(points)
    inside = d["u_xx"] + d["u_yy"] + d["u"] * d["u_x"] - 1
    return jnp.mean(inside**2) + jnp.mean(jax.vmap(model)(points) ** 2)


regression = lambda model, x: jnp.mean((jax.vmap(model)(x) - jnp.sin(x[:, :1])) ** 2)
images = lambda model, x: jnp.mean((jax.vmap(model)(x) - jnp.roll(x, 1, 1)) ** 2)


def attending(model, x):
    sequences = x.reshape(-1, 4, 8)
    return jnp.mean(jax.vmap(lambda s: model(s, jnp.sin(s), s))(sequences) ** 2)


def convolutions(key):
    conv = partial(eqx.nn.Conv2d, kernel_size=3, padding=1)
    first, second = jax.random.split(key)
    layers = [conv(1, 4, key=first), eqx.nn.Lambda(jax.nn.gelu), conv(4, 1, key=second)]
    return eqx.nn.Sequential(layers)


POINTS = jax.random.uniform(jax.random.key(1), (32, 2), minval=-1.0)
ROWS = jax.random.normal(jax.random.key(2), (32, 8))
FIELDS = jax.random.normal(jax.random.key(3), (2, 1, 8, 8))
CASES = {
    "foreign network": (pde, Gated(16, KEY), POINTS),
    "regression": (regression, eqx.nn.MLP(8, 1, 16, 2, key=KEY), ROWS),
    "attention": (attending, eqx.nn.MultiheadAttention(2, 8, key=KEY), ROWS),
    "convolutions": (images, convolutions(KEY), FIELDS),
    "neural operator": (images, nn.FNO(1, 1, 8, 1, (4, 4), key=KEY), FIELDS),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "half"), list(zip(CASES, 3 * HALVES, strict=False)))
def test_the_value_is_that_of_float32_and_the_gradient_nearly(name, half):
    loss, model, batch = CASES[name]
    assert_nearly(loss, model, batch, half)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["foreign network", "attention"])
def test_products_of_the_backward_pass_are_half(name):
    loss, model, batch = CASES[name]
    options = {"policy": policy("bfloat16"), "forward": "float32"}
    step = mpx.filter_grad(loss, mpx.StaticLossScaling(1.0), **options)
    report = mpx.precision_report(step)(model, batch)
    forward = mpx.precision_report(loss)(model, batch)
    full = sum(row.flops for row in report.rows if row.dtype == "float32")
    # The products of the forward pass, and those of the layer that meets the point (two of its
    # sixteen columns wide), which the backward pass also takes in float32.
    assert forward.flops <= full < 1.25 * forward.flops
    # There is no second forward pass, unlike with two evaluations.
    plain = mpx.precision_report(mpx.filter_grad(loss, None, use_mixed_precision=False))
    work = plain(model, batch).flops
    # All products of the backward pass. There are fewer if data have no cotangent.
    assert report.flops - full > 0.97 * (work - forward.flops)
    assert name == "attention" or report.flops - full > 1.5 * forward.flops
    # A product with the point may be a sum, which is not counted. A second pass adds a third.
    assert abs(report.flops / work - 1) < 0.05


def kept_of(loss, model, batch, size):
    """Returns the dtypes of arrays of a size that are kept for the backward pass."""
    forward = mpx.precision._forward.Forward("float32", "bfloat16")
    fun = mpx.engine.InForward(lambda model, batch: (loss(model, batch), ()), forward)
    pull = lambda model, batch: mpx.engine.linearized(fun, forward, model, batch)[1]
    leaves = jax.tree.leaves(eqx.filter_eval_shape(pull, model, batch))
    return [x.dtype.name for x in leaves if x.size == size and x.ndim > 1]


@pytest.mark.slow
def test_of_a_product_that_is_added_the_sum_alone_is_kept():
    width, keys = 6, jax.random.split(KEY, 4)
    first, last = eqx.nn.Linear(2, width, key=keys[0]), eqx.nn.Linear(width, "scalar", key=keys[1])
    blocks = [eqx.nn.MLP(width, width, 20, 1, jnp.tanh, key=k) for k in keys[2:]]

    def network(model, p):
        first, *blocks, last = model
        x = jnp.tanh(first(p))
        for block in blocks:
            x = x + block(x)
        return last(jnp.tanh(x))

    def loss(model, points):
        terms = mpx.partials(partial(network, model), ["u_xx", "u_yy"], coords="xy", outputs="u")
        return jnp.mean(sum(jax.vmap(terms)(points).values()) ** 2)

    # The value, two first and two second derivatives of both sums, and the value behind the first
    # layer. Neither the product of a block nor the array that it is added to is kept.
    model = first, *blocks, last
    assert len(kept_of(loss, model, POINTS, width * len(POINTS))) == 2 * 5 + 1
    assert_nearly(loss, model, POINTS, "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("saved", [None, jax.checkpoint_policies.dots_saveable])
def test_of_a_checkpoint_is_kept_what_enters_it_in_half(saved):
    """Of what is inside, decisions are kept, and what a policy says."""
    width, depth = 6, 3
    layers = [eqx.nn.MLP(width, width, 20, 1, key=k) for k in jax.random.split(KEY, depth)]
    model = eqx.nn.Linear(8, width, key=KEY), layers

    def loss(model, rows):
        first, layers = model
        x = jnp.tanh(jax.vmap(first)(rows))
        for layer in layers:
            x = x + jax.checkpoint(jax.vmap(layer), policy=saved)(x)
        return jnp.mean(x**2)

    assert_nearly(loss, model, ROWS, "bfloat16")
    of_rows = lambda size: kept_of(loss, model, ROWS, size * len(ROWS))
    assert sorted(of_rows(20)) == (depth * ["bfloat16"] if saved else []) + depth * ["bool"]
    # The result of the first layer, and the sums that enter each checkpoint and the loss.
    assert of_rows(width) == (1 + depth) * ["bfloat16"]


def test_who_takes_autocast_may_climb_to_a_forward_pass_in_full():
    loss, model, batch = CASES["regression"]
    step = partial(mpx.filter_grad, loss, SCALING, forward="float32")
    got, want = (eqx.filter_jit(f)(model, batch) for f in (step(autocast=True), step()))
    assert tree_equal_bits(got, want)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "compute"),
    # The mode `forward64` of the random programs draws others.
    [("foreign network", "float32"), ("convolutions", "bfloat16"), ("neural operator", "float16")],
)
def test_float64_forward(name, compute):
    loss, model, batch = CASES[name]
    with jax.enable_x64(True):
        args = in_float64((model, batch))
        want, want_grads = eqx.filter_jit(eqx.filter_value_and_grad(loss))(*args)
        step = mpx.filter_value_and_grad(loss, SCALING, policy=policy(compute), forward="float64")
        for given, wide in ((args, "float64"), ((model, batch), "float32")):
            value, grads = evaluated(loss, *given, compute, "float64")
            assert value.dtype == jnp.float64
            np.testing.assert_allclose(value, want, rtol=1e-14)  # sums in other orders
            assert {x.dtype.name for x in jax.tree.leaves(grads)} == {wide}
            # A few roundings of 2^-24 in float32.
            assert relative(grads, want_grads) < {"float32": 2.0**-21, **TOLERANCES}[compute]
        report = mpx.precision_report(step)(*args)
        flops = lambda dtype: report.by_dtype()[dtype][1]
        total, forward = report.flops, flops("float64")
        plain = mpx.precision_report(mpx.filter_grad(loss, None, use_mixed_precision=False))
        work = plain(*args).flops
        # All products of plain JAX, except the gradient of the point, which is a sum. All products
        # of the backward pass are in half, except those of the layer that meets the point.
        assert total > 0.96 * work > forward > 0
        assert flops(compute) > 0.94 * (work - forward)
        if name in ("foreign network", "neural operator"):
            # Two products of the backward pass for each of the forward pass, but one of the last
            # layer: it has one output, so nothing is summed. Data, which are much of the other
            # networks, have no cotangent.
            # The checkpoint of an operator's first block multiplies data again in full.
            once = mpx.precision_report(loss)(*args).flops if name == "neural operator" else forward
            assert total > 2.65 * once
            assert flops(compute) > 1.65 * once


@pytest.mark.slow
def test_aux_and_full_layers_and_integers_pass():
    head = mpx.FullPrecision(eqx.nn.Linear(8, 1, key=KEY))
    layers = [eqx.nn.Embedding(5, 8, key=KEY), eqx.nn.Lambda(jnp.tanh), head]
    model = eqx.nn.Sequential(layers)

    def loss(model, i):
        out = jax.vmap(model)(i)
        return jnp.mean(out**2), (out, i)

    step = mpx.filter_value_and_grad(loss, mpx.StaticLossScaling(1.0), True, forward="float32")
    plain = eqx.filter_value_and_grad(loss, has_aux=True)
    (value, (out, i)), _, _, grads = step(model, jnp.arange(5))
    (want, (want_out, _)), want_grads = plain(model, jnp.arange(5))
    np.testing.assert_allclose(value, want, rtol=2.0**-22)
    np.testing.assert_allclose(out, want_out, rtol=2.0**-20)
    np.testing.assert_array_equal(i, jnp.arange(5))
    assert relative(grads, want_grads) < TOLERANCES["float16"]


def test_custom_derivatives_are_kept():
    straight_through = jax.custom_vjp(lambda x: jnp.round(x))
    straight_through.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g,))
    loss = lambda model, x: jnp.mean(straight_through(3 * jax.vmap(model)(x)) ** 2)
    model = eqx.nn.Linear(8, 4, key=KEY)
    _, grads = evaluated(loss, model, ROWS, "float16")
    assert relative(grads, eqx.filter_grad(loss)(model, ROWS)) < TOLERANCES["float16"]


def test_a_backward_rule_is_evaluated_for_each_call():
    """A rule that clips cotangents returns less for a sum of two than for each."""
    clipped = jax.custom_vjp(lambda x: jnp.sin(x))
    clipped.defvjp(lambda x: (jnp.sin(x), None), lambda _, g: (jnp.clip(g, -1e-3, 1e-3),))
    network = jax.jit(lambda model, x: clipped(jax.vmap(model)(x)))  # both calls are traced once
    loss = lambda model, x: jnp.sum(network(model, x) + jnp.cos(network(model, x)))
    model = eqx.nn.Linear(8, 4, key=KEY)
    run = lambda loss: evaluated(loss, model, ROWS, "float16", scaling=mpx.NoOpLossScaling())
    for either in loss, lambda model, x: jax.lax.cond(x[0, 0] < 9, loss, lambda *_: 0.0, model, x):
        assert relative(run(either)[1], eqx.filter_grad(loss)(model, ROWS)) < 1e-3


def test_a_custom_rule_that_closes_over_arrays_of_the_loss_is_told_the_mend():
    def loss(model, x):
        @jax.custom_jvp
        def scaled(y):
            return y * model.bias

        scaled.defjvp(lambda primals, tangents: (scaled(*primals), tangents[0] * model.bias))
        return jnp.mean(scaled(jax.vmap(model)(x)) ** 2)

    model = eqx.nn.Linear(8, 8, key=KEY)
    gradient = mpx.filter_value_and_grad(loss, mpx.NoOpLossScaling(), forward="float32")
    with pytest.raises(jax.errors.UnexpectedTracerError) as raised:
        gradient(model, ROWS)
    assert any("`filter_value_and_grad` traces" in note for note in raised.value.__notes__)
    with pytest.raises(jax.errors.UnexpectedTracerError) as raised:
        eqx.filter_grad(mpx.autocast(loss, "bfloat16"))(model, ROWS)
    assert any("Pass such arrays to it as arguments" in n for n in raised.value.__notes__)


sine = jax.custom_vjp(lambda x: jnp.sin(x))
sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, cotangent: (cotangent * jnp.cos(x),))


@pytest.mark.parametrize(
    "made",
    [
        lambda a, b: a @ b,
        lambda a, b: a / jnp.linalg.norm(b),
        lambda a, b: sine(a) - jnp.exp(b),
        pytest.param(
            lambda a, b: a * (jnp.argsort(b)[0] @ jnp.argsort(b)[1]),
            marks=pytest.mark.filterwarnings("ignore:.*is done in half"),
        ),
        lambda a, b: jnp.real(jax.lax.complex(a, b) @ jax.lax.complex(b, a)),
    ],
)
def test_what_is_made_of_parameters_alone_is_in_full(made):
    network = lambda params, x: sine(sine(x @ made(*params)) @ params[1])
    loss = lambda params, x: jnp.mean(network(params, x) ** 2) + jnp.sum(params[0] ** 2)
    params = normal(0, (4, 4)), normal(1, (4, 4))
    with jax.enable_x64(True):
        value, grads = evaluated(loss, params, normal(2, (8, 4)), "float16", "float64")
        args = in_float64((params, normal(2, (8, 4))))
        want, want_grads = eqx.filter_jit(eqx.filter_value_and_grad(loss))(*args)
        np.testing.assert_allclose(value, want, rtol=1e-15)
        assert {x.dtype.name for x in grads} == {"float32"}
        assert relative(grads, want_grads) < TOLERANCES["float16"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is done in half")  # there is no complex half
@pytest.mark.parametrize("forward", ["float32", "float64"])
def test_complex_weights(forward):
    loss = lambda model, x: jnp.mean(jnp.abs(jnp.fft.rfft(x) @ model) ** 2)
    weight = jax.lax.complex(*(jax.random.normal(jax.random.key(i), (5, 5)) for i in range(2)))
    with jax.enable_x64(forward == "float64"):
        value, grads = evaluated(loss, weight, ROWS, "bfloat16", forward)
    with jax.enable_x64(True):
        wide = weight.astype(jnp.complex128), ROWS.astype(jnp.float64)
        want, want_grads = jax.value_and_grad(loss)(*wide)
        # Weights and rows are float32 in the program, but values computed from them are not.
        np.testing.assert_allclose(value, want, rtol=2.0**-21)
        assert grads.dtype == jnp.complex64
        assert jnp.linalg.norm(grads - want_grads) < 2.0**-6 * jnp.linalg.norm(want_grads)


@pytest.mark.slow
def test_refined_is_the_value_of_float32_with_the_gradient_of_half():
    _, model, points = CASES["foreign network"]

    terms = lambda model, p: mpx.partials(model, ["u", "u_x", "u_xx"], coords="xy", outputs="u")(p)
    refined = mpx.refined(terms, dtype="bfloat16", keep_full=(False, True))

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(model, terms):
        d = jax.vmap(terms, (None, 0))(model, points)
        return jnp.mean((d["u_xx"] + d["u"] * d["u_x"] - 1) ** 2)

    (want, want_grads), (value, grads) = loss(model, terms), loss(model, refined)
    np.testing.assert_allclose(value, want, rtol=2.0**-21)
    assert 2.0**-20 < relative(grads, want_grads) < TOLERANCES["bfloat16"]


def test_the_value_of_refined_is_finite_where_half_is_not():
    refined = mpx.refined(lambda w: 1e5 * w, dtype="float16")
    value, slope = jax.value_and_grad(lambda w: jnp.sum(refined(w)))(jnp.ones(3))
    assert value == 3e5
    assert np.all(np.isinf(slope))  # overflow is data, for which the step is skipped


@pytest.mark.slow
def test_a_stream_that_overflows_on_its_way_is_laid_to_the_derivative_scale():
    """A value kept for the backward pass is beyond float16, although the derivative is small."""
    weights = [jnp.full((8, 2), 400.0), jnp.full((8, 8), 50.0), jnp.full((1, 8), 1e-6)]

    def loss(weights, points, *, derivatives):
        first, second, last = weights
        net = lambda p: (last @ jnp.sin(second @ jnp.sin(first @ p)))[0]
        terms = mpx.partials(net, ["u_x"], coords="xy", outputs="u", scaling=derivatives)
        return jnp.mean(jax.vmap(terms)(points)["u_x"] ** 2)

    derivatives = mpx.DerivativeScaling.per_direction("xy", order=1)
    scaling = mpx.Scaling(mpx.DynamicLossScaling(1.0), derivatives)
    gradient = partial(mpx.filter_grad, loss, forward="float32")
    step = eqx.filter_jit(lambda scaling: gradient(scaling)(weights, POINTS))
    for _ in range(4):
        scaling, finite, _ = step(scaling)
        if finite:
            break
        # The stream reaches 8 * 50 * 400 = 1.6e5.
        assert scaling.loss.loss_scaling == 1.0
        assert scaling.derivatives.overflows[0] == scaling.skipped_steps
    assert finite
    assert 2.0**-4 <= scaling.derivatives.scales[0] < 1

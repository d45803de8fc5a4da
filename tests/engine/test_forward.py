"""Tests losses with full-precision values whose derivatives are taken in half."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import HALVES, in_float64, normal, policy, relative, tree_equal_bits
from jax.experimental import io_callback

import mpx_pde as mpx
from mpx_pde import nn


# Foreign networks are written for JAX's default promotion.
pytestmark = pytest.mark.usefixtures("standard_promotion")

# The error of a gradient that is evaluated in half at full values: a few roundings of 2^-11 and of
# 2^-8 in a row, most of which average out.
TOLERANCES = {"float16": 2.0**-9, "bfloat16": 2.0**-6}
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


SCALING = mpx.StaticLossScaling(2.0**8)


def evaluated(loss, model, batch, half, forward="float32", scaling=SCALING):
    step = mpx.filter_value_and_grad(loss, scaling, policy=policy(half), forward=forward)
    value, _, finite, grads = eqx.filter_jit(step)(model, batch)
    assert finite
    return value, grads


def assert_nearly(loss, model, batch, half, rtol=2.0**-21, least=1e-6, most=None, scaling=SCALING):
    """Checks that the value is float32's and the gradient that of a half backward pass."""
    want, want_grads = eqx.filter_jit(eqx.filter_value_and_grad(loss))(model, batch)
    value, grads = evaluated(loss, model, batch, half, scaling=scaling)
    # The operations are the same, but XLA may fuse a sum in another order.
    np.testing.assert_allclose(value, want, rtol=rtol)
    assert jax.tree.structure(grads) == jax.tree.structure(want_grads)
    assert least <= relative(grads, want_grads) < (most or TOLERANCES[half])


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
            # Two products of the backward pass for each of the forward pass. Data, which are much
            # of the other networks, have no cotangent.
            assert total > 2.7 * forward
            assert flops(compute) > 1.7 * forward


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
    loss = lambda params, x: jnp.mean(sine(x @ made(*params)) ** 2) + jnp.sum(params[0] ** 2)
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


@pytest.mark.slow
def test_derivatives_of_derivatives():
    """Differentiates a program with derivatives, as for a viscosity made of derivatives. The inner
    ones pass through the outer ones: values in full, kept values in half."""
    network = eqx.nn.MLP(2, "scalar", 16, 2, jnp.tanh, key=jax.random.key(0))
    scaling = mpx.Scaling(derivatives=mpx.DerivativeScaling.per_direction("xy", order=2))

    def loss(network, points, *, derivatives=None):
        def slope(point):
            d = mpx.partials(network, ["u_x", "u_y"], coords="xy", outputs="u", scaling=derivatives)
            return jnp.sqrt(d(point)["u_x"] ** 2 + d(point)["u_y"] ** 2 + 0.01)

        d = mpx.partials(slope, ["v_x", "v_y"], coords="xy", outputs="v", scaling=derivatives)
        d = jax.vmap(d)(points)
        return jnp.mean(d["v_x"] ** 2 + d["v_y"] ** 2)

    assert_nearly(loss, network, POINTS, "float16", rtol=2.0**-20, most=2e-3, scaling=scaling)
    gradient = mpx.filter_grad(loss, scaling, forward="float32")
    assert mpx.precision_report(gradient)(network, POINTS).half_share > 0.5


def _gradient_of_laplacians(model, points):
    lap = lambda p: mpx.laplacian(model, coords="xy", outputs="u")(p)["lap_u"]
    return jnp.mean(jax.vmap(jax.grad(lap))(points) ** 2)


def _slope_of_fields(model, fields):
    slope = lambda x: jax.jvp(model, (x,), (jnp.sin(x),))[1]
    return jnp.mean((jax.vmap(slope)(fields) - 0.1) ** 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::mpx_pde.PrecisionWarning")
@pytest.mark.parametrize("loss", [_gradient_of_laplacians, _slope_of_fields])
def test_what_jax_differentiates_inside_of_a_loss_is_full(loss):
    """A derivative inside the loss is a part of its value."""
    if loss is _slope_of_fields:
        model, batch = nn.FNO(1, 1, 4, 1, (4,), key=KEY), FIELDS[:, :, 0]
    else:
        model, batch = nn.CoordinateMLP(2, "scalar", 16, 1, key=KEY), POINTS
    # With the half derivative inside, the value was wrong by 2^-10 to 2^-15.
    assert_nearly(loss, model, batch, "bfloat16", rtol=2.0**-20, least=0)


_residual = lambda model, x, y: jax.vmap(model)(x) - y
_mean_square = lambda model, x, y: jnp.mean(_residual(model, x, y) ** 2)
_parts = lambda x, y: [a.reshape(4, -1, a.shape[-1]) for a in (x, y)]


def _checkpoints_in_a_loop(model, w, x, y):
    step = jax.checkpoint(lambda total, a: (total + _mean_square(model, *a), None))
    return jax.lax.scan(step, 0.0, _parts(x, y))[0]


def _a_loop_in_a_checkpoint(model, w, x, y):
    add = lambda total, a: (total + _mean_square(model, *a), None)
    return jax.checkpoint(lambda *parts: jax.lax.scan(add, 0.0, parts)[0])(*_parts(x, y))


def _a_branch_in_a_checkpoint(model, w, x, y):
    none = lambda x, y: 0 * x[0, 0] * y[0, 0]
    branch = lambda x, y: jax.lax.cond(x[0, 0] > -9, partial(_mean_square, model), none, x, y)
    return jax.checkpoint(branch)(x, y)


def _causal(model, w, x, y):
    losses = jnp.mean(_residual(model, x, y).reshape(8, -1) ** 2, axis=1)
    before = jnp.tril(jnp.ones((8, 8)), -1) @ losses
    return jnp.mean(jnp.exp(-1e3 * jax.lax.stop_gradient(before)) * losses)


def _matrices_in_a_loop(model, w, x, y):
    parts = w[1].reshape(3, 4, 16).swapaxes(0, 1), _residual(model, x, y).reshape(4, 16, 2)
    add = lambda total, a: (total + jnp.sum(a[0] @ a[1] ** 2), None)
    return jax.lax.scan(add, 0.0, parts)[0]


# The last cases have trainable weights, a vector and two matrices.
NEAR_ITS_END = {
    "plain": lambda m, w, x, y: _mean_square(m, x, y),
    "checkpoints in a loop": _checkpoints_in_a_loop,
    "a loop in a checkpoint": _a_loop_in_a_checkpoint,
    "a branch in a checkpoint": _a_branch_in_a_checkpoint,
    "before a sort": lambda m, w, x, y: jnp.sum(jnp.sort(_residual(m, x, y)[:, 0] ** 2)[:32]),
    "quadrature": lambda m, w, x, y: jnp.vdot(x[:, 0] ** 2, _residual(m, x, y)[:, 0] ** 2),
    "causal": _causal,
    "two evaluations": lambda m, w, x, y: _mean_square(m, x, y) + _mean_square(m, x[::-1], y[::-1]),
    "weights": lambda m, w, x, y: w[0] @ _residual(m, x, y)[:, 0] ** 2,
    "weights, einsum": lambda m, w, x, y: jnp.einsum("n,nk,nk->", w[0], *[_residual(m, x, y)] * 2),
    "weights of parts": lambda m, w, x, y: jnp.dot(
        w[0][:2], jnp.stack([_mean_square(m, x[:32], y[:32]), _mean_square(m, x, y)])
    ),
    "matrix": lambda m, w, x, y: jnp.sum(w[1] @ _residual(m, x, y) ** 2),
    "matrix of channels": lambda m, w, x, y: jnp.sum((_residual(m, x, y) @ w[2]) ** 2),
    "matrices in a loop": _matrices_in_a_loop,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NEAR_ITS_END)
def test_a_small_residual_is_full_wherever_it_is_squared(name):
    """The residual is a thousandth of its operands. bfloat16 would leave nothing of it, and the
    gradient of the network or of the weights would be wrong by several times its norm."""
    network = eqx.nn.MLP(3, 2, 16, 1, jnp.tanh, key=KEY)
    x, noise = normal(1, (64, 3)), normal(2, (64, 2))
    batch = x, jax.vmap(network)(x) + 1e-3 * noise
    model = network, [jnp.linspace(0.5, 1.5, 64), normal(3, (3, 64)), normal(4, (2, 2))]
    loss = lambda model, batch: NEAR_ITS_END[name](*model, *batch)
    want = eqx.filter_jit(eqx.filter_grad(loss))(model, batch)
    _, grads = evaluated(loss, model, batch, "bfloat16")
    # A forgotten residual causes an error of 2 and more, roundings of the derivative 2^-6.
    assert relative(grads[0], want[0]) < 2.0**-5
    # Their gradient is a product, whose operands are rounded.
    tolerance = 2.0**-7 if name.startswith("weights") else 2.0**-5
    for got, expected in zip(grads[1], want[1], strict=True):
        assert np.linalg.norm(got - expected) <= tolerance * np.linalg.norm(expected)


def test_effects_stay_in_their_order():
    """Tests a callback that reads a value which another one writes, and a reference."""
    seen = {"scale": np.float32(1)}
    number = lambda dtype: jax.ShapeDtypeStruct((), dtype)

    def write(scale):
        seen["scale"] = np.asarray(scale)
        return np.int32(0)

    def loss(params, x):
        h = x @ params[0]
        largest = jax.lax.stop_gradient(jnp.max(h))
        io_callback(write, number("int32"), largest, ordered=True)
        scale = io_callback(lambda: seen["scale"], number("float32"), ordered=True)
        ref = jax.new_ref(jnp.zeros_like(h))
        ref[...] = h / scale
        return jnp.mean((jnp.tanh(ref[...]) @ params[1] - 1) ** 2)

    def kept(params, x):
        ref = jax.new_ref(jnp.zeros((len(x), 8)))
        ref[...] = h = x @ params[0]
        return jnp.mean(jnp.tanh(h) @ params[1]) + jnp.mean(ref[...] ** 2)

    def looped(params, x):
        ref = jax.new_ref(jnp.zeros((len(x), 8)))

        def body(h, _):
            ref[...] = h
            return jnp.tanh(ref[...] @ params[1] @ params[0][:1]), None

        return jnp.mean(jax.lax.scan(body, x @ params[0], length=2)[0] @ params[1])

    params = [normal(0, (2, 8)), normal(1, (8, 1))]
    for fun in (loss, kept, looped):
        assert_nearly(fun, params, POINTS, "bfloat16", least=0)


@jax.custom_jvp
def divided(x, state):
    return x / state


@partial(divided.defjvp, symbolic_zeros=True)
def _divided_jvp(primals, tangents):
    (x, state), (x_dot, state_dot) = primals, tangents
    assert isinstance(state_dot, jax.custom_derivatives.SymbolicZero), "derivative of a state"
    return x / state, x_dot / state


def _by_divisions(params, p):
    first, last = params
    state = jax.lax.stop_gradient(2 + jnp.sum((first @ first.T) ** 2))
    h = jnp.tanh(p @ first)
    return jnp.tanh(divided(h, state + jax.lax.stop_gradient(jnp.max(h)))) @ last


@pytest.mark.slow
@pytest.mark.parametrize("terms", [False, True])
def test_what_has_no_derivative_has_none_in_any_layer(terms):
    """Solvers such as lineax's factorize beforehand, and raise an `AssertionError` if that is
    differentiated."""
    params = [normal(0, (2, 8)), normal(1, (8, 1))]

    def loss(params, x):
        if not terms:
            return jnp.mean((_by_divisions(params, x) - 1) ** 2)
        network = lambda p: _by_divisions(params, p)[0]
        d = jax.vmap(mpx.partials(network, ["u_x", "u_xy"], coords="xy", outputs="u"))(x)
        return jnp.mean((d["u_x"] + d["u_xy"] - 1) ** 2)

    assert_nearly(loss, params, POINTS, "bfloat16", rtol=2.0**-20, least=0)


@pytest.mark.slow
@pytest.mark.parametrize("forward", ["float64", "float32"])
def test_streams_that_no_vmap_maps_yet(forward):
    """Behind a float64 linear layer, JAX adds an axis to values of the backward pass alone."""

    def loss(params, x):
        network = lambda p: jnp.sum(jnp.tanh(params[1] @ (params[0] @ p)))
        d = jax.vmap(mpx.partials(network, ["u_x", "u_xx"], coords="xy", outputs="u"))(x)
        return jnp.mean((d["u_x"] - d["u_xx"]) ** 2)

    with jax.enable_x64(True):
        dtype = forward if forward == "float64" else "float32"
        params = [normal(0, (5, 2)).astype(dtype), normal(1, (5, 5)).astype(dtype)]
        given = params, POINTS.astype("float64")
        with jax.numpy_dtype_promotion("standard"):
            want, want_grads = jax.value_and_grad(loss)(*given)
            value, grads = evaluated(loss, *given, "bfloat16", forward)
        np.testing.assert_allclose(value, want, rtol=1e-6 if forward == "float32" else 1e-14)
        assert relative(grads, want_grads) < TOLERANCES["bfloat16"]


@jax.custom_jvp
def apart(x, w, s):
    return jnp.tanh(w @ x), jnp.exp(s)


@apart.defjvp
def _apart_jvp(primals, tangents):
    (x, w, s), (x_dot, w_dot, s_dot) = primals, tangents
    y, e = apart(x, w, s)
    return (y, e), ((1 - y**2) * (w_dot @ x + w @ x_dot), e * s_dot + 0 * jnp.sum(x_dot))


@pytest.mark.parametrize("options", [{"forward": "float32"}, {"autocast": True}])
def test_a_rule_that_maps_what_nothing_mapped_is_made_of(options):
    """JAX itself mistakes one axis for the other if there are as many points as entries."""
    loss = lambda w, x: jnp.mean(jax.vmap(lambda p: jnp.sum(jnp.stack(apart(p, *w))))(x) ** 2)
    weights = normal(0, (4, 2)), jnp.arange(4.0)
    full = "forward" in options
    options = {"policy": policy("bfloat16"), **options}
    step = mpx.filter_value_and_grad(loss, mpx.NoOpLossScaling(), **options)
    value, _, _, grads = step(weights, POINTS[:5])
    want, want_grads = jax.value_and_grad(loss)(weights, POINTS[:5])
    np.testing.assert_allclose(value, want, rtol=1e-5 if full else 2.0**-8)
    assert relative(grads, want_grads) < TOLERANCES["bfloat16"]
    if not full:
        match = r"`custom_jvp` function `apart` at .*function of its own"
        with pytest.raises(ValueError, match=match):
            step(weights, POINTS[:4])


def test_a_network_before_a_while_loop_has_a_half_backward_pass():
    """The residual may be weighted by the result of a loop, without a derivative."""
    model, x = eqx.nn.MLP(8, 8, 16, 2, key=jax.random.key(0)), jnp.ones((4, 8))

    def loss(model, x):
        h = jax.vmap(model)(x)
        norm = jax.lax.stop_gradient(jnp.sum(h**2))
        weight = jax.lax.while_loop(lambda c: c > 1, lambda c: c / 2, norm)
        return jnp.mean(h**2) * weight

    step = mpx.filter_grad(loss, mpx.DynamicLossScaling(), forward="float32")
    assert mpx.precision_report(step)(model, x).half_share > 0.6  # two products of three


def test_state_keeps_its_dtypes_under_float64():
    """The next step and a `lax.scan` over steps need the same dtypes."""
    make = lambda: eqx.nn.BatchNorm(2, "batch", mode="batch", dtype=jnp.float32)

    def loss(model, state, x):
        y, state = jax.vmap(model, (0, None), (0, None), axis_name="batch")(x, state)
        return jnp.mean((y - x) ** 4), state

    options = {"forward": "float64", "policy": policy("float32")}
    with jax.enable_x64(True):
        model, state = eqx.nn.make_with_state(make)()
        step = mpx.filter_value_and_grad(loss, mpx.NoOpLossScaling(), True, **options)
        (value, after), *_ = eqx.filter_jit(step)(model, state, normal(3, (8, 2)))
    assert value.dtype == jnp.float64
    dtypes = lambda state: [x.dtype for x in jax.tree.leaves(state)]
    assert dtypes(after) == dtypes(state)

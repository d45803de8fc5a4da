"""Tests programs whose forward pass is in full precision: derivatives in a loss, small residuals,
rules of users, effects and states."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forward_passes import SCALING, TOLERANCES, assert_nearly, evaluated
from helpers import normal, policy, relative
from jax.experimental import io_callback

import mpx_pde as mpx
from mpx_pde import nn


# Foreign networks are written for JAX's default promotion.
pytestmark = pytest.mark.usefixtures("standard_promotion")

KEY = jax.random.key(0)
SLOW = pytest.mark.slow
POINTS = jax.random.uniform(jax.random.key(1), (32, 2), minval=-1.0)
FIELDS = jax.random.normal(jax.random.key(3), (2, 1, 8, 8))


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


def _burgers(network, points):
    def residual(x, t):
        u = lambda x, t: network(jnp.stack([x, t]))
        u_x = jax.grad(u)
        return jax.grad(u, 1)(x, t) + u(x, t) * u_x(x, t) - 0.1 * jax.grad(u_x)(x, t)

    return jnp.mean(jax.vmap(residual)(*points.T) ** 2)


def _burgers_in_a_loop(network, points):
    step = lambda total, points: (total + _burgers(network, points) / 4, None)
    return jax.lax.scan(step, 0.0, points.reshape(4, -1, 2))[0]


def _burgers_in_a_branch(network, points):
    burgers = lambda points: _burgers_in_a_loop(network, points)
    return jax.lax.cond(points[0, 0] < 9, burgers, jnp.sum, points)


@pytest.mark.parametrize(
    "loss",
    [_burgers, *(pytest.param(f, marks=SLOW) for f in (_burgers_in_a_loop, _burgers_in_a_branch))],
)
def test_a_network_that_a_residual_calls_often_is_differentiated_once(loss):
    """Plain JAX has a backward pass for each call of the network."""
    network = eqx.nn.MLP(2, "scalar", 64, 3, jnp.tanh, key=KEY)
    assert_nearly(loss, network, POINTS, "float16", rtol=2.0**-20, most=1e-3)
    plain = eqx.filter_jit(eqx.filter_grad(_burgers)).lower(network, POINTS).compile().compiled
    ours = mpx.precision_report(mpx.filter_grad(loss, SCALING, forward="float32"))
    assert ours(network, POINTS).flops < 0.7 * plain.cost_analysis()["flops"]


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

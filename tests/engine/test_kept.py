"""Tests what a loss with a full forward pass keeps, and the gradient that follows from it.

The losses are in `losses.py`, programs of other people's shapes in `tests/clients`."""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clients.sequences import leaky
from forward_passes import CLOSE, step_of
from helpers import HALVES, equations, relative
from losses import LAYERS, MADE, OTHER, POINTS, PROGRAMS, STATES, WEIGHT, evolved, squared

import mpx_pde as mpx
from mpx_pde.engine._kept import unrounded
from mpx_pde.engine._minimum_cut import chosen


pytestmark = pytest.mark.usefixtures("standard_promotion")

FAST = "small residual", "trained centres", "fitted parameters", "made weights: tril"
FAST += "decision: where", "decision: a rule", "shares: softmax"
FAST += "near a minimum: divergence", "near a minimum: summed in a loop"
FAST += "near a minimum: energy by a matrix", "near a minimum: called twice"


@pytest.mark.filterwarnings("ignore:.*is done in half")  # loops of other libraries keep to float32
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in PROGRAMS]
)
def test_a_program_of_any_kind_has_its_gradient(name, half):
    loss, params, *data = PROGRAMS[name]
    want_value, want = eqx.filter_jit(jax.value_and_grad(loss))(params, *data)
    value, _, finite, got = eqx.filter_jit(step_of(loss, half))(params, *data)
    assert finite
    # Sums in another order, beside terms of a thousand times the size.
    np.testing.assert_allclose(value, want_value, rtol=1e-5)
    assert relative(got, want) < CLOSE[half]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two networks", *(f"made weights: {k}" for k in MADE)])
def test_their_backward_pass_is_half(name):
    loss, params, *data = PROGRAMS[name]
    report = mpx.precision_report(step_of(loss, "bfloat16"))(params, *data)
    assert report.backward_half_share >= 0.9
    # The results of two layers for each point, and more for two networks.
    assert report.kept_in_half >= 2 * 128 * 64 * 2
    assert f"{100 * report.backward_half_share:.0f}% of its work in half" in str(report)


def test_what_a_loop_keeps_is_counted_by_its_steps():
    loss, params, data, _ = leaky()
    report = mpx.precision_report(step_of(loss, "bfloat16"))(params, *data)
    # The state and the cosine of each step, and the last state.
    assert report.kept_in_half == (2 * 400 + 1) * STATES.size * 2


class Normed(eqx.Module):
    """Layers with a norm between them."""

    first: eqx.nn.MLP
    norm: eqx.nn.LayerNorm
    last: eqx.nn.Linear

    def __init__(self):
        one, other = jax.random.split(jax.random.key(0))
        self.first = eqx.nn.MLP(16, 64, 64, 1, jnp.tanh, key=one)
        self.norm, self.last = eqx.nn.LayerNorm(64), eqx.nn.Linear(64, "scalar", key=other)

    def __call__(self, x):
        return self.last(jnp.tanh(self.norm(self.first(x))))


def normed_value(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


def normed_terms(model, x):
    axes = [f"x{i}" for i in range(16)]
    terms = ["u", "u_x0", "u_x1", "u_x0x0"]
    return sum(jnp.mean(t**2) for t in jax.vmap(
        mpx.partials(model, terms, coords=axes, outputs="u")
    )(x).values())  # fmt: skip


@pytest.mark.parametrize(
    ("loss", "streams"), [(normed_value, 1), pytest.param(normed_terms, 4, marks=pytest.mark.slow)]
)
def test_the_deviations_from_a_mean_are_kept_once(loss, streams):
    """A norm and the variance in it both subtract the mean."""
    model, x = Normed(), 0.5 * POINTS
    report = mpx.precision_report(step_of(loss, "bfloat16"))(model, x)
    # The value of the first layer, and all streams of the norm.
    of_all = (1 + streams) * 128 * 64 * 2
    assert report.kept_in_half < 1.1 * of_all
    want = eqx.filter_jit(eqx.filter_grad(loss))(model, x)
    *_, got = eqx.filter_jit(step_of(loss, "bfloat16"))(model, x)
    assert relative(got, want) < CLOSE["bfloat16"]


def test_a_kept_value_beyond_the_range_of_float16_makes_the_step_not_finite():
    """The derivative of a saturated function would be zero, and the step silently wrong."""
    loss = lambda w, x: squared(jnp.tanh(1e-12 * (x @ w) ** 2) - 1)
    run = lambda half: eqx.filter_jit(step_of(loss, half))(WEIGHT, 1e6 * STATES)[2]
    assert not run("float16")
    assert run("bfloat16")


def test_a_mask_beyond_the_range_of_float16_is_no_overflow():
    mask = jnp.tril(jnp.ones((16, 16), bool))

    def loss(w, x):
        scores = jnp.where(mask, (x @ w) @ x.T, -1e9)
        return squared(jax.nn.softmax(scores) @ x - 1)

    _, _, finite, got = eqx.filter_jit(step_of(loss, "float16"))(WEIGHT, STATES)
    assert finite
    assert relative(got, jax.grad(loss)(WEIGHT, STATES)) < CLOSE["float16"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is done in half")  # an exponential asks for its precision
def test_numbers_beyond_the_range_of_float16_in_products_of_matrices():
    """The exponential of a matrix divides one polynomial of it by another, with coefficients up to
    6.5e16, in a branch."""
    params = WEIGHT[:16, :16], OTHER[:16, :16]

    def loss(p, x):
        return squared(jnp.tanh(x @ jax.scipy.linalg.expm(p[0] - p[0].T)) @ p[1] - x)

    _, _, finite, got = eqx.filter_jit(step_of(loss, "float16"))(params, POINTS)
    assert finite
    assert relative(got, jax.grad(loss)(params, POINTS)) < CLOSE["float16"]


def of_small_squares(p, x):
    fraction = (1e-4 * jnp.tanh(x @ p[0] + p[1])) ** 2
    return squared(fraction @ p[2] / 1e-8 - 1)


def of_small_values(p, x):
    return squared(jnp.tanh(1e-6 * jnp.tanh(x @ p[0] + p[1]) @ p[2] * 1e6) - 1)


@pytest.mark.filterwarnings("ignore:.*is done in half")  # products of such values are in full
@pytest.mark.parametrize("loss", [of_small_squares, of_small_values])
def test_numbers_below_the_range_of_float16(loss):
    """float16 has zero or a few digits of a value of 1e-6."""
    *_, finite, got = eqx.filter_jit(step_of(loss, "float16"))(LAYERS[:3], POINTS)
    assert finite
    assert relative(got, jax.grad(loss)(LAYERS[:3], POINTS)) < CLOSE["float16"]


def test_data_in_small_units_keep_no_product_in_full():
    """A number that makes large data small says nothing of the result."""

    def loss(p, x):
        return squared(jax.nn.relu(x / 101325 @ p[0] + p[1]) @ p[2] - 1)

    step, data = step_of(loss, "float16"), 101325 * POINTS
    assert mpx.precision_report(step)(LAYERS[:3], data).backward_half_share == 1
    *_, got = eqx.filter_jit(step)(LAYERS[:3], data)
    assert relative(got, jax.grad(loss)(LAYERS[:3], data)) < CLOSE["float16"]


def test_numbers_that_leave_again_keep_no_product_in_full():
    def loss(p, x):
        pressure = 1e5 * (1 + 0.1 * jax.nn.relu(x @ p[0] + p[1]))
        return squared(jax.nn.relu((pressure / 1e5 - 1) @ p[2] + p[3]) @ p[4] - 1)

    report = mpx.precision_report(step_of(loss, "float16"))(LAYERS, POINTS)
    assert report.backward_half_share == 1
    _, _, finite, got = eqx.filter_jit(step_of(loss, "float16"))(LAYERS, POINTS)
    assert finite
    assert relative(got, jax.grad(loss)(LAYERS, POINTS)) < CLOSE["float16"]


def test_tangents_of_integers_in_a_loss():
    """The second argument of `ldexp` has a tangent of no numbers, which `partials` meets."""

    def loss(w, x):
        u = lambda q: jnp.sum(jnp.ldexp(jnp.tanh(q @ w), 2))
        return squared(jax.vmap(mpx.partials(u, ["u_x"], coords="xy", outputs="u"))(x)["u_x"])

    params, points = LAYERS[0][:2], POINTS[:, :2]
    _, _, finite, got = step_of(loss, "bfloat16")(params, points)
    want = jax.grad(lambda w, x: squared(4 * jnp.sum(w[0] / jnp.cosh(x @ w) ** 2, -1)))
    assert finite
    assert relative(got, want(params, points)) < CLOSE["bfloat16"]


def test_forward_mode_around_the_gradient():
    loss, params, *data = PROGRAMS["made weights: tril"]
    of = lambda p: step_of(loss, "float16", keep_full=(False, True))(p, *data)[3]
    product = jax.jit(lambda p, v: jax.jvp(of, (p,), (v,))[1])(params, params)
    want = jax.jvp(lambda p: jax.grad(loss)(p, *data), (params,), (params,))[1]
    # A second derivative is taken of rounded values, and has more terms that cancel.
    assert relative(product, want) < 2e-3


def halved_step(w, x):
    """A step, or two of half the size if they differ by little."""
    once = x + 0.01 * jnp.tanh(w @ x)
    twice = x + 0.005 * jnp.tanh(w @ x)
    twice = twice + 0.005 * jnp.tanh(w @ twice)
    # The difference is 2.8e-5 at first, as large as the rounding of `w @ x` to bfloat16.
    return jnp.where(jnp.max(jnp.abs(twice - once)) < 3e-5, twice, x)


def in_a_loop_of(step):
    return lambda w, x: jax.lax.fori_loop(0, 2, lambda _, x: step(w, x), x)


def evaluated_again(function):
    """Returns a function whose backward rule evaluates it again, as a checkpoint does."""
    again = jax.custom_vjp(function)
    backward = lambda held, cotangent: jax.vjp(function, *held)[1](cotangent)
    again.defvjp(lambda w, x: (function(w, x), (w, x)), backward)
    return again


AGAIN = {
    "steps": lambda w, x: evaluated_again(halved_step)(w, evaluated_again(halved_step)(w, x)),
    "scan": lambda w, x: evolved(lambda x: evaluated_again(halved_step)(w, x), x, 2),
    "rule with a loop": evaluated_again(in_a_loop_of(halved_step)),
    "jitted": jax.jit(evaluated_again(jax.jit(in_a_loop_of(halved_step)))),
}


@pytest.mark.parametrize("name", AGAIN)
def test_a_rule_that_evaluates_a_function_again_decides_as_before(name):
    weight = 0.5 * jax.random.normal(jax.random.key(0), (8, 8))
    state = jax.random.normal(jax.random.key(1), (8,))
    loss = lambda w, x: jnp.sum((AGAIN[name](w, x) - 0.3) ** 2)
    plain = lambda w, x: jnp.sum((in_a_loop_of(halved_step)(w, x) - 0.3) ** 2)
    _, _, finite, got = step_of(loss, "bfloat16")(weight, state)
    assert finite
    assert relative(got, jax.jit(jax.grad(plain))(weight, state)) < CLOSE["bfloat16"]


@pytest.mark.slow
@pytest.mark.parametrize("half", HALVES)
def test_an_adaptive_solver_takes_the_same_steps_on_the_way_back(half):
    """diffrax' default adjoint solves again between checkpoints, and accepts or rejects steps."""
    weight = 0.5 * jax.random.normal(jax.random.key(0), (8, 8))
    state = jax.random.normal(jax.random.key(1), (8,))

    def loss(w, y):
        term = diffrax.ODETerm(lambda t, y, args: jnp.tanh(w @ y))
        control = diffrax.PIDController(rtol=1e-3, atol=1e-4)
        options = {"stepsize_controller": control, "max_steps": 256}
        ys = diffrax.diffeqsolve(term, diffrax.Tsit5(), 0, 3, 0.1, y, **options).ys
        assert ys is not None
        return squared(ys - 0.3)

    _, _, finite, got = step_of(loss, half)(weight, state)
    assert finite
    # A chain of some ten steps of six stages each, whose roundings do not all average out.
    assert relative(got, jax.grad(loss)(weight, state)) < 2 * CLOSE[half]


def test_a_loop_stacks_no_bfloat16():
    """XLA for CPUs widens a stack of bfloat16 as a whole in each step. Integers of the same bits
    have no derivative, which the gradient has."""
    weight, states = WEIGHT[:8, :8], STATES[:, :8]

    def loss(w, u):
        return squared(evolved(lambda u: u + 0.1 * jnp.tanh(u @ w), u, 7) - 2 * u)

    of = jax.jit(lambda w: step_of(loss, "bfloat16")(w, states)[3])
    loops = [e for e in equations(jax.make_jaxpr(of)(weight)) if e.primitive.name == "scan"]
    stacks = [v.aval.dtype for e in loops for v in e.outvars if v.aval.shape[:1] == (7,)]
    assert jnp.uint16 in stacks
    assert jnp.bfloat16 not in stacks
    exact = jax.jit(lambda w: jax.grad(loss)(w, states))
    assert relative(of(weight), exact(weight)) < CLOSE["bfloat16"]
    along = lambda f: jax.jit(lambda w: jax.jvp(f, (w,), (w,))[1])(weight)
    assert relative(along(of), along(exact)) < 2 * CLOSE["bfloat16"]
    of_norm = lambda f: jax.jit(jax.grad(lambda w: jnp.sum(f(w) ** 2)))(weight)
    assert relative(of_norm(of), of_norm(exact)) < 2 * CLOSE["bfloat16"]


def test_the_smallest_set_that_all_can_be_computed_from_is_kept():
    """Variables 3 and 4 follow from 2, which follows from 0 (there anyway) and 1."""
    operands = {2: (0, 1), 3: (2,), 4: (2,), 5: (3, 4)}
    sizes = {1: 4, 2: 2, 3: 2, 4: 2, 5: 3}
    assert chosen({3, 4}, operands, {0}, sizes.__getitem__) == [2]
    assert chosen({5}, operands, {0}, sizes.__getitem__) == [2]
    assert chosen({5}, operands, {0}, {**sizes, 5: 1}.__getitem__) == [5]
    assert chosen({1, 3}, operands, {0}, sizes.__getitem__) == [1]
    assert set(chosen({1, 3}, {3: (2,)}, {0}, sizes.__getitem__)) == {1, 3}
    # Of two choices of one size, the one nearest to where it is read.
    assert chosen({3}, {2: (1,), 3: (2,)}, {0}, lambda x: 2) == [3]


def test_small_arrays_stay_as_they_are():
    assert unrounded({0: 320, 1: 5, 2: 5, 3: 5}) == {1, 2}
    assert unrounded({}) == set()

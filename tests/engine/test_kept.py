"""Tests what a loss with a full forward pass keeps, and the gradient that follows from it.

Programs of other people's shapes are in `tests/clients`."""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clients.sequences import leaky
from forward_passes import CLOSE, step_of
from helpers import HALVES, equations, normal, relative
from jax.experimental.sparse import BCOO
from jax.sharding import PartitionSpec as P

import mpx_pde as mpx
from mpx_pde.engine._kept import unrounded
from mpx_pde.engine._minimum_cut import chosen


pytestmark = pytest.mark.usefixtures("standard_promotion")

WEIGHT, STATES = normal(0, (64, 64), 1 / 8), normal(1, (16, 64))
OTHER, POINTS = normal(2, (64, 64), 1 / 8), normal(3, (128, 16))
LAYERS = (
    normal(4, (16, 64), 1 / 4),
    normal(5, (64,), 0.1),
    normal(6, (64, 64), 1 / 8),
    normal(7, (64,), 0.1),
    normal(8, (64, 8), 1 / 8),
)


def network(p, x):
    h = jax.nn.gelu(x @ p[0] + p[1], approximate=False)
    return jax.nn.gelu(h @ p[2] + p[3]) @ p[4]


with jax.numpy_rank_promotion("allow"):
    TARGETS = network(LAYERS, POINTS)


def squared(x):
    return jnp.mean(x**2)


def evolved(step, state, length):
    return jax.lax.scan(lambda u, _: (step(u), None), state, length=length)[0]


def near(threshold, x, w):
    """Returns values that rounding to bfloat16 may move to the other side of a threshold."""
    return threshold - 1e-4 + 1e-5 * jnp.tanh(x @ w)


@jax.custom_vjp
def kinked(x):
    return jnp.where(x - 0.1 > 0, 30 * x, x)


kinked.defvjp(lambda x: (kinked(x), x), lambda x, g: (jnp.where(x - 0.1 > 0, 30 * g, g),))

DECISIONS = {
    "where": lambda h, w: jnp.where(h - 0.1 > 0, 30 * h, h) @ w,
    "sign": lambda h, w: (jnp.sign(h - 0.1) * h) @ w,
    "heaviside": lambda h, w: (jnp.heaviside(h - 0.1, 0.5) + h) @ w,
    "log": lambda h, w: jnp.where(jnp.log(10 * h) > 0, 30 * h, h) @ w,
    "maximum": lambda h, w: (jnp.maximum(h, 0.1) * h) @ w,
    "a rule": lambda h, w: kinked(h) @ w,
    "a checkpoint": jax.checkpoint(lambda h, w: jnp.where(h - 0.1 > 0, 30 * h, h) @ w),
    "a loop": lambda h, w: evolved(
        lambda h: jnp.where(h - 0.1 > 0, 1.2 * h, h) + 0.01 * jnp.tanh(h @ w), h, 5
    ),
    "a loop in a checkpoint": jax.checkpoint(
        lambda h, w: evolved(
            lambda h: jnp.where(h - 0.1 > 0, 1.2 * h, h) + 0.01 * jnp.tanh(h @ w), h, 5
        )
    ),
}


def _made(make):
    return lambda p, x: squared(network((*p[:2], make(p[2]), *p[3:]), x) - 1)


BASE = normal(9, (64, 64), 1 / 8)
MADE = {
    "tril": jnp.tril,
    "a base": lambda w: w + BASE,
    "a mask": lambda w: w * (BASE > 0),
    "identity": lambda w: w + jnp.eye(64),
    "a scale": lambda w: w * BASE[0][:, None],
    "padding": lambda w: jnp.pad(w[:-1], ((0, 1), (0, 0))),
    "a fixed row": lambda w: jnp.concatenate([w[:-1], BASE[:1]]),
    "its norm": lambda w: w / jnp.linalg.norm(w),
}

# Values near those of the network, of which each example has its own.
NEAR = TARGETS + normal(25, (128, 8), 1e-3)


def fitted(_, near, values):
    return 1e3 * squared(values - near) + squared(jnp.sin(3 * values)) + jnp.mean(values**3)


def centred(p, x):
    """Radial functions of computed values, at centres that are trained."""
    values = (300 + network(p[0], x))[..., None]
    return squared(jnp.exp(-((values + p[1]) ** 2)) @ p[2])


LABELS = jnp.arange(16) % 4


def sure(loss):
    """A classification that gives every label a probability of 0.999."""
    return lambda w, x: jnp.mean(loss(x @ w[:, :4] + 8 * jax.nn.one_hot(LABELS, 4)))


def of_labels(values):
    return jnp.take_along_axis(values, LABELS[:, None], axis=1)


def by_hand(values):
    terms = jnp.exp(values - jnp.max(values, axis=1, keepdims=True))
    return terms / (jnp.sum(terms, axis=1, keepdims=True) + 1e-12)


def mean_place(shares):
    """The place of a maximum, counted from far away."""
    return lambda w, x: squared(jnp.sum(shares(3 * x @ w) * (300.0 + jnp.arange(64)), 1) - 331)


SHARES = {
    "softmax": sure(lambda z: -jnp.log(of_labels(jax.nn.softmax(z)))),
    "a logarithm": sure(lambda z: jax.nn.logsumexp(z, axis=1, keepdims=True) - of_labels(z)),
    "place": mean_place(jax.nn.softmax),
    "place, by hand": mean_place(by_hand),
}


def deviation(p, x):
    return 0.01 * network(p, x)


def counts(p, x):
    logarithm = deviation(p, x)
    return 1e3 * jnp.mean(jnp.exp(logarithm) - 1.001 * logarithm)


def gate(w, x):
    open = jax.nn.sigmoid(x @ w)
    return squared(open * (30 + x) + (1 - open) * (30 + jnp.sin(x)) - 31)


def elastic(p, x):
    """The energy of a material close to its natural state."""
    strain = deviation(p, x)[:, :4].reshape(-1, 2, 2)
    gradient = jnp.eye(2) + strain
    (a, b), (c, d) = gradient[:, 0].T, gradient[:, 1].T
    return 1e3 * jnp.mean(0.5 * jnp.sum(gradient**2, (1, 2)) - jnp.log(a * d - b * c))


def divergence(p, x):
    """The divergence of two normal distributions, as in a variational autoencoder."""
    mean, log_variance = jnp.split(deviation(p, x), 2, axis=1)
    return 1e3 * jnp.mean(jnp.exp(log_variance) + mean**2 - 1 - log_variance)


def entropy(p, x):
    shares = jax.nn.softmax(deviation(p, x))
    return 1e3 * jnp.mean(shares * jnp.log(shares))


def by_a_product(p, x):
    """Its linear term has a product on the way back, which has no values of the network."""
    z = deviation(p, x)
    return 1e3 * (jnp.mean(jnp.exp(z)) - jnp.mean(z @ jnp.ones((8, 1))) / 8)


def summed(p, x):
    step = lambda total, x: (total + divergence(p, x), None)
    return jax.lax.scan(step, 0.0, x.reshape(4, 32, -1))[0]


def summed_again(p, x):
    step = jax.checkpoint(lambda total, x: (total + divergence(p, x), None))
    return jax.lax.scan(step, 0.0, x.reshape(4, 32, -1))[0]


def mapped(p, x):
    return jnp.mean(jax.lax.map(lambda x: divergence(p, x), x.reshape(4, 32, -1)))


def by_an_inner_product(p, x):
    z = deviation(p, x)
    return 1e3 * (jnp.mean(jnp.exp(z)) - jnp.vdot(jnp.ones_like(z), z) / z.size)


def of_two_networks(p, x):
    """The derivative by each network is a difference of values of both."""
    y, z = jnp.exp(deviation(p[0], x)), deviation(p[1], x)
    return 1e3 * (jnp.mean(jnp.exp(z)) - jnp.einsum("ij,ij->", y, z) / z.size)


def in_a_branch(p, x):
    return jax.lax.cond(x[0, 0] < 1e3, by_an_inner_product, lambda p, x: jnp.sum(p[-1]), p, x)


def over_devices(p, x):
    mesh = jax.make_mesh((2,), ("i",), (jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (P(), P("i")), "out_specs": P()}
    mean = lambda p, x: jax.lax.pmean(by_an_inner_product(p, x), "i")
    return jax.shard_map(mean, mesh=mesh, **specs)(p, x)


def called_twice(p, x):
    return 1e3 * jnp.mean(jnp.exp(deviation(p, x)) - deviation(p, x))


# The energy of a membrane, by matrices and stencils that are the same in each step. Its derivative
# is `K u - f`.
STIFFNESS = 2 * np.eye(128) - np.eye(128, k=1) - np.eye(128, k=-1)
DIFFERENCES = np.eye(129, 128) - np.eye(129, 128, k=-1)
SPARSE = BCOO.fromdense(jnp.asarray(STIFFNESS, jnp.float32))


LOAD = jnp.asarray(STIFFNESS, jnp.float32) @ (TARGETS + 1e-2 * normal(26, (128, 8)))


def loaded(energy):
    """Returns an energy with a load under which the network is close to the minimum."""
    moved = TARGETS + 1e-2 * normal(25, (128, 8))
    load = jax.grad(energy)(moved)
    return lambda p, x: energy(u := network(p, x)) - jnp.vdot(load, u)


def stretched(u):
    return 0.5 * jnp.sum((jnp.asarray(DIFFERENCES, u.dtype) @ u) ** 2)


def by_stiffness(u):
    return 0.5 * jnp.einsum("ic,ij,jc->", u, jnp.asarray(STIFFNESS, u.dtype), u)


def by_a_stencil(u):
    forces = jax.vmap(lambda v: jnp.convolve(v, jnp.array([-1.0, 2.0, -1.0]), mode="same"), 1, 1)
    return 0.5 * jnp.sum(u * forces(u))


def by_sparse_stiffness(u):
    return 0.5 * jnp.vdot(u, SPARSE @ u)


def area(u):
    return jnp.sum(jnp.sqrt(1 + (jnp.asarray(DIFFERENCES, u.dtype) @ u) ** 2))


def summed_over_columns(u):
    stiffness = jnp.asarray(STIFFNESS, u.dtype)
    step = lambda total, v: (total + 0.5 * v @ (stiffness @ v), None)
    return jax.lax.scan(step, 0.0, u.T)[0]


def by_elements(u):
    """Each element has two nodes, and the same matrix."""
    ends = u[np.arange(127)[:, None] + np.arange(2)]
    return 0.5 * jnp.einsum("eic,ij,ejc->", ends, jnp.array([[1.0, -1.0], [-1.0, 1.0]]), ends)


def by_a_trace(u):
    return 0.5 * jnp.trace(u.T @ (jnp.asarray(STIFFNESS, u.dtype) @ u))


def two_phases(u):
    """The stress is a sum of terms, times a value: none of them is small."""
    strain = jnp.asarray(DIFFERENCES, u.dtype) @ u
    return jnp.sum((strain**2 - 1) ** 2 + strain**2)


def on_a_basis(u):
    basis = normal(27, (8, 128), 0.1)
    return by_stiffness((u @ basis).T)


def lowest_frequency(p, x):
    """A quotient of energies, whose derivative is `K u - q u`."""
    u = network(p, x)[:, 0] + jnp.sin(jnp.pi * (jnp.arange(128.0) + 1) / 129)
    return u @ (jnp.asarray(STIFFNESS, u.dtype) @ u) / (u @ u)


# A small derivative of the loss, which is the difference of large terms.
NEAR_A_MINIMUM = {
    "counts": counts,
    "elastic": elastic,
    "divergence": divergence,
    "entropy": entropy,
    "gate": gate,
    "by a product": by_a_product,
    "by an inner product": by_an_inner_product,
    "of two networks": of_two_networks,
    "in a branch": in_a_branch,
    "over devices": over_devices,
    "called twice": called_twice,
    "energy by a matrix": loaded(by_stiffness),
    "energy by differences": loaded(stretched),
    "energy by a stencil": loaded(by_a_stencil),
    "energy by a sparse matrix": loaded(by_sparse_stiffness),
    "energy of an area": loaded(area),
    "energy of elements": loaded(by_elements),
    "energy by a trace": loaded(by_a_trace),
    "energy of two phases": loaded(two_phases),
    "energy on a basis": loaded(on_a_basis),
    "energy summed in a loop": loaded(summed_over_columns),
    "quotient of energies": lowest_frequency,
    "energy of parameters": lambda p, x: by_stiffness(p[0]) - jnp.vdot(LOAD, p[0]),
    "summed in a loop": summed,
    "summed in a loop of checkpoints": summed_again,
    "mean over a loop": mapped,
}
OTHERS = {
    "gate": (WEIGHT, STATES),
    "of two networks": ((LAYERS, LAYERS), POINTS),
    "energy of parameters": ((TARGETS,), POINTS),
}


PROGRAMS = {
    "small residual": (
        lambda p, x, y: squared(network(p, x) - y),
        LAYERS,
        POINTS,
        TARGETS + 1e-3 * normal(24, (128, 8)),
    ),
    "two networks": (
        lambda p, x, z: squared(jnp.einsum("bp,np->bn", network(p[0], x), network(p[1], z)) - 1),
        (LAYERS, LAYERS),
        POINTS,
        POINTS[:48],
    ),
    "trained centres": (
        centred,
        (LAYERS, jnp.linspace(-302, -298, 7), jnp.linspace(1, 2, 7)),
        POINTS,
    ),
    "fitted parameters": (lambda p, x: fitted(*p, network(p[0], x)), (LAYERS, NEAR), POINTS),
    **{f"shares: {k}": (loss, WEIGHT, STATES) for k, loss in SHARES.items()},
    **{
        f"near a minimum: {k}": (loss, *OTHERS.get(k, (LAYERS, POINTS)))
        for k, loss in NEAR_A_MINIMUM.items()
    },
    **{f"made weights: {k}": (_made(make), LAYERS, POINTS) for k, make in MADE.items()},
    **{
        f"decision: {k}": (
            lambda p, x, f=f: squared(f(near(0.1, x, p[0]), p[1])),
            (WEIGHT, OTHER),
            STATES,
        )
        for k, f in DECISIONS.items()
    },
}
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

"""Tests the initial scales, found before the first step or by the first steps, and checks that a
step contains no loop for them."""

import re
from contextlib import nullcontext

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import equations, relative, training_step, tree_equal_bits
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import mpx_pde as mpx


KEPT = {"keep_full": (False, True)}


def poisson(model, points, *, derivatives):
    d = mpx.partials(model, ["u", "u_xx"], coords="x", outputs="u", scaling=derivatives)
    d = jax.vmap(d)(points)
    return jnp.mean((1e-6 * d["u_xx"] + d["u"]) ** 2)


def start():
    """Returns a network of coordinates in units of 1/600. u_xx is beyond float16."""
    mlp = mpx.nn.CoordinateMLP(1, 1, 16, 2, key=jax.random.key(0))
    units = eqx.nn.Lambda(lambda p: 600.0 * p), eqx.nn.Lambda(lambda u: 30.0 * u)
    scaling = mpx.Scaling(derivatives=mpx.DerivativeScaling.per_direction("x", order=2))
    return eqx.nn.Sequential([units[0], mlp, units[1]]), scaling


def batches():
    return jax.random.uniform(jax.random.key(1), (4, 32, 1)) / 600.0


@pytest.mark.slow
def test_without_it_four_steps_are_lost_at_most():
    """The loss scale is 2^12 too large, and the derivative scale is too large as well."""
    model, scaling = start()
    optimizer = optax.adam(1e-2)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    taken, step = [], training_step(poisson, optimizer, **KEPT)
    for k in range(6):
        *_, scaling, _, finite, _ = step(model, state, scaling, batches()[k % 4])
        taken.append(bool(finite))
    assert taken == sorted(taken)
    assert taken.count(False) <= 4
    assert scaling.skipped_steps == taken.count(False)


def linear(w, x):
    return jnp.sum(w * x)


HARD = jnp.array([1.0, 3000.0, -2.0])  # 2^4 is the largest scale with a float16 result


def test_a_scale_falls_fast_until_a_step_has_been_taken():
    """After that step it follows its rule."""
    f = eqx.filter_jit(lambda s, x: mpx.filter_grad(linear, s)(jnp.ones(3), x)[0])
    scaling, seen = mpx.DynamicLossScaling(), []
    for x in (HARD, HARD, HARD, HARD, 1e3 * HARD, 1e3 * HARD):
        scaling = f(scaling, x)
        seen.append(int(jnp.log2(scaling.loss_scaling)))
    # 1e3 * HARD itself is beyond float16.
    assert seen == [11, 7, 3, 3, 2, 1]
    at_floor = mpx.DynamicLossScaling(2.0**2, min_loss_scaling=1.0)
    assert f(at_floor, 8.0 * HARD).loss_scaling == 1.0
    assert f(mpx.DynamicLossScaling(counter=5), HARD).loss_scaling == 2.0**14
    assert f(mpx.DynamicLossScaling(2.0**15, factor=2**6), HARD).loss_scaling == 2.0**9
    assert f(mpx.StaticLossScaling(2.0**15), HARD).loss_scaling == 2.0**15


@pytest.mark.slow
@pytest.mark.parametrize("first", [15, -20])
def test_a_loss_scale_neither_overflows_nor_underflows(first):
    """At 2^4 the largest entry is near overflow. Far below, the smallest loses its digits."""
    x = jnp.array([2.0**-9 * 1.34375, 3000.0, -2.0])
    split = lambda m, x: linear(m["small"], x[:1]) + linear(m["rest"], x[1:])
    model = {"small": jnp.ones(1), "rest": jnp.ones(2)}
    scaling = mpx.DynamicLossScaling(2.0**first)
    found = mpx.initial_scaling(split, scaling)(model, x)
    _, finite, grads = mpx.filter_grad(split, found)(model, x)
    assert finite
    want = x.astype(jnp.float16).astype(jnp.float32)
    np.testing.assert_array_equal(jnp.concatenate([grads["small"], grads["rest"]]), want)
    assert found.loss_scaling == 2.0**2
    assert tree_equal_bits(found.counter, scaling.counter)


@pytest.mark.parametrize(
    ("options", "scaling"),
    [
        ({"policy": "params=float32,compute=bfloat16,output=float32"}, mpx.DynamicLossScaling()),
        ({}, mpx.StaticLossScaling(8.0)),
        ({}, mpx.NoOpLossScaling()),
        ({"use_mixed_precision": False}, mpx.DynamicLossScaling()),
    ],
)
def test_where_there_is_nothing_to_find_it_returns_what_it_got(options, scaling):
    def never(w, x):
        raise AssertionError

    found = mpx.initial_scaling(never, scaling, **options)(jnp.ones(3), HARD)
    assert tree_equal_bits(found, scaling)


@pytest.mark.parametrize("factor", [0.0, jnp.nan])
def test_where_no_scale_helps_it_says_so(factor):
    find = mpx.initial_scaling(lambda w: jnp.sum(jnp.sqrt(factor * w)), mpx.DynamicLossScaling())
    with pytest.raises(ValueError, match=r"`initial_scaling` found no scale.*explain_nonfinite"):
        find(jnp.ones(2))


@pytest.mark.slow
def test_a_check_that_fails_where_the_gradient_overflows_is_an_overflow():
    """As that of lineax, whose solve in a backward pass takes no infinity."""

    def loss(w, x, most):
        solved = jax.custom_vjp(lambda w: w)
        checked = lambda g: eqx.error_if(g, jnp.any(jnp.abs(g) > most), "large")
        solved.defvjp(lambda w: (w, None), lambda _, g: (checked(g),))
        return linear(solved(w), x)

    found = mpx.initial_scaling(loss, mpx.DynamicLossScaling())(jnp.ones(3), HARD, 6e4)
    assert found == mpx.initial_scaling(linear, mpx.DynamicLossScaling())(jnp.ones(3), HARD)
    (model, scaling), finite = start(), lambda x: eqx.error_if(x, ~jnp.isfinite(x), "large")
    for fun in (poisson, lambda *args, **given: finite(poisson(*args, **given))):
        found = mpx.initial_scaling(fun, scaling, **KEPT)(model, batches()[0])
        assert found.derivatives.exponents == -4
    with pytest.raises(eqx.EquinoxRuntimeError, match="large"):
        mpx.initial_scaling(loss, mpx.DynamicLossScaling())(jnp.ones(3), HARD, 0.0)


@pytest.mark.filterwarnings("ignore:The gradient has vanished as a whole")
def test_underflow_at_the_highest_scale_is_told():
    """The suggested cap keeps the gradient. There is no warning of an ordinary loss."""

    def found_for(factor, **options):
        loss = lambda w, x: linear(w, x).astype(jnp.float32) * factor
        scaling = mpx.initial_scaling(loss, mpx.DynamicLossScaling(**options))(jnp.ones(3), HARD)
        return scaling, mpx.filter_grad(loss, scaling)(jnp.ones(3), HARD)[2]

    with pytest.warns(mpx.PrecisionWarning, match=r"`initial_scaling`.*2\^15.*underflows") as told:
        scaling, grads = found_for(2.0**-44)
    assert not grads.any()
    assert scaling.loss_scaling == 2.0**15
    cap = 2.0 ** int(re.search(r"max_loss_scaling=2\*\*(\d+)`", str(told[0].message))[1])
    np.testing.assert_array_equal(found_for(2.0**-44, max_loss_scaling=cap)[1], 2.0**-44 * HARD)
    assert found_for(2.0**-14)[0].loss_scaling == 2.0**15


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (lambda w, x: jnp.mean((1e-5 * linear(w, x)) ** 2), r"2\^15, at which a part"),
        (lambda w, x: 1e-12 * linear(w, x), "zero at every scale, but not in float32"),
    ],
)
def test_underflow_of_a_loss_that_ends_in_half_is_told(loss, match):
    """No larger scale helps, because the loss itself is in float16. The advice helps."""
    w, x = jnp.ones(3), jnp.array([1.0, 0.5, -1.0])
    scaling = mpx.DynamicLossScaling(2.0**12)
    with pytest.warns(mpx.PrecisionWarning, match=match + ".*forward='float32'"):
        mpx.initial_scaling(loss, scaling)(w, x)
    found = mpx.initial_scaling(loss, scaling, forward="float32")(w, x)
    grads = mpx.filter_grad(loss, found, forward="float32")(w, x)[2]
    assert relative(grads, eqx.filter_grad(loss)(w, x)) < 2.0**-9


@pytest.mark.slow
@pytest.mark.parametrize("warns", [True, False])
def test_a_derivative_beside_a_far_larger_one_is_told(warns):
    units = jnp.array([1e6, 1e-6 if warns else 1e3])
    network = mpx.nn.CoordinateMLP(2, "scalar", 8, 2, key=jax.random.key(0))

    def loss(network, points, *, derivatives=None):
        named = {"coords": "tx", "outputs": "u", "scaling": derivatives}
        terms = mpx.partials(lambda p: network(p / units), ["u_t", "u_x"], **named)
        return jnp.mean(sum(d**2 for d in jax.vmap(terms)(points).values()))

    scaling = mpx.Scaling(derivatives=mpx.DerivativeScaling.per_order(1, terms=["u_t", "u_x"]))
    expected = pytest.warns(mpx.PrecisionWarning, match="'u_t' is nearly all below")
    with expected if warns else nullcontext():
        mpx.initial_scaling(loss, scaling, forward="float32")(network, units[None])


def test_a_gradient_of_zero_asks_for_no_scale():
    """A loss without a weight yet: the scale came to 2^126, and later 107 steps were skipped."""
    in_full = lambda w, weight: weight * jnp.sum(w**2)
    zero, add = jnp.zeros((), jnp.float16), lambda total, x: (total + x, None)
    only_in_half = lambda w, weight: jax.lax.scan(add, zero, weight * w)[0]
    for loss, options in ((in_full, {"forward": "float32"}), (only_in_half, {})):
        find = mpx.initial_scaling(loss, mpx.DynamicLossScaling(2.0**12), **options)
        assert find(jnp.ones(3), jnp.zeros(())).loss_scaling == 2.0**12


@pytest.mark.slow
def test_a_loss_in_full_has_no_cap_of_half_precision():
    """A loss of 1e-12 lost its gradient in float16 without a warning."""
    model, x = eqx.nn.MLP(1, 1, 8, 1, jnp.tanh, key=jax.random.key(0)), batches()[0]
    loss = lambda model, x: 1e-12 * jnp.mean((jax.vmap(model)(x) - 1) ** 2)
    want, start = eqx.filter_grad(loss)(model, x), mpx.DynamicLossScaling(period=1)
    scaling = mpx.initial_scaling(loss, start, forward="float32")(model, x)
    assert scaling.loss_scaling > 2.0**30
    after, finite, grads = mpx.filter_grad(loss, scaling, forward="float32")(model, x)
    assert finite
    assert relative(grads, want) < 2.0**-9  # a few roundings to float16 in a row
    assert after.loss_scaling == 2 * scaling.loss_scaling


@pytest.mark.slow
def test_all_that_a_step_takes():
    """Passes auxiliary output, a state that can be used once, keyword arguments, `forward=`,
    sharded batches, and a `Scaling` whose loss scale is fixed."""
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, axis_name="b", mode="batch")

    def loss(model, state, x, *, factor):
        w, norm = model
        run = jax.vmap(norm, axis_name="b", in_axes=(0, None), out_axes=(0, None))
        y, state = run(x, state)
        return jnp.mean((w[None] * y).astype(jnp.float32)) * factor, state

    options = {"has_aux": True, "forward": "float32"}
    mesh = Mesh(np.array(jax.devices()[:4]), "b")
    x = jax.device_put(jnp.ones((8, 3)) * HARD[None], NamedSharding(mesh, P("b")))
    find = mpx.initial_scaling(loss, mpx.DynamicLossScaling(), **options)
    found = find((jnp.ones(3), norm), state, x, factor=1e8)
    run = mpx.filter_grad(loss, found, **options)
    assert run((jnp.ones(3), norm), state, x, factor=1e8)[1]
    model, scaling = start()
    fixed = mpx.Scaling(mpx.StaticLossScaling(2.0**-3), scaling.derivatives)
    found = mpx.initial_scaling(poisson, fixed, **KEPT)(model, batches()[0])
    assert found.loss.loss_scaling == 2.0**-3
    assert found.derivatives.exponents[0] < 0


@pytest.mark.filterwarnings("ignore:.*takes no derivative:mpx_pde.PrecisionWarning")
@pytest.mark.parametrize("derivatives", [False, True])
def test_the_step_holds_no_loop_and_no_branch(derivatives):
    scaling = mpx.DynamicLossScaling()
    if derivatives:
        scaling = mpx.Scaling(derivatives=mpx.DerivativeScaling.per_direction("x", order=2))
    f = mpx.filter_grad(lambda w, x, **_: linear(w, x), scaling)
    names = {e.primitive.name for e in equations(jax.make_jaxpr(lambda x: f(HARD, x)[2])(HARD))}
    assert not names & {"while", "cond", "custom_jvp_call"}


@pytest.mark.slow
def test_the_gradient_can_still_be_differentiated():
    """The modes are forward and reverse, also with respect to values that the loss closes over."""
    scaling = mpx.DynamicLossScaling(2.0**3)

    def outer(factor, x):
        loss = lambda w: jnp.sum(w**2 * (x * factor).astype(w.dtype))
        return jnp.sum(mpx.filter_grad(loss, scaling)(jnp.ones(3))[2] ** 2)

    want = 8 * jnp.sum(HARD**2)  # the gradient of (2 x factor)^2 at a factor of 1
    for f in (jax.grad(outer), jax.jit(jax.grad(outer))):
        np.testing.assert_allclose(f(jnp.array(1.0), HARD), want, rtol=2e-3)  # float16
    tangent = jax.jvp(lambda f: outer(f, HARD), (jnp.array(1.0),), (jnp.array(1.0),))[1]
    np.testing.assert_allclose(tangent, want, rtol=2e-3)

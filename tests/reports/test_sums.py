"""Tests that sums which stand still in half precision are told, with their lines."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_tells, line_here, relative
from jax import lax
from jax.experimental import sparse

import mpx_pde as mpx
from mpx_pde.reports._sums import STEPS, UNITS, long_sums
from mpx_pde.reports._survey import Survey


pytestmark = pytest.mark.usefixtures("standard_promotion")

N = 3000
HUB = jnp.zeros(N, jnp.int32)
APART = np.random.default_rng(0).permutation(N)  # known while tracing
MESH = np.arange(2 * N) // 6  # each entry gets six terms


def wide(x):
    return jnp.sum(x.astype(jnp.float32))


def zero(x):
    return jnp.zeros((), x.dtype)


def window(x):
    return lax.reduce_window(x[:, None] * x[:2], zero(x), lax.add, (N, 1), (1, 1), "VALID")


def decayed(x, factor):
    return lax.scan(lambda c, a: (factor * c + a, None), x[0], x)[0]


# Functions of N ones of a half type and of N zeros, some entry of whose result should be N.
STILL = {
    "segment_sum": lambda x, i: jax.ops.segment_sum(x, i, 3),
    "at[].add": lambda x, i: jnp.zeros(3, x.dtype).at[i].add(x),
    "at[].subtract": lambda x, i: jnp.zeros(3, x.dtype).at[i].subtract(-x),
    "gradient of a gather": lambda x, i: jax.grad(lambda t: wide(t[i]))(x[:2]),
    "gradient of a mapped gather": lambda x, i: jax.grad(
        lambda t: wide(jax.vmap(lambda j: t[j])(i))
    )(x[:2]),
    "reduce_window": lambda x, i: window(x),
    "scan": lambda x, i: lax.scan(lambda c, a: (c + a, None), zero(x), x)[0],
    "scan of casts": lambda x, i: lax.scan(
        lambda c, a: ((c.astype("float32") + a.astype("float32")).astype(c.dtype), None), zero(x), x
    )[0],
    "fori_loop": lambda x, i: lax.fori_loop(0, N, lambda k, c: x[k] + c, zero(x)),
    "gradient of a weight in a scan": lambda x, i: jax.grad(
        lambda w: wide(lax.scan(lambda c, a: (c, w * a), None, x)[1])
    )(x[0]),
    "Horner's rule": lambda x, i: jnp.polyval(x, x[0]),
    "known factors near 1": lambda x, i: lax.scan(
        lambda c, a: (jnp.asarray(-1, x.dtype) * c - a, None), zero(x), x * (-1) ** jnp.arange(N)
    )[0],
    "inside of jit and scan": lambda x, i: lax.scan(
        lambda c, _: (c, jax.jit(lambda x: jax.ops.segment_sum(x, i, 3))(x)), None, length=2
    )[1],
    "BCOO": lambda x, i: sparse.BCOO((x, jnp.stack([i, jnp.arange(N)], 1)), shape=(2, N)) @ x,
}

# The same for functions that are right, or round at most each term.
RIGHT = {
    "sum": lambda x, i: x.sum(),
    "dot": lambda x, i: x @ x,
    "gradient of a bias": lambda x, i: jax.grad(lambda b: wide(jax.vmap(lambda r: r + b)(x)))(x[0]),
    "known indices": lambda x, i: jnp.zeros(N, x.dtype).at[APART].add(x) * N,
    "gradient of known indices": lambda x, i: jax.grad(lambda t: wide(t[APART]))(x) * N,
    "mesh": lambda x, i: jax.ops.segment_sum(jnp.concatenate([x, x]), MESH, N // 3) * (N / 6),
    "in float32": lambda x, i: jax.ops.segment_sum(x.astype("float32"), i, 3),
    "average": lambda x, i: lax.scan(lambda c, a: (0.5 * c + a / 2, None), x[0], x)[0] * N,
    "decay": lambda x, i: decayed(x, jnp.asarray(0.75, x.dtype)) * (N / 4),
    "few": lambda x, i: jax.ops.segment_sum(x[:200], i[:200], 3) * (N / 200),
    "known sparse": lambda x, i: sparse.BCOO((x, APART_2), shape=(N, N)) @ x * N,
}
APART_2 = np.stack([APART, APART], 1)


def stagnating(fun, *args):
    return [x for x in long_sums(Survey(jax.make_jaxpr(fun)(*args))) if x.stagnates()]


@pytest.mark.parametrize("name", [*STILL, *RIGHT])
def test_sums_that_stand_still_are_told_and_no_others(name):
    fun = (STILL | RIGHT)[name]
    for half, units in UNITS.items():
        x = jnp.ones(N, half)
        told = stagnating(fun, x, HUB)
        got = float(np.max(np.asarray(jax.jit(fun)(x, HUB)).astype(np.float64)))
        if name in STILL:
            assert (told[0].dtype, told[0].terms) == (half, N)
            assert "test_sums.py" in told[0].line
            # The oracle is what is computed. A window of several columns is added in other ways.
            assert got == units or name == "reduce_window"
        else:
            assert told == []
            assert got == pytest.approx(N, rel=float(jnp.finfo(half).eps))


def euler(steps):
    def loss(w, u):
        step = lambda u, _: (u + jnp.tanh(u @ w) / steps, None)
        return jnp.mean((lax.scan(step, u, length=steps)[0] - 2 * u) ** 2)

    return loss


def leaky(steps):
    """A cell with a rate that is not known while tracing, or is 1/2."""

    def loss(w, u, rate=None):
        rate = w[0, 0] if rate is None else jnp.asarray(rate, u.dtype)
        step = lambda u, _: (u * (1 - rate) + rate * jnp.tanh(u @ w), None)
        return jnp.mean(lax.scan(step, u, length=steps)[0] ** 2)

    return loss


def leapfrog(w, u):
    def step(carry, _):
        u, v = carry
        v = v - 1e-3 * jnp.tanh(u @ w)
        return (u + 1e-3 * v, v), None

    return jnp.mean(lax.scan(step, (u, u), length=STEPS)[0][0])


def summed_on_the_way(w, u):
    """A state that contracts, and a sum over its path."""

    def step(carry, _):
        u, total = carry
        u = jnp.tanh(u @ w)
        return (u, total + jnp.mean(u)), None

    return lax.scan(step, (u, zero(u)), length=STEPS)[0][1]


def layered(w, u):
    """A residual network of as many layers as there are steps in `euler(4 * STEPS)`."""
    weights = jnp.stack([jnp.roll(w, i, axis=1) for i in range(4 * STEPS)])
    layer = jax.checkpoint(lambda u, w: u + jnp.tanh(u @ w) / 4)
    return jnp.mean((lax.scan(lambda u, w: (layer(u, w), None), u, weights)[0] - 2 * u) ** 2)


SQUARE = 0.3 * np.random.default_rng(1).normal(size=(16, 16)).astype("float32") / 4
STATE = np.random.default_rng(2).normal(size=(8, 16)).astype("float32")


@pytest.mark.parametrize("half", UNITS)
def test_steps_that_are_lost_beside_the_state_are_told(half):
    count = lambda loss: stagnating(jax.grad(loss), SQUARE.astype(half), STATE.astype(half))
    told = count(euler(STEPS))
    assert {x.backward for x in told} == {False, True}  # the state and its adjoint
    assert all(
        x.steps and f"test_sums.py:{euler.__code__.co_firstlineno + 2}" in x.line for x in told
    )
    assert count(euler(STEPS - 1)) == []
    assert count(leapfrog) != []  # each value is fed by the other
    assert count(leaky(STEPS)) != []
    assert count(lambda w, u: leaky(STEPS)(w, u, 0.5)) == []
    assert count(layered) == []
    if half == "float16":
        assert count(summed_on_the_way) == []


@pytest.mark.slow
@pytest.mark.parametrize("half", UNITS)
def test_layers_of_a_residual_network_lose_less_than_steps(half):
    with jax.enable_x64(True):
        want = jax.grad(layered)(SQUARE.astype("float64"), STATE.astype("float64"))
    got = jax.jit(jax.grad(layered))(SQUARE.astype(half), STATE.astype(half))
    # Integrators lose 20 to 40 (float16) and 50 to 70 (bfloat16) roundings in 128 steps.
    assert relative(got, want) < 16 * float(jnp.finfo(half).eps) / 2


@pytest.mark.slow
@pytest.mark.parametrize("half", UNITS)
def test_a_warning_of_lost_steps_names_the_line_and_the_mends_work(half):
    loss = euler(4 * STEPS)
    given = {"policy": f"params=float32,compute={half},output=float32"}
    want = jax.grad(loss)(SQUARE, STATE)
    run = lambda **options: eqx.filter_jit(
        mpx.filter_grad(loss, mpx.NoOpLossScaling(), **given, **options)
    )(SQUARE, STATE)[-1]
    with pytest.warns(mpx.PrecisionWarning, match=f"each of {4 * STEPS} steps") as told:
        lost = run()
    assert_tells(str(told[0].message), f"{UNITS[half]:,}", "astype", "autocast=True", "forward=")
    # What the warning is for: more than 16 roundings.
    assert relative(lost, want) > 16 * float(jnp.finfo(half).eps) / 2
    for mend in ({"autocast": True}, {"forward": "float32"}):
        # Operands of one product are rounded, and errors of the steps average out.
        assert relative(run(**mend), want) < 4 * float(jnp.finfo(half).eps)


def hub(model, h, senders, receivers):
    messages = jnp.tanh(h @ model)[senders]
    count = jax.ops.segment_sum(jnp.ones(len(senders), h.dtype), receivers, len(h))
    sums = jax.ops.segment_sum(messages, receivers, len(h))
    return jnp.mean((sums[0] / count[0] - 1) ** 2)


def graph(edges=6000):
    h = jnp.abs(jax.random.normal(jax.random.key(1), (16, 8)))
    w = jax.random.normal(jax.random.key(0), (8, 8)) / 3
    return w, h, jnp.arange(edges) % 16, jnp.zeros(edges, jnp.int32)


def test_a_gradient_warns_of_them_while_it_is_traced():
    def loss(w, i):
        return jnp.sum(jax.ops.segment_sum(w, i, 3).astype(jnp.float32))

    run = jax.jit(lambda w, i: mpx.filter_grad(loss, mpx.DynamicLossScaling(1.0))(w, i)[2])
    with pytest.warns(mpx.PrecisionWarning, match="3,000 terms in float16") as told:
        run(jnp.ones(N), HUB)
    assert_tells(str(told[0].message), f"test_sums.py:{line_here(-5)}", "astype(jnp.float32)")


@pytest.mark.slow
@pytest.mark.parametrize("half", UNITS)
def test_a_hub_of_a_graph_is_told_with_its_line_and_the_mends_work(half):
    given = {"policy": f"params=float32,compute={half},output=float32"}
    scaling, args = mpx.DynamicLossScaling(2.0**6), graph()
    run = lambda **options: eqx.filter_jit(mpx.filter_value_and_grad(hub, scaling, **options))
    want, *_, grads = run(use_mixed_precision=False)(*args)
    with pytest.warns(mpx.PrecisionWarning, match=f"6,000 terms in {half}") as told:
        value, *_, lost = run(**given)(*args)
    text = str(told[0].message)
    line = hub.__code__.co_firstlineno
    assert_tells(text, "filter_value_and_grad", "autocast=True", "forward='float32'")
    assert_tells(text, f"test_sums.py:{line + 2}", "2 other lines", f"{UNITS[half]:,}")
    assert abs(value - want) > 0.05 * want or relative(lost, grads) > 0.05
    for mend in ({"autocast": True}, {"forward": "float32"}):
        value, *_, right = run(**given, **mend)(*args)
        # Rounded operands of one product: 2^-8 and 2^-11.
        assert relative(right, grads) < 4 * float(jnp.finfo(half).eps)
        assert value == pytest.approx(want, rel=4 * float(jnp.finfo(half).eps))


@pytest.mark.slow
def test_reports_and_the_advice_see_it():
    scaling, args = mpx.DynamicLossScaling(2.0**6), graph()
    of_half = mpx.filter_grad(hub, scaling)
    line = f"test_sums.py:{hub.__code__.co_firstlineno + 2}"
    for fun in (of_half, jax.grad(hub)):
        assert_tells(mpx.explain_nonfinite(fun)(*args), line, "6,000 terms", "stands still")
        report = mpx.range_report(fun)(*args)
        assert line in report.stagnating("float16")[0].line
        assert_tells(str(report), "may stand still", "6,000 terms")
    kept = mpx.range_report(mpx.filter_grad(hub, scaling, autocast=True))(*args)
    assert kept.sums == ()
    short = mpx.range_report(of_half)(*graph(1000))
    assert short.stagnating("float16") == ()
    advice = mpx.advise(hub)(*args)
    throughout = advice.rows[3]
    assert throughout.value_error > 0.05
    want, got = (
        mpx.filter_value_and_grad(hub, scaling, use_mixed_precision=mixed)(*args)[0]
        for mixed in (False, True)
    )
    assert throughout.value_error == pytest.approx(relative(got, want), rel=0.02)
    assert advice.choice.value_error < 0.01
    assert_tells(str(advice), "loss off by")


@pytest.mark.slow
def test_a_value_that_is_wrong_beside_a_right_gradient_is_not_advised():
    """The count of a mean does not depend on the parameters."""

    def loss(model, x, i):
        count = jax.ops.segment_sum(jnp.ones(len(x), x.dtype), i, 2)[0]
        return jnp.mean((jax.vmap(model)(x)) ** 2) + lax.stop_gradient(count).astype("float32")

    model = eqx.nn.MLP(4, "scalar", 16, 1, key=jax.random.key(0))
    advice = mpx.advise(loss)(model, jax.random.normal(jax.random.key(1), (N, 4)), HUB)
    throughout = advice.rows[3]
    assert throughout.error < 0.01
    # 2,048 of 3,000.
    assert throughout.value_error == pytest.approx(1 - 2048 / N, rel=0.01)
    assert throughout is not advice.choice


def test_sizes_that_are_symbols_are_no_error():
    (n,) = jax.export.symbolic_shape("n")
    x, i = jax.ShapeDtypeStruct((n,), jnp.float16), jax.ShapeDtypeStruct((n,), jnp.int32)
    fun = jax.jit(lambda x, i: jax.ops.segment_sum(x, i, 3) + jnp.cumsum(x)[0])
    assert long_sums(Survey(fun.trace(x, i).jaxpr)) == []


def test_data_that_a_loss_closes_over_are_named():
    x = jax.random.normal(jax.random.key(1), (64, 16))
    model = eqx.nn.MLP(16, "scalar", 16, 1, key=jax.random.key(0))
    loss = lambda model: jnp.mean(jax.vmap(model)(x) ** 2)
    run = eqx.filter_jit(mpx.filter_grad(loss, mpx.DynamicLossScaling()))
    with pytest.warns(mpx.PrecisionWarning, match=" 0% of the work") as told:
        run(model)
    assert_tells(str(told[0].message), "closes over", "float32[64, 16]", "arguments")
    assert_tells(str(told[0].message), 'forward="float32"', "Flax")
    assert told[0].lineno == line_here(-3)

"""Tests derivative scales, the values that they count, and their use in a training step."""

from functools import partial, reduce

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_tells, relative, training_step, tree_allclose, tree_equal_bits
from jax import lax

import mpx_pde as mpx


NONFINITE = -1
"""The last column of `counts`. The first counts zeros, and the second exponents up to -32."""


def network():
    return eqx.nn.MLP(2, "scalar", 8, 1, jnp.tanh, key=jax.random.key(0))


STEEP = jnp.array([[1.0, 3e4]])


def steep():
    """Returns a network whose layers overflow in the derivative in t, but not in u and u_xx."""
    bent = lambda x: x + 0.1 * jnp.sin(x)
    model = eqx.nn.MLP(2, "scalar", 16, 2, bent, key=jax.random.key(0))
    weights = lambda m: [m.layers[0].weight, m.layers[1].weight]
    first, second = weights(model)
    return eqx.tree_at(weights, model, [first * STEEP, 32 * second])


def points(n=16):
    return jax.random.uniform(jax.random.key(1), (n, 2))


def loss(model, x, *, derivatives, dtype="float16"):
    """Evaluates a residual. Without a dtype the points are not cast, for float32 or bfloat16."""
    given = {"coords": "xt", "outputs": "u", "scaling": derivatives, "dtype": dtype}
    d = jax.vmap(mpx.partials(model, ["u", "u_t", "u_x", "u_xx"], **given))(x)
    return jnp.mean((d["u_t"] + d["u"] * d["u_x"] - 0.1 * d["u_xx"]) ** 2)


def direction(**options):
    return mpx.DerivativeScaling.per_direction("xt", order=2, **options)


def machine(steps, exponent, low, high, growth, recover, threshold):
    """Yields exponent and tracker of a scaler after each step, by the rule of the paper."""
    tracker = 0
    for step in steps:
        tracker += step == "clean"
        if step == "overflow":
            exponent, tracker = max(exponent - 1, low), 0
        elif step == "clean" and tracker >= (recover if exponent <= threshold else growth):
            # A scale rises above 1 only if values vanish, and none does here.
            exponent, tracker = min(exponent + 1, max(exponent, min(high, 0))), 0
        yield exponent, tracker


def counts_for(scaling, column_of_row):
    counts = np.zeros(scaling.counts.shape, np.float32)
    for row, column in column_of_row.items():
        counts[scaling.row_names.index(row), column] = 5
    return jnp.asarray(counts)


class TestPaperRule:
    @pytest.mark.slow
    @hypothesis.settings(max_examples=25)
    @hypothesis.given(
        st.lists(st.tuples(*[st.sampled_from(["clean", "overflow", "unseen"])] * 2), max_size=40),
        st.integers(-2, 1),
        st.integers(0, 3),
    )
    def test_against_a_machine_in_plain_python(self, steps, high, below):
        low = high - 5
        options = {"init_scale": 2.0 ** (high - below), "recover_threshold": 2.0 ** (high - 3)}
        options |= {"growth_interval": 4, "recover_growth_interval": 2}
        limits = {"max_scale": 2.0**high, "min_scale": 2.0**low}
        scaling = mpx.DerivativeScaling.per_order(2, **options, **limits)
        given = high - below, low, high, 4, 2, high - 3
        machines = (machine([step[i] for step in steps], *given) for i in range(2))
        adjust = eqx.filter_jit(lambda s, c: s.adjust(c))
        for step, *wanted in zip(steps, *machines, strict=True):
            columns = {"clean": 30, "overflow": NONFINITE}
            rows = {f"order {i + 1}": columns[s] for i, s in enumerate(step) if s in columns}
            scaling = adjust(scaling, counts_for(scaling, rows))
            assert list(zip(scaling.exponents, scaling.tracker, strict=True)) == wanted
        overflows = [sum(s[i] == "overflow" for s in steps) for i in range(2)]
        assert scaling.overflows.tolist() == overflows
        assert scaling.skipped_steps == sum("overflow" in s for s in steps)


class TestStep:
    def test_an_overflow_skips_the_step_and_leaves_everything_as_it_was(self):
        model, optimizer = steep(), optax.adam(1e-3)
        scaling = mpx.Scaling(derivatives=direction())
        state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        step = training_step(loss, optimizer)
        after, state_after, new, _, finite, _ = step(model, state, scaling, points() / STEEP)
        assert not finite
        # The loss scale is as it was, the counter too. No step has been taken yet.
        assert tree_equal_bits((after, state_after, new.loss), (model, state, scaling.loss))
        assert new.derivatives.exponents.tolist() == [0, -4]
        assert new.derivatives.skipped_steps == 1

    @pytest.mark.slow
    def test_grads_finite_is_false_although_the_loss_masks_what_overflowed(self):
        model = steep()

        def masked(model, x, *, derivatives):
            given = {"coords": "xt", "outputs": "u", "dtype": "float16"}
            fun = mpx.partials(model, ["u_t"], scaling=derivatives, **given)
            u_t = jax.vmap(fun)(x)["u_t"]
            return jnp.sum(0 * jnp.where(jnp.isfinite(u_t), u_t, 0.0))

        scaling = mpx.Scaling(mpx.NoOpLossScaling(), direction())
        gradient = eqx.filter_jit(mpx.filter_grad(masked, scaling))
        assert not gradient(model, points() / STEEP)[1]

    @pytest.mark.slow
    def test_a_gradient_overflow_leaves_the_derivative_scalers_alone(self):
        loss_scaling = mpx.DynamicLossScaling(2.0**30, max_loss_scaling=2.0**30)
        scaling = mpx.Scaling(loss_scaling, direction(init_scale=2.0**-1))
        scale_up = lambda m, x, *, derivatives: 1e30 * loss(m, x, derivatives=derivatives)
        new, finite, _ = eqx.filter_jit(mpx.filter_grad(scale_up, scaling))(network(), points())
        assert not finite
        assert (new.loss.loss_scaling, new.derivatives.skipped_steps) == (2.0**26, 0)
        assert new.derivatives.exponents.tolist() == [-1, -1]
        assert new.derivatives.tracker.tolist() == [1, 1]

    def test_at_the_floor_of_the_loss_scale_the_derivative_scales_rise(self):
        loss_scaling = mpx.DynamicLossScaling(1.0, min_loss_scaling=1.0)
        scaling = mpx.Scaling(loss_scaling, direction(init_scale=2.0**-3))
        counts = counts_for(scaling.derivatives, {"_x": 30, "_t": 30})
        for finite, exponent in ((False, -2), (True, -3)):
            new = scaling.adjust(jnp.array(finite), counts)
            assert new.derivatives.exponents.tolist() == [exponent, exponent]

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["direction", "order", "term"])
    def test_gradients_do_not_depend_on_the_scale(self, kind):
        model, x = network(), points()
        make = {
            "direction": direction,
            "order": partial(mpx.DerivativeScaling.per_order, 2),
            "term": partial(mpx.DerivativeScaling.per_term, ["u_t", "u_x", "u_xx"]),
        }[kind]
        step = eqx.filter_jit(lambda s: mpx.filter_value_and_grad(loss, s)(model, x))
        results = []
        for exponent in (0, -2):
            scaling = mpx.Scaling(mpx.StaticLossScaling(2.0**4), make(init_scale=2.0**exponent))
            value, _, finite, grads = step(scaling)
            assert finite
            results.append((value, grads))
        # Cotangents are rounded at different places of the subnormal range.
        assert tree_allclose(*results, computed_in="float16")

    @pytest.mark.slow
    def test_bfloat16_is_the_identity_bit_for_bit(self):
        model, x = network(), points()
        gradient = partial(mpx.filter_value_and_grad, policy="bfloat16")
        plain = partial(loss, dtype=None)
        run = lambda fun, scaling: eqx.filter_jit(gradient(fun, scaling))(model, x)
        start = direction(init_scale=2.0**-3)
        value, scaling, finite, grads = run(plain, mpx.Scaling(mpx.NoOpLossScaling(), start))
        unscaled = partial(plain, derivatives=None)
        want, _, _, want_grads = run(unscaled, mpx.NoOpLossScaling())
        assert tree_equal_bits((value, grads), (want, want_grads))
        assert finite
        assert tree_equal_bits(scaling.derivatives.exponents, start.exponents)
        assert scaling.derivatives.shifts.tolist() == [0] * len(start.row_names)
        assert scaling.derivatives.counts.sum() == 3 * len(x)


@pytest.mark.slow
def test_coordinates_of_more_than_one_letter_per_order():
    build = mpx.DerivativeScaling.per_order
    scaling = build(2, terms=["u_x1", "u_x1x2"], coords=["x1", "x2"], init_scale=2.0**-3)
    scaling = scaling.with_exponents([-3, -5])
    fun = lambda p: p[0] ** 2 * p[1]
    names = {"coords": ["x1", "x2"], "outputs": "u"}
    take = lambda s: mpx.partials(fun, ["u_x1", "u_x1x2"], **names, scaling=s)
    terms = jax.jit(lambda s: take(s)(jnp.array([2.0, 3.0])))
    assert {n: float(v) for n, v in terms(scaling).items()} == {"u_x1": 12.0, "u_x1x2": 4.0}
    # Each scaler reacts to its own order.
    for name, shrunk in (("u_x1", [-4, -5]), ("u_x1x2", [-3, -6])):
        counts = jnp.zeros_like(scaling.counts).at[scaling.row_names.index(name), NONFINITE].set(1)
        np.testing.assert_array_equal(scaling.adjust(counts).exponents, shrunk)


@pytest.mark.parametrize(
    ("scaling", "options", "error"),
    [
        pytest.param(None, {"use_mixed_precision": False}, 1e-6, marks=pytest.mark.slow),
        (mpx.NoOpLossScaling(), {"forward": "float32"}, 2.0**-5),  # eight bfloat16 roundings
    ],
    ids=["full", "unscaled"],
)
def test_a_loss_that_needs_derivatives_gets_none_where_nothing_is_scaled(scaling, options, error):
    """So the loss of one mode serves them all, and a baseline needs no other."""
    w, x = jnp.ones((2, 2)), jnp.array([0.5, 0.25])

    def loss(w, x, *, derivatives):
        assert derivatives is None
        net = lambda p: jnp.tanh(w @ jnp.tanh(w @ p))[0]
        fun = mpx.partials(net, ["u_xx"], coords="xy", outputs="u")
        return fun(x)["u_xx"] ** 2

    run = mpx.filter_value_and_grad(loss, scaling, **options)
    with mpx.half_precision("bfloat16"):
        value, *_, grads = run(w, x)
        # A compiled call binds its arguments to the signature. By hand it is the same.
        for alike in (eqx.filter_jit(run)(w, x), eqx.filter_jit(run)(w, x, derivatives=None)):
            assert relative(alike[3], grads) < 1e-6
    want, want_grads = jax.value_and_grad(partial(loss, derivatives=None))(w, x)
    assert relative(value, want) < 1e-6  # both are float32
    assert relative(grads, want_grads) < error
    with pytest.raises(TypeError, match=r"`filter_grad` .*`Scaling` alone.*NoOpLossScaling\(\)"):
        mpx.filter_grad(loss, mpx.DynamicLossScaling(), forward="float32")(w, x)


def test_a_laplacian_with_a_scaler_of_its_own_is_named_once():
    scaling = mpx.DerivativeScaling.per_order(2, special=["laplacian"])
    assert scaling.row_names.count("laplacian") == 1
    lap = lambda s: mpx.laplacian(jnp.prod, coords="xy", outputs="u", scaling=s)(jnp.ones(2))
    counts = jax.jit(jax.grad(lambda s: lap(s)["lap_u"], allow_int=True))(scaling).counts
    row = scaling.row_names.index("laplacian")
    assert mpx.derivatives.telemetry(scaling.adjust(counts))["zeros"]["laplacian"] == 1
    lost = jnp.zeros_like(counts).at[row, NONFINITE].set(1)
    np.testing.assert_array_equal(scaling.adjust(lost).exponents, [0, 0, -1])


def test_a_scaling_is_shown_in_a_few_lines():
    derivatives = mpx.DerivativeScaling.per_direction("xt", order=2, init_scale={"x": 0.5, "t": 1})
    counts = jnp.zeros_like(derivatives.counts).at[0, NONFINITE].set(1)
    scaling = mpx.Scaling(mpx.StaticLossScaling(4), derivatives).adjust(jnp.array(True), counts)
    shown = repr(scaling)
    assert len(shown.splitlines()) <= 12
    assert_tells(shown, "loss=StaticLossScaling(loss_scaling=2^2)", "x: 2^-2, t: 2^0")
    assert_tells(shown, "overflows={x: 1, t: 0}", "skipped_steps=1, consecutive_skips=1, vanished")
    assert_tells(shown, "2^-24 to 2^15", "per_direction")
    # Also where there are no values.
    assert "scales=2^int32[2]" in repr(jax.eval_shape(lambda: scaling))


def bucket(exponent):
    """Returns the column of `counts` for scaled values with this exponent."""
    return exponent + 33


class TestUnderflow:
    """Tests that a scale rises if values vanish, no further than necessary, and falls back."""

    def after(self, scaling, rows):
        return scaling.adjust(counts_for(scaling, rows)).exponents.tolist()

    def test_a_scale_rises_while_a_derivative_vanishes(self):
        scaling = direction()
        for column in (0, bucket(-32), bucket(-9)):  # zeros alone, underflow, near to it
            assert self.after(scaling, {"_xx": column, "_t": bucket(0)}) == [1, 0]
        assert self.after(scaling, {"_xx": bucket(-8), "_t": bucket(0)}) == [0, 0]
        capped = direction(max_scale={"x": 1, "t": 2})
        assert self.after(capped, {"_xx": 0, "_tt": 0}) == [0, 1]

    def test_but_not_where_another_would_overflow(self):
        scaling = direction().with_exponents([5, 0])
        assert self.after(scaling, {"_xx": 0, "_x": bucket(8), "_t": bucket(0)}) == [6, 0]
        assert self.after(scaling, {"_xx": 0, "_x": bucket(9), "_t": bucket(0)}) == [5, 0]

    def test_it_comes_down_before_an_overflow(self):
        scaling = direction().with_exponents([2, 0])
        new = scaling.adjust(counts_for(scaling, {"_x": bucket(10), "_t": bucket(3)}))
        assert (new.exponents.tolist(), new.skipped_steps) == ([1, 0], 0)

    def test_after_an_overflow_it_waits_an_interval(self):
        """A hidden layer can overflow although the derivative itself vanishes."""
        scaling = direction(growth_interval=3).with_exponents([4, 0])
        scaling = scaling.adjust(counts_for(scaling, {"_xx": NONFINITE}))
        seen = []
        for _ in range(5):
            scaling = scaling.adjust(counts_for(scaling, {"_xx": bucket(-20)}))
            seen.append(scaling.exponents[0].item())
        assert seen == [3, 3, 3, 4, 5]


SMALL = {
    "direction": (lambda **options: direction(**options), ["u_x", "u_t", "u_xx"]),
    # One scale for a whole derivative must reach as far as the powers of a coordinate's scale.
    "order": (partial(mpx.DerivativeScaling.per_order, 3), ["u_x", "u_t", "u_xxx"]),
    "special": (partial(mpx.DerivativeScaling.per_order, 3, special=["u_xxx"]), ["u_t", "u_xxx"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SMALL)
def test_derivatives_far_below_one_do_not_vanish(kind):
    (make, terms), size = SMALL[kind], 1e4
    # The coordinates are too large for the network.
    net = mpx.nn.CoordinateMLP(2, "scalar", 8, 2, key=jax.random.key(0))
    model = eqx.nn.Sequential([eqx.nn.Lambda(lambda point: point / size), net])
    x = size * points(16)

    @eqx.filter_jit
    def look(model, scaling):
        def total(scaling):
            fun = mpx.partials(model, terms, coords="xt", outputs="u", scaling=scaling)
            values = jax.vmap(fun)(x)
            return sum(map(jnp.sum, values.values())), values

        grads, values = jax.grad(total, has_aux=True, allow_int=True)(scaling)
        return values, scaling.adjust(grads.counts)

    def error(values):
        return max(np.linalg.norm(values[n] - want[n]) / np.linalg.norm(want[n]) for n in terms)

    half = mpx.cast_to_float16(model)
    start = scaling = make()
    want, _ = look(model, start)
    values, after = look(half, start)
    assert error(values) > 0.05  # what this is about
    lost = mpx.derivatives.telemetry(after)["underflow"]
    assert max(lost.values()) > 0.9
    if kind == "direction":  # which has its second derivatives in a row of their own
        assert lost["_xx"] > 0.9
    for _ in range(15 if kind == "direction" else 40):
        values, scaling = look(half, scaling)
    # Two or three orders through three layers in float16.
    assert error(values) < 0.01
    assert scaling.skipped_steps == 0
    assert max(mpx.derivatives.telemetry(scaling)["underflow"].values()) < 0.1


MICROMETRES = {
    "direction": direction(),
    "order": mpx.DerivativeScaling.per_order(2),
    "special": mpx.DerivativeScaling.per_order(2, special=["u_t"]),
    "term": mpx.DerivativeScaling.per_term(["u_t", "u_xx"]),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "forward", "container"),
    [
        *((kind, forward, "none") for kind in MICROMETRES for forward in ("half", "float32")),
        *(("direction", "float32", container) for container in ("scan", "cond")),
    ],
)
def test_what_leads_to_a_derivative_overflows_without_it(kind, forward, container):
    """`u_x` is not requested and follows the scale of `u_xx` if no other `u_x` is counted. The loss
    scale does not fall because of products in the backward pass of a layer."""
    size, keys = jnp.array([[4e-6, 1.0]]), jax.random.split(jax.random.key(0), 3)
    first = jax.random.normal(keys[0], (16, 2)) / size
    model = jax.random.normal(keys[1], (2, 16, 16)) / 2, jax.random.normal(keys[2], (16,)) / 80
    x = size * points(32)

    def network(model, point):
        layer = lambda h, weight: (jnp.tanh(weight @ h), None)
        stack = lambda h: lax.scan(layer, h, model[0])[0]
        if container != "scan":
            stack = lambda h: reduce(lambda h, weight: layer(h, weight)[0], model[0], h)
        h = jnp.tanh(first @ point).astype(model[1].dtype)
        if container == "cond":
            return model[1] @ lax.cond(point[1] > 0.5, stack, lambda h: stack(2 * h), h)
        return model[1] @ stack(h)

    def loss(model, x, *, derivatives):
        fun, terms = partial(network, model), ["u_t", "u_xx"]
        fun = mpx.partials(fun, terms, coords="xt", outputs="u", scaling=derivatives)
        d = jax.vmap(fun)(x)
        return jnp.mean((d["u_t"] - size[0, 0] ** 2 * d["u_xx"]) ** 2)

    scaling = mpx.Scaling(derivatives=MICROMETRES[kind])
    options = {"keep_full": (False, True), "forward": forward}
    step = eqx.filter_jit(lambda s: mpx.filter_value_and_grad(loss, s, **options)(model, x))
    for _ in range(12):
        _, scaling, finite, grads = step(scaling)
        if finite:
            break
    want = eqx.filter_grad(partial(loss, derivatives=None))(model, x)
    assert finite
    assert scaling.loss.loss_scaling >= 2.0**11
    # A few roundings of 2^-11 to float16.
    assert relative(grads, want) < 2e-3


@pytest.mark.slow
def test_at_minimum_tells_which_derivative_no_scale_can_help():
    scaling = direction(min_scale={"x": 2.0**-2, "t": 2.0**-24})
    for _ in range(3):
        assert not scaling.at_minimum.any()
        scaling = scaling.adjust(counts_for(scaling, {"_xx": NONFINITE, "_t": NONFINITE}))
        assert scaling.at_minimum.tolist() == [scaling.exponents[0] == -2, False]
        if scaling.at_minimum.any():
            break
    both = mpx.Scaling(mpx.StaticLossScaling(1.0), scaling)
    stuck = both.adjust(jnp.array(False), counts_for(scaling, {"_xx": NONFINITE}))
    with pytest.raises(eqx.EquinoxRuntimeError, match=r"smallest scale of 'x'.*above 65504"):
        mpx.error_if_stuck(stuck, stuck, max_consecutive_skips=1)
    falling = both.adjust(jnp.array(False), counts_for(scaling, {"_t": NONFINITE}))
    with pytest.raises(eqx.EquinoxRuntimeError, match=r"derivatives.*can still fall"):
        mpx.error_if_stuck(falling, falling, max_consecutive_skips=1)
    assert mpx.derivatives.telemetry(stuck)["at_minimum"] == {"x": True, "t": False}
    assert not scaling.adjust(counts_for(scaling, {"_xx": bucket(0)})).at_minimum.any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forward", "compute", "taken"),
    [
        ("float32", "float16", False),
        ("float32", "bfloat16", True),
        ("float64", "float16", False),
        ("float64", "float32", True),
    ],
)
def test_beyond_float16_is_no_overflow_where_nothing_is_kept_in_it(forward, compute, taken):
    with jax.enable_x64(forward == "float64"):
        mlp = eqx.nn.MLP(2, 1, 8, 2, jnp.tanh, dtype=jnp.dtype(forward), key=jax.random.key(0))
        model = mpx.nn.Ansatz(mlp, lambda point, u: 3e5 * point[0] ** 2 + u)
        points = jnp.ones((4, 2), forward)

        def loss(model, points, *, derivatives):
            terms = mpx.partials(model, ["u_xx"], coords="xy", outputs="u", scaling=derivatives)
            return jnp.mean((jax.vmap(terms)(points)["u_xx"] - 6e5) ** 2)

        scaling = mpx.Scaling(mpx.NoOpLossScaling(), mpx.DerivativeScaling.per_direction("xy"))
        policy = f"params={forward},compute={compute},output={forward}"
        step = eqx.filter_jit(mpx.filter_grad(loss, scaling, forward=forward, policy=policy))
        after, finite, grads = step(model, points)
        assert (bool(finite), int(after.skipped_steps)) == (taken, not taken)
        assert mpx.all_finite(grads)

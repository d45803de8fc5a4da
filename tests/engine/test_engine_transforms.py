"""The derivative engine under JAX's transformations, and what it cannot take."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_zoo import chain
from helpers import relative, tree_allclose
from jax.sharding import PartitionSpec

import mpx_pde as mpx


TERMS = ["u", "u_x", "u_xyy"]


def points(n=8):
    return jax.random.uniform(jax.random.key(3), (n, 2))


def values(model, x):
    return jax.vmap(mpx.partials(model, TERMS, coords="xy", outputs="u"))(x)


def loss(model, x):
    d = values(model, x)
    return jnp.mean((d["u_xyy"] + d["u"] * d["u_x"]) ** 2)


def mesh():
    return jax.make_mesh((4,), ("points",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.mark.slow
def test_transformations_agree():
    """One program with every way of calling it."""
    model, x = chain(jnp.tanh, jax.random.key(0)), points()
    single = mpx.partials(model, TERMS, coords="xy", outputs="u")

    @jax.jit
    def ways(model, x):
        spec = PartitionSpec("points")
        spread = jax.shard_map(
            values, mesh=mesh(), in_specs=(PartitionSpec(), spec), out_specs=spec
        )

        def step(carry, p):
            return carry + 1, mpx.partials(model, TERMS, coords="xy", outputs="u")(p)

        return {
            "vmap": values(model, x),
            "map": jax.lax.map(lambda p: step(0, p)[1], x),
            "scan": jax.lax.scan(step, 0, x)[1],
            "checkpoint": jax.checkpoint(values)(model, x),
            "shard_map": spread(model, x),
        }

    found = ways(model, x)
    want = found.pop("vmap")
    for got in found.values():
        assert tree_allclose(got, want)
    # Without a transformation.
    first = single(x[0])
    assert tree_allclose(first, jax.tree.map(lambda v: v[0], want))


@pytest.mark.slow
def test_gradients_agree():
    """Reverse mode over the engine, over nested forward mode, of shares, under a checkpoint."""
    model, x = chain(jnp.tanh, jax.random.key(0)), points()

    def nested(model, x):
        def at(p):
            along = lambda f, i: lambda p: jax.jvp(f, (p,), (jnp.eye(2)[i],))[1]
            u_x = along(model, 0)
            u_xyy = along(along(u_x, 1), 1)
            return u_xyy(p) + model(p) * u_x(p)

        return jnp.mean(jax.vmap(at)(x) ** 2)

    def spread(model, x):
        share = lambda model, x: jax.lax.pmean(loss(model, x), "points")
        specs = (PartitionSpec(), PartitionSpec("points"))
        return jax.shard_map(share, mesh=mesh(), in_specs=specs, out_specs=PartitionSpec())(
            model, x
        )

    @jax.jit
    def grads(model, x):
        return [jax.grad(f)(model, x) for f in (nested, loss, jax.checkpoint(loss), spread)]

    want, *found = grads(model, x)
    for got in found:
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            # float32 sums of some hundred terms in another order; the last bias has none.
            assert np.linalg.norm(b) < 1e-6 or relative(a, b) < 1e-4


@pytest.mark.slow
def test_no_leaks_and_no_retrace():
    traces = []

    @jax.jit
    def run(model, x):
        traces.append(x.shape)
        return jax.grad(loss)(model, x)

    with jax.checking_leaks():
        model = chain(jnp.tanh, jax.random.key(0))
        for seed in range(3):
            run(jax.tree.map(lambda w, s=seed: w + 0.1 * s, model), points() + seed)
    assert len(traces) == 1


def callback(p):
    shape = jax.ShapeDtypeStruct((), p.dtype)
    return jax.pure_callback(lambda v: np.sum(v), shape, p) * p[0]


def printing(p):
    jax.debug.print("{}", p[0], ordered=False)
    return jnp.prod(p)


def test_what_has_no_derivative_is_named_with_its_line():
    terms = mpx.partials(callback, ["u_x"], coords="xy", outputs="u")
    with pytest.raises(ValueError, match=r"pure_callback.*test_engine_transforms\.py:\d+"):
        terms(jnp.ones(2))
    with pytest.raises(ValueError, match=r"pure_callback.*test_engine_transforms\.py:\d+"):
        jax.jit(jax.vmap(terms))(jnp.ones((3, 2)))
    inside = lambda p: jax.lax.fori_loop(0, 2, lambda i, v: v + callback(p), 0.0)
    with pytest.raises(ValueError, match=r"pure_callback.*test_engine_transforms\.py:\d+"):
        mpx.partials(inside, ["u_x"], coords="xy", outputs="u")(jnp.ones(2))


def test_integers_have_no_derivative():
    whole = lambda p: jnp.sum(jnp.floor(p)).astype(jnp.int32)
    with pytest.raises(TypeError, match="real floating-point outputs, got int32"):
        mpx.partials(whole, ["u_x"], coords="xy", outputs="u")(jnp.ones(2))


def test_printing_is_no_obstacle(capfd):
    d = mpx.partials(printing, ["u_x", "u_xy"], coords="xy", outputs="u")(jnp.array([2.0, 3.0]))
    jax.effects_barrier()
    assert (float(d["u_x"]), float(d["u_xy"])) == (3.0, 1.0)
    assert capfd.readouterr().out.count("2.0") == 1


@pytest.mark.slow
def test_what_does_not_move_in_a_direction_vanishes():
    """A factorization that depends on one coordinate is known in the other: JAX has no second
    derivative of a solve whose factors move by zeros, and none is asked of it."""
    point = jnp.array([0.3, 0.7])
    matrix = np.array([[0.2, -0.1], [0.4, 0.3]], np.float32)

    def fun(p):
        x, y = p
        return jnp.sum(jnp.linalg.solve(3 * jnp.eye(2) + jnp.sin(x) * matrix, y * jnp.ones(2)))

    got = mpx.partials(fun, ["u_xx", "u_yy"], coords="xy", outputs="u")(point)
    want = jax.hessian(fun)(point)
    np.testing.assert_allclose(got["u_xx"], want[0, 0], rtol=1e-4)
    assert got["u_yy"] == 0
    sums = mpx.laplacian(fun, coords="xy", outputs="u")(point)
    np.testing.assert_allclose(sums["lap_u"], want[0, 0], rtol=1e-4)


def test_the_report_names_what_is_nested():
    fun = lambda p: jnp.arctan2(p[0], jnp.cosh(p[1]))
    report = mpx.partials(fun, ["u_xy"], coords="xy", outputs="u").report(jnp.ones(2))
    (only,) = report.nested
    assert only.primitive == "atan2"
    assert "test_engine_transforms.py" in only.line
    assert "nested forward mode" in str(report)


@pytest.mark.parametrize("factor", ["b", None, 1j, jnp.ones(2), jnp.ones(1), lambda p: p])
def test_factors_are_numbers(factor):
    """Of what has several entries, one would be taken for each output."""
    with pytest.raises(ValueError, match=r"`linear_operator` multiplies.*in the operator 'op'"):
        mpx.linear_operator(lambda p: p[0] ** 3, {"op": {"x": factor}}, coords="xy", outputs="u")(
            jnp.ones(2)
        )


def test_samples_need_a_key():
    for key in (None, 3):
        with pytest.raises(ValueError, match=f"`linear_operator` needs a `key`.*got {key}"):
            mpx.linear_operator(
                jnp.sum, {"op": "laplacian"}, coords="xy", outputs="u", samples=1, key=key
            )


def test_one_sample():
    """As many as there are with one summand, or fewer with two."""
    fun = lambda p: p[0] ** 2 + 3 * p[-1] ** 4
    point = jnp.array([0.5, 0.5])
    draw = jax.jit(
        lambda key: mpx.linear_operator(
            fun,
            {"lap": "laplacian", "bi": "biharmonic"},
            coords="xy",
            outputs="u",
            samples=1,
            key=key,
        )(point)
    )
    seen = {float(draw(jax.random.key(i))["lap_u"]) for i in range(8)}
    assert seen == {4.0, 18.0}
    # Along a direction whose second entry is z the fourth derivative is 72 z^4, of one third.
    z = jax.random.normal(jax.random.split(jax.random.key(0), 2)[1], (1, 2))[0, 1]
    np.testing.assert_allclose(draw(jax.random.key(0))["bi_u"], 24 * z**4, rtol=1e-5)


@pytest.mark.slow
def test_no_leaks_with_the_forward_pass_in_full():
    """What a stream loses is told of, and factors may be traced."""

    def residual(model, x, *, derivatives):
        def at(p):
            terms = mpx.linear_operator(
                model,
                {"op": {"x": x[0, 0], "yy": lambda p: p[0]}},
                coords="xy",
                outputs="u",
                scaling=derivatives,
            )
            return terms(p)["op_u"]

        return jnp.mean((jax.vmap(at)(x) - 1) ** 2)

    scaling = mpx.Scaling(derivatives=mpx.DerivativeScaling.per_direction("xy"))
    step = mpx.filter_value_and_grad(residual, scaling, forward="float32")
    model = chain(jnp.tanh, jax.random.key(0))
    with jax.checking_leaks():
        value, _, finite, _ = eqx.filter_jit(step)(model, points())
    assert finite
    want = residual(model, points(), derivatives=None)
    np.testing.assert_allclose(value, want, rtol=1e-5)


def _grown(x):
    """Each row for itself until it is large: after another number of steps."""
    grow = lambda x: 1.3 * x + 0.1 * jnp.sin(x)
    until = lambda row: jax.lax.while_loop(lambda x: jnp.sum(x**2) < 4.0, grow, row)
    return jax.vmap(until)(x)


@pytest.mark.slow
def test_loops_that_are_mapped_end_each_for_itself():
    rows = jax.random.normal(jax.random.key(0), (6, 3))
    want = _grown(rows)
    np.testing.assert_allclose(mpx.autocast(_grown, "bfloat16")(rows), want, rtol=1e-6)
    assert "sin" in str(mpx.range_report(_grown)(rows))

    loss = lambda w, x: jnp.mean((x @ w - jax.lax.stop_gradient(_grown(x))) ** 2)
    weight = jax.random.normal(jax.random.key(1), (3, 3))
    step = mpx.filter_value_and_grad(loss, mpx.NoOpLossScaling(), forward="float32")
    value, _, _, grads = step(weight, rows)
    expected, want_grads = jax.value_and_grad(loss)(weight, rows)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert relative(grads, want_grads) < 2.0**-6

    def network(p):
        return jnp.sum(_grown(rows * p[0] + jnp.sin(rows) * p[1]))

    p = jnp.array([0.7, -0.4])
    d = mpx.partials(network, ["u", "u_x", "u_xy"], coords="xy", outputs="u")(p)
    hessian = jax.jacfwd(jax.jacfwd(network))(p)
    np.testing.assert_allclose(d["u"], network(p), rtol=1e-6)
    np.testing.assert_allclose(d["u_x"], jax.jacfwd(network)(p)[0], rtol=1e-5)
    np.testing.assert_allclose(d["u_xy"], hessian[0, 1], rtol=1e-5)
    stacked = mpx.laplacian(network, coords="xy", outputs="u")(p)
    np.testing.assert_allclose(stacked["lap_u"], jnp.trace(hessian), rtol=1e-5)


class Growing(eqx.Module):
    """A loop that multiplies in its step and in its test, by weights of their own."""

    steps: list[jax.Array]
    test: jax.Array
    bound: jax.Array
    last: jax.Array

    def __init__(self, key):
        keys = jax.random.split(key, 5)
        self.steps = [jnp.eye(8) + jax.random.normal(k, (8, 8)) / 16 for k in keys[:3]]
        self.test = jax.random.normal(keys[3], (8, 8)) / 3
        self.last = jax.random.normal(keys[4], (2, 8))
        self.bound = jnp.array(3.0)

    def __call__(self, p):
        def more(c):
            x = 1.2 * c[1]
            for weight in self.steps:
                x = x @ weight
            return c[0] + 1, x.astype(c[1].dtype)

        going = lambda c: jnp.sum((c[1] @ self.test) ** 2) < self.bound
        return jnp.sum(jnp.sin(jax.lax.while_loop(going, more, (0, p @ self.last))[1]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::mpx_pde.PrecisionWarning")  # a loop has no backward pass
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_loops_whose_test_multiplies(dtype):
    model, p = Growing(jax.random.key(0)), jnp.array([0.3, -0.4])
    terms = lambda model: mpx.partials(model, ["u", "u_x"], coords="xy", outputs="u")(p)
    _, slope = jax.jvp(model, (p,), (jnp.eye(2)[0],))
    np.testing.assert_allclose(terms(model)["u"], model(p), rtol=1e-6)
    np.testing.assert_allclose(terms(model)["u_x"], slope, rtol=1e-5)
    half = terms(mpx.cast_tree(model, dtype))
    # Some ten roundings, of values that grow to 3.
    tolerance = {"float16": 2.0**-7, "bfloat16": 2.0**-4}[dtype]
    np.testing.assert_allclose(half["u"], model(p), atol=tolerance)
    np.testing.assert_allclose(half["u_x"], slope, atol=4 * tolerance)

    def residual(model, x):
        return jnp.mean((jnp.sum(x @ model.last) - jax.lax.stop_gradient(model(x))) ** 2)

    policy = f"params=float32,compute={dtype},output=float32"
    step = mpx.filter_value_and_grad(
        residual, mpx.NoOpLossScaling(), forward="float32", policy=policy
    )
    value, _, _, grads = eqx.filter_jit(step)(model, points())
    want, want_grads = eqx.filter_jit(eqx.filter_value_and_grad(residual))(model, points())
    np.testing.assert_allclose(value, want, rtol=1e-6)
    assert relative(grads.last, want_grads.last) < 2.0**-6


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_loops_that_take_no_step(dtype):
    """Over no values of the point, over no data, and over nothing; what they hand on, and stack."""
    model, p = chain(jnp.tanh, jax.random.key(0)), jnp.array([0.3, -0.4])

    def network(model, p, steps=0):
        def step(carry, x):
            carry = carry * jnp.sin(p[0]).astype(carry.dtype)
            return carry, carry if x is None else carry * x

        h = model(p)
        outs = [jax.lax.scan(step, h, xs, steps) for xs in (p[:steps], jnp.ones(steps), None)]
        return h + sum(c + jnp.sum(ys).astype(h.dtype) for c, ys in outs)

    cast = mpx.cast_tree(model, dtype)
    terms = lambda steps: mpx.partials(
        lambda p: network(cast, p, steps), TERMS, coords="xy", outputs="u"
    )(p)
    alone = mpx.partials(cast, TERMS, coords="xy", outputs="u")(p)
    tolerance = {"float32": 1e-6, "float16": 2.0**-8}[dtype]
    for name, value in terms(0).items():
        np.testing.assert_allclose(value, 4 * alone[name], rtol=tolerance)

    def fit(model, x):
        return jnp.mean((jax.vmap(lambda p: network(model, p))(x) - 1) ** 2)

    policy = "params=float32,compute=float16,output=float32"
    step = mpx.filter_value_and_grad(fit, mpx.NoOpLossScaling(), forward="float32", policy=policy)
    value, _, _, grads = eqx.filter_jit(step)(model, points())
    want, want_grads = eqx.filter_value_and_grad(fit)(model, points())
    np.testing.assert_allclose(value, want, rtol=1e-5)
    got, want = (
        jax.flatten_util.ravel_pytree(eqx.filter(g, eqx.is_array))[0] for g in (grads, want_grads)
    )
    assert relative(got, want) < 2.0**-7


def test_loops_with_derivatives_that_the_loss_does_not_use():
    """JAX cannot transpose a loop of whose outputs some have cotangents that are zero by symbol."""
    w, p = jnp.arange(1.0, 5.0), jnp.array([0.8, 0.5])
    network = lambda w, p: jnp.sum(jax.lax.map(jnp.sin, (p[0] + 2 * p[1]) * w))
    terms = lambda w: mpx.partials(
        lambda p: network(w, p), ["u_x", "u_y"], coords="xy", outputs="u"
    )(p)
    want = jax.grad(lambda w: jax.grad(network, 1)(w, p)[0])(w)
    np.testing.assert_allclose(jax.grad(lambda w: terms(w)["u_x"])(w), want, rtol=1e-5)


@pytest.mark.parametrize("forward", ["float32", "bfloat16_x3"])
def test_a_while_loop_of_what_a_layer_takes_too(forward):
    """It has no derivative in reverse mode, and needs none: it depends on no parameter."""
    w, points = jnp.array([-0.7, 0.4]), jnp.array([[0.3]])

    def network(w, p):
        h = jnp.sin(p)
        step = lambda c: (c[0] + 1, (c[1] + (1 + h * h) / c[1]) / 2)
        root = jax.lax.while_loop(lambda c: c[0] < 6, step, (0, 1 + h * h))[1]
        return jnp.maximum(w[0] * h, root) @ w[1:]

    def loss(w, points, derive=mpx.partials):
        d = jax.vmap(derive(lambda p: network(w, p), ["u", "u_xx"], coords="x", outputs="u"))
        return sum(jnp.sum(x**2) for x in d(points).values())

    _, _, got = mpx.filter_grad(loss, mpx.NoOpLossScaling(), forward=forward)(w, points)
    want = jax.grad(lambda w: loss(w, points))(w)
    np.testing.assert_allclose(got, want, rtol=2e-3)  # the half backward pass


@pytest.mark.filterwarnings("ignore::mpx_pde.PrecisionWarning")  # a loop has no backward pass
@pytest.mark.parametrize("around", ["scan", "checkpoint", "cond"])
def test_loops_whose_results_are_stopped(around):
    """A loop of unknown length has no derivative in reverse mode, and needs none where its result
    goes into `stop_gradient` alone, whatever moves in it."""
    keys = jax.random.split(jax.random.key(0), 4)
    weights = [jax.random.normal(k, (8, 8)) / 3 for k in keys[:3]]
    x = jax.random.normal(keys[3], (8,))

    def layer(weights, h):
        more = lambda c: (c[0] + 1, jnp.tanh(weights[1] @ c[1]))
        state = jax.lax.while_loop(lambda c: c[0] < 3, more, (0, h))[1]
        return jnp.tanh(weights[0] @ h) + jnp.sin(jax.lax.stop_gradient(state * h)) * h

    def held(weights, x):
        step = lambda h, _: (jnp.tanh(weights[2] @ layer(weights, h)), None)
        if around == "scan":
            return jnp.sum(jax.lax.scan(step, x, None, length=3)[0] ** 2)
        if around == "checkpoint":
            body = jax.checkpoint(lambda weights, x: step(x, None)[0])
            return jnp.sum(jax.lax.scan(lambda h, _: (body(weights, h), None), x, None, 2)[0])
        run = lambda weights, x: jnp.sum(step(step(x, None)[0], None)[0] ** 2)
        return jax.lax.cond(x[0] < 9, run, lambda weights, x: 0.0, weights, x)

    policy = "params=float32,compute=bfloat16,output=float32"
    step = mpx.filter_value_and_grad(held, mpx.NoOpLossScaling(), forward="float32", policy=policy)
    value, _, _, grads = eqx.filter_jit(step)(weights, x)
    want, want_grads = jax.jit(jax.value_and_grad(held))(weights, x)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    assert not np.any(grads[1])
    for i in (0, 2):
        assert relative(grads[i], want_grads[i]) < 2.0**-5

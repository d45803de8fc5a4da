"""Tests the derivative engine under JAX's transformations, and the functions that it rejects."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import over_devices, relative
from jax.sharding import PartitionSpec as P
from program_functions import newton, own, tilted

import mpx_pde as mpx


MODEL = eqx.nn.MLP(2, "scalar", 12, 2, jnp.tanh, key=jax.random.key(0))


def points(n=8):
    return jax.random.uniform(jax.random.key(3), (n, 2))


def loss(model, x):
    d = jax.vmap(mpx.partials(model, ["u", "u_x", "u_xyy"], coords="xy", outputs="u"))(x)
    return jnp.mean((d["u_xyy"] + d["u"] * d["u_x"]) ** 2)


def shared(whole):
    """Returns a mean over points that four devices share."""
    share = lambda arrays, x: jax.lax.pmean(whole(arrays, x), "data")
    return over_devices(share, 4, (P(), P("data")), P())


@pytest.mark.slow
def test_gradients_of_shares_are_those_of_the_whole():
    arrays, static = eqx.partition(MODEL, eqx.is_array)
    whole = lambda arrays, x: loss(eqx.combine(arrays, static), x)
    run = jax.jit(lambda *args: [jax.grad(f)(*args) for f in (shared(whole), whole)])
    got, want = run(arrays, points())
    # float32 sums of some hundred terms in another order; the last bias has none.
    close = lambda a, b: np.linalg.norm(b) < 1e-6 or relative(a, b) < 1e-4
    assert jax.tree.all(jax.tree.map(close, got, want))


def callback(p):
    shape = jax.ShapeDtypeStruct((), p.dtype)
    return jax.pure_callback(lambda v: np.sum(v), shape, p, vmap_method="sequential") * p[0]


def printing(p):
    jax.debug.print("{}", p[0], ordered=False)
    return jnp.prod(p)


@pytest.mark.slow
def test_points_one_after_another_on_each_device():
    arrays, static = eqx.partition(MODEL, eqx.is_array)

    def whole(arrays, x):
        fun = mpx.partials(eqx.combine(arrays, static), ["u", "u_xx"], coords="xy", outputs="u")
        d = jax.lax.map(fun, x)
        return jnp.mean((d["u"] - d["u_xx"]) ** 2)

    run = mpx.filter_value_and_grad(shared(whole), mpx.NoOpLossScaling(), forward="float32")
    value, _, _, got = eqx.filter_jit(run)(arrays, points())
    want_value, want = jax.value_and_grad(whole)(arrays, points())
    np.testing.assert_allclose(value, want_value, rtol=1e-5)
    assert relative(got, want) < 2.0**-9  # the half backward pass


def test_what_has_no_derivative_is_named_with_its_line():
    inside = lambda p: jax.lax.fori_loop(0, 2, lambda i, v: v + callback(p), 0.0)
    as_it_is, mapped = lambda f: f, lambda f: lambda p: jax.jit(jax.vmap(f))(p[None])
    for fun, transform in ((callback, as_it_is), (callback, mapped), (inside, as_it_is)):
        terms = mpx.partials(fun, ["u_x"], coords="xy", outputs="u")
        with pytest.raises(ValueError, match=r"pure_callback.*test_engine_transforms\.py:\d+"):
            transform(terms)(jnp.ones(2))


def sparse(solve, p):
    return jnp.sum(jnp.sin(solve(lambda v: 3 * v + jnp.sum(v) / 4, jnp.tanh(p))[0]))


def beside_a_solution(p):
    solve = lambda _, b: (b / 3, jnp.sum(b**2))
    x, aux = jax.lax.custom_linear_solve(lambda v: 3 * v, jnp.tanh(p), solve, solve, has_aux=True)
    return jnp.sum(jnp.sin(x)) * aux


WITHOUT_A_RULE = {
    "stopped callback": lambda p: callback(jax.lax.stop_gradient(p)) * p[0] ** 2,
    "stopped maximum": lambda p: jnp.sum(jnp.exp(p - jax.lax.pmax(jax.lax.stop_gradient(p), "x"))),
    "cg": lambda p: sparse(jax.scipy.sparse.linalg.cg, p),
    "gmres": lambda p: sparse(jax.scipy.sparse.linalg.gmres, p),
    "beside a solution": beside_a_solution,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WITHOUT_A_RULE)
def test_what_has_no_derivative_may_be_stopped_and_solves_are_linear(name):
    u, along = WITHOUT_A_RULE[name], lambda f: lambda p: jax.jvp(f, (p,), (jnp.eye(2)[0],))[1]
    mapped = lambda f: jax.vmap(f, axis_name="x")(points(3))
    got = mapped(mpx.partials(u, ["u_xx"], coords="xy", outputs="u"))["u_xx"]
    assert relative(got, mapped(along(along(u)))) < 1e-4  # the tolerance of a solve is 1e-5


def test_printing_is_no_obstacle(capfd):
    d = mpx.partials(printing, ["u_x", "u_xy"], coords="xy", outputs="u")(jnp.array([2.0, 3.0]))
    jax.effects_barrier()
    assert (float(d["u_x"]), float(d["u_xy"])) == (3.0, 1.0)
    assert capfd.readouterr().out.count("2.0") == 1


def test_the_report_names_what_is_nested():
    fun = lambda p: jnp.cumprod(jnp.cosh(p))[1]
    report = mpx.partials(fun, ["u_xy"], coords="xy", outputs="u").report(jnp.ones(2))
    (only,) = report.nested
    assert (only.primitive, only.line.rpartition(":")[0]) == ("cumprod", __file__)
    assert "nested forward mode" in str(report)
    assert report.nested_elementwise == ()


def test_the_report_names_functions_without_a_closed_form():
    own = jax.custom_jvp(jnp.sin)
    own.defjvp(lambda primals, tangents: (own(*primals), jnp.cos(primals[0]) * tangents[0]))

    def fun(p):
        special = jax.lax.lgamma(p[0]) + jax.lax.erf_inv(p[1]) + jax.lax.digamma(p[0])
        return special + own(p[0]) + jnp.arcsin(p[1]) + jnp.logaddexp(p[0], 0.0)

    report = mpx.partials(fun, ["u_xy"], coords="xy", outputs="u").report(jnp.full(2, 0.3))
    names = ("lgamma", "erf_inv", "digamma", "custom_jvp_call")
    line = f"{__file__}:{fun.__code__.co_firstlineno + 1}"
    assert sorted(e.primitive for e in report.nested_elementwise) == sorted(names)
    assert {e.line for e in report.nested_elementwise[:3]} >= {line}
    assert report.nested == ()
    assert str(report).count("nested forward mode, entry by entry") == 4


@pytest.mark.parametrize("term", ["u_xxx", "u_xxy", "u_xyyy"])
def test_a_rule_that_is_no_derivative_is_applied_in_the_order_of_the_directions(term):
    """Its third derivative depends on the order in which a bend and a slope are directions."""
    fun = lambda p: jnp.sum(tilted(jnp.sin(p[0] * jnp.arange(1.0, 5.0)) * jnp.cos(p[1])) ** 2)
    nested = fun
    for d in (jnp.eye(2)["xy".index(c)] for c in term[2:]):
        nested = lambda p, f=nested, d=d: jax.jvp(f, (p,), (d,))[1]
    p = jnp.array([0.463, 0.7])
    got = jax.jit(mpx.partials(fun, [term], coords="xy", outputs="u"))(p)[term]
    np.testing.assert_allclose(got, jax.jit(nested)(p), rtol=1e-5)


@pytest.mark.parametrize("samples", [1, 3])
def test_the_samples_of_a_laplacian_and_of_a_biharmonic_operator(samples):
    """Draws fewer samples than there are summands, or more with replacement."""
    fun = lambda p: p[0] ** 2 + 3 * p[-1] ** 4
    spec = {"lap": "laplacian", "bi": "biharmonic"}

    @jax.jit
    def draw(key):
        options = {"coords": "xy", "outputs": "u", "samples": samples, "replace": samples > 2}
        return mpx.linear_operator(fun, spec, key=key, **options)(jnp.array([0.5, 0.5]))

    if samples == 1:
        assert {float(draw(jax.random.key(i))["lap_u"]) for i in range(8)} == {4.0, 18.0}
    # Along a direction whose second entry is z, the fourth derivative is 72 z^4; a third counts.
    key = jax.random.split(jax.random.key(0), 2)[1]
    z = jax.random.normal(key, (samples, 2))[:, 1]
    want = np.mean(24 * np.asarray(z) ** 4)
    np.testing.assert_allclose(draw(jax.random.key(0))["bi_u"], want, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("drawn", [False, True])
def test_factors_of_a_float64_network_are_float64(drawn):
    with jax.enable_x64(True):
        a, point = np.linspace(0.11, 0.9, 6), jnp.linspace(0.1, 1.0, 6)
        spec = {2 * c: float(0.1 * x) for c, x in zip("abcdef", a, strict=True)}
        options = {"samples": 6, "key": jax.random.key(0), "replace": False} if drawn else {}
        fun = lambda p: jnp.sum(jnp.sin(p) * a)
        terms = mpx.linear_operator(fun, {"op": spec}, coords="abcdef", outputs="u", **options)
        assert terms(point)["op_u"].dtype == jnp.float64
        want = -np.sum(0.1 * a * a * np.sin(point))
        np.testing.assert_allclose(terms(point)["op_u"], want, rtol=1e-14)


@pytest.mark.slow
def test_no_leaks_with_the_forward_pass_in_full():
    """Streams report their overflows, and factors may be traced."""

    def residual(model, x, *, derivatives):
        def at(p):
            spec = {"op": {"x": x[0, 0], "yy": lambda p: p[0]}}
            names = {"coords": "xy", "outputs": "u"}
            return mpx.linear_operator(model, spec, **names, scaling=derivatives)(p)["op_u"]

        return jnp.mean((jax.vmap(at)(x) - 1) ** 2)

    scaling = mpx.Scaling(derivatives=mpx.DerivativeScaling.per_direction("xy"))
    step = mpx.filter_value_and_grad(residual, scaling, forward="float32")
    with jax.checking_leaks():
        value, _, finite, _ = eqx.filter_jit(step)(MODEL, points())
    assert finite
    want = eqx.filter_jit(residual)(MODEL, points(), derivatives=None)
    np.testing.assert_allclose(value, want, rtol=1e-5)


def growing(weights, p):
    """Runs a loop that multiplies in its step and in its test, each by its own weights."""
    step, test, last = weights
    more = lambda x: (1.2 * x @ step @ step).astype(x.dtype)
    going = lambda x: jnp.sum((x @ test) ** 2) < jnp.asarray(3.0, test.dtype)
    return jnp.sum(jnp.sin(jax.lax.while_loop(going, more, p @ last)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::mpx_pde.PrecisionWarning")  # a loop has no backward pass
def test_loops_whose_test_multiplies(standard_promotion):
    draws = [jax.random.normal(jax.random.key(i), (n, 8)) for i, n in enumerate((8, 8, 2))]
    weights, p = [jnp.eye(8) + draws[0] / 16, draws[1] / 3, draws[2]], jnp.array([0.3, -0.4])
    terms = lambda w: mpx.partials(lambda p: growing(w, p), ["u", "u_x"], coords="xy", outputs="u")
    got, half = terms(weights)(p), terms(mpx.cast_tree(weights, "float16"))(p)
    want = jax.jvp(lambda p: growing(weights, p), (p,), (jnp.eye(2)[0],))
    for name, value in zip(("u", "u_x"), want, strict=True):
        np.testing.assert_allclose(got[name], value, rtol=1e-5)
        # Some ten roundings of values that grow to 3.
        np.testing.assert_allclose(half[name], value, atol=2.0**-5)

    stopped = lambda weights: jax.lax.stop_gradient(growing(weights, p))
    residual = lambda weights, x: jnp.mean((jnp.sum(x @ weights[2]) - stopped(weights)) ** 2)
    step = mpx.filter_value_and_grad(residual, mpx.NoOpLossScaling(), forward="float32")
    value, _, _, grads = eqx.filter_jit(step)(weights, points())
    want, want_grads = jax.jit(jax.value_and_grad(residual))(weights, points())
    np.testing.assert_allclose(value, want, rtol=1e-6)
    assert relative(grads[2], want_grads[2]) < 2.0**-6


def test_loops_with_derivatives_that_the_loss_does_not_use():
    """JAX cannot transpose a loop if some outputs have symbolically zero cotangents."""
    w, p = jnp.arange(1.0, 5.0), jnp.array([0.8, 0.5])
    network = lambda w, p: jnp.sum(jax.lax.map(jnp.sin, (p[0] + 2 * p[1]) * w))
    names = {"coords": "xy", "outputs": "u"}
    terms = lambda w: mpx.partials(lambda p: network(w, p), ["u_x", "u_y"], **names)(p)
    want = jax.grad(lambda w: jax.grad(network, 1)(w, p)[0])(w)
    np.testing.assert_allclose(jax.grad(lambda w: terms(w)["u_x"])(w), want, rtol=1e-5)


@pytest.mark.slow
def test_loops_with_a_result_of_which_the_loss_uses_the_derivative_alone():
    a, w = (jax.random.normal(jax.random.key(i), (4, 4)) for i in range(2))

    def network(w, p):
        carry = lambda h, _: (jnp.tanh(w @ h), h)
        last, every = jax.lax.scan(carry, jnp.tanh(a[:, :2] @ p), None, length=3)
        return every.mean() * p[1] + jnp.sum((w @ last) ** 2)

    p, names = jnp.array([0.3, 0.4]), {"coords": "xt", "outputs": "u"}
    term = lambda w: mpx.partials(lambda p: network(w, p), ["u_x"], **names)(p)["u_x"]
    want = jax.grad(lambda w: jax.grad(network, 1)(w, p)[0])(w)
    np.testing.assert_allclose(jax.grad(term)(w), want, rtol=1e-5, atol=1e-6)


rooted = jax.custom_jvp(lambda h: jnp.sqrt(1 + h * h))
rooted.defjvp(lambda p, t: (rooted(*p), p[0] / newton(p[0]) * t[0]))


@pytest.mark.slow
@pytest.mark.parametrize("root", [newton, own(newton), rooted], ids=["newton", "own", "rooted"])
@pytest.mark.parametrize("forward", ["float32", "bfloat16_x3"])
def test_a_while_loop_of_what_a_layer_takes_too(forward, root):
    """The loop has no derivative in reverse mode. It needs none, as it depends on no parameter."""
    w, points = jnp.array([-0.7, 0.4]), jnp.array([[0.3]])

    def network(w, p):
        h = jnp.sin(p)
        return (jnp.maximum(w[0] * h, root(h)) + jnp.sin(root(p) @ jnp.ones((1, 1)))) @ w[1:]

    def loss(w, points, derive=mpx.partials):
        d = jax.vmap(derive(lambda p: network(w, p), ["u", "u_xx"], coords="x", outputs="u"))
        return sum(jnp.sum(x**2) for x in d(points).values())

    _, _, got = mpx.filter_grad(loss, mpx.NoOpLossScaling(), forward=forward)(w, points)
    want = jax.grad(lambda w: loss(w, points))(w)
    np.testing.assert_allclose(got, want, rtol=2e-3)  # the half backward pass

"""Tests that rules of functions know which operands depend on the point, at each order of
derivatives, and that a function without derivatives raises, and gives no zero."""

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import SymbolicZero

import mpx_pde as mpx


POINT = jnp.array([0.7, 2.0])
TERMS = ["u", "u_x", "u_xx", "u_xy", "u_xxx"]
# Three orders of float32 arithmetic, in another order of operations.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@jax.custom_jvp
def guard(init, final):
    """Returns `final`, as Equinox does: without a derivative unless `init` has one."""
    return final


def _guarded(primals, tangents):
    fixed = any(isinstance(t, SymbolicZero) for t in tangents)
    return primals[1], jnp.zeros_like(primals[1]) if fixed else tangents[1]


guard.defjvp(_guarded, symbolic_zeros=True)


def along(fun, i):
    direction = jnp.eye(2)[i]
    return lambda p: jax.jvp(fun, (p,), (direction,))[1]


def nested(fun, point):
    """Returns the terms by nested `jax.jvp`."""
    x = along(fun, 0)
    return [f(point) for f in (fun, x, along(x, 0), along(x, 1), along(along(x, 0), 0))]


def listed(found):
    """Returns the values of `TERMS`, which `jax.jit` sorts by name."""
    return [np.asarray(found[name]) for name in TERMS]


def partials(fun, terms=TERMS):
    return mpx.partials(fun, terms, coords="xy", outputs="u")


GUARDED = {
    "point": lambda p: guard(p[0], p[0] ** 3),
    "other coordinate": lambda p: guard(p[1], p[0] ** 3),
    "zero times": lambda p: guard(0 * p[0], p[0] ** 3),
    "fixed": lambda p: guard(lax.stop_gradient(p[0]), p[0] ** 3),
    "whole": lambda p: jnp.sum(guard(p, jnp.sin(p) * p[0])),
    "scan": lambda p: lax.scan(lambda c, _: (guard(p[1], c**2), None), p[0], None, length=2)[0],
    "cond": lambda p: lax.cond(p[1] > 0, lambda p: guard(p[0], p[0] ** 3), jnp.sum, p),
    "solve": lambda p: lax.custom_linear_solve(
        lambda x: 2 * x + guard(p[0], p[0] ** 2) * x,
        p[1],
        lambda _, b: b / (2 + p[0] ** 2),
        symmetric=True,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GUARDED)
def test_rules_that_ask_which_operands_move(name):
    """A stream that is zero everywhere is no sign that an operand does not depend on the point."""
    fun = GUARDED[name]
    want = nested(fun, POINT)
    np.testing.assert_allclose([*partials(fun)(POINT).values()], want, **CLOSE)
    lap = mpx.laplacian(fun, coords="xy", outputs="u")(POINT)["lap_u"]
    both = along(along(fun, 0), 0)(POINT) + along(along(fun, 1), 1)(POINT)
    np.testing.assert_allclose(lap, both, **CLOSE)


@pytest.mark.slow
def test_rules_that_ask_in_a_loss_and_in_drop_ins():
    fun = lambda w, x: guard(x, jnp.sin(w * x**2))
    grad = mpx.derivatives.grad
    ours = grad(grad(fun, 1), 1)
    theirs = jax.grad(jax.grad(fun, 1), 1)
    np.testing.assert_allclose(ours(1.3, 0.7), theirs(1.3, 0.7), **CLOSE)
    want = jax.grad(lambda w: theirs(w, 0.7) ** 2)(jnp.float32(1.3))
    loss = lambda w, x: ours(w, x) ** 2
    gradient = mpx.filter_grad(loss, mpx.NoOpLossScaling(), forward="float32")
    got = gradient(jnp.float32(1.3), jnp.float32(0.7))[2]
    # There is no product that rounds.
    np.testing.assert_allclose(got, want, rtol=1e-3)


def _loop(kind):
    def fun(p):
        step = lambda c: (c[0] + 1, jnp.sin(c[1]) + p[0], c[2].at[c[0]].set(c[1] * p[1]))
        options = {"kind": kind, "max_steps": 4, "buffers": lambda c: c[2]}
        out = eqxi.while_loop(lambda c: c[0] < 3, step, (0, p[0], jnp.zeros(3)), **options)
        return out[1] + jnp.sum(out[2] ** 2)

    return fun


def _three_steps(p):
    c, sum_ = p[0], 0.0
    for _ in range(3):
        sum_, c = sum_ + (c * p[1]) ** 2, jnp.sin(c) + p[0]
    return c + sum_


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["checkpointed", "lax", "bounded"])
def test_loops_of_equinox(kind):
    got = partials(_loop(kind))(POINT)
    np.testing.assert_allclose([*got.values()], nested(_three_steps, POINT), **CLOSE)


def test_checkpointed_scans_of_equinox():
    def fun(p):
        step = lambda c, _: (jnp.sin(c) + p[0], None)
        return eqxi.scan(step, p[0] * p[1], None, length=3, kind="checkpointed")[0]

    plain = lambda p: jnp.sin(jnp.sin(jnp.sin(p[0] * p[1]) + p[0]) + p[0]) + p[0]
    np.testing.assert_allclose([*partials(fun)(POINT).values()], nested(plain, POINT), **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "adjoint", ["RecursiveCheckpointAdjoint", "DirectAdjoint", "ForwardMode", "BacksolveAdjoint"]
)
def test_diffrax(adjoint):
    """y' = -a y² from 1 + x has the solution (1 + x) / (1 + a (1 + x)) at time 1."""
    diffrax = pytest.importorskip("diffrax")

    def solution(a, p):
        term = diffrax.ODETerm(lambda t, y, a: -a * y**2)
        options = {"args": a, "adjoint": getattr(diffrax, adjoint)(), "max_steps": 16}
        return diffrax.diffeqsolve(term, diffrax.Tsit5(), 0.0, 1.0, 0.1, 1 + p[0], **options).ys[0]

    exact = lambda a, p: (1 + p[0]) / (1 + a * (1 + p[0]))
    want = nested(lambda p: exact(1.0, p), POINT)
    # Ten steps of fifth order.
    got = jax.jit(partials(lambda p: solution(1.0, p)))(POINT)
    np.testing.assert_allclose(listed(got), want, rtol=1e-4, atol=1e-5)
    taken = lambda u, a: u(a, "u_x") ** 2 + u(a, "u_xx")
    ours = lambda a, name: partials(lambda p: solution(a, p), [name])(POINT)[name]
    theirs = lambda a, name: dict(zip(TERMS, nested(lambda p: exact(a, p), POINT), strict=True))[
        name
    ]
    gradient = jax.jit(jax.grad(lambda a: taken(ours, a)))
    if adjoint != "DirectAdjoint":
        with pytest.raises(ValueError, match=r"while_loop. at .*test_dependence.*DirectAdjoint"):
            gradient(1.0)
        return
    want = jax.grad(lambda a: taken(theirs, a))(1.0)
    np.testing.assert_allclose(gradient(1.0), want, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("adjoint", ["RecursiveCheckpointAdjoint", "ImplicitAdjoint"])
def test_optimistix(adjoint):
    """y = 0.9 x cos(y), by implicit differentiation in float64."""
    optx = pytest.importorskip("optimistix")

    def fun(p):
        step = lambda y, x: 0.9 * x * jnp.cos(y)
        solver = optx.FixedPointIteration(1e-7, 1e-7)
        options = {"args": p[0], "adjoint": getattr(optx, adjoint)(), "max_steps": 256}
        return optx.fixed_point(step, solver, jnp.array(0.5), **options).value

    with jax.enable_x64(True):
        x = np.float64(POINT[0])
        y = 0.5
        for _ in range(200):
            y = 0.9 * x * np.cos(y)
        # y' (1 + 0.9 x sin y) = 0.9 cos y, and once more.
        below = 1 + 0.9 * x * np.sin(y)
        slope = 0.9 * np.cos(y) / below
        bend = -slope * (1.8 * np.sin(y) + 0.9 * x * np.cos(y) * slope) / below
    got = partials(fun, ["u", "u_x", "u_xx"])(POINT)
    # The iteration ends at 1e-7 of the value, and earlier at its derivatives.
    np.testing.assert_allclose([*got.values()], [y, slope, bend], rtol=1e-3)


@pytest.mark.slow
def test_odeint_of_jax():
    """Its error estimate in float32 is 1e7 and more, so that powers of its derivatives overflow."""
    from jax.experimental.ode import odeint

    fun = lambda p: odeint(lambda y, t: -(y**2), 1 + p[0], jnp.array([0.0, 1.0]))[-1]
    got = partials(fun, ["u", "u_x", "u_xx", "u_xxx"])(POINT)
    # The solution is 1 - 1 / (2 + x). Its tolerance of 1e-8 is below float32's rounding, which each
    # derivative magnifies.
    x = 2.7
    want = [1 - 1 / x, 1 / x**2, -2 / x**3, 6 / x**4]
    np.testing.assert_allclose([*got.values()], want, rtol=3e-2)


@pytest.mark.parametrize("size", [1e-14, 1e14])
def test_square_roots_of_any_size(size):
    fun = lambda p: jnp.sqrt(size * (p[0] ** 2 + jnp.exp(p[1]) * p[0] + 1))
    got = [float(x) for x in partials(fun)(POINT).values()]
    with jax.enable_x64(True):
        want = nested(fun, POINT.astype(jnp.float64))
    np.testing.assert_allclose(got, want, rtol=1e-4)  # third derivatives cancel


@jax.custom_vjp
def rounded(x):
    return jnp.round(4 * x) / 4


rounded.defvjp(lambda x: (rounded(x), None), lambda _, g: (g,))


def test_derivatives_that_only_a_backward_rule_knows():
    fun = lambda p: jnp.sin(rounded(p[0]) * p[0])
    for call in (partials(fun), mpx.derivatives.grad(fun)):
        with pytest.raises(ValueError, match=r"custom_vjp. function `rounded` at .*custom_jvp"):
            call(POINT)
    # The value has no derivative, and a loss takes the rule.
    assert partials(fun, ["u"])(POINT)["u"] == fun(POINT)

    def kept(p):
        x = p[0]
        return lax.stop_gradient(rounded(x)) * x**2

    assert partials(kept, ["u_x"])(POINT)["u_x"] == 2 * rounded(POINT[0]) * POINT[0]


def test_a_function_applied_in_place():
    applied = lambda p: jnp.sum(p.at[0].apply(jnp.exp) * p)
    calls = partials(applied), mpx.laplacian(applied, coords="xy", outputs="u")
    for call in (*calls, mpx.derivatives.grad(applied)):
        with pytest.raises(ValueError, match=r"apply\(f\).*test_dependence.*set\(f\(x\[i\]\)\)"):
            call(POINT)
    applied_to_data = lambda p: jnp.sum(jnp.arange(2.0).at[0].apply(jnp.exp) * p)
    assert partials(applied_to_data, ["u_x"])(POINT)["u_x"] == 1.0
    assert mpx.autocast(applied)(POINT) == applied(POINT)


def test_updates_of_one_entry():
    """All streams take the update that the value takes."""
    at = jnp.array([0, 1, 0])
    parts = lambda p: jnp.stack([p[0] ** 2, p[1], p[0] * p[1]])
    fun = lambda p: jnp.sum(jnp.sin(jnp.zeros(2).at[at].set(parts(p))))
    np.testing.assert_allclose([*partials(fun)(POINT).values()], nested(fun, POINT), **CLOSE)


REDUCED = {
    "window": lambda x: lax.reduce_window(x, x.dtype.type(0), lax.add, (2,), (1,), "VALID"),
    "maximum": lambda x: lax.reduce_window(x, x.dtype.type(-np.inf), lax.max, (2,), (1,), "SAME"),
    "sum": lambda x: lax.reduce(x, x.dtype.type(0), lax.add, (0,)),
}


@pytest.mark.parametrize("name", REDUCED)
@pytest.mark.parametrize("options", [{"autocast": True}, {"forward": "float32"}], ids=str)
def test_reductions_that_start_with_an_array(name, options):
    """In a trace JAX does not see the number that they start with, and knows no reverse mode."""
    reduced = lambda x: REDUCED[name](x.astype(jnp.float16)).astype(jnp.float32)
    loss = lambda w, x: jnp.sum(reduced(w * x) ** 2)
    w, x = jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.array([0.5, -1.0, 2.0, 0.25])
    with jax.numpy_dtype_promotion("standard"):
        got = mpx.filter_grad(loss, mpx.NoOpLossScaling(), **options)(w, x)[2]
        want = jax.grad(loss)(w, x)
    np.testing.assert_allclose(got, want, rtol=2.0**-9)  # float16 holds all of these


# References.


def _written(p):
    r = jax.new_ref(jnp.zeros(3))
    r[0] = p[0] ** 2
    jax.ref.addupdate(r, 1, p[1])

    def step(i, carry):
        r[...] += jnp.sin(p[0] * i)
        return carry

    lax.fori_loop(0, 3, step, 0)
    return jnp.sum(r[...] ** 2) + jnp.sum(jax.freeze(r) * p[0])


def _written_in_a_loop(p):
    def step(c, _):
        r = jax.new_ref(c)
        r[...] = jnp.sin(r[...] * p[1])
        return r[...], None

    return lax.scan(step, p[0], None, length=3)[0]


@pytest.mark.slow
@pytest.mark.parametrize("fun", [_written, _written_in_a_loop])
def test_references(fun):
    with jax.numpy_dtype_promotion("standard"):
        want = nested(fun, POINT)
        np.testing.assert_allclose([*partials(fun)(POINT).values()], want, **CLOSE)
        outside = lambda p: jnp.exp(-fun(jnp.sin(p)) / 8) * p[1]
        got = jax.jit(partials(outside))(POINT)
        np.testing.assert_allclose(listed(got), nested(outside, POINT), **CLOSE)


@pytest.mark.slow
def test_references_in_a_loss():
    model = eqx.nn.MLP(2, "scalar", 8, 1, activation=jnp.tanh, key=jax.random.key(0))
    points = jax.random.uniform(jax.random.key(1), (4, 2))

    def field(model, p):
        r, u = jax.new_ref(jnp.zeros(())), model(p)

        def step(c, i):
            r[...] += jnp.sin(i * u)
            return c, None

        lax.scan(step, None, jnp.arange(1.0, 4.0))
        return r[...] * u

    def loss(model, points):
        d = jax.vmap(partials(lambda p: field(model, p), ["u_x", "u_xx"]))(points)
        return jnp.mean((d["u_x"] + d["u_xx"]) ** 2)

    def oracle(model, points):
        u_x = lambda p: along(lambda p: field(model, p), 0)
        both = jax.vmap(lambda p: u_x(p)(p) + along(u_x(p), 0)(p))
        return jnp.mean(both(points) ** 2)

    gradient = mpx.filter_grad(loss, mpx.NoOpLossScaling(), forward="float32")
    got = jax.tree.leaves(eqx.filter_jit(gradient)(model, points)[2])
    want = jax.tree.leaves(
        eqx.filter(eqx.filter_jit(eqx.filter_grad(oracle))(model, points), eqx.is_array)
    )
    for g, w in zip(got, want, strict=True):
        # A float16 backward pass: a few roundings of a layer.
        assert jnp.abs(g - w).max() <= 2.0**-7 * jnp.abs(w).max()


# Products of the point itself.

WEIGHTS = jnp.arange(6.0).reshape(2, 3) / 4
OUTER = {
    "i,ij->ij": lambda p: jnp.einsum("i,ij->ij", p, WEIGHTS),
    "ij,i->ij": lambda p: jnp.einsum("ij,i->ij", WEIGHTS, p),
    "i,jk->ijk": lambda p: jnp.einsum("i,jk->ijk", p, WEIGHTS),
    "tensordot": lambda p: jnp.tensordot(p, WEIGHTS, 0),
    "with itself": lambda p: jnp.outer(p, p),
    "mixed": lambda p: mpx.mixed_einsum("i,jk->ijk", p, WEIGHTS),
}


@pytest.mark.parametrize("name", OUTER)
def test_products_of_the_point_without_contraction(name):
    fun = lambda p: jnp.sum(jnp.sin(OUTER[name](p)))
    np.testing.assert_allclose([*partials(fun)(POINT).values()], nested(fun, POINT), **CLOSE)
    lap = mpx.laplacian(fun, coords="xy", outputs="u")(POINT)["lap_u"]
    both = along(along(fun, 0), 0)(POINT) + along(along(fun, 1), 1)(POINT)
    np.testing.assert_allclose(lap, both, **CLOSE)
    products = partials(fun).report(POINT).products
    assert {e.precision for e in products} <= {"float32 × float32 → float32"}

"""What is known of derivatives while a function is traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import equations, in_float64, relative

import mpx_pde as mpx
from mpx_pde.engine import _known


def moved(p):
    """A function of four coordinates that go through every kind of move first."""
    a = jnp.concatenate([p[1:3], 2 * p[::-1][:2]])
    b = jnp.broadcast_to(-a.reshape(2, 2).T[:, :1] / 4, (2, 3)) + 1
    c = (p[0:1] - p[3:4]).squeeze() + jnp.expand_dims(p, 0)[0, 2]
    return jnp.sum(jnp.sin(b)) * c**3 + jnp.sum(jnp.cos(a) * p)


@pytest.mark.slow
def test_moves_of_coordinates_need_no_compiler(monkeypatch):
    monkeypatch.setattr(_known, "_by_jax", lambda *_: pytest.fail("compiled while tracing"))
    terms = ["u_x", "u_xy", "u_zzt", "u_xxxx"]
    p = jnp.array([0.3, -0.7, 0.4, 0.9])
    got = jax.jit(mpx.partials(moved, terms, coords="xyzt", outputs="u"))(p)
    basis = dict(zip("xyzt", jnp.eye(4), strict=True))
    for term in terms:
        nested = moved
        for c in term[2:]:
            nested = lambda p, f=nested, d=basis[c]: jax.jvp(f, (p,), (d,))[1]
        want = jax.jit(nested)(p)
        # float32, by some ten operations.
        assert abs(got[term] - want) < 1e-5 * (1 + abs(want)), term
    # Stacked directions have an axis in front.
    size = 12
    whole = lambda p: sum(moved(p[i : i + 4]) for i in range(0, size, 4))
    p = jnp.linspace(-1, 1, size)
    got = jax.jit(mpx.laplacian(whole, coords=[f"x{i}" for i in range(size)], outputs="u"))(p)
    assert relative(got["lap_u"], jnp.trace(jax.jit(jax.hessian(whole))(p))) < 1e-5


BY_COLUMNS = {
    "ravel": lambda p: jnp.ravel(p.reshape(2, -1), order="F"),
    "reshape": lambda p: p.reshape(2, -1).reshape(-1, 2, order="F")[0],
    "lax": lambda p: jax.lax.reshape(p.reshape(2, -1), (p.size,), (1, 0)),
}


@pytest.mark.parametrize("size", [4, 12])
@pytest.mark.parametrize("name", BY_COLUMNS)
def test_coordinates_in_an_array_that_is_read_by_columns(name, size):
    def fun(p):
        moved = BY_COLUMNS[name](p)
        return jnp.sum(jnp.sin(moved * jnp.arange(1.0, 1 + moved.size)))

    p = jnp.linspace(0.1, 0.9, size)
    coords = [f"x{i}" for i in range(size)]
    run = mpx.laplacian(fun, [f"u_{c}" for c in coords], coords=coords, outputs="u")
    got, slope = jax.jit(run)(p), jax.jit(jax.grad(fun))(p)
    # float32, by some ten operations.
    np.testing.assert_allclose([got[f"u_{c}"] for c in coords], slope, rtol=1e-5, atol=1e-5)
    want = jnp.trace(jax.jit(jax.hessian(fun))(p))
    np.testing.assert_allclose(got["lap_u"], want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_network_of_many_coordinates_is_traced_as_fast_as_one_of_few(monkeypatch):
    """A slice of each of a thousand coordinates was compiled by itself: it took minutes."""
    monkeypatch.setattr(_known, "_by_jax", lambda *_: pytest.fail("compiled while tracing"))
    size = 1000
    model = mpx.nn.CoordinateMLP(size, "scalar", 8, 1, periodic={3: 1.0}, key=jax.random.key(0))
    lap = mpx.laplacian(model, coords=[f"x{i}" for i in range(size)], outputs="u")
    jaxpr = jax.make_jaxpr(lambda p: lap(p)["lap_u"])(jnp.zeros(size))
    assert len(jaxpr.eqns) < 150


def test_what_numpy_does_not_know_is_worked_out_by_jax():
    def gathered(p):
        return jnp.prod(jnp.sin(p[np.array([2, 0])] + jnp.pad(p, (1, 0))[:2]))

    p = jnp.array([0.3, -0.7, 0.4])
    got = jax.jit(mpx.partials(gathered, ["u_x", "u_xz", "u_y"], coords="xyz", outputs="u"))(p)
    slope, curvature = jax.jit(lambda p: (jax.grad(gathered)(p), jax.hessian(gathered)(p)))(p)
    assert relative(got["u_xz"], curvature[0, 2]) < 1e-5
    assert relative(got["u_x"], slope[0]) < 1e-5
    assert got["u_y"] == 0


COMPLEX = {
    "a sum with a real one": lambda p: jnp.real(1 / (p[0] + p[1] * 1j)),
    "a difference": lambda p: jnp.abs(jnp.exp(2 * p[1] * 1j - p[0])) * jnp.cos(p[1]),
    "a power": lambda p: jnp.imag((1j * p[0] + p[1]) ** 3),
    "both in one array": lambda p: jnp.real(jnp.prod(jnp.sin(jnp.stack([p[0] + 0j, p[1] / 2j])))),
}


@pytest.mark.parametrize("name", COMPLEX)
@jax.numpy_dtype_promotion("standard")
def test_coordinates_become_complex(name):
    fun, p = COMPLEX[name], jnp.array([0.3, 0.7])
    names = ["u_x", "u_y", "u_xx", "u_xy", "u_yy"]
    run = mpx.linear_operator(fun, {"lap": "laplacian"}, names, coords="xy", outputs="u")
    slope, curvature = jax.jit(lambda p: (jax.grad(fun)(p), jax.hessian(fun)(p)))(p)
    want = [*slope, curvature[0, 0], curvature[0, 1], curvature[1, 1], jnp.trace(curvature)]
    got = jax.jit(run)(p)
    # float32, by some ten operations.
    np.testing.assert_allclose([got[n] for n in (*names, "lap_u")], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("coords", [1, 3, 5])
@pytest.mark.parametrize("turned", [False, True])
def test_few_coordinates_meet_the_rows_of_a_weight(coords, turned):
    """No product then, and one sum over points for all that its gradient is made of."""
    names, rng = "txyzw"[:coords], np.random.default_rng(0)
    weight, bias, last = (jnp.asarray(rng.normal(size=s), "float32") for s in ((coords, 8), 8, 8))
    points = jnp.asarray(rng.normal(size=(6, coords)), "float32")
    terms = ["u", *(f"u_{c}" for c in names), f"u_{names[0]}{names[-1]}"]

    def net(params, p):
        weight, bias, last = params
        first = weight.T @ p if turned else p @ weight
        return jnp.tanh(first + bias) @ last

    def nested(params, p):
        slope, curve = jax.grad(net, 1)(params, p), jax.hessian(net, 1)(params, p)
        return [net(params, p), *slope, curve[0, -1]]

    def loss(of):
        square = lambda out: sum((i + x) ** 2 for i, x in enumerate(out))
        return lambda params, points: jnp.mean(jax.vmap(lambda p: square(of(params, p)))(points))

    engine = lambda params, p: list(
        mpx.partials(lambda p: net(params, p), terms, coords=names, outputs="u")(p).values()
    )
    args = (weight, bias, last), points
    gradient = jax.grad(loss(engine), (0, 1))
    got = jax.jit(gradient)(*args)
    with jax.enable_x64(True):
        want = jax.jit(jax.grad(loss(nested), (0, 1)))(*in_float64(args))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative(a, b) < 1e-5  # float32
    names_of = [e.primitive.name for e in equations(jax.make_jaxpr(loss(engine))(*args))]
    assert ("beside" in names_of) == (coords <= 4)

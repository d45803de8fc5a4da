"""Tests derivatives of functions with complex outputs, by real coordinates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal

import mpx_pde as mpx


POINT = np.array([0.3, 0.7], np.float32)
WEIGHTS = {"first": normal(0, (2, 8)), "last": normal(1, (8, 2)), "mixed": normal(2, (2, 2, 2))}
GIVEN = {"coords": "xy", "outputs": "uv"}
TERMS = ["u", "v_y", "u_xx", "u_xy", "v_xxx"]


def bloch(m, p):
    """A Bloch wave: a network times a plane wave, and a product of complex matrices."""
    a, b = jnp.tanh(p @ m["first"]) @ m["last"]
    h = jnp.exp(1j * (2 * p[0] - p[1])) * jnp.stack([a + 1j * b, jnp.conj(a - 2j * b)])
    return h @ jax.lax.complex(m["mixed"][0], m["mixed"][1])


def in_float64(dtype=np.float64):
    return jax.tree.map(lambda x: np.asarray(x, dtype), (WEIGHTS, POINT))


def along(fun, *dirs):
    for i in dirs:
        fun = lambda p, f=fun, i=i: jax.jvp(f, (p,), (jnp.eye(2, dtype=p.dtype)[i],))[1]
    return fun


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_terms_of_complex_outputs():
    fun = lambda p: bloch(WEIGHTS, p)
    factors = {"op": {"x": 2.0, "yy": lambda p: p[0]}}
    with jax.enable_x64(True):
        model, point = in_float64()
        wide = lambda p: bloch(model, p)
        d = lambda *dirs: along(wide, *dirs)(jnp.asarray(point))
        terms = [d()[0], d(1)[1], d(0, 0)[0], d(0, 1)[0], d(0, 0, 0)[1]]
        lap, op = d(0, 0) + d(1, 1), 2 * d(0) + point[0] * d(1, 1)
        double = mpx.partials(wide, TERMS, **GIVEN)(jnp.asarray(point))
        assert {x.dtype.name for x in double.values()} == {"complex128"}
        np.testing.assert_allclose([*double.values()], terms, rtol=1e-12)
    found = mpx.partials(fun, TERMS, **GIVEN)(jnp.asarray(POINT))
    assert {x.dtype.name for x in found.values()} == {"complex64"}
    # Three orders of a float32 network.
    np.testing.assert_allclose([*found.values()], terms, rtol=1e-4)
    found = mpx.laplacian(fun, ["u"], **GIVEN)(jnp.asarray(POINT))
    np.testing.assert_allclose([found["lap_u"], found["lap_v"]], lap, rtol=1e-4)
    found = mpx.linear_operator(fun, factors, **GIVEN)(jnp.asarray(POINT))
    np.testing.assert_allclose([found["op_u"], found["op_v"]], op, rtol=1e-4)
    jac = mpx.derivatives.jacfwd(fun)(jnp.asarray(POINT))
    np.testing.assert_allclose(jac, jax.jacfwd(fun)(jnp.asarray(POINT)), rtol=1e-4)


def schroedinger(m, points, *, derivatives=None):
    fun = lambda p: bloch(m, p)[0]
    given = {"coords": "tx", "outputs": "u", "scaling": derivatives}
    d = jax.vmap(mpx.partials(fun, ["u_t", "u_xx"], **given))(points)
    return jnp.mean(jnp.abs(1j * d["u_t"] + 0.5 * d["u_xx"]) ** 2)


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("options", [{"forward": "float32"}, {"autocast": True}], ids=str)
def test_a_loss_of_complex_terms(options):
    points = jax.random.uniform(jax.random.key(3), (4, 2))
    with jax.enable_x64(True):
        model, _ = in_float64()
        want = jax.grad(schroedinger)(model, points.astype(jnp.float64))
        want = jax.tree.map(np.asarray, want)
    both = mpx.Scaling(mpx.StaticLossScaling(1.0), mpx.DerivativeScaling.per_direction("tx"))
    gradient = mpx.filter_grad(schroedinger, both, keep_full=(False, True), **options)
    after, finite, got = jax.jit(gradient)(WEIGHTS, points)
    assert finite
    for name, w in want.items():
        # Products of halves, in two layers and two orders.
        assert np.abs(got[name] - w).max() <= 2.0**-5 * np.abs(w).max(), name
    counts = mpx.derivatives.telemetry(after)["counts"]
    assert {name: int(c.sum()) for name, c in counts.items() if c.sum()} == {"_t": 4, "_xx": 4}
    # The exponents of the larger of the real and the imaginary part.
    with jax.enable_x64(True):
        u_xx = jax.vmap(along(lambda p: bloch(model, p)[0], 1, 1))(points.astype(jnp.float64))
    larger = np.maximum(np.abs(u_xx.real), np.abs(u_xx.imag))
    told = mpx.derivatives.telemetry(after)
    exponents = np.repeat(told["exponents"]["_xx"], np.int32(counts["_xx"]))
    np.testing.assert_allclose(exponents, np.sort(np.floor(np.log2(larger))), atol=1)


def test_what_is_refused():
    fun = lambda p: jax.lax.complex(jnp.sin(p[0]), p[1])
    with pytest.raises(TypeError, match=r"`grad` .* real number.*complex64.*`jacfwd`"):
        mpx.derivatives.grad(fun)(jnp.asarray(POINT))
    given = {"coords": "xy", "outputs": "u"}
    with pytest.raises(ValueError, match=r"real numbers.*1j in the operator 'op'. Take.*as terms"):
        mpx.linear_operator(fun, {"op": {"x": 1j}}, **given)

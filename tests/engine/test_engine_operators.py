"""Sums of derivatives, and operators that are sampled."""

import math
import string

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_zoo import NETWORKS, chain, dense, layers
from helpers import relative

import mpx_pde as mpx


pytestmark = pytest.mark.slow


P = jnp.array([[0.31, 0.62], [0.78, 0.17], [-0.4, 0.55]])


def tensors(fun, order):
    """All derivatives of an order at the points, by nested `jax.jacfwd`."""
    for _ in range(order):
        fun = jax.jacfwd(fun)
    return jax.vmap(fun)


@pytest.mark.parametrize("name", ["tanh", "pirate"])
def test_operators_in_two_dimensions(name):
    """Each as one stream: all of them, with terms beside them, come out of one pass."""
    operators = {
        "lap": "laplacian",
        "bih": "biharmonic",
        "mixed": {"y": 2.0, "xx": -0.3, "xxy": 0.7},
        "varying": {"xx": lambda p: p[0] * p[1], "xy": lambda p: jnp.sin(p[1]), "x": 1.5},
    }
    with jax.enable_x64(True):
        model = NETWORKS[name](jax.random.key(1))
        x = jnp.asarray(np.asarray(P, np.float64))

        def all_of(x):
            linear = mpx.linear_operator(model, operators, ["u", "u_x"], coords="xy", outputs="u")
            return jax.vmap(linear)(x), [tensors(model, k)(x) for k in range(5)]

        got, tables = jax.jit(all_of)(x)
        u, u1, u2, u3, u4 = map(np.asarray, tables)
    a, b = np.asarray(x).T
    want = {
        "u": u,
        "u_x": u1[:, 0],
        "lap_u": u2[:, 0, 0] + u2[:, 1, 1],
        "bih_u": u4[:, 0, 0, 0, 0] + 2 * u4[:, 0, 0, 1, 1] + u4[:, 1, 1, 1, 1],
        "mixed_u": 2 * u1[:, 1] - 0.3 * u2[:, 0, 0] + 0.7 * u3[:, 0, 0, 1],
        "varying_u": a * b * u2[:, 0, 0] + np.sin(b) * u2[:, 0, 1] + 1.5 * u1[:, 0],
    }
    assert got.keys() == want.keys()
    for key, value in want.items():
        # As for single terms: rounding of float64 through some ten layers.
        assert relative(got[key], value) < 1e-10, key


def test_laplacians_and_weighted_sums_in_many_dimensions():
    """From nine directions on they are stacked."""
    size = 16
    coords = string.ascii_lowercase[:size]
    params = layers(jax.random.key(0), size, 24, 24, 1)
    fun = lambda p: dense(params, p, jax.nn.gelu)[0] * jnp.sum(p**3)
    weights = np.linspace(-1, 2, size)
    operators = {
        "lap": "laplacian",
        "weighted": {2 * c: float(w) for c, w in zip(coords, weights, strict=True)},
        "third": {3 * c: (lambda p, i=i: p[i]) for i, c in enumerate(coords)},
    }
    x = jax.random.uniform(jax.random.key(1), (4, size))

    @jax.jit
    def both(x):
        got = jax.vmap(mpx.linear_operator(fun, operators, coords=coords, outputs="u"))(x)
        along = lambda d: lambda f: lambda p: jax.jvp(f, (p,), (d,))[1]

        def pure(p, d):
            second = along(d)(along(d)(fun))
            return second(p), along(d)(second)(p)

        return got, jax.vmap(lambda p: jax.vmap(lambda d: pure(p, d))(jnp.eye(size)))(x)

    got, (second, third) = both(x)
    # float32: some hundred products, of which the third order cancels one digit.
    assert relative(got["lap_u"], np.sum(second, 1)) < 1e-5
    assert relative(got["weighted_u"], np.asarray(second) @ weights) < 1e-5
    assert relative(got["third_u"], np.sum(np.asarray(third) * x, 1)) < 1e-4


# Samples.

SIZE = 12
COORDS = string.ascii_lowercase[:SIZE]
_ROWS = jax.random.normal(jax.random.key(5), (3, SIZE)) / 3


def waves(p):
    return jnp.sum(jnp.sin(_ROWS @ p + 0.4))


def exact_operators(p):
    phase = np.asarray(_ROWS @ p + 0.4)
    rows = np.asarray(_ROWS)
    return {
        "laplacian": -np.sin(phase) @ np.sum(rows**2, 1),
        "biharmonic": np.sin(phase) @ np.sum(rows**2, 1) ** 2,
        "third": -np.cos(phase) @ np.sum(rows**3, 1),
    }


SPECS = {
    "laplacian": "laplacian",
    "biharmonic": "biharmonic",
    "third": {3 * c: 1.0 for c in COORDS},
}


@pytest.mark.parametrize(
    ("name", "replace"), [("laplacian", False), ("biharmonic", True), ("third", True)]
)
def test_samples_are_unbiased_and_their_variance_falls(name, replace):
    p = jax.random.uniform(jax.random.key(2), (SIZE,))
    want, n = exact_operators(p)[name], 4096

    @jax.jit
    def draw(keys):
        def estimates(key, samples):
            return mpx.linear_operator(
                waves,
                {"op": SPECS[name]},
                coords=COORDS,
                outputs="u",
                samples=samples,
                key=key,
                replace=replace,
            )(p)["op_u"]

        return [jax.vmap(lambda k, s=s: estimates(k, s))(keys) for s in (2, 8)]

    few, many = (np.asarray(e, np.float64) for e in draw(jax.random.split(jax.random.key(0), n)))
    for estimates in (few, many):
        # Four times the standard error of the mean.
        assert abs(np.mean(estimates) - want) < 4 * np.std(estimates) / math.sqrt(n)
    # Without replacement by the factor (D - S) / (D - 1) less; normal directions never come twice.
    drawn_twice = replace or name == "biharmonic"
    ratio = 4 if drawn_twice else 4 * (SIZE - 2) / (SIZE - 8)
    # The variance of 4,096 estimates is known to 3 % where they are normal, and to some 10 % where
    # they are fourth powers.
    assert np.var(few) / np.var(many) == pytest.approx(ratio, rel=0.25)


def test_all_samples_without_replacement_are_exact():
    p = jax.random.uniform(jax.random.key(2), (SIZE,))
    for name in ("laplacian", "third"):
        operator = mpx.linear_operator(
            waves,
            {"op": SPECS[name]},
            coords=COORDS,
            outputs="u",
            samples=SIZE,
            key=jax.random.key(3),
        )
        # float32 sums of a dozen terms.
        assert relative(operator(p)["op_u"], exact_operators(p)[name]) < 1e-5


def test_samples_in_half():
    """Half precision adds its rounding to the same samples."""
    model = chain(jnp.tanh, jax.random.key(0))
    scaling = mpx.DerivativeScaling.per_direction("xy")

    @jax.jit
    def run(model, scaling):
        key = jax.random.key(1)
        operators = {"lap": "laplacian", "bih": "biharmonic"}
        return jax.vmap(
            mpx.linear_operator(
                model,
                operators,
                coords="xy",
                outputs="u",
                scaling=scaling,
                samples=3,
                key=key,
                replace=True,
            )
        )(P)

    want, got = run(model, scaling), run(mpx.cast_to_float16(model), scaling)
    for name in ("lap_u", "bih_u"):
        # Ten roundings of 2^-11.
        assert relative(got[name], want[name]) < 0.01


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("kind", ["number", "function"])
def test_factors_of_a_float64_network_are_float64(kind, drawn):
    if drawn and kind == "function":
        pytest.skip("samples are drawn of constant factors")
    with jax.enable_x64(True):
        size = 6
        a = np.linspace(0.11, 0.9, size)
        coords = [f"x{i}" for i in range(size)]
        point = jnp.linspace(0.1, 1.0, size)
        factor = {"number": lambda i: float(0.1 * a[i]), "function": lambda i: lambda p: p[i] * 0.1}
        spec = {f"x{i}x{i}": factor[kind](i) for i in range(size)}
        weight = 0.1 * a if kind == "number" else 0.1 * np.asarray(point)
        options = {"samples": size, "key": jax.random.key(0), "replace": False} if drawn else {}
        terms = mpx.linear_operator(
            lambda p: jnp.sum(jnp.sin(p) * a), {"op": spec}, coords=coords, outputs="u", **options
        )
        want = -np.sum(weight * a * np.sin(point))
        assert terms(point)["op_u"].dtype == jnp.float64
        np.testing.assert_allclose(terms(point)["op_u"], want, rtol=1e-14)

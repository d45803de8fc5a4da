"""Sums of derivatives, and operators that are sampled."""

import math
import string

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx_pde as mpx


pytestmark = pytest.mark.slow


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

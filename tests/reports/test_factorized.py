"""Tests that factorizations, which JAX cannot compile in half precision, are told."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import assert_tells, normal
from jax import lax

import mpx_pde as mpx


pytestmark = pytest.mark.usefixtures("standard_promotion")

FACTORIZED = {
    "cholesky": lambda a, b: jnp.linalg.cholesky(a),
    "lu": lambda a, b: jnp.linalg.solve(a, b),
    "qr": lambda a, b: jnp.linalg.qr(a)[1],
    "svd": lambda a, b: jnp.linalg.svd(a, compute_uv=False),
    "eigh": lambda a, b: jnp.linalg.eigvalsh(a),
    "tridiagonal_solve": lambda a, b: lax.custom_linear_solve(
        lambda x: 2 * x,
        a @ b,
        lambda _, y: lax.linalg.tridiagonal_solve(0 * y, 0 * y + 2, 0 * y, y[:, None])[:, 0],
        symmetric=True,
    ),
}
MATRIX, VECTOR = normal(0, (8, 8), 0.1), normal(1, (8,))


def step(f, **options):
    def loss(w, b):
        return jnp.sum(f(w @ w.T + 2 * jnp.eye(8, dtype=w.dtype), b) ** 2)

    gradient = mpx.filter_grad(loss, mpx.NoOpLossScaling(), **options)
    return eqx.filter_jit(lambda w, b: gradient(w, b)[2])


@pytest.mark.parametrize("name", FACTORIZED)
def test_a_factorization_in_half_is_told_with_its_line(name):
    """JAX raises when it traces it, from 0.12 on, or when it compiles it. That error has no line of
    the user's, so a warning comes first."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises((TypeError, NotImplementedError), match="float16") as caught:
            step(FACTORIZED[name])(MATRIX, VECTOR)
    if caught.type is TypeError:
        assert any("for which JAX has no such operation" in note for note in caught.value.__notes__)
        return
    (text,) = (str(x.message) for x in told if "factorizes" in str(x.message))
    assert_tells(text, f"(`{name}`)", "test_factorized.py:", "in float16", "autocast=True")


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"autocast": True}, {"forward": "float32"}])
@pytest.mark.parametrize("name", FACTORIZED)
@pytest.mark.filterwarnings("ignore:.*is done in half")
def test_it_works_as_the_warning_says(name, options):
    got = step(FACTORIZED[name], **options)(MATRIX, VECTOR)
    assert bool(jnp.all(jnp.isfinite(got)))


def test_triangular_solves_are_compiled():
    f = lambda a, b: jax.scipy.linalg.solve_triangular(jnp.tril(a), b, lower=True)
    assert bool(jnp.all(jnp.isfinite(step(f)(MATRIX, VECTOR))))

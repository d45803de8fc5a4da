"""Tests that differences which magnify the rounding of half products are told, and do so."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_tells, relative
from jax.experimental import sparse

import mpx_pde as mpx
from mpx_pde.reports._differences import magnified_differences


pytestmark = pytest.mark.usefixtures("standard_promotion")

N = 128


def network(params, x):
    h = x[:, None]
    for w, b in params[:-1]:
        h = jnp.tanh(h @ w + b)
    return x * (1 - x) * (h @ params[-1][0])[:, 0]


def start():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    sizes = ((1, 32), (32, 32), (32, 1))
    params = tuple((draw(m, n) / m**0.5, 0.1 * draw(n)) for m, n in sizes)
    return params, jnp.linspace(0, 1, N + 1)


def laplacian():
    """Returns the entries and indices of a matrix of second differences."""
    off, main, n = np.full(N, -float(N)), np.full(N + 1, 2.0 * N), np.arange(N)
    rows, columns = np.r_[n, N, n, n + 1], np.r_[n, N, n + 1, n]
    return np.r_[main, off, off].astype(np.float32), np.stack([rows, columns], 1)


def by_matrix(params, x, entries):
    matrix = sparse.BCOO((entries, jnp.asarray(laplacian()[1])), shape=(N + 1, N + 1))
    return N * jnp.sum(((matrix @ network(params, x))[1:-1] - 10 / N) ** 2)


def by_slices(params, x):
    u = network(params, x)
    return jnp.mean(((u[2:] - 2 * u[1:-1] + u[:-2]) * N**2 + 10) ** 2)


def by_shifts(params, x):
    u = network(params, x)
    return jnp.mean(((jnp.roll(u, 1) - 2 * u + jnp.roll(u, -1)) * N**2 + 10)[1:-1] ** 2)


def by_diff(params, x):
    return jnp.mean((jnp.diff(network(params, x), 2) * N**2 + 10) ** 2)


def twice(params, x):
    return jnp.mean((jnp.gradient(jnp.gradient(network(params, x))) * N**2 + 10) ** 2)


TAKE = {"slices": by_slices, "shifts": by_shifts, "diff": by_diff, "gradient": twice}


def averaged(params, x):
    """A matrix of an average, known while tracing."""
    entries = jnp.asarray(np.full(3 * N + 1, 1 / 3), x.dtype)
    matrix = sparse.BCOO((entries, jnp.asarray(laplacian()[1])), shape=(N + 1, N + 1))
    return jnp.mean((matrix @ network(params, x) - 1) ** 2)


def once(params, x):
    """First differences, and a sum of three with the same signs."""
    u = network(params, x)
    return jnp.mean(((u[1:] - u[:-1]) * N) ** 2) + jnp.mean((u[2:] + u[1:-1] + u[:-2]) ** 2)


def with_known_data(params, x):
    """Second differences of data, not of a network."""
    f = jnp.sin(x)
    return jnp.mean((network(params, x)[1:-1] - (f[2:] - 2 * f[1:-1] + f[:-2])) ** 2)


def gradient(loss, half, **options):
    policy = f"params=float32,compute={half},output=float32"
    return eqx.filter_jit(mpx.filter_grad(loss, mpx.NoOpLossScaling(), policy=policy, **options))


@pytest.mark.parametrize("name", TAKE)
def test_second_differences_of_half_products_are_told(name):
    params, x = mpx.cast_tree(start(), "float16")
    found = magnified_differences(jax.make_jaxpr(jax.grad(TAKE[name]))(params, x), "float16")
    assert [one.nodes for one in found[:1]] == [N + 1]
    assert "second differences" in found[0].what
    first = TAKE[name].__code__.co_firstlineno
    assert int(found[0].line.partition("test_differences.py:")[2]) - first in (1, 2)
    few = x[::8]
    assert magnified_differences(jax.make_jaxpr(jax.grad(TAKE[name]))(params, few), "float16") == []


@pytest.mark.parametrize("loss", [averaged, once, with_known_data])
def test_what_magnifies_little_is_no_alarm(loss):
    params, x = mpx.cast_tree(start(), "float16")
    assert magnified_differences(jax.make_jaxpr(jax.grad(loss))(params, x), "float16") == []


@pytest.mark.slow
@pytest.mark.parametrize("loss", [by_matrix, by_slices])
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_a_warning_names_the_line_and_the_mend_works(loss, half):
    params, x = start()
    args = (params, x, jnp.asarray(laplacian()[0])) if loss is by_matrix else (params, x)
    with jax.enable_x64(True):
        wide = lambda x: jnp.asarray(np.asarray(x, np.float64))
        want = jax.jit(jax.grad(loss))(*jax.tree.map(wide, args))
    for options in ({"autocast": True}, {}):
        run = gradient(loss, half, **options)
        with pytest.warns(mpx.PrecisionWarning, match="nodes that products of") as told:
            lost = run(*args)[-1]
        line = loss.__code__.co_firstlineno + 2
        assert_tells(str(told[0].message), f"test_differences.py:{line}", f"{N + 1}", "forward=")
        # More than 16 roundings, the tolerance of the sweep over JAX's functions.
        assert relative(lost, want) > 16 * float(jnp.finfo(half).eps) / 2
    right = gradient(loss, half, forward="float32")(*args)[-1]
    assert relative(right, want) < 4 * float(jnp.finfo(half).eps)


def test_autocast_does_not_round_what_a_sparse_matrix_takes():
    """All operands are exact in bfloat16 and the results of the first product are not, so what a
    difference of them leaves is exact only if they are not rounded."""
    i = jnp.arange(N, dtype=jnp.float32)
    entries = jnp.concatenate([jnp.ones(N - 1), -jnp.ones(N - 1)])
    rows = np.tile(np.arange(N - 1), 2)
    indices = jnp.asarray(np.stack([rows, np.r_[np.arange(1, N), np.arange(N - 1)]], 1))

    def slope(w, features):
        matrix = sparse.BCOO((entries, indices), shape=(N - 1, N))
        return (matrix @ (features @ w)) @ jnp.eye(N - 1)

    run = jax.jit(mpx.autocast(slope, "bfloat16"))
    got = run(jnp.asarray([3.0, 1024.0]), jnp.stack([i, jnp.ones(N)], 1))
    np.testing.assert_array_equal(got, 3.0)

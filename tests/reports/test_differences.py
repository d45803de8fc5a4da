"""Tests that differences which magnify the rounding of half products are told, and do so."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_tells, relative
from jax import lax
from jax.experimental import sparse

import mpx_pde as mpx
from mpx_pde.reports._differences import magnified_differences
from mpx_pde.reports._survey import Survey


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


THREE = np.asarray([1.0, -2.0, 1.0], np.float32)


def second(n):
    return np.eye(n, k=1) - 2 * np.eye(n) + np.eye(n, k=-1)


def by_convolution(params, x):
    u = network(params, x)
    return jnp.mean((jnp.convolve(u, jnp.asarray(THREE), "valid") * N**2 + 10) ** 2)


def by_channels(params, x):
    """A bank of kernels for several fields, of which one takes second differences."""
    u, numbers = jnp.stack([network(params, x)] * 2, 1)[None], ("NHC", "HIO", "NHC")
    bank = jnp.asarray(np.stack([THREE, [0, 1, 0]], 1)[:, None], u.dtype)
    bank = jnp.concatenate([bank, bank], 2)
    v = lax.conv_general_dilated(
        u, bank, (1,), "SAME", dimension_numbers=numbers, feature_group_count=2
    )
    return jnp.mean((v * N**2) ** 2)


def by_two_convolutions(params, x):
    u, once = network(params, x), jnp.asarray([1.0, -1.0], x.dtype)
    v = jnp.convolve(jnp.convolve(u, once, "valid"), once, "valid")
    return jnp.mean((v * N**2 + 10) ** 2)


def by_dense_matrix(params, x):
    matrix = jnp.asarray(second(len(x)), x.dtype)
    return jnp.mean(((matrix @ network(params, x))[1:-1] * N**2 + 10) ** 2)


def in_steps(params, x):
    def step(u, _):
        return u + 0.1 * (u @ jnp.asarray(second(len(x)).T, u.dtype)), None

    return jnp.mean(lax.scan(step, network(params, x), length=3)[0] ** 2)


def by_spectral_matrix(params, x):
    """Second differences by the Chebyshev matrix, all of whose entries differ from zero."""
    n = len(x) - 1
    nodes, signs = np.cos(np.pi * np.arange(n + 1) / n), (-1.0) ** np.arange(n + 1)
    ends = signs * np.r_[2, np.ones(n - 1), 2]
    matrix = np.outer(ends, 1 / ends) / (np.subtract.outer(nodes, nodes) + np.eye(n + 1))
    matrix -= np.diag(matrix.sum(1))
    u = network(params, jnp.asarray((nodes + 1) / 2, x.dtype))
    return jnp.mean((jnp.asarray(matrix @ matrix / n**4, x.dtype) @ u + 10) ** 2)


def by_indices(params, x):
    u, i = network(params, x), np.arange(1, len(x) - 1)
    return jnp.mean(((u[i + 1] - 2 * u[i] + u[i - 1]) * N**2 + 10) ** 2)


def by_dynamic_slices(params, x):
    u, n = network(params, x), len(x) - 2
    parts = [lax.dynamic_slice_in_dim(u, i, n) for i in range(3)]
    return jnp.mean(((parts[0] - 2 * parts[1] + parts[2]) * N**2 + 10) ** 2)


def in_columns(params, x):
    u = network(params, x)[:, None].T
    return jnp.mean(((u[:, 2:] - 2 * u[:, 1:-1] + u[:, :-2]) * N**2 + 10) ** 2)


def in_a_branch(params, x):
    differences = lambda u: (u[2:] - 2 * u[1:-1] + u[:-2]) * N**2 + 10
    u = network(params, x)
    return jnp.mean(lax.cond(x[0] < 1, differences, lambda u: u[1:-1], u) ** 2)


TAKE = {
    "slices": by_slices,
    "shifts": by_shifts,
    "diff": by_diff,
    "gradient": twice,
    "convolution": by_convolution,
    "channels": by_channels,
    "two convolutions": by_two_convolutions,
    "dense matrix": by_dense_matrix,
    "steps": in_steps,
    "spectral matrix": by_spectral_matrix,
    "indices": by_indices,
    "dynamic slices": by_dynamic_slices,
    "columns": in_columns,
    "branch": in_a_branch,
}


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


def smoothed(params, x):
    """A smoothing kernel, an edge filter of first differences, and their matrices."""
    u = network(params, x)
    loss = jnp.mean(jnp.convolve(u, jnp.asarray([0.25, 0.5, 0.25], x.dtype)) ** 2)
    edges = jnp.asarray([1, 0, -1], x.dtype)
    loss += jnp.mean(jnp.convolve(u, edges) ** 2) + jnp.mean((np.abs(second(len(x))) @ u) ** 2)
    return loss + jnp.mean((jnp.asarray(np.eye(N + 1) - np.eye(N + 1, k=1), x.dtype) @ u) ** 2)


def transformed(params, x):
    """A Fourier transform, an average taken off, a random projection, and a graph's Laplacian."""
    u, rng, i = network(params, x), np.random.default_rng(1), np.arange(N + 1)
    waves = np.cos(2 * np.pi * np.outer(i, i) / (N + 1))
    links = np.maximum(edges := (rng.random((N + 1, N + 1)) < 4 / N), edges.T)
    graph = np.diag(links.sum(1)) - links
    known = waves, np.eye(N + 1) - 1 / (N + 1), rng.normal(size=(N + 1, N + 1)), graph
    return sum(jnp.mean((jnp.asarray(m, x.dtype) @ u) ** 2) for m in known)


def attended(params, x):
    """Attention along the grid, and a kernel that is learned."""
    u = network(params, x)
    weights = jax.nn.softmax(u[:, None] * u[None])
    return jnp.mean((weights @ u) ** 2) + jnp.mean(jnp.convolve(u, params[0][0][0, :3]) ** 2)


def many_short(params, x):
    """Second differences of many fields at few nodes."""
    u = network(params, x)[: N // 8 * 8].reshape(-1, 8)
    return jnp.mean((u[:, 2:] - 2 * u[:, 1:-1] + u[:, :-2]) ** 2)


QUIET = [averaged, once, with_known_data, smoothed, transformed, attended, many_short]


def gradient(loss, half, **options):
    policy = f"params=float32,compute={half},output=float32"
    return eqx.filter_jit(mpx.filter_grad(loss, mpx.NoOpLossScaling(), policy=policy, **options))


def found_in_gradient(loss, params, x):
    return magnified_differences(Survey(jax.make_jaxpr(jax.grad(loss))(params, x)), "float16")


@pytest.mark.parametrize("name", TAKE)
def test_second_differences_of_half_products_are_told(name):
    params, x = mpx.cast_tree(start(), "float16")
    found = found_in_gradient(TAKE[name], params, x)
    assert [one.nodes for one in found[:1]] == [N + 1]
    assert "differences" in found[0].what
    first = TAKE[name].__code__.co_firstlineno
    assert 0 < int(found[0].line.partition("test_differences.py:")[2]) - first < 11
    few = x[::8]
    assert found_in_gradient(TAKE[name], params, few) == []


@pytest.mark.parametrize("loss", QUIET)
def test_what_magnifies_little_is_no_alarm(loss):
    params, x = mpx.cast_tree(start(), "float16")
    assert found_in_gradient(loss, params, x) == []


@pytest.mark.slow
@pytest.mark.parametrize("loss", [by_matrix, by_slices, by_convolution, by_dense_matrix])
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_a_warning_names_the_line_and_the_mend_works(loss, half):
    params, x = start()
    args = (params, x, jnp.asarray(laplacian()[0])) if loss is by_matrix else (params, x)
    with jax.enable_x64(True):
        wide = lambda x: jnp.asarray(np.asarray(x, np.float64))
        want = jax.jit(jax.grad(loss))(*jax.tree.map(wide, args))
    for options in ({"autocast": True}, {}):
        run = gradient(loss, half, **options)
        with pytest.warns(mpx.PrecisionWarning, match="products of .* computed") as told:
            lost = run(*args)[-1]
        line = loss.__code__.co_firstlineno + 2
        assert_tells(str(told[0].message), f"test_differences.py:{line}", f"{N + 1}", "forward=")
        assert_tells(str(told[0].message), "factor of about 20,000")
        # More than 16 roundings, the tolerance of the sweep over JAX's functions.
        assert relative(lost, want) > 16 * float(jnp.finfo(half).eps) / 2
    right = gradient(loss, half, forward="float32")(*args)[-1]
    assert relative(right, want) < 4 * float(jnp.finfo(half).eps)


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_a_field_that_is_itself_the_parameter_is_told(half):
    """No product computes it. A cast rounds it, and so does the product with the matrix."""
    x = np.linspace(0, 1, N + 1, dtype=np.float32)
    matrix, field = second(N + 1)[1:-1].astype(np.float32), jnp.asarray(np.exp(x))
    by_dense = lambda u, f: jnp.mean((jnp.asarray(matrix, u.dtype) @ u * N**2 - f) ** 2)
    by_parts = lambda u, f: jnp.mean(((u[2:] - 2 * u[1:-1] + u[:-2]) * N**2 - f) ** 2)
    want = (matrix.T @ (matrix @ np.exp(np.float64(x)) * N**2 - 0.5)) * 2 * N**2 / (N - 1)
    for loss, options in ((by_dense, {}), (by_dense, {"autocast": True}), (by_parts, {})):
        with pytest.warns(mpx.PrecisionWarning, match=f"rounded to {half}"):
            lost = gradient(loss, half, **options)(field, np.float32(0.5))[-1]
        # 4 n² roundings of u, beside second differences of the size of u.
        assert relative(lost, want) > 1
    data = lambda w, f: jnp.mean((w * x[:1] - (f[2:] - 2 * f[1:-1] + f[:-2])) ** 2)
    gradient(data, half, autocast=True)(jnp.ones(1), field)  # warnings are errors


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

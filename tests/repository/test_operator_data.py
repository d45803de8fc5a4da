"""Compares the data of the neural-operator examples with analytic solutions."""

import importlib

import jax.numpy as jnp
import numpy as np
import pytest
from pages import module


# Examples are programs of users.
pytestmark = pytest.mark.usefixtures("standard_promotion")

_cache, darcy, references = map(module, ("_cache", "_darcy", "references"))
trainings = importlib.import_module("benchmarks.operators")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MPX_PDE_CACHE", str(tmp_path))
    return tmp_path


# --- The cache -------------------------------------------------------------------------------


def counted(**parameters):
    counted.calls += 1
    return {"x": np.arange(3) + counted.calls, "y": np.float32(parameters["b"])}


def test_a_second_call_reads_what_the_first_has_made(cache):
    counted.calls = 0
    first = _cache.cached("data", counted, version=1, a=1, b=0.5)
    [path] = cache.iterdir()
    written = path.read_bytes()
    second = _cache.cached("data", counted, version=1, b=0.5, a=1)
    assert counted.calls == 1
    assert [*cache.iterdir()] == [path]
    assert path.read_bytes() == written
    bits = lambda arrays: {k: (v.dtype, v.tobytes()) for k, v in arrays.items()}
    assert bits(first) == bits(second)


# --- Darcy flow ------------------------------------------------------------------------------


def grid(n):
    return np.meshgrid(np.linspace(0, 1, n + 1), np.linspace(0, 1, n + 1), indexing="ij")


def smooth(n):
    """Returns a = exp(x + 2y), its right-hand side, and u = sin(πx) sin(πy)."""
    x, y = grid(n)
    a = np.exp(x + 2 * y)
    u = np.sin(np.pi * x) * np.sin(np.pi * y)
    u_x = np.pi * np.cos(np.pi * x) * np.sin(np.pi * y)
    u_y = np.pi * np.sin(np.pi * x) * np.cos(np.pi * y)
    return a, -a * (u_x + 2 * u_y - 2 * np.pi**2 * u), u


def layered(n):
    """Returns the same for an `a` that jumps at x = ½. The flux a u_x = cos(2πx) sin(πy) is
    continuous and not zero there, so u_x jumps."""
    x, y = grid(n)
    a = np.where(x < 0.5, darcy.HIGH, darcy.LOW)
    s = np.sin(2 * np.pi * x) * np.sin(np.pi * y)
    return a, 5 * np.pi / 2 * s, s / (2 * np.pi * a)


@pytest.mark.parametrize("transposed", [False, True])
# The jump lies halfway between two points because n is odd.
@pytest.mark.parametrize(("exact", "sizes"), [(smooth, (16, 32, 64)), (layered, (15, 31, 63))])
def test_the_solver_is_of_second_order(exact, sizes, transposed):
    errors = []
    for n in sizes:
        a, f, u = (x.T if transposed else x for x in exact(n))
        errors.append(np.max(np.abs(darcy.solve(a, f) - u)) / np.max(np.abs(u)))
    orders = np.diff(np.log(errors)) / -np.diff(np.log(sizes))
    assert np.all(np.abs(orders - 2) < 0.1), (errors, orders)
    assert errors[-1] < 1e-3


def test_a_sample_is_the_same_function_at_every_resolution_and_in_every_data_set():
    a, u = darcy.darcy_data(3, 16, seed=0)
    fine, fine_u = darcy.darcy_data(2, 64, seed=0)
    np.testing.assert_array_equal(fine[:, ::4, ::4], a[:2])
    # The grid resolves interfaces only to a cell, so the error is of first order in 1/16.
    assert np.linalg.norm(fine_u[:, ::4, ::4] - u[:2]) < 0.05 * np.linalg.norm(u)
    assert a.dtype == u.dtype == np.float32
    assert set(np.unique(a)) == {darcy.LOW, darcy.HIGH}
    assert not np.array_equal(a[0], a[1])
    assert not np.array_equal(a, darcy.darcy_data(3, 16, seed=1)[0])


# --- Navier–Stokes ---------------------------------------------------------------------------


def test_taylor_green_vortices_decay_as_they_should():
    n, k, viscosity = 32, 2 * np.pi * np.array([1, 2])[:, None, None], 1e-2
    x = np.arange(n) / n
    initial = np.sin(k * x[:, None]) * np.sin(k * x)
    options = {"viscosity": viscosity, "time_step": 0.005, "time": 0.5}
    final = references.solve_vorticity(jnp.asarray(initial, jnp.float32), **options)
    assert final.dtype == jnp.float32
    expected = initial * np.exp(-2 * k**2 * viscosity * 0.5)
    # 100 steps in float32.
    np.testing.assert_allclose(final, expected, rtol=0, atol=1e-5)


# --- An operator in another size -------------------------------------------------------------


def test_an_operator_is_tested_on_samples_and_grids_of_its_own(monkeypatch):
    fields = np.random.default_rng(0).standard_normal((2, 7, 1, 8, 8)).astype(np.float32)
    pairs = lambda count, points, seed: module("_operators").Pairs(*fields[:, :count])
    monkeypatch.setattr(module("operator_darcy"), "pairs", pairs)
    monkeypatch.setattr(trainings, "TESTS", 2)
    operator = trainings.Operator("darcy", trainings.Size(5, 8, (2, 1), (4,), 8, 1))
    assert operator.training.inputs.shape == (5, 1, 4, 4)
    assert [x.shape for x in operator.tests[1]] == 2 * [(2, 1, 8, 8)]
    outputs = {x.shape[-1]: 1.1 * y for x, y in operator.tests}
    errors = operator.errors(lambda inputs: outputs[inputs.shape[-1]])
    assert list(errors) == ["l2 4", "h1 4", "l2 8", "h1 8"]
    assert np.allclose(list(errors.values()), 0.1, rtol=1e-4)

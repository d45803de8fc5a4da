"""The data and the losses of the neural-operator examples, against analytic solutions."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.fft
from pages import jax_defaults, module


_cache, darcy, references = map(module, ("_cache", "_darcy", "references"))
flow = module("operator_navier_stokes")
trainings = importlib.import_module("benchmarks._operator_trainings")


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
    assert {k: (v.dtype, v.tobytes()) for k, v in first.items()} == {
        k: (v.dtype, v.tobytes()) for k, v in second.items()
    }


@pytest.mark.parametrize(
    "change", [{"version": 2}, {"a": 2}, {"b": 0.5 + 2**-50}, {"name": "other"}, {"c": 0}]
)
def test_any_other_parameter_is_other_data(change):
    counted.calls = 0
    parameters = {"name": "data", "version": 1, "a": 1, "b": 0.5}
    for p in (parameters, parameters | change):
        _cache.cached(p.pop("name"), counted, **p)
    assert counted.calls == 2


def test_a_failure_leaves_nothing_behind(cache, monkeypatch):
    def disk_full(file, **arrays):
        file.write(b"half of it")
        raise OSError("disk full")

    counted.calls = 0
    monkeypatch.setattr(np, "savez", disk_full)
    with pytest.raises(OSError, match="disk full"):
        _cache.cached("data", counted, version=1, b=0)
    assert [*cache.iterdir()] == []


# --- Darcy flow ------------------------------------------------------------------------------


def grid(n):
    return np.meshgrid(np.linspace(0, 1, n + 1), np.linspace(0, 1, n + 1), indexing="ij")


def smooth(n):
    """u = sin(πx) sin(πy) for a = exp(x + 2y)."""
    x, y = grid(n)
    a = np.exp(x + 2 * y)
    u = np.sin(np.pi * x) * np.sin(np.pi * y)
    u_x = np.pi * np.cos(np.pi * x) * np.sin(np.pi * y)
    u_y = np.pi * np.sin(np.pi * x) * np.cos(np.pi * y)
    return a, -a * (u_x + 2 * u_y - 2 * np.pi**2 * u), u


def layered(n):
    """A jump of a at x = ½. The flux a u_x = cos(2πx) sin(πy) is continuous and not zero there,
    so u_x jumps."""
    x, y = grid(n)
    a = np.where(x < 0.5, darcy.HIGH, darcy.LOW)
    s = np.sin(2 * np.pi * x) * np.sin(np.pi * y)
    return a, 5 * np.pi / 2 * s, s / (2 * np.pi * a)


@pytest.mark.parametrize("transposed", [False, True])
# The jump lies halfway between two points where n is odd.
@pytest.mark.parametrize(("exact", "sizes"), [(smooth, (16, 32, 64)), (layered, (15, 31, 63))])
def test_the_solver_is_of_second_order(exact, sizes, transposed):
    errors = []
    for n in sizes:
        a, f, u = (x.T if transposed else x for x in exact(n))
        errors.append(np.max(np.abs(darcy.solve(a, f) - u)) / np.max(np.abs(u)))
    orders = np.diff(np.log(errors)) / -np.diff(np.log(sizes))
    assert np.all(np.abs(orders - 2) < 0.1), (errors, orders)
    assert errors[-1] < 1e-3


@pytest.mark.slow
def test_the_random_field_has_the_covariance_of_the_paper():
    """Its cosine coefficients, by SciPy's transform, divided by those of (−Δ + 9)^−1, are
    independent and of unit variance."""
    n, samples, modes = 128, 200, 8
    fields = [darcy.random_field(rng, n) for rng in np.random.default_rng(0).spawn(samples)]
    k = np.arange(modes)
    # The transform of type 1 sums the cosine of norm √½ per axis to n, the constant to 2n.
    norm = np.where(k == 0, 1 / (2 * n), np.sqrt(0.5) / n)
    coefficients = scipy.fft.dctn(np.stack(fields), type=1, axes=(1, 2))[:, :modes, :modes]
    white = coefficients * np.outer(norm, norm) * (np.pi**2 * (k[:, None] ** 2 + k**2) + 9)
    np.testing.assert_allclose(white[:, 0, 0], 0, atol=1e-12)
    white = white.reshape(samples, -1)[:, 1:]
    # Five standard deviations of estimates from so many samples.
    assert np.all(np.abs(np.mean(white**2, axis=0) - 1) < 5 * np.sqrt(2 / samples))
    correlation = white.T @ white / samples
    np.fill_diagonal(correlation, 0)
    assert np.max(np.abs(correlation)) < 5 / np.sqrt(samples)


def test_a_sample_is_the_same_function_at_every_resolution_and_in_every_data_set():
    a, u = darcy.darcy_data(3, 16, seed=0)
    fine, fine_u = darcy.darcy_data(2, 64, seed=0)
    np.testing.assert_array_equal(fine[:, ::4, ::4], a[:2])
    # Interfaces are resolved to a cell only: the error is of first order in 1/16.
    assert np.linalg.norm(fine_u[:, ::4, ::4] - u[:2]) < 0.05 * np.linalg.norm(u)
    assert a.dtype == u.dtype == np.float32
    assert set(np.unique(a)) == {darcy.LOW, darcy.HIGH}
    assert not np.array_equal(a[0], a[1])
    assert not np.array_equal(a, darcy.darcy_data(3, 16, seed=1)[0])


def test_darcy_data_are_the_solution_for_their_coefficients(cache):
    a, u = darcy.darcy_data(1, 8, seed=0)
    written = {path: path.read_bytes() for path in cache.iterdir()}
    [rng] = np.random.default_rng(0).spawn(1)
    with_boundary = np.where(darcy.random_field(rng, 8) >= 0, darcy.HIGH, darcy.LOW)
    solution = darcy.solve(with_boundary, np.ones((9, 9)))
    np.testing.assert_array_equal(u[0], solution[:-1, :-1].astype(np.float32))
    # The flux out of the boundary is the integral of f = 1, less what flows into the half cells
    # along it: (n − 1)² of n² cells are balanced.
    to_left = 2 / (1 / with_boundary[0] + 1 / with_boundary[1]) * solution[1]
    to_right = 2 / (1 / with_boundary[-1] + 1 / with_boundary[-2]) * solution[-2]
    to_bottom = 2 / (1 / with_boundary[:, 0] + 1 / with_boundary[:, 1]) * solution[:, 1]
    to_top = 2 / (1 / with_boundary[:, -1] + 1 / with_boundary[:, -2]) * solution[:, -2]
    flux = sum(x.sum() for x in (to_left, to_right, to_bottom, to_top))
    np.testing.assert_allclose(flux, 49 / 64, rtol=1e-12)
    again = darcy.darcy_data(1, 8, seed=0)
    assert again[0].tobytes() == a.tobytes()
    assert {path: path.read_bytes() for path in cache.iterdir()} == written


# --- Navier–Stokes ---------------------------------------------------------------------------


def solve(vorticity, **options):
    options = {"viscosity": 1e-3, "time_step": 0.005} | options
    with jax_defaults():
        out = references.solve_vorticity(jnp.asarray(vorticity, jnp.float32), **options)
    assert out.dtype == jnp.float32
    return np.asarray(out, np.float64)


def fields_of(vorticity):
    """Velocity and gradient of the vorticity, in float64 by Fourier series."""
    n = vorticity.shape[-1]
    k = 2 * np.pi * np.fft.fftfreq(n, 1 / n)
    kx, ky = k[:, None], k[None, : n // 2 + 1].copy()
    hat = np.fft.rfft2(vorticity)
    square = kx**2 + ky**2
    square[0, 0] = 1
    stream = hat / square  # −Δψ = ω

    def derivative(x, k):
        return np.fft.irfft2(1j * k * x, s=(n, n))

    velocity = np.stack([derivative(stream, ky), -derivative(stream, kx)])
    gradient = np.stack([derivative(hat, kx), derivative(hat, ky)])
    return velocity, gradient, np.fft.irfft2(-square * hat, s=(n, n))


def test_taylor_green_vortices_decay_as_they_should():
    n, k, viscosity = 32, 2 * np.pi * np.array([1, 2])[:, None, None], 1e-2
    x = np.arange(n) / n
    initial = np.sin(k * x[:, None]) * np.sin(k * x)
    final = solve(initial, time=0.5, viscosity=viscosity)
    expected = initial * np.exp(-2 * k**2 * viscosity * 0.5)
    # 100 steps in float32.
    np.testing.assert_allclose(final, expected, rtol=0, atol=1e-5)


def random_initial(samples=1, resolution=64):
    keys = jax.random.split(jax.random.key(0), samples)
    with jax.enable_x64(True), jax_defaults():
        return np.asarray(jax.lax.map(lambda key: flow.initial(key, resolution), keys))


@pytest.mark.slow
def test_the_vorticity_is_carried_by_its_own_velocity():
    [initial] = random_initial(resolution=128)
    h = 1e-3
    first = solve(initial[None], time=h, time_step=h)[0]
    second = solve(first[None], time=h, time_step=h)[0]
    rate = (4 * first - 3 * initial - second) / (2 * h)
    velocity, gradient, laplacian = fields_of(initial)
    # Products of wavenumbers up to 16 stay far below those that the 2/3 rule cuts off.
    expected = 1e-3 * laplacian - np.sum(velocity * gradient, axis=0)
    # A difference quotient of second order in h, of float32 values.
    error = np.max(np.abs(rate - expected)) / np.max(np.abs(expected))
    assert error < 1e-3, error


# --- Errors ----------------------------------------------------------------------------------


def relative(prediction, truth, norm, periodic=True):
    with jax_defaults():
        return trainings.relative_errors(prediction, truth, periodic=periodic)[norm]


def waves(n, k):
    x = np.arange(n) / n
    return jnp.asarray(np.sin(2 * np.pi * k * x)[:, None] * np.ones(n), jnp.float32)[None]


def test_relative_l2_is_a_mean_of_quotients():
    truth = jnp.stack([waves(16, 1), 100 * waves(16, 2)])
    factors = jnp.array([1.5, 0.9], jnp.float32)[:, None, None, None]
    # 0.5 and 0.1, whatever the size of the sample.
    assert jnp.allclose(relative(factors * truth, truth, "l2"), 0.3, rtol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_relative_h1_of_waves(transposed):
    n, k, size = 64, 5, 0.01
    truth, error = waves(n, 1)[None], size * waves(n, k)[None]
    if transposed:
        truth, error = truth.swapaxes(-1, -2), error.swapaxes(-1, -2)
    # The central difference of a wave has the wavenumber sin(2πk/n) n in place of 2πk.
    squares = [1 + (n * np.sin(2 * np.pi * k / n)) ** 2 for k in (k, 1)]
    expected = size * np.sqrt(squares[0] / squares[1])
    value = relative(truth + error, truth, "h1")
    # The error is a difference of float32 values a hundred times as large.
    assert jnp.allclose(value, expected, rtol=1e-4)


@pytest.mark.parametrize("shape", [(16, 16), (2, 16, 24)])
def test_gradients_of_linear_functions_are_exact_up_to_the_boundary(shape):
    *_, n, m = shape
    x, y = jnp.arange(n, dtype=jnp.float32) / n, jnp.arange(m, dtype=jnp.float32) / m
    u = jnp.broadcast_to(2 * x[:, None] - 3 * y[None], shape)
    du_dx, du_dy = trainings.slopes(u, periodic=False)
    assert du_dx.shape == du_dy.shape == shape
    assert jnp.allclose(du_dx, 2, atol=1e-4)
    assert jnp.allclose(du_dy, -3, atol=1e-4)


def test_h1_of_a_field_that_ends_at_its_boundary_sees_no_jump_there():
    n = 16
    x = jnp.arange(n, dtype=jnp.float32) / n
    truth = jnp.broadcast_to(1 + x[:, None], (1, 1, n, n))
    prediction = jnp.full_like(truth, 1.5)
    error = float(jnp.mean((x - 0.5) ** 2) + 1) / float(jnp.mean((1 + x) ** 2) + 1)
    value = relative(prediction, truth, "h1", periodic=False)
    assert jnp.allclose(value, np.sqrt(error), rtol=1e-5)
    assert relative(prediction, truth, "h1") < 1 - 1e-2


# --- An operator in another size -------------------------------------------------------------


def test_an_operator_is_tested_on_samples_and_grids_of_its_own(monkeypatch):
    fields = np.random.default_rng(0).standard_normal((2, 7, 1, 8, 8)).astype(np.float32)
    pairs = lambda count, points, seed: module("_operators").Pairs(*fields[:, :count])
    monkeypatch.setattr(module("operator_darcy"), "pairs", pairs)
    monkeypatch.setattr(trainings, "TESTS", 2)
    operator = trainings.Operator("darcy", 5, (2, 1), finest=8)
    assert operator.training.inputs.shape == (5, 1, 4, 4)
    assert [x.shape for x in operator.tests[1]] == 2 * [(2, 1, 8, 8)]
    outputs = {x.shape[-1]: 1.1 * y for x, y in operator.tests}
    with jax_defaults():
        errors = operator.errors(lambda inputs: outputs[inputs.shape[-1]])
    assert list(errors) == ["l2 4", "h1 4", "l2 8", "h1 8"]
    assert np.allclose(list(errors.values()), 0.1, rtol=1e-4)

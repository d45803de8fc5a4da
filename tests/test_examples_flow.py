"""The flow examples run, and their references agree with published tables and with themselves."""

import importlib
import itertools
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_docs import ROOT

import mpx_pde as mpx


sys.path.insert(0, str(ROOT / "examples"))
pinn = importlib.import_module("_pinn")
cavity = importlib.import_module("lid_driven_cavity")
cavity_reference = importlib.import_module("_cavity_reference")
heat_sink = importlib.import_module("heat_sink")
heat_reference = importlib.import_module("_heat_sink_reference")
newton = importlib.import_module("_newton")


@pytest.fixture(autouse=True)
def promotion_of_numpy():
    """Examples are programs of users, who have JAX's own promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_newton_solves_coupled_fields():
    """A nonlinear diffusion whose solution is known: q = sin(πx) on a grid, by its own source."""
    x = np.linspace(0, 1, 9)[1:-1]
    want = np.stack([np.sin(np.pi * x)[:, None] * np.ones(5), np.outer(x, np.ones(5))])

    def operator(q):
        wide = jnp.pad(q, ((0, 0), (1, 1), (0, 0)))
        return q**3 + q[::-1] - 10 * (wide[:, 2:] + wide[:, :-2] - 2 * q)

    with jax.enable_x64(True):
        source = np.asarray(operator(jnp.asarray(want)))
    got = newton.solve(lambda q: operator(q) - source, np.zeros_like(want), reach=1)
    assert np.allclose(got, want, atol=1e-10)
    with pytest.raises(ValueError, match="residual of"):
        newton.solve(lambda q: operator(q) - source, np.zeros_like(want), reach=1, iterations=1)


# --- The cavity ------------------------------------------------------------------------------


def test_cavity_reference_against_published_values():
    s = np.linspace(0, 1, 401)
    u, v = cavity_reference.center_lines(s, n=32)
    # Botella & Peyret (1998), spectral, Re = 100: extrema on the centre lines.
    assert np.isclose(u.min(), -0.2140424, rtol=5e-3)
    assert np.isclose(v.max(), 0.1795728, rtol=5e-3)
    assert np.isclose(v.min(), -0.2538030, rtol=5e-3)
    # Ghia et al. differ from these values by up to 0.008 themselves.
    table_u, table_v = cavity_reference.GHIA_U, cavity_reference.GHIA_V
    assert table_u.shape == table_v.shape == (17, 2)
    u, _ = cavity_reference.center_lines(table_u[:, 0], n=32)
    _, v = cavity_reference.center_lines(table_v[:, 0], n=32)
    assert np.abs(u - table_u[:, 1]).max() < 0.01
    assert np.abs(v - table_v[:, 1]).max() < 0.01


@pytest.mark.parametrize("turbulence", [False, True])
def test_cavity_reference_converges_and_keeps_its_mass(turbulence):
    s = np.linspace(0.05, 0.95, 50)
    lines = []
    for n in (8, 16, 32):
        flow = cavity_reference.reference(100.0, n, turbulence)
        mass = np.diff(flow.u, axis=0) + np.diff(flow.v, axis=1)
        assert np.abs(mass).max() < 1e-9
        lines.append(np.concatenate(cavity_reference._sample(flow, s)))
    coarse, fine = (np.linalg.norm(a - b) for a, b in itertools.pairwise(lines))
    # The first order would be 2, the second 4, of which eight cells do not show much.
    assert coarse / fine > 2.2


def test_turbulence_slows_the_vortex():
    s = np.linspace(0, 1, 101)
    laminar, _ = cavity_reference.center_lines(s, n=16)
    turbulent, _ = cavity_reference.center_lines(s, n=16, turbulence=True)
    assert 0.7 * laminar.min() > turbulent.min() > laminar.min()


def cavity_points(n=16):
    return jax.random.uniform(jax.random.key(1), (n, 2), minval=0.15, maxval=0.85)


def test_cavity_fields_meet_the_boundary_conditions():
    model = cavity.network(jax.random.key(0))
    s = np.linspace(0.05, 0.95, 10)
    at = lambda x, y: np.asarray(jax.vmap(model)(jnp.float32(np.stack([x, y], axis=1))))
    lid = at(s, np.ones(10))
    # By the formula at a distance of 1e-6 from the lid.
    assert np.allclose(lid[:, 0], 1, atol=1e-4)
    assert np.allclose(lid[:, 1], 0, atol=1e-4)
    for wall in (at(s, 0 * s), at(0 * s, s), at(0 * s + 1, s)):
        assert np.allclose(wall[:, :2], 0, atol=1e-5)


def test_cavity_formula_keeps_mass_and_is_a_stokes_flow_in_the_corners():
    zero = lambda p: cavity.form(p, jnp.zeros(3))

    def at(points, nu):
        d = mpx.partials(zero, cavity.FIRST + cavity.SECOND, coords="xy", outputs="uvp")
        d = jax.vmap(d)(points)
        stress = nu * (d["u_xx"] + d["u_yy"]), nu * (d["v_xx"] + d["v_yy"])
        return d["u_x"] + d["v_y"], d["p_x"] - stress[0], d["p_y"] - stress[1], d["p_x"]

    with jax.enable_x64(True):
        mass, *_ = at(jnp.asarray(np.asarray(cavity_points(), np.float64)), cavity.NU)
        assert np.abs(mass).max() < 1e-12
        for r in (1e-2, 1e-3):
            for x in (0.6 * r, 1 - 0.6 * r):
                _, x_force, y_force, p_x = at(jnp.asarray([[x, 1 - 0.8 * r]]), cavity.NU)
                # Forces are like 1/r², and what is left of them like 1/r.
                assert np.abs(np.r_[x_force, y_force]).max() < 10 * r * np.abs(p_x).max()


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_both_forms_of_the_turbulence_model_agree(precision):
    model = cavity.network(jax.random.key(0))
    scaling = None
    if precision == "float16":
        model = mpx.cast_to_float16(model)
        scaling = cavity.derivative_scaling(model, "paper", "zero-equation")
        assert scaling.names == ("order 1", "order 2", "nu_x", "nu_y")

    @eqx.filter_jit
    def run(model, scaling, turbulence):
        at = lambda p: cavity.residuals(model, p, scaling, turbulence)
        return jax.vmap(at)(cavity_points())

    nested = run(model, scaling, "zero-equation")
    flattened = run(model, scaling, "zero-equation-flattened")
    laminar = run(model, scaling, "none")
    size = np.abs(flattened).max()
    # Some ten roundings of 2^-11, or of 2^-24, in terms that are larger than their sum.
    tolerance = 1e-4 if precision == "float32" else 0.05
    assert np.abs(nested - flattened).max() < tolerance * size
    assert np.abs(laminar - flattened).max() > 0.02 * size


@pytest.mark.parametrize("turbulence", ["none", "zero-equation"])
def test_the_cavity_trains(turbulence, tmp_path, monkeypatch):
    for module in (pinn, cavity):
        monkeypatch.setattr(module, "STEPS_PER_CALL", 2)
    monkeypatch.setattr(cavity, "BATCH", 16)
    lines = tuple(np.sin(np.pi * cavity.S) * a for a in (0.2, 0.1))
    monkeypatch.setattr(cavity, "_reference", lambda _: lines)
    [result] = cavity.main(["float16"], steps=4, out=tmp_path, turbulence=turbulence).values()
    assert np.isfinite(result.loss).all()
    assert 0 < result.error < 10
    name = "cavity" if turbulence == "none" else f"cavity-{turbulence}"
    assert (tmp_path / f"{name}.png").exists()


def test_unknown_turbulence():
    with pytest.raises(ValueError, match="zero-equation"):
        cavity.main(turbulence="k-epsilon")


# --- The heat sink ---------------------------------------------------------------------------


def test_heat_sink_reference_balances_mass_and_heat():
    flow = heat_reference.reference(20)
    y = flow.y
    assert np.isclose(flow.outflow, heat_reference.inlet(y).mean(), rtol=1e-9)
    assert np.isclose(flow.heating, flow.heat_outflow, rtol=1e-9)
    assert flow.heating > 0.5
    assert np.nanmin(flow.t) > -1e-3
    assert np.nanmax(flow.t) < 1
    # The problem is symmetric about y = 0.
    assert np.allclose(flow.u, flow.u[:, ::-1], atol=1e-8, equal_nan=True)
    assert np.allclose(flow.v, -flow.v[:, ::-1], atol=1e-8, equal_nan=True)


def test_heat_sink_reference_converges():
    coarse, fine = (heat_reference.reference(n) for n in (20, 40))
    for name, tolerance in {"u": 0.05, "t": 0.03, "v": 0.15, "p": 0.15}.items():
        values = getattr(fine, name)
        mean = (values[::2, ::2] + values[1::2, ::2] + values[::2, 1::2] + values[1::2, 1::2]) / 4
        difference = (getattr(coarse, name) - mean)[~coarse.solid]
        assert np.linalg.norm(difference) < tolerance * np.linalg.norm(mean[~coarse.solid])
    with pytest.raises(ValueError, match="multiple of 20"):
        heat_reference.reference(30)


def test_distances_to_the_fins():
    x = jnp.asarray([-0.3, 0.25, 0.25, 0.5 + 0.3, 0.25])
    y = jnp.asarray([0.0, 0.0, 0.125, 0.3 + 0.4, 0.45])
    want = [0.3, -0.05, 0.075, 0.5, 0.15]
    assert np.allclose(heat_reference.fin_distance(x, y), want, atol=1e-6)
    # The smooth one vanishes where the exact one does, and grows with it.
    surface = np.asarray([[0.0, -0.25], [0.3, 0.05], [0.5, 0.22], [0.1, 0.2]], np.float32)
    assert np.allclose([heat_sink.away(*p) for p in surface], 0, atol=1e-5)
    assert heat_sink.away(jnp.float32(0.6), jnp.float32(0.0)) > 0.1


def test_heat_sink_fields_meet_the_boundary_conditions():
    model = heat_sink.network(jax.random.key(0))
    at = lambda x, y: np.asarray(model(jnp.asarray([x, y], jnp.float32)))
    for y in (-0.4, 0.1, 0.45):
        u, v, _, t = at(heat_reference.X_IN, y)
        assert np.allclose([u, v, t], [heat_reference.inlet(y), 0, 0], atol=1e-5)
        assert np.allclose(at(heat_reference.X_OUT, y)[1:3], 0, atol=1e-5)
    for x, y in ((0.0, -0.25), (0.3, 0.05), (0.5, 0.22)):
        u, v, _, t = at(x, y)
        assert np.allclose([u, v, t], [0, 0, 1], atol=1e-5)
    assert np.allclose(at(1.0, 0.5)[:2], 0, atol=1e-5)


def test_the_heat_sink_trains(tmp_path, monkeypatch):
    for module in (pinn, heat_sink):
        monkeypatch.setattr(module, "STEPS_PER_CALL", 2)
    for name, value in {"BATCH": 16, "WALL": 4, "SECTIONS": 2, "ACROSS": 20}.items():
        monkeypatch.setattr(heat_sink, name, value)
    monkeypatch.setattr(heat_sink, "CANDIDATES", 100)
    monkeypatch.setattr(heat_sink, "_reference", lambda: heat_reference.reference(20))
    points = heat_sink.choose_points(None, jax.random.key(0))
    fluid = points["fluid"]
    assert fluid.shape == (2, 16, 2)
    assert (heat_reference.fin_distance(fluid[..., 0], fluid[..., 1]) > 0).all()
    [result] = heat_sink.main(["float16"], steps=4, out=tmp_path).values()
    assert np.isfinite(result.loss).all()
    assert 0 < result.error < 100
    assert set(result.errors) == {"rel. L2 error", "u", "v", "p", "t"}
    assert (tmp_path / "heat_sink.png").exists()

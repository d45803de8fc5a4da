"""The references of flows agree with published tables and with themselves, and fields meet their
conditions."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pages import module

import mpx_pde as mpx


cavity, zero_equation, heat_sink = map(module, ("cavity", "cavity_zero_equation", "heat_sink"))
cavity_reference, newton = map(module, ("_cavity_reference", "_newton"))
channel = module("_plane_channel")


# Examples are programs of users.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]


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


def by_the_product_rule(fields, point, derivatives):
    """The turbulent viscosity and its derivatives out of second derivatives of u and v."""
    names = [*cavity.FIRST, *cavity.SECOND, "u_xy", "v_xy"]
    d = mpx.partials(fields, names, coords="xy", outputs="uvp", scaling=derivatives)(point)
    size, shear = cavity.strain(d), d["u_y"] + d["v_x"]
    along_x = 2 * d["u_x"] * d["u_xx"] + 2 * d["v_y"] * d["v_xy"]
    along_y = 2 * d["u_x"] * d["u_xy"] + 2 * d["v_y"] * d["v_yy"]
    size_x = (along_x + shear * (d["u_xy"] + d["v_xx"])) / size
    size_y = (along_y + shear * (d["u_yy"] + d["v_xy"])) / size
    square = lambda p: cavity_reference.mixing_length(p[0], p[1]) ** 2
    length, (length_x, length_y) = jax.value_and_grad(square)(point)
    nu_x, nu_y = length_x * size + length * size_x, length_y * size + length * size_y
    return cavity.NU + length * size, nu_x, nu_y


def test_both_forms_of_the_turbulence_model_agree():
    assert zero_equation.PROBLEM.derivatives().names == ("order 1", "order 2", "nu_x", "nu_y")
    model = cavity.network(jax.random.key(0))

    @eqx.filter_jit
    def run(model, viscosity):
        at = lambda p: cavity.residuals(model, p, None, viscosity)
        return jax.vmap(at)(cavity_points())

    nested = run(model, cavity.turbulent_viscosity)
    flattened = run(model, by_the_product_rule)
    laminar = run(model, None)
    size = np.abs(flattened).max()
    # Some ten roundings of 2^-24, in terms that are larger than their sum.
    assert np.abs(nested - flattened).max() < 1e-4 * size
    assert np.abs(laminar - flattened).max() > 0.02 * size


# --- The heat sink ---------------------------------------------------------------------------


def on_grid(cells):
    """Centers of cells, and u, v, p and the temperature there."""
    points, values = heat_sink.reference(cells)
    x, y = (np.unique(points[:, i]) for i in (0, 1))
    return x, y, values.T.reshape(4, len(x), len(y))


def test_heat_sink_reference_balances_mass_and_heat(monkeypatch):
    balances = []
    heat = channel.heat

    def watched(q, **given):
        balances.append((q, given))
        return heat(q, **given)

    monkeypatch.setattr(channel, "heat", watched)
    heat_sink.reference.cache_clear()
    _, y, (u, v, _, t) = on_grid(20)
    given = balances[0][1]
    assert np.isclose(given["u"][-1].mean(), heat_sink.inlet(y).mean(), rtol=1e-9)
    with jax.enable_x64(True):
        solved = jnp.asarray(np.where(given["solid"], 1.0, t)[None])
        residual, heating, carried = map(np.asarray, heat(solved, **given))
    assert np.abs(residual).max() < 1e-8
    assert np.isclose(heating, carried, rtol=1e-8)
    assert heating > 0.5
    assert np.nanmin(t) > -1e-3
    assert np.nanmax(t) < 1
    # The problem is symmetric about y = 0.
    assert np.allclose(u, u[:, ::-1], atol=1e-8, equal_nan=True)
    assert np.allclose(v, -v[:, ::-1], atol=1e-8, equal_nan=True)


def test_heat_sink_reference_converges():
    coarse, fine = on_grid(20)[2], on_grid(40)[2]
    mean = fine.reshape(4, 40, 2, 20, 2).mean(axis=(2, 4))
    for got, want, tolerance in zip(coarse, mean, (0.05, 0.15, 0.15, 0.03), strict=True):
        known = np.isfinite(got)
        assert np.linalg.norm((got - want)[known]) < tolerance * np.linalg.norm(want[known])
    with pytest.raises(ValueError, match="multiple of 20"):
        heat_sink.reference(30)


def test_distances_to_the_fins():
    x = jnp.asarray([-0.3, 0.25, 0.25, 0.5 + 0.3, 0.25])
    y = jnp.asarray([0.0, 0.0, 0.125, 0.3 + 0.4, 0.45])
    want = [0.3, -0.05, 0.075, 0.5, 0.15]
    assert np.allclose(heat_sink.fin_distance(x, y), want, atol=1e-6)
    # The smooth one vanishes where the exact one does, and grows with it.
    surface = np.asarray([[0.0, -0.25], [0.3, 0.05], [0.5, 0.22], [0.1, 0.2]], np.float32)
    assert np.allclose([heat_sink.away(*p) for p in surface], 0, atol=1e-5)
    assert heat_sink.away(jnp.float32(0.6), jnp.float32(0.0)) > 0.1


def test_heat_sink_fields_meet_the_boundary_conditions():
    model = heat_sink.network(jax.random.key(0))
    at = lambda x, y: np.asarray(model(jnp.asarray([x, y], jnp.float32)))
    for y in (-0.4, 0.1, 0.45):
        u, v, _, t = at(heat_sink.X_IN, y)
        assert np.allclose([u, v, t], [heat_sink.inlet(y), 0, 0], atol=1e-5)
        assert np.allclose(at(heat_sink.X_OUT, y)[1:3], 0, atol=1e-5)
    for x, y in ((0.0, -0.25), (0.3, 0.05), (0.5, 0.22)):
        u, v, _, t = at(x, y)
        assert np.allclose([u, v, t], [0, 0, 1], atol=1e-5)
    assert np.allclose(at(1.0, 0.5)[:2], 0, atol=1e-5)


def test_points_of_the_heat_sink_are_in_the_fluid(monkeypatch):
    for name, value in {"STEPS_PER_CALL": 2, "BATCH": 16, "CANDIDATES": 100}.items():
        monkeypatch.setattr(heat_sink, name, value)
    fluid = heat_sink.choose_points(None, jax.random.key(0))["fluid"]
    assert fluid.shape == (2, 16, 2)
    assert (heat_sink.fin_distance(fluid[..., 0], fluid[..., 1]) > 0).all()

"""Tests that flow references agree with published tables and with themselves, and that fields meet
their conditions."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative
from pages import module


NAMES = "cavity", "heat_sink", "_cavity_reference", "_plane_channel"
cavity, heat_sink, cavity_reference, channel = map(module, NAMES)


# Examples are programs of users.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]


# --- The cavity ------------------------------------------------------------------------------


def test_cavity_reference_against_published_values():
    s = np.linspace(0, 1, 401)
    u, v = cavity_reference.center_lines(s, n=32)
    # Botella & Peyret (1998), spectral, Re = 100: extrema on the centre lines.
    assert np.isclose(u.min(), -0.2140424, rtol=5e-3)
    assert np.isclose(v.max(), 0.1795728, rtol=5e-3)
    assert np.isclose(v.min(), -0.2538030, rtol=5e-3)
    # Marchi, Suero & Araki (2009), nine digits. The singular corners of the lid leave 3.6e-4.
    lines = cavity_reference.center_lines(cavity_reference.MARCHI_S, n=64)
    published = cavity_reference.MARCHI_U, cavity_reference.MARCHI_V
    assert relative(np.concatenate(lines), np.concatenate(published)) < 5e-4


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
    # First order gives 2 and second order 4, but eight cells are too few to reach it.
    assert coarse / fine > 2.2


def test_cavity_fields_meet_the_boundary_conditions():
    model = cavity.network(jax.random.key(0))
    s = np.linspace(0.05, 0.95, 10)
    at = lambda x, y: np.asarray(jax.vmap(model)(jnp.float32(np.stack([x, y], axis=1))))
    lid = at(s, np.ones(10))
    # The formula moves points on the lid down by 1e-6.
    assert np.allclose(lid[:, 0], 1, atol=1e-4)
    assert np.allclose(lid[:, 1], 0, atol=1e-4)
    for wall in (at(s, 0 * s), at(0 * s, s), at(0 * s + 1, s)):
        assert np.allclose(wall[:, :2], 0, atol=1e-5)


# --- The heat sink ---------------------------------------------------------------------------


def on_grid(cells):
    """Returns the centers of cells, and u, v, p and the temperature there."""
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
